package remote_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// adapter is a LoRA of rank 2 for a module of the worker's network, with values of v and lora_alpha 4.
func adapter(t *testing.T, module string, v float32) *lora.Adapter {
	t.Helper()
	a, b := make([]float32, 2*remotetest.Channels), make([]float32, 2*remotetest.Channels)
	for i := range a {
		a[i], b[i] = v*float32(i%5), v*float32(i%3)
	}
	var file bytes.Buffer
	x, err1 := safetensors.FloatTensor(module+".lora_A.weight", tensor.F32, []int{2, remotetest.Channels}, a)
	y, err2 := safetensors.FloatTensor(module+".lora_B.weight", tensor.F32, []int{remotetest.Channels, 2}, b)
	err := errors.Join(err1, err2, safetensors.Write(&file, []safetensors.Tensor{x, y}, nil))
	if err != nil {
		t.Fatal(err)
	}
	out, err := lora.Parse("test", file.Bytes(), []byte(`{"peft_type": "LORA", "r": 2, "lora_alpha": 4}`))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// distance is the largest difference of values.
func distance(a, b [][]float32) (most float64) {
	for i := range a {
		for j := range a[i] {
			most = max(most, float64(a[i][j]-b[i][j]), float64(b[i][j]-a[i][j]))
		}
	}
	return most
}

// An adapter is the same change as its product in the weights, for the scale that its configuration resolves to; the
// checkpoint stays as it is, and a worker that lost the adapter gets it again.
func TestAdapted(t *testing.T) {
	w, m := join(t, remotetest.Options{Deterministic: true})
	rows := rowsOf(t, m, 2)
	bare := velocity(t, m, rows)
	a, b := adapter(t, "proj", 0.25), adapter(t, "proj", 0.5)
	adapted := func(list ...lora.Weighted) model.Model {
		n, err := m.Adapted(list...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		if want := lora.WeightsDigest(m.BaseDigest(), list...); n.Card().WeightsDigest != want {
			t.Errorf("digest %s, want %s", n.Card().WeightsDigest, want)
		}
		return n
	}
	one := velocity(t, adapted(lora.Weighted{Adapter: a, Weight: 1}), rows)
	twice := velocity(t, adapted(lora.Weighted{Adapter: a, Weight: 2}), rows)
	both := adapted(lora.Weighted{Adapter: a, Weight: 1}, lora.Weighted{Adapter: b, Weight: 1})
	sum := velocity(t, both, rows)
	only := velocity(t, adapted(lora.Weighted{Adapter: b, Weight: 1}), rows)
	// proj x is linear in the weights: by its product alone, the worker's scale is 2 = alpha/r.
	p := a.Product("proj")
	if p.Scale != 2 {
		t.Fatalf("scale %g", p.Scale)
	}
	for i, r := range rows {
		for c := range r.X {
			token := r.X[c/remotetest.Channels*remotetest.Channels:]
			want := 0.0
			for k := range remotetest.Channels {
				for rank := range 2 {
					ab := p.B[c%remotetest.Channels*2+rank] * p.A[rank*remotetest.Channels+k]
					want += 2 * float64(ab) * float64(token[k]) / 4
				}
			}
			if got := float64(one[i][c] - bare[i][c]); got-want > 1e-4 || want-got > 1e-4 {
				t.Fatalf("row %d element %d: changed by %g, want %g", i, c, got, want)
			}
			if got := float64(twice[i][c] - bare[i][c]); got-2*want > 1e-4 || 2*want-got > 1e-4 {
				t.Fatalf("row %d element %d: changed by %g at twice the strength, want %g", i, c, got, 2*want)
			}
			if got := sum[i][c] - bare[i][c] - (one[i][c] - bare[i][c]) - (only[i][c] - bare[i][c]); got > 1e-3 ||
				got < -1e-3 {
				t.Fatalf("row %d element %d: two adapters are not the sum of each: %g", i, c, got)
			}
		}
	}
	if again := velocity(t, m, rows); distance(again, bare) != 0 {
		t.Error("the checkpoint changed")
	}
	w.Forget()
	if again := velocity(t, both, rows); distance(again, sum) != 0 {
		t.Error("the adapters are not back")
	}
	none := adapted()
	if distance(velocity(t, none, rows), bare) != 0 {
		t.Error("no adapter is not the checkpoint")
	}
}

// What is closed is freed in the worker, with the last model of its digest.
func TestAdapted_Freed(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	a := lora.Weighted{Adapter: adapter(t, "proj", 1), Weight: 1}
	one, err1 := m.Adapted(a)
	two, err2 := m.Adapted(a)
	if err := errors.Join(err1, err2, one.Close(), one.Close()); err != nil || w.Loaded() != 1 {
		t.Fatalf("%v, %d loaded; want the one in use", err, w.Loaded())
	}
	velocity(t, two, rowsOf(t, m, 1))
	freed := make(chan struct{})
	w.Play(wire.CallUnload, remotetest.Then(func() { close(freed) }))
	if err := two.Close(); err != nil {
		t.Fatal(err)
	}
	if <-freed; w.Loaded() != 0 {
		t.Errorf("%d are loaded", w.Loaded())
	}
}

func TestAdapted_Refuses(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	if _, err := m.Adapted(lora.Weighted{Adapter: adapter(t, "elsewhere", 1), Weight: 1}); err == nil ||
		!strings.Contains(err.Error(), "elsewhere") || w.Calls(wire.CallLoad) != 0 {
		t.Errorf("%v after %d loads; want a refusal before anything is sent", err, w.Calls(wire.CallLoad))
	}
	w.Play(wire.CallLoad, remotetest.Fail(wire.ClassWeights, "no slot"))
	if _, err := m.Adapted(lora.Weighted{Adapter: adapter(t, "proj", 1), Weight: 1}); err == nil ||
		!strings.Contains(err.Error(), "weights: no slot") {
		t.Errorf("%v", err)
	}
}

// A whole network takes the place of the checkpoint's: by its file, or by its tensors over TCP.
func TestReplaced(t *testing.T) {
	dir, other := remotetest.Folder(t, class, 1), remotetest.Folder(t, class, 2)
	file := filepath.Join(other, "transformer", "diffusion_pytorch_model.safetensors")
	bare := opened(t, other, joined(t, other))
	theirs := velocity(t, bare, rowsOf(t, bare, 2))
	for name, cfg := range map[string]remote.Config{"files": joined(t, dir), "tensors": overTCP(t, dir)} {
		t.Run(name, func(t *testing.T) {
			temporary := t.TempDir()
			t.Setenv("TMPDIR", temporary)
			m := opened(t, dir, cfg)
			full, err := lora.OpenFull(file)
			if err != nil {
				t.Fatal(err)
			}
			n, err := m.Replaced(full, strings.Repeat("7", 64))
			if err := errors.Join(err, full.Close()); err != nil {
				t.Fatal(err)
			}
			rows := rowsOf(t, m, 2)
			if got := velocity(t, n, rows); !slices.EqualFunc(got, theirs, slices.Equal) {
				t.Error("not the velocities of the other network")
			}
			if got := velocity(t, m, rows); slices.EqualFunc(got, theirs, slices.Equal) {
				t.Error("the checkpoint changed")
			}
			if n.Card().WeightsDigest != strings.Repeat("7", 64) {
				t.Errorf("digest %s", n.Card().WeightsDigest)
			}
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
			if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
				t.Errorf("%d files are left, %v", len(left), err)
			}
		})
	}
}

func TestReplaced_Refuses(t *testing.T) {
	_, m := join(t, remotetest.Options{})
	var file bytes.Buffer
	x, err := safetensors.FloatTensor("other.weight", tensor.F32, []int{1}, []float32{1})
	if err := errors.Join(err, safetensors.Write(&file, []safetensors.Tensor{x}, nil)); err != nil {
		t.Fatal(err)
	}
	full, err := lora.ParseFull(file.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Replaced(full, "d"); err == nil || !strings.Contains(err.Error(), "proj.weight") {
		t.Errorf("%v; want the tensor that is missing", err)
	}
}

// joined starts a worker at a socket, overTCP one at a port.
func joined(t *testing.T, dir string) remote.Config {
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	return remote.Config{Address: address}
}

func overTCP(t *testing.T, dir string) remote.Config {
	t.Helper()
	w, err := remotetest.New(remotetest.Options{Dir: dir, Deterministic: true, Token: "t"})
	if err == nil {
		err = w.Listen("tcp", "127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return remote.Config{Address: w.Address(), Token: "t"}
}
