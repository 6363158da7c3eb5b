package images_test

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/remoteimage/remoteimagetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/enginetest"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// dialServed returns the network of a recorded server of signs, which takes texts of so many tokens.
func dialServed(t *testing.T, s *remoteimagetest.Server, tokens int) engine.Network {
	t.Helper()
	info, err := families.All().Inspect("../../../../deploy/models/signs")
	if err != nil {
		t.Fatal(err)
	}
	info.Card.MaxPromptTokens = tokens
	n, err := images.Dial(t.Context(), engine.Server{Engine: "sglang-diffusion=" + s.URL, EnginePatience: time.Minute},
		images.ServedModel{Card: info.Card, Class: "QwenImagePipeline"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// recordedRequest asks for what sde_all.msgpack has.
func recordedRequest(change func(r *schemas.Request)) *schemas.Request {
	r := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u"},
		Sampling: schemas.Sampling{
			Prompt: remoteimagetest.Prompt, Height: remoteimagetest.Height, Width: remoteimagetest.Width,
			TrueCFGScale: 1, SampleSeed: remoteimagetest.Seed, NoiseSeed: remoteimagetest.Seed,
			Sigmas:      remoteimagetest.Sigmas(),
			Transitions: []string{"sde", "sde", "sde", "sde"}, NoiseLevel: 0.7, Solver: "euler",
			LogProbKind: "density", LatentsDType: "F32",
		},
		Outputs: schemas.Outputs{ReturnStepIndices: []int64{0, 1, 2, 3, 4}},
	}
	change(r)
	r.ScheduleDigest = r.ComputeScheduleDigest()
	return r
}

// makeOne steps one episode to its end, and returns its events, its trajectory and its images.
func makeOne(
	t *testing.T, e engine.Engine, r *schemas.Request,
) ([]*schemas.Step, *schemas.Trajectory, engine.Images, engine.Episode) {
	t.Helper()
	p, err := e.Start(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	var steps []*schemas.Step
	for !p.Done() {
		if err := e.Step(t.Context(), []engine.Episode{p}); err != nil {
			t.Fatal(err)
		}
		events, err := p.Take()
		if err != nil {
			t.Fatal(err)
		}
		for _, event := range events {
			steps = append(steps, event.(*schemas.Step))
		}
	}
	out := &schemas.Trajectory{}
	made, err := p.Finish(t.Context(), out)
	if err != nil {
		t.Fatal(err)
	}
	return steps, out, made, p
}

// What a real server sent becomes the events and the trajectory that a sampler would make: states, log-probs, noise of
// the schedule, tensors, texts and pixels.
func TestServed_Recorded(t *testing.T) {
	n := dialServed(t, remoteimagetest.New(t), 512)
	if p := n.Policy(); n.Backend() != "sglang-diffusion 0.5.23/fp32" || p.Engine.Precision != "fp32" ||
		p.Checkpoint() != "served by sglang-diffusion" {
		t.Errorf("%s, %+v", n.Backend(), p)
	}
	e := n.Engine(engine.Options{})
	steps, out, made, _ := makeOne(t, e, recordedRequest(func(*schemas.Request) {}))
	want := []float64{-1.0031823, -0.97806346, -0.44098842, 2.8738062}
	for i, s := range steps {
		if math.Abs(*s.LogProb-want[i]) > 1e-7 || *s.LogProbSum != *s.LogProb*512 || s.ElementCount != 512 ||
			s.StepIndex != int64(i) ||
			!(s.NoiseStd > 0) || len(s.Latents) != 1+i/3 || s.Latents[0].Index != int64(i) {
			t.Errorf("step %d: %+v", i, s)
		}
	}
	if d := out.Drawn; d == nil || d.Engine.String() != "sglang-diffusion 0.5.23" || len(steps) != 4 ||
		!slices.Equal(out.LatentsShape, []int64{8, 64}) || made.End.Size().String() != "64 x 32" &&
		made.End.Size().Width != 64 {
		t.Errorf("%d steps, %+v, %v", len(steps), out, made.End.Size())
	}
	steps, _, _, p := makeOne(t, e, recordedRequest(func(r *schemas.Request) {
		r.Debug, r.ReturnConditioning, r.TrueCFGScale, r.NegativePrompt = []string{
			"noise", "mean", "std",
			"model_output",
		}, true, 2.5, "red"
	}))
	for i, s := range steps {
		noise, mean, next := make([]float32, 512), make([]float32, 512), make([]float32, 512)
		for k, dst := range [][]float32{noise, mean} {
			if err := tensor.F32.DecodeFloats(dst, s.Debug[k].Tensor.Data); err != nil {
				t.Fatal(err)
			}
		}
		state := s.Latents[len(s.Latents)-1]
		if i < 3 {
			state = steps[i+1].Latents[0]
		}
		if err := tensor.F32.DecodeFloats(next, state.Tensor.Data); err != nil {
			t.Fatal(err)
		}
		for k := range next {
			if off := float64(mean[k]) + s.NoiseStd*float64(noise[k]) - float64(next[k]); math.Abs(off) > 1e-6 {
				t.Fatalf("step %d, element %d: mean + n eps is %g away from the state", i, k, off)
			}
		}
	}
	_, cond, negative := p.(engine.Texter).Texts()
	if cond.Tensors[0].Name != "prompt_embeds" || cond.Tensors[0].Shape[0] != 16 || negative.Tensors[0].Shape[0] != 7 {
		t.Errorf("texts: %+v, %+v", cond.Tensors[0].Shape, negative.Tensors[0].Shape)
	}
	steps, _, _, _ = makeOne(t, e, recordedRequest(func(r *schemas.Request) {
		r.Transitions, r.ReturnStepIndices, r.Debug = []string{"ode", "sde", "sde", "ode"}, []int64{1, 2, 3},
			[]string{"noise"}
	}))
	if steps[0].LogProb != nil || steps[1].LogProb == nil || len(steps[0].Latents) != 0 || len(steps[3].Latents) != 1 {
		t.Errorf("window: %+v, %+v", steps[0], steps[3])
	}
}

// Errors have the class that decides what becomes of the sample: it fails, comes again, or waits for a server.
func TestServed_Errors(t *testing.T) {
	file := func(name string) []byte { return remoteimagetest.Recorded(t, name) }
	for name, c := range map[string]struct {
		status         int
		body           []byte
		terminal, away bool
		says           string
	}{
		"refused":     {400, file("err400_noise.json"), true, false, "must be non-negative"},
		"a NaN":       {200, file("sde_lora_nan.msgpack"), true, false, "not finite"},
		"a fault":     {500, file("sde_lora_shape.json"), false, false, "shapes cannot be multiplied"},
		"a cut":       {200, file("sde_all.msgpack")[:9000], false, false, "ends early"},
		"a dead part": {500, file("killed_worker_inflight.json"), false, true, "has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			s := remoteimagetest.New(t)
			e := dialServed(t, s, 512).Engine(engine.Options{})
			s.SetAnswer(remoteimagetest.Say(c.status, c.body))
			p, err := e.Start(t.Context(), recordedRequest(func(*schemas.Request) {}), nil)
			if err != nil {
				t.Fatal(err)
			}
			_, faults := enginetest.StepAll(t, e, []engine.Episode{p})
			_, terminal := errors.AsType[*bus.TerminalError](faults[0])
			if faults[0] == nil || terminal != c.terminal || errors.Is(faults[0], engine.ErrAway) != c.away ||
				!strings.Contains(faults[0].Error(), c.says) {
				t.Errorf("%v; want %q, terminal %t, away %t", faults[0], c.says, c.terminal, c.away)
			}
		})
	}
	s := remoteimagetest.New(t)
	e := dialServed(t, s, 512).Engine(engine.Options{})
	before := len(s.Asked())
	for says, r := range map[string]*schemas.Request{
		"rollout.solver: heun": recordedRequest(func(r *schemas.Request) { r.Solver = "heun" }),
		"height x width":       recordedRequest(func(r *schemas.Request) { r.Height = 33 }),
		"text: given":          recordedRequest(func(r *schemas.Request) { r.Text = &schemas.TextRequest{} }),
		"sigmas":               recordedRequest(func(r *schemas.Request) { r.Sigmas = []float32{1, 2, 3, 4, 0} }),
		"schedule_digest: stored other": func() *schemas.Request {
			r := recordedRequest(func(*schemas.Request) {})
			r.ScheduleDigest = "other"
			return r
		}(),
	} {
		_, err := e.Start(t.Context(), r, nil)
		if _, terminal := errors.AsType[*bus.TerminalError](err); !terminal || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want a terminal error with %q", err, says)
		}
	}
	if n := len(s.Asked()) - before; n != 0 {
		t.Errorf("asked %d times for what was refused", n)
	}
}

// A prompt that the server may cut is asked for with its encoding; one that was too long fails by name.
func TestServed_LongPrompt(t *testing.T) {
	for tokens, says := range map[int]string{512: "", 15: "16 tokens; must be at most 15"} {
		s := remoteimagetest.New(t)
		e := dialServed(t, s, tokens).Engine(engine.Options{})
		s.SetAnswer(remoteimagetest.Say(http.StatusOK, remoteimagetest.Recorded(t, "sde_debug_env.msgpack")))
		p, err := e.Start(t.Context(),
			recordedRequest(func(r *schemas.Request) { r.Prompt = strings.Repeat("a sign, ", 100) }), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, faults := enginetest.StepAll(t, e, []engine.Episode{p})
		if _, terminal := errors.AsType[*bus.TerminalError](faults[0]); terminal != (says != "") ||
			fmt.Sprint(faults[0]) == "" ||
			!strings.Contains(fmt.Sprint(faults[0]), says) {
			t.Errorf("a text of 16 tokens of %d: %v; want %q", tokens, faults[0], says)
		}
		asked := s.Asked()
		if last := asked[len(asked)-1]; last["rollout_return_denoising_env"] != true {
			t.Errorf("asked for %v", last)
		}
	}
}
