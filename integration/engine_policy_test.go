package integration_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// servedLane is a lane of texts whose tokens a server draws, with a folder for adapters.
type servedLane struct {
	*world
	server *remotelmtest.Server
	folder string
}

func newServedLane(t *testing.T, mode string) *servedLane {
	t.Helper()
	return serveLane(t, remotelmtest.New(t, mode))
}

func serveLane(t *testing.T, server *remotelmtest.Server) *servedLane {
	t.Helper()
	l := &servedLane{server: server, folder: t.TempDir()}
	l.world = start(t, func(c *config) {
		c.sampler.Model, c.sampler.Engine, c.sampler.EngineAdapters = sumsFolder(t), l.server.Engine(), l.folder
	})
	l.awaitLane(t)
	return l
}

// awaitLane waits until the sampler has announced its lane and itself.
func (w *world) awaitLane(t *testing.T) {
	t.Helper()
	bustest.Until(t, "the lane", func() error {
		p, err := w.client.Policy(t.Context(), schemas.Lineage{})
		if err != nil {
			return err
		}
		if present, err := w.client.Replicas(t.Context(), p); err != nil || len(present) != 1 {
			return fmt.Errorf("samplers: %v, %w", present, err)
		}
		return nil
	})
}

// push pushes an adapter and returns its policy with what the lane's sampler says of it.
func (l *servedLane) push(t *testing.T, seed uint64) (*schemas.Policy, schemas.Applied) {
	t.Helper()
	a := parsedLoRA(t, loraFile(t, "model.layers.0.mlp.down_proj", 128, 384, 4, seed, 0))
	pushed, err := l.client.PushPolicy(t.Context(), a, client.Push{})
	return l.answer(t, pushed, err)
}

// pushWhole is push for whole weights: those of a folder.
func (l *servedLane) pushWhole(t *testing.T, folder string) (*schemas.Policy, schemas.Applied) {
	t.Helper()
	full, err := lora.OpenFull(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	pushed, err := l.client.PushWeights(t.Context(), full, client.Push{})
	return l.answer(t, pushed, err)
}

// answer returns what the lane's sampler says of a policy that was pushed.
func (l *servedLane) answer(t *testing.T, pushed *schemas.Policy, err error) (*schemas.Policy, schemas.Applied) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	answers, err := l.client.AwaitPolicy(t.Context(), pushed)
	if err != nil || len(answers) != 1 {
		t.Fatalf("answers %+v, %v; want one", answers, err)
	}
	return pushed, *answers[0].Answer
}

// draw makes a run of one group, and returns its first sample and the models that its requests named.
func (l *servedLane) draw(t *testing.T, run schemas.Run) (tr *schemas.Trajectory, models map[any]bool) {
	t.Helper()
	before := len(l.server.Asked())
	if _, err := l.client.Publish(t.Context(), run, &schemas.Prompt{
		UID: "g", Prompt: remotelmtest.Prompt, GroupSize: new(int64(2)),
	}); err != nil {
		t.Fatal(err)
	}
	if a := l.advantages(t, run, 1)["g"]; a.Status != schemas.StatusComplete {
		t.Fatalf("%s: %+v", run, a)
	}
	models = map[any]bool{}
	for _, body := range l.server.Asked()[before:] {
		models[body[l.server.AdapterField()]] = true
	}
	return l.trajectory(t, run, "g", 0), models
}

// An adapter that is pushed to a lane of served texts is loaded by the server, and draws the samples that follow: also
// after the server was started again. The one before is unloaded, and its folder removed.
func TestEngine_PushedAdapters(t *testing.T) {
	t.Parallel()
	for mode, engine := range map[string]string{remotelmtest.LogProbs: "vllm", remotelmtest.SGLang: "sglang"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			testPushedAdapters(t, mode, schemas.ServedBy(engine))
		})
	}
}

func testPushedAdapters(t *testing.T, mode, served string) {
	l := newServedLane(t, mode)
	base, models := l.draw(t, "base")
	if len(models) != 1 || base.WeightsDigest != served {
		t.Fatalf("models %v, weights %s", models, base.WeightsDigest)
	}
	pushed, answer := l.push(t, 7)
	if answer.State != schemas.AppliedApplied || answer.Canary == nil {
		t.Fatalf("the push: %+v", answer)
	}
	for i, run := range []schemas.Run{"adapter", "again"} {
		if i == 1 {
			l.server.Restart()
		}
		tr, models := l.draw(t, run)
		loaded := l.server.Adapters() // one of zeros, for samples of the checkpoint
		if len(loaded) != 2 || len(models) != 1 || tr.WeightsDigest != pushed.WeightsDigest ||
			tr.PolicyVersionMin != 1 {
			t.Fatalf("%s: server has %v, asked for %v; weights %s, want %s", run, loaded, models, tr.WeightsDigest,
				pushed.WeightsDigest)
		}
		for name := range loaded {
			if models[name] == strings.HasPrefix(name, "meander-base-") {
				t.Errorf("%s: asked for %v, the server has %v", run, models, loaded)
			}
		}
	}
	if _, answer = l.push(t, 8); answer.State != schemas.AppliedApplied {
		t.Fatalf("the second push: %+v", answer)
	}
	bustest.Until(t, "the first adapter is gone", func() error {
		folders, err := os.ReadDir(l.folder)
		if loaded := l.server.Adapters(); err == nil && (len(folders) != 2 || len(loaded) != 2) {
			return fmt.Errorf("the server has %v, the folder %v", loaded, folders)
		}
		return err
	})
	if next, err := l.client.PushPolicy(t.Context(), nil, client.Push{}); err != nil {
		t.Fatal(err)
	} else if _, err := l.client.AwaitPolicy(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if back, models := l.draw(t, "back"); len(models) != 1 || back.WeightsDigest != base.WeightsDigest {
		t.Errorf("without an adapter: models %v, weights %s", models, back.WeightsDigest)
	}
	// The recorded answers are the model's without an adapter: with it verify computes other numbers.
	for run, versions := range map[schemas.Run]int{"base": 0, "adapter": 1} {
		r, err := verify.Run(t.Context(), l.Bus, run, verify.Options{Model: []string{sumsFolder(t)}})
		if err != nil || r.Versions != versions || len(r.Mismatches) > 0 || (r.Worst == nil) != (versions == 0) {
			t.Errorf("verify %s: %+v, %v; want %d versions", run, r, err, versions)
		}
	}
}

// Whole weights that are pushed to a lane of served texts are loaded by the server, which names them in its answers,
// also after it was started again. Without adapters it takes these alone. A rollback has it load those of its model.
func TestEngine_PushedWeights(t *testing.T) {
	t.Parallel()
	for mode, engine := range map[string]string{remotelmtest.LogProbs: "vllm", remotelmtest.SGLang: "sglang"} {
		for _, without := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, adapters %v", engine, !without), func(t *testing.T) {
				t.Parallel()
				server := remotelmtest.New(t, mode)
				server.DevMode, server.NoAdapters = true, without
				testPushedWeights(t, serveLane(t, server), schemas.ServedBy(engine))
			})
		}
	}
}

// vLLM on a CPU keeps a copy of the head, which whole weights of a model with a tied one do not reach: such a push is
// refused.
func TestEngine_KeepsHead(t *testing.T) {
	t.Parallel()
	server := remotelmtest.New(t, remotelmtest.LogProbs)
	server.DevMode, server.CPU = true, true
	l := serveLane(t, server)
	_, answer := l.pushWhole(t, otherWeights(t, sumsFolder(t), "model.safetensors"))
	if answer.State != schemas.AppliedRefused || !strings.Contains(answer.Error, "on a CPU keeps the head") {
		t.Errorf("the push: %+v", answer)
	}
}

func testPushedWeights(t *testing.T, l *servedLane, served string) {
	if p, err := l.client.Policy(t.Context(), schemas.Lineage{}); err != nil || p.Tensors == nil ||
		(p.Modules == nil) != l.server.NoAdapters {
		t.Fatalf("%+v, %v", p, err)
	}
	base, _ := l.draw(t, "base")
	pushed, answer := l.pushWhole(t, otherWeights(t, sumsFolder(t), "model.safetensors"))
	if answer.State != schemas.AppliedApplied || answer.Canary == nil {
		t.Fatalf("the push: %+v", answer)
	}
	name := remotelm.WeightsName(pushed.WeightsDigest)
	for i, run := range []schemas.Run{"whole", "again"} {
		if i == 1 {
			l.server.Restart()
		}
		tr, _ := l.draw(t, run)
		if has, _ := l.server.Version(); has != name || tr.WeightsDigest != pushed.WeightsDigest ||
			tr.PolicyVersionMin != 1 || len(tr.Drawn.Weights) == 0 {
			t.Fatalf("%s: the server has %s, the sample %s and %+v", run, has, tr.WeightsDigest, tr.Drawn)
		}
		for _, w := range tr.Drawn.Weights {
			if w.Version != name {
				t.Errorf("%s: %+v; want %s", run, w, name)
			}
		}
	}
	if _, answer = l.pushWhole(t, sumsFolder(t)); answer.State != schemas.AppliedApplied {
		t.Fatalf("the second push: %+v", answer)
	}
	back, err := l.client.RollbackPolicy(t.Context(), 0, client.Push{})
	if _, answer = l.answer(t, back, err); answer.State != schemas.AppliedApplied {
		t.Fatalf("the rollback: %+v", answer)
	}
	if tr, _ := l.draw(t, "back"); tr.WeightsDigest != served || base.WeightsDigest != served {
		t.Errorf("weights %s, and %s before; want %s", tr.WeightsDigest, base.WeightsDigest, served)
	}
	if has, _ := l.server.Version(); has != "default" {
		t.Errorf("the server has %s", has)
	}
	bustest.Until(t, "the folders of the versions are gone", func() error {
		folders, err := os.ReadDir(l.folder)
		if err == nil && len(folders) > 1 { // but of the adapter of zeros
			return fmt.Errorf("%v", folders)
		}
		return err
	})
}

// A server that was started without adapters is refused at once, with what it lacks. An adapter of another shape never
// comes to a server, and a lane without a folder takes none.
func TestEngine_PushRefused(t *testing.T) {
	t.Parallel()
	l := newServedLane(t, remotelmtest.LogProbs)
	other := parsedLoRA(t, loraFile(t, "model.layers.0.mlp.down_proj", 384, 128, 4, 7, 0))
	_, err := l.client.PushPolicy(t.Context(), other, client.Push{})
	if _, refused := errors.AsType[*client.RefusedError](err); !refused {
		t.Errorf("another shape: %v; must be refused", err)
	}
	_, err = l.client.PushWeights(t.Context(), nil, client.Push{})
	if _, refused := errors.AsType[*client.RefusedError](err); !refused ||
		!strings.Contains(err.Error(), "VLLM_SERVER_DEV_MODE=1") {
		t.Errorf("whole weights: %v; must be refused", err)
	}
	plain := start(t, func(c *config) { c.sampler.Model, c.sampler.Engine = sumsFolder(t), l.server.Engine() })
	plain.awaitLane(t)
	_, err = plain.client.PushPolicy(t.Context(), other, client.Push{})
	if _, refused := errors.AsType[*client.RefusedError](err); !refused ||
		!strings.Contains(err.Error(), "takes none") {
		t.Errorf("without a folder: %v; must be refused", err)
	}
	without := remotelmtest.New(t, remotelmtest.LogProbs)
	without.NoAdapters = true
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"not enabled": {[]string{"--engine", without.Engine(), "--engine-adapters", t.TempDir()}, 1, "--enable-lora"},
		"no folder":   {[]string{"--engine", without.Engine(), "--engine-adapters", "gone"}, 2, "engine-adapters: stat gone"},
		"no server":   {[]string{"--engine-adapters", t.TempDir()}, 2, "must be absent without engine"},
		"other kind":  {[]string{"--engine", "torch", "--engine-adapters", t.TempDir()}, 2, "must be absent with torch"},
	} {
		args := append([]string{"run", "--model", sums(t)}, append(c.args, remotelmtest.Prompt)...)
		if out := meander(t, t.TempDir(), args...).must(t, c.code); !strings.Contains(out.stderr, c.says) {
			t.Errorf("%s: %s; want %q", name, out.stderr, c.says)
		}
	}
}
