package remote_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// whole is the network of a checkpoint with other weights.
func whole(t *testing.T) *lora.Full {
	t.Helper()
	full, err := lora.OpenFull(filepath.Join(remotetest.Folder(t, class, 2), "transformer",
		"diffusion_pytorch_model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := full.Close(); err != nil {
			t.Error(err)
		}
	})
	return full
}

// once returns a play that answers, and a channel that is closed then.
func once() (remotetest.Play, <-chan struct{}) {
	answered := make(chan struct{})
	return remotetest.Then(func() { close(answered) }), answered
}

// A worker with room for two whole networks takes one after the other, as each is closed before the next is loaded.
func TestReplaced_OneAfterTheOther(t *testing.T) {
	w, m := join(t, remotetest.Options{MaxWhole: 2})
	full := whole(t)
	var open []model.Model
	for i := range 40 {
		if len(open) == 2 {
			if err := open[0].Close(); err != nil {
				t.Fatal(err)
			}
			open = open[1:]
		}
		n, err := m.Replaced(full, fmt.Sprint("network ", i))
		if err != nil {
			t.Fatalf("network %d: %v", i, err)
		}
		open = append(open, n)
	}
	for _, n := range open {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := w.Calls(wire.CallLoad); n != 40 {
		t.Errorf("%d loads; want 40", n)
	}
}

// Weights that were closed are not loaded again: they would never be freed.
func TestVelocity_Closed(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 1)
	n, err := m.Adapted(lora.Weighted{Adapter: adapter(t, "proj", 1), Weight: 1})
	if err != nil {
		t.Fatal(err)
	}
	play, freed := once()
	w.Play(wire.CallUnload, play)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	<-freed
	if err := n.Velocity(t.Context(), rows, size); !errors.Is(err, model.ErrWeights) {
		t.Errorf("%v; want that the weights cannot be loaded", err)
	}
	if w.Loaded() != 0 || w.Calls(wire.CallLoad) != 1 {
		t.Errorf("%d loaded by %d loads; want none, and one load", w.Loaded(), w.Calls(wire.CallLoad))
	}
}

// Weights that are closed while the worker gets them again are freed after that.
func TestVelocity_ClosedOnTheWay(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 1)
	n, err := m.Adapted(lora.Weighted{Adapter: adapter(t, "proj", 1), Weight: 1})
	if err != nil {
		t.Fatal(err)
	}
	w.Forget()
	w.Play(wire.CallLoad, remotetest.Before(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}))
	play, freed := once()
	w.Play(wire.CallUnload, play)
	velocity(t, n, rows)
	if <-freed; w.Loaded() != 0 {
		t.Errorf("%d are loaded", w.Loaded())
	}
}

// What a worker refuses to load again is an error of the weights.
func TestVelocity_NotLoadedAgain(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 1)
	n := replaced(t, m)
	w.Forget()
	w.Play(wire.CallLoad, remotetest.Fail(wire.ClassWeights, "no memory"))
	if err := n.Velocity(t.Context(), rows, size); !errors.Is(err, model.ErrWeights) {
		t.Errorf("%v; want that the weights cannot be loaded", err)
	}
	velocity(t, n, rows)
}

// A worker that others started goes on after the model, and holds no weights of it any more.
func TestClose_Unloads(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	n := replaced(t, m)
	if err := errors.Join(m.Close(), n.Close()); err != nil {
		t.Fatal(err)
	}
	if w.Loaded() != 0 {
		t.Errorf("%d are loaded after the end", w.Loaded())
	}
}

// A worker that does not answer keeps no model from its end.
func TestClose_UnloadHangs(t *testing.T) {
	t.Parallel()
	w, m := join(t, remotetest.Options{})
	n := replaced(t, m)
	w.Play(wire.CallUnload, remotetest.Hang(make(chan struct{})))
	if err := errors.Join(m.Close(), n.Close()); err != nil {
		t.Fatal(err)
	}
}

// replaced returns a model whose trained network is replaced, for the length of a test.
func replaced(t *testing.T, m *remote.Model) model.Model {
	t.Helper()
	n, err := m.Replaced(whole(t), "weights")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n
}
