package main

import (
	"bytes"
	"errors"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// wholeGPU interprets all blocks of what a countingGPU counts one of.
type wholeGPU struct {
	*countingGPU
	on   bool
	sums map[string]launch // by kernel
}

func (w *wholeGPU) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	if k := f.(countedKernel); w.on {
		if err := w.VM.Launch(k.f, g, args...); err != nil {
			return err
		}
		c, s := w.Counts(), w.sums[k.name]
		s.instructions += float64(c.Instructions)
		s.products += float64(c.Products)
		w.sums[k.name] = s
	}
	return w.countingGPU.Launch(f, g, args...)
}

// The model of costs has the launches that a session makes, no more and no fewer. One block of each stands for all:
// these do together what it says, less what would be beyond the edges of matrices.
func TestCountingGPU(t *testing.T) {
	bustest.Sequential(t, measures)
	t.Chdir("../../..")
	w, launched := &wholeGPU{countingGPU: newCountingGPU(false), sums: map[string]launch{}}, map[string]float64{}
	note := func(kernel string, _ time.Duration) { launched[kernel]++ }
	d, err := cuda.New(w, cuda.Options{Factors: tensor.BF16, Profile: note})
	if err != nil {
		t.Fatal(err)
	}
	call, end, err := warmEvaluation(t.Context(), d, "signs", [2]int{64, 128}, variant{})
	if err != nil {
		t.Fatal(err)
	}
	clear(w.counts)
	clear(launched)
	w.on = true
	if err := errors.Join(call(), end(), d.Close()); err != nil {
		t.Fatal(err)
	}
	modelled, counts := map[string]launch{}, map[string]float64{}
	for key, n := range w.counts {
		l := w.kinds[key]
		m := modelled[l.kernel]
		m.instructions += n * l.instructions
		m.products += n * l.products
		modelled[l.kernel] = m
		counts[l.kernel] += n
	}
	if !maps.Equal(counts, launched) {
		t.Errorf("launches of %v, want those of %v", counts, launched)
	}
	for kernel, whole := range w.sums {
		m := modelled[kernel]
		if r := m.instructions / whole.instructions; r < 1 || r > 1.15 || m.products != whole.products {
			t.Errorf("%s: %v instructions and %v FLOP of tensor cores, all blocks together %v and %v", kernel,
				m.instructions,
				m.products, whole.instructions, whole.products)
		}
	}
}

// The table says that it is a model, and has each kernel with its share on each GPU. What would be measured by it is
// refused beside it.
func TestBenchGPU_Roofline(t *testing.T) {
	bustest.Sequential(t, measures)
	t.Chdir("../../..")
	var out bytes.Buffer
	g := gpuBench{small: true, of: 60, out: &out}
	if err := g.roofline(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"^A model, not a measurement: the clock decides",
		`\n\| kernel \| launches .* H200 \| H100 SXM \| A100 SXM \| RTX 4090 \|\n`,
		`\n\| cublasLt \| [1-9]`, `\n\| attention_bf16_32 \| [1-9]`,
		`\n\| layer_norm_wide \| [1-9].* [0-9.]+ ms, [0-9.]+ %, launch`,
		`\n\| at least \| [1-9].* ms`, `\n\| expected \|.* ms`, `\n\| MFU, expected \|.* %`, `do not fit|0\.0 of 24 GB`,
	} {
		if !regexp.MustCompile(want).Match(out.Bytes()) {
			t.Errorf("no %s in\n%s", want, &out)
		}
	}
	err := execute(t.Context(), []string{"gpu", "--roofline", "--dtype", "f32"})
	if err == nil || !strings.Contains(err.Error(), "--dtype: set; must be absent with --roofline") ||
		exitCode(err) != 2 {
		t.Errorf("--roofline --dtype: %v", err)
	}
}
