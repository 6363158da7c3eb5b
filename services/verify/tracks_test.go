package verify_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// newPipelineStudio is a studio with a worker of a whole pipeline of a class, and how another worker verifies its runs.
func newPipelineStudio(t *testing.T, class string) (*studio, verify.Options) {
	t.Helper()
	dir := remotetest.Folder(t, class, 1)
	_, sampling := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	_, verifying := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	x := newStudio(t, "proj.weight", []int{remotetest.Channels, remotetest.Channels}, func(c *pipeline.Config) {
		c.Sampler.Model, c.Sampler.Engine = dir, "torch="+sampling
	})
	return x, verify.Options{Model: []string{dir}, Engine: "torch=" + verifying}
}

// A pipeline with two tracks makes steps that have both, whose log-probs verify finds again; at a size whose tracks are
// not known it refuses samples by name.
func TestRun_Tracks(t *testing.T) {
	t.Parallel()
	x, again := newPipelineStudio(t, remotetest.TracksClass)
	tr := x.sample("p", schemas.RewardSpec{Name: "loudness"}, schemas.RewardSpec{Name: "silence", Track: "sound"},
		schemas.RewardSpec{Name: "synthetic", Track: "video"})
	want := []schemas.Track{
		{Name: "video", Shape: []int64{3, 4, remotetest.Channels}, Elements: 12 * remotetest.Channels},
		{Name: "sound", Shape: []int64{4 * remotetest.Channels}, Elements: 4 * remotetest.Channels},
	}
	if !slices.EqualFunc(tr.Tracks, want, func(a, b schemas.Track) bool { return a.Same(&b) }) {
		t.Fatalf("%q: tracks %v, want %v", tr.Error, tr.Tracks, want)
	}
	for i := range tr.Steps {
		step, err := x.Bus.LoadStepOf(t.Context(), tr, i)
		if err != nil {
			t.Fatal(err)
		}
		if err := step.Validate(); err != nil || len(step.Tracks) != 2 || step.Tracks[1].Name != "sound" ||
			(step.Tracks[1].LogProb == nil) != (step.LogProb == nil) {
			t.Errorf("step %d: tracks %+v, %v", i, step.Tracks, err)
		}
	}
	checkSound(t, x, tr)
	x.proves(1, again)
	if _, err := x.peer.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "q", Prompt: "red", GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{Height: new(int64(128)), Width: new(int64(64))},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", "q"))
	failed, err := x.peer.Trajectory(t.Context(), "r", "q", 0)
	if err != nil || !strings.Contains(failed.Error, "must be the default size of LTX2Pipeline") {
		t.Errorf("%+v, %v", failed, err)
	}
}

// A credit is a matrix from rewards to tracks: each track has the advantages of its own rewards.
func TestRun_TracksCredit(t *testing.T) {
	t.Parallel()
	x, _ := newPipelineStudio(t, remotetest.TracksClass)
	ask := func(uid schemas.UID, credit ...schemas.CreditShare) error {
		_, err := x.peer.Publish(t.Context(), "r", &schemas.Prompt{
			UID: uid, Prompt: "red", GroupSize: new(int64(4)), Credit: credit,
			Reward: []schemas.RewardSpec{{Name: "loudness"}, {Name: "synthetic", Track: "video"}},
			ImageSettings: schemas.ImageSettings{
				NumInferenceSteps: new(int64(6)), Height: new(int64(64)), Width: new(int64(64)), TrueCFGScale: new(1.0),
				Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 2}},
			},
		})
		return err
	}
	if err := ask("bad", schemas.CreditShare{Reward: "loudness", Track: "depth", Weight: 1}); err == nil ||
		!strings.Contains(err.Error(), `credit[0].track: "depth"; must be one of the states' tracks, which are video, sound`) {
		t.Errorf("a track that is not there: %v", err)
	}
	if err := ask("p", schemas.CreditShare{Reward: "loudness", Track: "sound", Weight: 2},
		schemas.CreditShare{Reward: "synthetic", Weight: 1}); err != nil {
		t.Fatal(err)
	}
	var a *schemas.Advantage
	for _, m := range bustest.Await(t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", "p")) {
		a = bustest.Decode[schemas.Advantage](t, m)
	}
	sums := map[string][]float64{"sound": make([]float64, 4), "video": make([]float64, 4)}
	for _, m := range bustest.Await(t, x.Bus, 4, schemas.StreamRewards, schemas.RewardFilter("r", a.Batch, "p")) {
		r := bustest.Decode[schemas.Reward](t, m)
		if r.Status != schemas.StatusScored {
			t.Fatalf("sample %d: %s", r.SampleIndex, r.Error)
		}
		sums["sound"][r.SampleIndex] = 2**r.Scores[0].Value + *r.Scores[1].Value
		sums["video"][r.SampleIndex] = *r.Scores[1].Value
	}
	for _, c := range a.Credits {
		mean, squares := 0.0, 0.0
		for _, r := range sums[c.Track] {
			mean += r / 4
		}
		for _, r := range sums[c.Track] {
			squares += (r - mean) * (r - mean)
		}
		for i, v := range c.Values { // flow_grpo, up to the order of its sums
			want := (sums[c.Track][i] - mean) / (math.Sqrt(squares/3) + 1e-4)
			if c.Stage != schemas.StageMain || v == nil || math.Abs(*v-want) > 1e-9 {
				t.Errorf("stage %s, track %s, sample %d: %v, want %v", c.Stage, c.Track, i, v, want)
			}
		}
	}
	if len(a.Credits) != 2 || a.Credits[0].Track == a.Credits[1].Track {
		t.Errorf("credits %+v", a.Credits)
	}
}

// checkSound checks that the sample has an image and a sound, each of its track, that functions judge the one that the
// prompt names, and that one which the samples lack is refused.
func checkSound(t *testing.T, x *studio, tr *schemas.Trajectory) {
	t.Helper()
	if kinds := tr.MediaKinds(); !slices.Equal(kinds, []string{schemas.KindImage, schemas.KindAudio}) ||
		tr.Media[0].Track != "video" || tr.Media[1].Track != "sound" {
		t.Fatalf("media %+v", tr.Media)
	}
	file, err := x.peer.Medium(t.Context(), tr, schemas.KindAudio)
	if err != nil {
		t.Fatal(err)
	}
	made, err := sampling.DecodeMedium(&tr.Media[1], file)
	s := made.Sound
	if err != nil || s.Digest() != tr.Media[1].Digest || s.Channels != 2 || s.Rate != remotetest.SoundRate {
		t.Errorf("sound %v, %v; want %+v", s.Size(), err, tr.Media[1])
	}
	power := 0.0
	for _, v := range s.Values {
		power += float64(v) * float64(v) / float64(len(s.Values))
	}
	var rewards []schemas.Score
	m, err := x.Bus.Last(t.Context(), schemas.StreamRewards, schemas.RewardFilter("r", tr.Group.Batch, "p"))
	r := &schemas.Reward{}
	if err == nil {
		err = schemas.DecodeValid(m.Data, r)
	}
	if rewards = r.Scores; err != nil || r.Status != schemas.StatusScored || len(rewards) != 3 {
		t.Fatalf("reward %+v, %v", r, err)
	}
	if want := 10 * math.Log10(power); math.Abs(*rewards[0].Value-want) > 1e-9 || *rewards[1].Value != 0 ||
		rewards[2].Value == nil {
		t.Errorf("scores %v; want loudness %v", rewards, want)
	}
	for _, c := range []struct {
		spec  schemas.RewardSpec
		fault string
	}{
		{schemas.RewardSpec{Name: "loudness", Track: "depth"}, `track: "depth"; must be one of audio, image, sound, video`},
		{schemas.RewardSpec{Name: "loudness", Track: "video"}, `"loudness"; rates sounds, and it would judge images`},
		{schemas.RewardSpec{Name: "synthetic", Track: "audio"}, `"synthetic"; rates images, and it would judge sounds`},
	} {
		_, err := x.peer.Publish(t.Context(), "bad", &schemas.Prompt{Prompt: "x", Reward: []schemas.RewardSpec{c.spec}})
		if err == nil || !strings.Contains(err.Error(), c.fault) {
			t.Errorf("%s of %s: %v; want %q", c.spec.Name, c.spec.Track, err, c.fault)
		}
	}
}
