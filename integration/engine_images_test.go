package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/imageserver"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/remoteimage/remoteimagetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
	"github.com/meander-rl/meander/services/verify"
)

const sign = `a blue sign that says "4071"`

// Images of a server become the same events and trajectories as those of a sampler, and verify computes them again.
func TestImageServer_Run(t *testing.T) {
	t.Parallel()
	s := imageserver.New(t, signs(t), model.Options{})
	for name, args := range map[string][]string{
		"sde":    nil,
		"guided": {"--true-cfg-scale", "2.5", "--negative-prompt", "red", "--return-conditioning"},
		"window": {"--sde-steps", "1,2", "--steps", "6"},
		"cps":    {"--sde-type", "cps", "--noise-level", "0.8", "--log-prob-kind", "squared"},
		"size": {
			"--height", "96", "--width", "32", "--sde-window", "2", "--debug", "noise,model_output",
			"--reward", "jpeg_compressibility",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			out := meander(t, dir, slices.Concat([]string{
				"run", "--json", "--model", signs(t), "--engine", imageserver.Engine(s), "--run", "r", "-n", "3", sign,
			}, args)...).must(t, 0)
			groups, sum := out.parse(t)
			if sum.Complete != 1 || len(groups[0].Members) != 3 {
				t.Fatalf("%+v", sum)
			}
			out = meander(t, dir, "verify", "--json", "--run", "r", "--model", signs(t)).must(t, 0)
			var r verify.Report
			if err := json.Unmarshal([]byte(out.stdout), &r); err != nil || r.Steps == 0 ||
				r.MaxDrawnDifference > 1e-5 ||
				!slices.Equal(r.DrawnBy, []string{"sglang-diffusion 0.5.23"}) {
				t.Errorf("verify: %+v, %v", r, err)
			}
		})
	}
}

// What the server cannot do is refused where it is asked for, before any image is made.
func TestImageServer_Refuses(t *testing.T) {
	t.Parallel()
	s := imageserver.New(t, signs(t), model.Options{})
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--solver", "heun"}, "--solver: heun; must be euler"},
		{[]string{"--sde-type", "dance_sde"}, "--sde-type: dance_sde; must be sde, cps, ode"},
		{[]string{"--latents-dtype", "BF16"}, "--latents-dtype: BF16; must be F32"},
		{[]string{"--initial-noise", "shared"}, "--initial-noise: shared"},
		{[]string{"--stop-step", "4"}, "--stop-step: given"},
		{[]string{"--sigmas", "1,0.5"}, "--sigmas: given"},
		{[]string{"--cfg-until", "0.5", "--true-cfg-scale", "3"}, "--cfg-until: given"},
		{[]string{"--true-cfg-scale-2", "2"}, `--true-cfg-scale-2: 2; must be absent, model "signs" has no second network`},
		{[]string{"--model", "synthetic"}, "no pipeline of diffusers"},
		{[]string{"--model", sums(t)}, "makes images; --model"},
		{[]string{"--adapter", "x"}, "adapter: set"},
		{[]string{"--engine", "sglang-diffusion=" + s.URL + "," + s.URL}, "names " + s.URL + " twice"},
	} {
		out := meander(t, t.TempDir(), slices.Concat([]string{
			"run", "--model", signs(t), "--engine", imageserver.Engine(s), "-n", "2", sign,
		}, c.args)...)
		if out.code == 0 || !strings.Contains(out.stderr, c.says) {
			t.Errorf("%v: exit %d, %s; want %q", c.args, out.code, out.stderr, c.says)
		}
	}
	for _, q := range s.Asked() {
		if q.Steps != 4 || *q.Seed != 5 { // the probe
			t.Errorf("asked for %+v of what was refused", q)
		}
	}
}

// Images that a real server made, as it was recorded, hold when verify makes each step of them again.
func TestImageServer_VerifyRecorded(t *testing.T) {
	t.Parallel()
	s, w := remoteimagetest.New(t), newWorld(t)
	c := sampler.DefaultConfig()
	c.Model, c.Engine = signs(t), "sglang-diffusion="+s.URL
	w.sampler(t, c)
	r := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u", GroupSize: 1, Lane: "signs"},
		Sampling: schemas.Sampling{
			Prompt: remoteimagetest.Prompt, Height: remoteimagetest.Height, Width: remoteimagetest.Width,
			TrueCFGScale: 1, SampleSeed: remoteimagetest.Seed, NoiseSeed: remoteimagetest.Seed,
			Sigmas:      remoteimagetest.Sigmas(),
			Transitions: []string{"sde", "sde", "sde", "sde"}, NoiseLevel: 0.7, Solver: "euler",
			LogProbKind: "density", LatentsDType: "F32",
		},
		Outputs: schemas.Outputs{
			ReturnStepIndices: []int64{0, 1, 2, 3, 4}, ReturnConditioning: true, Debug: []string{"noise"},
		},
		Group: schemas.Group{Batch: "u"},
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	if _, err := w.Bus.Publish(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "a trajectory", func() error {
		_, err := w.client.Trajectory(t.Context(), "r", "u", 0)
		return err
	})
	report, err := verify.Run(t.Context(), w.Bus, "r", verify.Options{Model: []string{signs(t)}})
	if err != nil || !report.OK(0) || report.Steps != 4 || report.States != 5 || report.Conditionings != 2 ||
		report.MaxDrawnDifference == 0 || report.EngineTolerance != 1e-5 {
		t.Errorf("%+v, %v", report, err)
	}
}

// Verify sees a server that has other weights than the folder, and one that draws other noise than it says.
func TestImageServer_VerifyFails(t *testing.T) {
	t.Parallel()
	adapted, liar := imageserver.New(t, signs(t), model.Options{Adapter: filepath.Join(root, "deploy/demo/adapter")}),
		imageserver.New(t, signs(t), model.Options{})
	liar.DrawOther()
	for name, s := range map[string]*imageserver.Server{"weights": adapted, "noise": liar} {
		dir := t.TempDir()
		meander(t, dir, "run", "--model", signs(t), "--engine", imageserver.Engine(s), "--run", "r", "-n", "1",
			sign).must(t, 0)
		out := meander(t, dir, "verify", "--run", "r", "--model", signs(t)).must(t, 1)
		if !strings.Contains(out.stdout, "--engine-tolerance") || !strings.Contains(out.stdout, "0 mismatches") {
			t.Errorf("%s: %s", name, out.stdout)
		}
	}
}

// imageWorld is a world whose lane signs is served by servers, with what its readiness says of them.
type imageWorld struct {
	*world
	mu    sync.Mutex
	check func() error
}

func newImageWorld(t *testing.T, servers ...*imageserver.Server) *imageWorld {
	t.Helper()
	return newImageWorldWith(t, "", servers...)
}

// newImageWorldWith is newImageWorld of servers that find pushed weights in a folder.
func newImageWorldWith(t *testing.T, folder string, servers ...*imageserver.Server) *imageWorld {
	t.Helper()
	w := &imageWorld{world: newWorld(t)}
	c := defaults()
	c.sampler.Model, c.sampler.Engine, c.sampler.EngineAdapters = signs(t), imageserver.Engine(servers...), folder
	c.sampler.Health = func(name string, check func() error) {
		if name == "engine" {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.check = check
		}
	}
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	return w
}

// says waits until readiness says something of the engine; nothing: that it can be used.
func (w *imageWorld) says(t *testing.T, what string) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("readiness: %q", what), func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.check == nil {
			return errors.New("no condition yet")
		}
		err := w.check()
		if (err == nil) != (what == "") || err != nil && !strings.Contains(err.Error(), what) {
			return fmt.Errorf("it is %w", err)
		}
		return nil
	})
}

// publishGroup asks for a group of n images.
func (w *imageWorld) publishGroup(t *testing.T, uid schemas.UID, n int64) {
	t.Helper()
	w.publish(t, "r", &schemas.Prompt{
		UID: uid, Prompt: sign, GroupSize: &n, Routing: schemas.Routing{Model: "signs"},
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(groupSteps))},
	})
}

// A server whose worker dies in the middle of an image says so; its samples wait, and none is lost.
func TestImageServer_Killed(t *testing.T) {
	skipShort(t)
	t.Parallel()
	s := imageserver.New(t, signs(t), model.Options{})
	w := newImageWorld(t, s)
	w.says(t, "")
	s.Hang()
	w.publishGroup(t, "a", 3)
	<-s.Hung()
	s.Kill()
	w.says(t, "a process of the server has ended; restart the server")
	s.Restart()
	w.says(t, "")
	w.checkGroup(t, w.advantages(t, "r", 1)["a"], 3)
	s.Kill()
	w.says(t, "has ended")
	w.publishGroup(t, "b", 2)
	s.Restart()
	w.checkGroup(t, w.advantages(t, "r", 2)["b"], 2)
}

// groupSteps is how many steps the images of publishGroup have; the probe has others.
const groupSteps = 3

// samplesAsked returns how many images of publishGroup a server was asked for. All else must be the probe, which it is
// asked for once, and again at each look while it is not used.
func samplesAsked(t *testing.T, s *imageserver.Server) (n int) {
	t.Helper()
	asked := s.Asked()
	if len(asked) == 0 || asked[0].Steps == groupSteps {
		t.Fatal("the server was not probed first")
	}
	for _, q := range asked {
		switch q.Steps {
		case groupSteps:
			n++
		case asked[0].Steps:
		default:
			t.Errorf("asked for %d steps; want %d, or %d of the probe", q.Steps, groupSteps, asked[0].Steps)
		}
	}
	return n
}

// A server of another pipeline ends the sampler with what to do. One of other weights than the first is not used.
func TestImageServer_Other(t *testing.T) {
	t.Parallel()
	s, adapted := imageserver.New(t, signs(t), model.Options{}), imageserver.New(t, signs(t),
		model.Options{Adapter: filepath.Join(root, "deploy/demo/adapter")})
	w := newImageWorld(t, s, adapted)
	w.publishGroup(t, "a", 3)
	w.checkGroup(t, w.advantages(t, "r", 1)["a"], 3)
	if n := samplesAsked(t, adapted); n != 0 {
		t.Errorf("the server of other weights was asked for %d images; want the probe alone", n)
	}
	fallback := imageserver.New(t, signs(t), model.Options{})
	fallback.Say("pipeline_name", "DiffusersPipeline")
	c := sampler.DefaultConfig()
	c.Model, c.Engine = signs(t), imageserver.Engine(fallback)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	if err := sampler.Run(ctx, c, w.Bus, zerolog.Nop()); err == nil || !strings.Contains(err.Error(), "--model-id") {
		t.Errorf("a server of another pipeline: %v", err)
	}
}

// changing is an image world of two servers whose weights change.
type changing struct {
	*imageWorld
	servers []*imageserver.Server
	groups  int
	adapter *lora.Adapter
	full    *lora.Full
}

func newChanging(t *testing.T) *changing {
	t.Helper()
	a, b := imageserver.New(t, signs(t), model.Options{}), imageserver.New(t, signs(t), model.Options{})
	w := &changing{imageWorld: newImageWorldWith(t, t.TempDir(), a, b), servers: []*imageserver.Server{a, b}}
	w.awaitLane(t)
	var err error
	if w.adapter, err = lora.Open(filepath.Join(root, "deploy/demo/adapter")); err != nil {
		t.Fatal(err)
	}
	if w.full, err = lora.ParseFull(transformer(t, 2, set(t, "proj_out.bias", 0.5, -0.5))...); err != nil {
		t.Fatal(err)
	}
	return w
}

// answer waits for what the lane's sampler says of a policy.
func (w *changing) answer(t *testing.T, p *schemas.Policy, err error) (*schemas.Policy, *schemas.Applied) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	answers, err := w.client.AwaitPolicy(t.Context(), p)
	if err != nil || len(answers) != 1 {
		t.Fatalf("answers %+v, %v; want one", answers, err)
	}
	return p, answers[0].Answer
}

// push pushes an adapter, or whole weights without one, which must be taken over.
func (w *changing) push(t *testing.T, adapter *lora.Adapter) (*schemas.Policy, *schemas.Applied) {
	t.Helper()
	p, err := w.client.PushPolicy(t.Context(), adapter, client.Push{})
	p, a := w.answer(t, p, err)
	if a.State != schemas.AppliedApplied || a.Canary == nil {
		t.Fatalf("%+v", a)
	}
	return p, a
}

// finish waits for a group, the next one of the world, whose samples must have the weights of a policy.
func (w *changing) finish(t *testing.T, uid schemas.UID, n int64, p *schemas.Policy) {
	t.Helper()
	w.groups++
	w.checkGroup(t, w.advantages(t, "r", w.groups)[uid], n)
	tr := w.trajectory(t, "r", uid, 0)
	if tr.WeightsDigest != p.WeightsDigest || tr.PolicyVersionMin != p.PolicyVersion {
		t.Errorf("%s: version %d, weights %.16s; want %d", uid, tr.PolicyVersionMin, tr.WeightsDigest, p.PolicyVersion)
	}
}

// verified computes all samples again, with as many versions that were pushed.
func (w *changing) verified(t *testing.T, versions int) {
	t.Helper()
	r, err := verify.Run(t.Context(), w.Bus, "r", verify.Options{Model: []string{signs(t)}})
	if err != nil || !r.OK(0) || r.Trajectories == 0 || r.Versions != versions {
		t.Errorf("%+v, %v; want %d versions", r, err, versions)
	}
}

// Weights that are pushed to servers of images make the samples that follow, and verify computes with them. Samples
// that have begun end with the weights before. Whole weights after an adapter are refused: the server would leave them
// out.
func TestImageServer_PushedWeights(t *testing.T) {
	skipShort(t)
	t.Parallel()
	w := newChanging(t)
	p, err := w.client.PushWeights(t.Context(), w.full, client.Push{})
	whole, first := w.answer(t, p, err)
	if first.State != schemas.AppliedApplied || first.Canary == nil {
		t.Fatalf("a whole transformer: %+v", first)
	}
	for _, s := range w.servers {
		s.Hang()
	}
	w.publishGroup(t, "begun", 3)
	for _, s := range w.servers {
		<-s.Hung()
	}
	p, err = w.client.PushPolicy(t.Context(), w.adapter, client.Push{})
	for _, s := range w.servers {
		s.Release()
	}
	w.finish(t, "begun", 3, whole)
	adapted, second := w.answer(t, p, err)
	if second.State != schemas.AppliedApplied || second.Canary.Digest == first.Canary.Digest {
		t.Fatalf("an adapter: %+v", second)
	}
	w.publishGroup(t, "adapted", 3)
	w.finish(t, "adapted", 3, adapted)
	p, err = w.client.PushWeights(t.Context(), w.full, client.Push{})
	if _, answer := w.answer(t, p, err); answer.State != schemas.AppliedRefused ||
		!strings.Contains(answer.Error, "restart the server") {
		t.Errorf("a whole transformer after an adapter: %+v; want it refused", answer)
	}
	// The adapter comes back under a new number, beside the same weights.
	p, err = w.client.RollbackPolicy(t.Context(), adapted.PolicyVersion, client.Push{})
	back, answer := w.answer(t, p, err)
	if answer.State != schemas.AppliedApplied {
		t.Fatalf("the adapter again: %+v", answer)
	}
	w.publishGroup(t, "back", 2)
	w.finish(t, "back", 2, back)
	w.verified(t, 2)
	base, _ := w.push(t, nil)
	w.publishGroup(t, "base", 2)
	w.finish(t, "base", 2, base)
}

// An image that the adapter of another client spoiled is made again; servers that start again get the pushed weights.
func TestImageServer_SpoiledWeights(t *testing.T) {
	skipShort(t)
	t.Parallel()
	w := newChanging(t)
	adapted, _ := w.push(t, w.adapter)
	w.publishGroup(t, "adapted", 3)
	w.finish(t, "adapted", 3, adapted)
	other := filepath.Join(t.TempDir(), "other")
	if err := (lora.Weighted{Adapter: w.adapter, Weight: 3}).Save(other); err != nil {
		t.Fatal(err)
	}
	asked := func() (n int) {
		for _, s := range w.servers {
			n += len(s.Asked())
		}
		return n
	}
	before := asked()
	for _, s := range w.servers {
		if err := s.SetAdapter("meander", other); err != nil {
			t.Fatal(err)
		}
	}
	w.publishGroup(t, "spoiled", 3)
	w.finish(t, "spoiled", 3, adapted)
	if n := asked() - before; n < 4 {
		t.Errorf("asked for %d images; want those of the other adapter to be made again", n)
	}
	for _, s := range w.servers {
		s.Kill()
	}
	w.says(t, "has ended")
	for _, s := range w.servers {
		s.StartAgain()
		s.Restart()
	}
	w.says(t, "")
	w.publishGroup(t, "again", 3)
	w.finish(t, "again", 3, adapted)
	w.verified(t, 1)
}
