package cuda_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
)

// wideHeads writes a model with heads of 128, as the published one has them, and returns its folder with a LoRA of it.
func wideHeads(t *testing.T) (folder string, a *lora.Adapter) {
	t.Helper()
	const width, rank = 2 * 128, 4
	folder = t.TempDir()
	if err := checkpoint.Write(folder, checkpoint.Config{Heads: 2, HeadDim: 128}); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(5, 6))
	var file bytes.Buffer
	var factors []safetensors.Tensor
	for _, module := range []string{"to_q", "to_v", "add_k_proj"} {
		for i, shape := range [][]int{{rank, width}, {width, rank}} {
			part := [2]string{"lora_A", "lora_B"}[i]
			x := make([]float32, rank*width)
			for i := range x {
				x[i] = float32(r.NormFloat64()) / 4
			}
			factors = append(factors, safetensors.Tensor{
				Name: "transformer.transformer_blocks.0.attn." + module + "." + part + ".weight", DType: tensor.F32, Shape: shape,
				Data: tensor.F32.AppendFloats(nil, x),
			})
		}
	}
	err := safetensors.Write(&file, factors, nil)
	if err == nil {
		a, err = lora.Parse("wide", file.Bytes(), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return folder, a
}

// opened opens a model on a device, with a prompt that is encoded and the noise of a seed.
func opened(
	t *testing.T, d tensor.Device, folder string, height, width int, seed uint64,
) (m *qwenimage.Model, cond *model.Conditioning, x []float32) {
	t.Helper()
	m, err := qwenimage.Open(folder, qwenimage.Options{Options: model.Options{Device: d}})
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := m.Encode(t.Context(), []string{"a sign"})
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(seed, seed+1))
	x = make([]float32, height/16*width/16*m.Card().LatentChannels)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return m, encoded[0], x
}

// steps takes steps of a model and of the same with a LoRA, in turns, and returns the velocities.
// With each LoRA that no one has any more, memory goes back to the device.
func steps(t *testing.T, d tensor.Device, folder string, a *lora.Adapter) (velocities [][]float32) {
	t.Helper()
	const height, width = 64, 64
	base, cond, x := opened(t, d, folder, height, width, 3)
	defer base.Close()
	for i := range 4 {
		m := model.Model(base)
		if i%2 == 1 {
			var err error
			if m, err = base.Adapted(lora.Weighted{Adapter: a, Weight: float64(i)}); err != nil {
				t.Fatal(err)
			}
		}
		v := make([]float32, len(x))
		row := model.Row{X: x, Sigma: 0.7, Conditioning: cond, Dst: v}
		if err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(height, width)); err != nil {
			t.Fatal(err)
		}
		velocities = append(velocities, v)
		if m != model.Model(base) {
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return velocities
}

// paintPushed paints from noise to pixels in two Euler steps; after one a LoRA is pushed, unless it is nil.
func paintPushed(t *testing.T, d tensor.Device, folder string, a *lora.Adapter) (pixels []float32) {
	t.Helper()
	const height, width = 32, 64
	base, cond, x := opened(t, d, folder, height, width, 7)
	defer base.Close()
	var adapters []lora.Weighted
	if a != nil {
		adapters = append(adapters, lora.Weighted{Adapter: a, Weight: 16})
	}
	pushed, err := base.Adapted(adapters...)
	if err != nil {
		t.Fatal(err)
	}
	defer pushed.Close()
	eulerStep(t, base, x, cond, 0, 2, height, width)
	eulerStep(t, pushed, x, cond, 1, 2, height, width)
	if pixels, err = base.DecodePixels(t.Context(), x, media.ImageSize(height, width)); err != nil {
		t.Fatal(err)
	}
	return pixels
}

// checkPushed compares the pixels of a device with those of the processor, whose image the LoRA changes by three times
// the tolerance at least: in bf16 that of TestSigns_paintsLikeTheProcessor for the whole way.
func checkPushed(t *testing.T, c, d tensor.Device, tolerance float64) {
	t.Helper()
	folder, a := wideHeads(t)
	want, got, without := paintPushed(t, c, folder, a), paintPushed(t, d, folder, a), paintPushed(t, c, folder, nil)
	e, changed := distance(got, want), distance(without, want)
	t.Logf("relative L2 distance of the pixels %.2g, at most %g; the LoRA moves them by %.2g", e, tolerance, changed)
	if !(e <= tolerance) || !(changed > 3*tolerance) {
		t.Error("too far from the CPU, or a LoRA that changes nothing")
	}
}

// A checkpoint with heads of 128 is painted to the pixels as on the processor, with a LoRA pushed on the way.
func TestDevice_PaintsAndTakesALoRA(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	c := processor(t, 1)
	for _, cs := range []struct {
		factors    tensor.DType
		capability int
		tolerance  float64
	}{{tensor.F32, 80, 1e-5}, {tensor.BF16, 80, 3e-2}, {tensor.BF16, 90, 3e-2}} {
		t.Run(fmt.Sprintf("%s, capability %d", cs.factors, cs.capability), func(t *testing.T) {
			d, err := cuda.New(ptxvm.New(ptxvm.Options{Unchecked: true, Capability: cs.capability}),
				cuda.Options{Factors: cs.factors})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			checkPushed(t, c, d, cs.tolerance)
		})
	}
}

// A LoRA is swapped between steps on the device as on the processor: without it the bits are those
// from before, and what it took is given back.
func TestDevice_SwapsLoRAs(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	c := processor(t, 1)
	golden := filepath.Join("..", "..", "model", "qwenimage", "testdata", "golden")
	first, err := lora.Open(filepath.Join(golden, "lora-first"))
	if err != nil {
		t.Fatal(err)
	}
	t.Run("heads of 8", func(t *testing.T) { swapsLoRAs(t, c, filepath.Join(golden, "full"), first, 80) })
	for _, capability := range []int{80, 90} {
		t.Run(fmt.Sprintf("heads of 128, capability %d", capability), func(t *testing.T) {
			folder, a := wideHeads(t)
			swapsLoRAs(t, c, folder, a, capability)
		})
	}
}

// swapsLoRAs compares steps on a GPU of a compute capability with those on the processor c.
func swapsLoRAs(t *testing.T, c tensor.Device, folder string, a *lora.Adapter, capability int) {
	want := steps(t, c, folder, a)
	for factors, most := range map[tensor.DType]float64{tensor.F32: 1e-5, tensor.BF16: 2e-2} {
		if factors == tensor.F32 && capability == 90 {
			continue // the kernels of 80
		}
		vm := ptxvm.New(ptxvm.Options{Unchecked: true, Capability: capability})
		d, err := cuda.New(vm, cuda.Options{Factors: factors})
		if err != nil {
			t.Fatal(err)
		}
		got := steps(t, d, folder, a)
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

// Rows of several LoRAs and of none in one call have the bits that each has alone: the weight multiplies them at once.
func TestDevice_MixesLoRAs(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	folder, a := wideHeads(t)
	for _, cs := range []struct {
		factors    tensor.DType
		capability int
	}{{tensor.F32, 80}, {tensor.BF16, 80}, {tensor.BF16, 90}} {
		t.Run(fmt.Sprintf("%s, capability %d", cs.factors, cs.capability), func(t *testing.T) {
			d, err := cuda.New(ptxvm.New(ptxvm.Options{Unchecked: true, Capability: cs.capability}),
				cuda.Options{Factors: cs.factors})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			const height, width = 32, 32
			m, cond, x := opened(t, d, folder, height, width, 3)
			defer m.Close()
			of := []model.Model{m}
			for _, weight := range []float64{1, 2} {
				n, err := m.Adapted(lora.Weighted{Adapter: a, Weight: weight})
				if err != nil {
					t.Fatal(err)
				}
				defer n.Close()
				of = append(of, n)
			}
			var rows []model.Row
			for i, k := range []int{1, 0, 2, 1} {
				sigma := []float32{0.7, 0.2}[i%2]
				v := make([]float32, len(x))
				rows = append(rows, model.Row{X: x, Sigma: sigma, Conditioning: cond, Of: of[k], Dst: v})
			}
			if err := m.Velocity(t.Context(), rows, media.ImageSize(height, width)); err != nil {
				t.Fatal(err)
			}
			for i, r := range rows {
				got := slices.Clone(r.Dst)
				if err := r.Of.Velocity(t.Context(), rows[i:i+1], media.ImageSize(height, width)); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, r.Dst) {
					t.Errorf("row %d has other bits than alone: relative L2 distance %.2g", i, distance(got, r.Dst))
				}
			}
			if slices.Equal(rows[0].Dst, rows[2].Dst) {
				t.Error("the LoRAs do not differ")
			}
		})
	}
}
