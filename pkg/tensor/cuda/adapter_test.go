package cuda_test

import (
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/media"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/qwenimage"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cpu"
	"github.com/meander-rl/meander/pkg/tensor/cuda"
)

// steps takes steps of a model and of the same with a LoRA, in turns, and returns the velocities.
// With each LoRA that no one has any more, memory goes back to the device.
func steps(t *testing.T, d tensor.Device) (velocities [][]float32) {
	t.Helper()
	const height, width = 64, 64
	golden := filepath.Join("..", "..", "model", "qwenimage", "testdata", "golden")
	a, err := lora.Open(filepath.Join(golden, "lora-first"))
	if err != nil {
		t.Fatal(err)
	}
	base, err := qwenimage.Open(filepath.Join(golden, "full"), qwenimage.Options{Device: d})
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	cond, err := base.Encode(t.Context(), []string{"a sign"})
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	x := make([]float32, height/16*width/16*base.Card().LatentChannels)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	for i := range 4 {
		m := base
		if i%2 == 1 {
			if m, err = base.WithAdapters(lora.Weighted{Adapter: a, Weight: float64(i)}); err != nil {
				t.Fatal(err)
			}
		}
		v := make([]float32, len(x))
		row := model.Row{X: x, Sigma: 0.7, Conditioning: cond[0], Dst: v}
		if err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(height, width)); err != nil {
			t.Fatal(err)
		}
		velocities = append(velocities, v)
		if m != base {
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return velocities
}

// A LoRA is swapped between steps on the device as on the processor: without it the bits are those
// from before, and what it took is given back.
func TestDevice_SwapsLoRAs(t *testing.T) {
	c, err := cpu.NewDevice(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := steps(t, c)
	for factors, most := range map[tensor.DType]float64{tensor.F32: 1e-5, tensor.BF16: 2e-2} {
		vm := ptxvm.New(ptxvm.Options{Unchecked: true})
		d, err := cuda.New(vm, cuda.Options{Factors: factors})
		if err != nil {
			t.Fatal(err)
		}
		got := steps(t, d)
		for i := range want {
			e := distance(got[i], want[i])
			t.Logf("%s, step %d: relative L2 distance %.2g", factors, i, e)
			if !(e < most) {
				t.Errorf("%s, step %d: relative L2 distance %.3g, want less than %g", factors, i, e, most)
			}
		}
		if !slices.Equal(got[0], got[2]) || slices.Equal(got[0], got[1]) || slices.Equal(got[1], got[3]) {
			t.Errorf("%s: the base changes with a LoRA, or LoRAs do not differ", factors)
		}
		for deadline := time.Now().Add(time.Minute); d.Usage().Blocks > 0; runtime.GC() {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d blocks are still out", factors, d.Usage().Blocks)
			}
			runtime.Gosched()
		}
		if err := d.Close(); err != nil || vm.Used() != 0 {
			t.Errorf("close: %v, %d bytes are lost", err, vm.Used())
		}
	}
}
