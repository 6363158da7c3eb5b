package images

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/enginetest"
)

// poisoned is a model that does what a prompt is named by.
type poisoned struct{ model.Model }

func (m poisoned) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	err := m.Model.Velocity(ctx, rows, size)
	var outputs [][]float32
	for _, r := range rows {
		outputs = append(outputs, r.Dst)
	}
	for _, r := range rows {
		err = errors.Join(err, enginetest.Strike(r.Conditioning.Prompt, r.Dst, outputs...))
	}
	return err
}

func paint(prompt string, seed uint64, scale float64) *schemas.Request {
	r := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u"},
		Sampling: schemas.Sampling{
			Prompt: prompt, Height: 64, Width: 64, TrueCFGScale: scale, SampleSeed: seed, NoiseSeed: seed,
			Sigmas: []float32{1, 0.75, 0.5, 0.25, 0}, Transitions: []string{"sde", "ode", "sde", "ode"}, NoiseLevel: 0.7,
			Solver: string(flow.Euler), LogProbKind: string(flow.Density),
			LatentsDType: string(tensor.F32),
		},
		Outputs: schemas.Outputs{ReturnStepIndices: []int64{0, 1, 2, 3, 4}},
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
	r.Sigmas, r.Transitions, r.ReturnStepIndices = levels.Sigmas(), slices.Repeat([]string{"ode"}, 10),
		[]int64{3, 4, 5, 6}
	r.ScheduledSampling = &schemas.ScheduledSample{
		RollSettings: schemas.RollSettings{
			Timesteps: 10, Prediction: noise.Prediction, Sampler: "unipc", Order: 2, Compat: "exact",
		},
		Roll: schemas.Roll{Timestep: 3, Base: 3, Source: 6, Offset: 3},
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	tokens, err := card.Tokens(media.ImageSize(64, 64))
	if err != nil {
		t.Fatal(err)
	}
	x0 := make([]float32, tokens*card.LatentChannels)
	flow.InitialNoise(x0, seed+1)
	shape := []int64{1, int64(tokens), int64(card.LatentChannels)}
	data := tensor.F32.AppendFloats(nil, x0)
	return r, &schemas.SegmentStart{Latents: &schemas.Tensor{DType: "F32", Shape: shape, Data: data}}
}

// A poison prompt fails alone. Samples beside it, guided, without guidance and of scheduled sampling, have the bits of
// a batch without it.
func TestFlowEngine_PoisonFailsAlone(t *testing.T) {
	t.Parallel()
	m, err := families.All().Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	e := newFlowEngine(poisoned{m}, engine.Options{Workers: 1})
	run := func(bad ...string) ([]string, []error) {
		var episodes []engine.Episode
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
		return enginetest.StepAll(t, e, episodes)
	}
	want, _ := run()
	for name, bad := range map[string][]string{
		enginetest.Panics: {enginetest.Panics}, enginetest.Fails: {enginetest.Fails},
		enginetest.Spoils: {enginetest.Spoils}, enginetest.Infects: {enginetest.Infects},
		"guided": {"a door", enginetest.Panics}, "all": enginetest.Poisons, "twice": {enginetest.Infects, enginetest.Panics, enginetest.Infects},
	} {
		states, faults := run(bad...)
		end := len(states) - 2
		for i, prompt := range bad {
			fault, code := faults[i+1], schemas.CodeFailed
			switch prompt {
			case enginetest.Panics:
				code = schemas.CodePanic
			case enginetest.Fails:
				code = schemas.CodeExhausted // an error that may pass: the request comes again
			case "a door":
				if fault != nil {
					t.Errorf("%s: %v", name, fault)
				}
				continue
			}
			if fault == nil || bus.Code(fault) != code || prompt == enginetest.Fails &&
				!errors.Is(fault, enginetest.ErrModel) {
				t.Errorf("%s: %q: %v, code %s; want %s", name, prompt, fault, bus.Code(fault), code)
			}
		}
		states, faults = append(states[:1], states[end:]...), append(faults[:1], faults[end:]...)
		for i, state := range states {
			if faults[i] != nil || len(want[i]) == 0 || state != want[i] {
				t.Errorf("%s: sample %d: %v, the bits of one without poison beside it: %v", name, i, faults[i],
					state == want[i])
			}
		}
	}
}
