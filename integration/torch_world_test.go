package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/verify"
)

// needTorch has programs and services of a test start the worker of this tree, and skips the test where MEANDER_PYTHON
// names no Python with its packages.
func needTorch(t *testing.T) {
	t.Helper()
	if os.Getenv("MEANDER_PYTHON") == "" {
		t.Skip("the worker in Python is not tested: MEANDER_PYTHON is not set; make engines-torch sets it")
	}
	pythonWith(t, "torch, diffusers, transformers, peft, accelerate, msgpack")
	t.Setenv("PYTHONPATH", absolute(t, filepath.Join(root, "pkg/client/python")))
	t.Setenv("OMP_NUM_THREADS", "1")
}

// absolute returns a path that does not depend on the folder of the process.
func absolute(t *testing.T, path string) string {
	t.Helper()
	at, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// exactWorker has the worker compute row by row in f32 on one thread of the CPU.
var exactWorker = models.Compute{Device: "cpu", DType: "f32", Threads: 1, Deterministic: true}

// torchSigns is a pipeline for signs, whose network a worker in Python computes, and its log.
func torchSigns(t *testing.T) (*world, *logbook) {
	t.Helper()
	w, log := newWorld(t), &logbook{}
	c := defaults()
	c.sampler.Model, c.sampler.Engine, c.sampler.Compute = signsFolder, "torch", exactWorker
	c.sampler.Batch, c.sampler.Workers = 4, 1
	for _, name := range []string{"intake", "reward", "advantage"} {
		w.Serve(t, c.run(name))
	}
	w.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, c.sampler, b, zerolog.New(log)) })
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the sampler's log:\n%s", log)
		}
	})
	return w, log
}

var startedWorker = regexp.MustCompile(`(?:started a worker|took the worker of the inspection), process (\d+)`)

// workers returns the numbers of the workers' processes that a log names.
func workers(t *testing.T, log string) (list []int) {
	t.Helper()
	for _, said := range startedWorker.FindAllStringSubmatch(log, -1) {
		n, err := strconv.Atoi(said[1])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, n)
	}
	return list
}

// killWorker kills the worker that was started last, without a word to its sampler.
func killWorker(t *testing.T, log *logbook) {
	t.Helper()
	list := workers(t, log.String())
	if err := syscall.Kill(list[len(list)-1], syscall.SIGKILL); err != nil {
		t.Fatalf("worker %v: %v", list, err)
	}
}

// provenNatively recomputes a run with this program's own network, which agrees with the worker's to roundings.
func provenNatively(t *testing.T, w *world, run schemas.Run, samples int) {
	t.Helper()
	r, err := verify.Run(t.Context(), w.Bus, run, verify.Options{
		Model: []string{signsFolder}, Engine: verify.EngineNone,
	})
	if err != nil || r.Trajectories != samples || r.MaxRatio > 1e-5 || !r.OK(1e-5) {
		t.Errorf("%s: %+v, %v; want %d samples, which this program makes, too", run, r, err, samples)
	}
}

// stepsOnce waits until each step of the group of swapGroup is stored, and holds that none is stored twice.
func stepsOnce(t *testing.T, w *world, run schemas.Run) {
	t.Helper()
	bustest.Until(t, "each step is there once", func() error {
		steps := harness.Subjects(t, w.Bus, schemas.StreamSteps, schemas.StepsFilter(run, "*", "*", "*"))
		if len(steps) != swapSamples*swapSteps {
			return fmt.Errorf("%d steps, want %d", len(steps), swapSamples*swapSteps)
		}
		return nil
	})
	harness.NoDead(t, w.Bus)
}

// A worker that is killed half way through, or while a version of the weights is taken over, costs no sample: each has
// the content that it has where nothing disturbs it, and is recomputed by the other network with the weights that its
// steps name. Trees and scheduled sampling go through the worker, too.
func TestTorch_PythonKilled(t *testing.T) {
	needTorch(t)
	w, log := torchSigns(t)
	served(t, w, 1, 0)
	swapGroup(t, w, "calm")
	calm := swapped(t, w, "calm")
	provenNatively(t, w, "calm", swapSamples)

	swapGroup(t, w, "cut")
	if s := halfWay(t, w, swapSteps/2); s.StepIndex >= swapSteps {
		t.Fatalf("step %d of %d: not cut off in the middle", s.StepIndex, swapSteps)
	}
	killWorker(t, log)
	for i, got := range swapped(t, w, "cut") {
		if got.digest != calm[i].digest {
			t.Errorf("sample %d has another digest after its worker was killed", i)
		}
	}
	if n := len(workers(t, log.String())); n != 2 || !strings.Contains(log.String(), "the worker is lost") {
		t.Errorf("%d workers were started; want another one after the loss", n)
	}
	stepsOnce(t, w, "cut")

	w.publish(t, "tree", treePrompt())
	if g := w.advantages(t, "tree", 1)["t"]; g.Status != schemas.StatusComplete {
		t.Errorf("the tree is %s: %s", g.Status, g.Error)
	}
	provenNatively(t, w, "tree", treeLeaves)
	w.rolled(t, "rolled", &schemas.Prompt{
		UID: "u", Prompt: `a red sign that says "OPEN"`, Seed: new(int64(3)), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			Start: &schemas.Start{Data: &schemas.Data{Images: []schemas.DataImage{{Data: paint(t, 64, 64, 60)}}}},
			ScheduledSampling: &schemas.ScheduledSampling{
				MaxStepOffset: new(int64(10)), Probability: new(1.0), Timesteps: new(int64(50)),
				BaseTimesteps: []float64{20.5, 7}, Decode: true,
			},
		},
	})
	native := verify.Options{Model: []string{signsFolder}, Engine: verify.EngineNone}
	r, err := verify.Run(t.Context(), w.Bus, "rolled", native)
	if err != nil || r.Rolled == 0 || r.MaxRolled > 1e-5 {
		t.Errorf("scheduled sampling: %+v, %v", r, err)
	}

	pushEachRule(t, w, log, calm)
	exact, err := verify.Run(t.Context(), w.Bus, "swap-"+schemas.SwapSwitch, verify.Options{
		Model: []string{signsFolder}, Engine: "torch", Compute: exactWorker,
	})
	if err != nil || !exact.OK(0) || exact.Steps != swapSamples*swapSteps || exact.MaxRatio != 0 {
		t.Errorf("by a worker: %+v, %v; want all exact", exact, err)
	}
}

// pushEachRule pushes weights while samples are made, by each rule, and kills the worker while it takes them over.
func pushEachRule(t *testing.T, w *world, log *logbook, calm map[int64]content) {
	t.Helper()
	base := served(t, w, 1, 0)
	adapter := func(version int) []byte {
		if version > 1 {
			d := widthOfSigns(t, w.Bus, base)
			return loraFile(t, projection, d, d, 4, uint64(version), 0)
		}
		b, err := os.ReadFile(filepath.Join(root, "deploy/demo/adapter/adapter_model.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	before := calm
	for i, rule := range schemas.SwapRules {
		run := schemas.Run("swap-" + rule)
		swapGroup(t, w, run)
		bustest.Await(t, w.Bus, 1, schemas.StreamSteps, schemas.StepsFilter(run, "*", "*", "*"))
		pushed, err := w.client.PushPolicy(t.Context(), parsedLoRA(t, adapter(i+1)), client.Push{Rule: rule})
		if err != nil {
			t.Fatal(err)
		}
		if rule != schemas.SwapFinish { // a fourth loss within minutes would be the last
			killWorkerWhenLoading(t, w, log, pushed)
		}
		served(t, w, 1, pushed.PolicyVersion)
		got := swapped(t, w, run)
		swapGroup(t, w, "after-"+schemas.Run(rule))
		after := swapped(t, w, "after-"+schemas.Run(rule))
		versions := map[string]int{}
		for k, s := range got {
			versions[fmt.Sprint(s.min, "-", s.max)]++
			switch {
			case s.min != s.max && rule != schemas.SwapSwitch:
				t.Errorf("%s: sample %d has steps of the versions %d and %d", rule, k, s.min, s.max)
			case s.min != s.max:
			case s.max == pushed.PolicyVersion && s.digest != after[k].digest,
				s.max != pushed.PolicyVersion && s.digest != before[k].digest:
				t.Errorf("%s: sample %d, of version %d, has another digest than undisturbed", rule, k, s.max)
			}
		}
		t.Logf("%s: samples by versions: %v", rule, versions)
		if calm[0].digest == after[0].digest {
			t.Errorf("%s: the adapter changes nothing", rule)
		}
		stepsOnce(t, w, run)
		provenNatively(t, w, run, swapSamples)
		before = after
	}
}

// killWorkerWhenLoading kills the worker the moment its sampler says that it loads a version, or has it.
func killWorkerWhenLoading(t *testing.T, w *world, log *logbook, p *schemas.Policy) {
	t.Helper()
	bustest.Until(t, "the version is loaded", func() error {
		replicas, err := w.client.Replicas(t.Context(), p)
		for _, r := range replicas {
			if r.Loading != nil || r.PolicyVersion != nil && *r.PolicyVersion == p.PolicyVersion {
				killWorker(t, log)
				return nil
			}
		}
		return errors.Join(err, errors.New("not yet"))
	})
}

// halfWay waits for a step of the run cut, and returns it.
func halfWay(t *testing.T, w *world, index int64) *schemas.Step {
	t.Helper()
	ctx, moved := bustest.WhileItMoves(t)
	for m, err := range w.Read(ctx, schemas.StreamSteps, []string{schemas.Address{
		Kind: schemas.KindStep, Run: "cut",
	}.Filter()}, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		moved()
		if s := bustest.Decode[schemas.Step](t, m); s.StepIndex >= index {
			return s
		}
	}
	t.Fatal("no step came so far")
	return nil
}
