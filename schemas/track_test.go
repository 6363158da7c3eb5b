package schemas_test

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// tracksStep is a step whose state is a video and its sound.
func tracksStep() *schemas.Step {
	s := sdeStep()
	s.LogProb, s.LogProbSum = new(-0.65625), new(-5.25)
	s.Tracks = []schemas.StepTrack{
		{Track: schemas.Track{Name: "video", Shape: []int64{1, 3, 2}, Elements: 6}, LogProb: new(-0.75), LogProbSum: new(-4.5)},
		{Track: schemas.Track{Name: "sound", Shape: []int64{2}, Elements: 2}, LogProb: new(-0.375), LogProbSum: new(-0.75)},
	}
	return s
}

func odeTracksStep() *schemas.Step {
	e := tracksStep()
	e.Transition, e.LogProb, e.LogProbSum = "ode", nil, nil
	for i := range e.Tracks {
		e.Tracks[i].LogProb, e.Tracks[i].LogProbSum = nil, nil
	}
	return e
}

func tracksTrajectory(t testing.TB) *schemas.Trajectory {
	e := completedTrajectory(t)
	e.Tracks = []schemas.Track{
		{Name: "video", Shape: []int64{30, 64}, Elements: 1920}, {Name: "sound", Shape: []int64{1, 128}, Elements: 128},
	}
	return e
}

// creditsAdvantage has an advantage for each track of a stage, and one for the stage before it.
func creditsAdvantage(t testing.TB) *schemas.Advantage {
	a := completeAdvantage(t)
	a.Credits = []schemas.Credit{
		{Stage: "plan", Values: []*float64{new(0.5), new(-0.5), nil}},
		{Stage: schemas.StageMain, Track: "video", Values: []*float64{new(1.0), new(-1.0), nil}},
		{Stage: schemas.StageMain, Track: "sound", Values: []*float64{new(0.25), new(-0.25), nil}},
	}
	return a
}

func TestStep_ValidateTracks(t *testing.T) {
	type S = schemas.Step
	faults(t, tracksStep, []fault[S]{
		{"one track", func(s *S) { s.Tracks = s.Tracks[:1] }, "tracks: 1 items; must be at least 2\ntracks: 6 elements; must be 8 in all, the state's\nlog_prob_sum: -5.25; must be -4.5, the sum of the tracks in order\nlog_prob: -0.65625; must be -0.5625, log_prob_sum / element_count"},
		{"empty list", func(s *S) { s.Tracks = []schemas.StepTrack{} }, "tracks: 0 items; must be at least 2"},
		{"nine tracks", func(s *S) { s.Tracks = make([]schemas.StepTrack, 9) }, "tracks: 9 items; must be at most 8"},
		{"name", func(s *S) { s.Tracks[1].Name = "a.b" }, `tracks[1].name: "a.b"; ` + tokenRule},
		{"name twice", func(s *S) { s.Tracks[1].Name = "video" }, `tracks[1].name: "video"; must come at most once`},
		{"shape", func(s *S) { s.Tracks[1].Shape = []int64{3} }, "tracks[1].elements: 2; must be 3, the product of the shape [3]"},
		{"elements", func(s *S) { s.ElementCount = 9; s.Latents = nil }, "tracks: 8 elements; must be 9 in all, the state's\nlog_prob: -0.65625; must be -0.5833333333333334, log_prob_sum / element_count"},
		{"no log-prob", func(s *S) { s.Tracks[0].LogProb = nil }, "tracks[0].log_prob: null; must be a number unless the transition is ode"},
		{"ode with a log-prob", func(s *S) {
			s.Transition, s.LogProb, s.LogProbSum = "ode", nil, nil
			s.Tracks[0].LogProb, s.Tracks[0].LogProbSum, s.Tracks[1].LogProb = nil, nil, nil
		}, "tracks[1].log_prob_sum: -0.75; must be null on an ode step"},
		{"mean", func(s *S) { s.Tracks[0].LogProb = new(-0.5) }, "tracks[0].log_prob: -0.5; must be -0.75, log_prob_sum / elements"},
		{"sum", func(s *S) { s.LogProbSum = new(-5.0) }, "log_prob_sum: -5; must be -5.25, the sum of the tracks in order"},
		{"step's mean", func(s *S) { s.LogProb = new(-5.0) }, "log_prob: -5; must be -0.65625, log_prob_sum / element_count"},
	})
}

func TestTrajectory_ValidateTracks(t *testing.T) {
	type T = schemas.Trajectory
	faults(t, func() *T { return tracksTrajectory(t) }, []fault[T]{
		{"name twice", func(e *T) { e.Tracks[1].Name = "video" }, `tracks[1].name: "video"; must come at most once`},
		{"elements", func(e *T) { e.Tracks[1].Shape, e.Tracks[1].Elements = []int64{64}, 64 }, "tracks: 1984 elements; must be 2048 in all, the state's"},
		{"one track", func(e *T) { e.Tracks = e.Tracks[:1] }, "tracks: 1 items; must be at least 2\ntracks: 1920 elements; must be 2048 in all, the state's"},
	})
}

func TestAdvantage_ValidateCredits(t *testing.T) {
	type A = schemas.Advantage
	faults(t, func() *A { return creditsAdvantage(t) }, []fault[A]{
		{"no credit", func(a *A) { a.Credits = a.Credits[:0] }, "credits: 0 items; must be at least 1"},
		{"stage", func(a *A) { a.Credits[0].Stage = "" }, `credits[0].stage: ""; ` + tokenRule},
		{"track", func(a *A) { a.Credits[1].Track = "a.b" }, `credits[1].track: "a.b"; ` + tokenRule},
		{"track twice", func(a *A) { a.Credits[2].Track = "video" }, `credits[2].track: "video"; must come at most once in a stage`},
		{"all tracks beside one", func(a *A) { a.Credits[2].Track = "" }, `credits[2].track: ""; must be a track in each credit of a stage that has several`},
		{"few values", func(a *A) { a.Credits[0].Values = a.Credits[0].Values[:2] }, "credits[0].values: 2 items; must be 3, one per member, or every few of them"},
		{"value of a missing member", func(a *A) { a.Credits[0].Values[2] = new(0.0) }, "credits[0].values[2]: 0; must be a number exactly where a member that ran the stage has an advantage"},
		{"no value", func(a *A) { a.Credits[0].Values[1] = nil }, "credits[0].values[1]: null; must be a number exactly where a member that ran the stage has an advantage"},
		{"value of a stage that did not run", func(a *A) {
			a.Members[0].Stages = []schemas.StageResult{{Stage: "plan-2"}}
			a.Members[1].Stages = []schemas.StageResult{{Stage: "other"}}
			a.Credits, a.Credits[0].Every = a.Credits[:1], 0
		}, "credits[0].values[1]: -0.5; must be a number exactly where a member that ran the stage has an advantage"},
		{"NaN", func(a *A) { a.Credits[0].Values[1] = new(math.NaN()) }, "credits[0].values[1]: NaN; must be finite"},
	})
}
