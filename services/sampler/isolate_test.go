package sampler

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/lm"
	languages "github.com/meander-rl/meander/pkg/lm/families"
	"github.com/meander-rl/meander/pkg/lm/qwen2"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// What a row of a poison prompt, or of a poison token, does to its call.
const (
	panics  = "panics"
	fails   = "fails"
	spoils  = "is not finite"
	infects = "makes all rows not finite"
)

var (
	poisons  = []string{panics, fails, spoils, infects}
	errModel = errors.New("the model cannot compute it")
	nan      = float32(math.NaN())
)

// poisoned is a model that does what a prompt is named by.
type poisoned struct{ model.Model }

func (m poisoned) Velocity(
	ctx context.Context, dst, x [][]float32, sigma []float32, cond []*model.Conditioning, height, width int,
) error {
	err := m.Model.Velocity(ctx, dst, x, sigma, cond, height, width)
	for i, c := range cond {
		switch c.Prompt {
		case panics:
			panic("index out of range")
		case fails:
			return errModel
		case spoils:
			dst[i][3] = nan
		case infects:
			for _, d := range dst {
				d[0] = nan
			}
		}
	}
	return err
}

func paint(prompt string, seed uint64, scale float64) *schemas.Request {
	r := &schemas.Request{
		Run: "r", UID: "u", Prompt: prompt, Height: 64, Width: 64, TrueCFGScale: scale, SampleSeed: seed, NoiseSeed: seed,
		Sigmas: []float32{1, 0.75, 0.5, 0.25, 0}, Transitions: []string{"sde", "ode", "sde", "ode"}, NoiseLevel: 0.7,
		Solver: string(flow.Euler), LogProbKind: string(flow.Density),
		LatentsDType: string(tensor.F32), ReturnStepIndices: []int64{0, 1, 2, 3, 4},
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	return r
}

// rolled is a sample of scheduled sampling, of the same size.
func rolled(t *testing.T, card *model.Card, seed uint64) (*schemas.Request, *schemas.SegmentStart) {
	t.Helper()
	noise, err := scheduled.ParseNoise(card.SchedulerConfig)
	if err != nil {
		t.Fatal(err)
	}
	levels, err := noise.Levels(10)
	if err != nil {
		t.Fatal(err)
	}
	r := paint("a blue door", seed, 1)
	r.Sigmas, r.Transitions, r.ReturnStepIndices = levels.Sigmas(), slices.Repeat([]string{"ode"}, 10), []int64{3, 4, 5, 6}
	r.ScheduledSampling = &schemas.ScheduledSample{
		RollSettings: schemas.RollSettings{
			Timesteps: 10, Prediction: noise.Prediction, Sampler: "unipc", Order: 2, Compat: "exact",
		},
		Roll: schemas.Roll{Timestep: 3, Base: 3, Source: 6, Offset: 3},
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	tokens, err := card.Tokens(64, 64)
	if err != nil {
		t.Fatal(err)
	}
	x0 := make([]float32, tokens*card.LatentChannels)
	flow.InitialNoise(x0, seed+1)
	shape := []int64{1, int64(tokens), int64(card.LatentChannels)}
	data := tensor.F32.AppendFloats(nil, x0)
	return r, &schemas.SegmentStart{Latents: &schemas.Tensor{DType: "F32", Shape: shape, Data: data}}
}

// stepAll steps episodes in one batch until none is left, and returns what each came to.
func stepAll(t *testing.T, e Engine, episodes []Episode) (states []string, faults []error) {
	t.Helper()
	states, faults = make([]string, len(episodes)), make([]error, len(episodes))
	for {
		var active []Episode
		for i, p := range episodes {
			if faults[i] == nil && !p.Done() {
				active = append(active, p)
			}
		}
		if len(active) == 0 {
			return states, faults
		}
		if err := e.Step(t.Context(), active); err != nil {
			t.Fatal(err)
		}
		for i, p := range episodes {
			if !slices.Contains(active, p) {
				continue
			}
			var events []schemas.StepEvent
			events, faults[i] = p.Take()
			for _, event := range events {
				if step, ok := event.(*schemas.Step); ok {
					for _, l := range step.Latents {
						states[i] += string(l.Tensor.Data)
					}
				}
			}
		}
	}
}

// A poison prompt fails alone. Samples beside it, guided, without guidance and of scheduled sampling, have the bits
// of a batch without it.
func TestFlowEngine_PoisonFailsAlone(t *testing.T) {
	t.Parallel()
	m, err := families.All().Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	e := newFlowEngine(poisoned{m}, 1)
	run := func(bad ...string) ([]string, []error) {
		var episodes []Episode
		start := func(req *schemas.Request, from *schemas.SegmentStart) {
			p, err := e.Start(t.Context(), req, from)
			if err != nil {
				t.Fatal(err)
			}
			episodes = append(episodes, p)
		}
		start(paint("a red fox", 1, 1), nil)
		for i, prompt := range bad {
			start(paint(prompt, uint64(i), float64(1+2*(i%2))), nil)
		}
		start(paint("a grey owl", 2, 4), nil)
		start(rolled(t, &e.card, 3))
		return stepAll(t, e, episodes)
	}
	want, _ := run()
	for name, bad := range map[string][]string{
		panics: {panics}, fails: {fails}, spoils: {spoils}, infects: {infects},
		"guided": {"a door", panics}, "all": poisons, "twice": {infects, panics, infects},
	} {
		states, faults := run(bad...)
		end := len(states) - 2
		for i, prompt := range bad {
			fault, code := faults[i+1], schemas.CodeFailed
			switch prompt {
			case panics:
				code = schemas.CodePanic
			case fails:
				code = schemas.CodeExhausted // an error that may pass: the request comes again
			case "a door":
				if fault != nil {
					t.Errorf("%s: %v", name, fault)
				}
				continue
			}
			if fault == nil || bus.Code(fault) != code || prompt == fails && !errors.Is(fault, errModel) {
				t.Errorf("%s: %q: %v, code %s; want %s", name, prompt, fault, bus.Code(fault), code)
			}
		}
		states, faults = append(states[:1], states[end:]...), append(faults[:1], faults[end:]...)
		for i, state := range states {
			if faults[i] != nil || len(want[i]) == 0 || state != want[i] {
				t.Errorf("%s: sample %d: %v, the bits of one without poison beside it: %v", name, i, faults[i], state == want[i])
			}
		}
	}
}

// A device that is lost, a cache without room and the end of the context say nothing of the rows.
func TestIsolate_Outages(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for _, c := range []struct {
		ctx  context.Context
		want error
	}{{t.Context(), tensor.ErrDeviceLost}, {t.Context(), lm.ErrFull}, {ended, context.Canceled}} {
		calls := 0
		faults, err := isolate(c.ctx, []int{1, 2, 3}, func([]int) (map[int]error, error) {
			calls++
			return nil, c.want
		})
		if calls != 1 || faults != nil || !errors.Is(err, c.want) {
			t.Errorf("%v: %d calls, faults %v, error %v; want one call and the error", c.want, calls, faults, err)
		}
	}
}

// poisonedText does what the token says that a sequence is seen with.
type poisonedText struct {
	lm.Model
	of map[int32]string
}

func (m poisonedText) Forward(ctx context.Context, rows []lm.Row) error {
	err := m.Model.Forward(ctx, rows)
	for _, r := range rows {
		for _, id := range r.IDs {
			switch m.of[id] {
			case panics:
				panic("index out of range")
			case fails:
				return errModel
			case spoils:
				r.Logits[5] = nan
			case infects:
				for _, r := range rows {
					r.Logits[0] = nan
				}
			}
		}
	}
	return err
}

// randomText opens a language model of random weights.
func randomText(t *testing.T) lm.Model {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "babble")
	if err := (qwen2.Random{Seed: 3}).Write(dir); err != nil {
		t.Fatal(err)
	}
	m, err := languages.All().Open(dir, lm.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// A device that is lost while samples are tried alone says nothing of them: they go elsewhere.
func TestIsolate_DeviceLost(t *testing.T) {
	t.Parallel()
	calls := 0
	faults, err := isolate(t.Context(), []int{1, 2}, func([]int) (map[int]error, error) {
		if calls++; calls == 1 {
			return nil, errors.New("the call failed")
		}
		return nil, tensor.ErrDeviceLost
	})
	if !errors.Is(err, tensor.ErrDeviceLost) || faults != nil {
		t.Errorf("faults %v, %v; want the lost device", faults, err)
	}
}

// A sequence that the model cannot compute fails alone; those beside it get the tokens that they get without it.
func TestTokenEngine_PoisonFailsAlone(t *testing.T) {
	t.Parallel()
	m := randomText(t)
	const samples = 6
	run := func(of map[int32]string) (*tokenEngine, []Episode, []error) {
		e := newTokenEngine(poisonedText{m, of}, true)
		var episodes []Episode
		for i := range samples {
			x := &schemas.TextRequest{
				Messages: []schemas.Message{{Role: "user", Content: "2+2=?"}}, MaxNewTokens: 12,
				Temperature: 1, TopP: 1, TokensPerEvent: 1, Vocabulary: int64(e.card.Vocabulary),
			}
			req := &schemas.Request{Run: "r", UID: "g", SampleIndex: int64(i), SampleSeed: uint64(i), Text: x}
			req.ScheduleDigest = req.ComputeScheduleDigest()
			p, err := e.Start(t.Context(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.(*tokenEpisode).Close() })
			episodes = append(episodes, p)
		}
		_, faults := stepAll(t, e, episodes)
		return e, episodes, faults
	}
	_, want, _ := run(nil)
	prompt := slices.Index(want[0].(*tokenEpisode).mask, 1)
	generated := func(p Episode) []int32 { return p.(*tokenEpisode).ids[prompt:] }
	for _, poison := range poisons {
		// The poison is a token that some samples draw, and not as their last: that one the model never sees.
		of := map[int32]string{generated(want[2])[3]: poison}
		_, got, faults := run(of)
		struck := 0
		for i, p := range got {
			ids := generated(want[i])
			seen := slices.IndexFunc(ids[:len(ids)-1], func(id int32) bool { return of[id] != "" })
			switch {
			case seen < 0 && (faults[i] != nil || !slices.Equal(generated(p), ids)):
				t.Errorf("a token %s: sample %d: %v, %v; want %v as without it", poison, i, faults[i], generated(p), ids)
			case seen >= 0 && (faults[i] == nil || !slices.Equal(generated(p), ids[:seen+1])):
				t.Errorf("a token %s: sample %d: %v, %v; want a fault at %d", poison, i, faults[i], generated(p), seen)
			}
			if seen >= 0 {
				struck++
			}
		}
		if struck == 0 || struck == samples {
			t.Errorf("a token %s: %d of %d samples drew it; the test needs some", poison, struck, samples)
		}
	}
}

// A prompt that the model panics at ends the sample that has it computed, and keeps none of its group waiting.
func TestPrefixes_Panic(t *testing.T) {
	t.Parallel()
	m := randomText(t)
	x := prefixes{model: poisonedText{m, map[int32]string{7: panics}}}
	for range 2 { // the second would wait for the first
		_, err := x.fork(t.Context(), []int32{6, 7}, make([]float32, m.Card().Vocabulary))
		if bus.Code(err) != schemas.CodePanic {
			t.Errorf("%v; want a panic", err)
		}
	}
}
