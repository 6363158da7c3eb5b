package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// sheet is what a GPU's data sheet says.
type sheet struct {
	name            string
	hopper          bool
	multiprocessors float64
	clock           float64 // Hz, the one that the rate of tensor cores is of
	products        float64 // FLOP/s of tensor cores: bf16 with sums in float32, dense
	bandwidth       float64 // bytes/s
	memory          float64 // bytes
}

var sheets = []sheet{
	{"H200", true, 132, 1.83e9, 989e12, 4.8e12, 141e9},
	{"H100 SXM", true, 132, 1.83e9, 989e12, 3.35e12, 80e9},
	{"A100 SXM", false, 108, 1.41e9, 312e12, 2.04e12, 80e9},
	{"RTX 4090", false, 128, 2.52e9, 165e12, 1.01e12, 24e9},
}

// What a multiprocessor begins in a cycle: instructions of warps, and approximations of lanes.
const (
	issued  = 4
	special = 16
)

// reached is the share of the times of launch.times that kernels reached on an H200 (deploy/bench/gpu.md), at 1024 x
// 1024; that of attention without wgmma is of its 165 TFLOP/s there.
var reached = map[string]float64{"cublasLt": 0.72, "attention_wgmma_128": 0.50, "attention_bf16_128": 0.38}

const reachedByOthers = 0.55

// reachedText names them.
func reachedText() string {
	var texts []string
	for _, kernel := range slices.Sorted(maps.Keys(reached)) {
		texts = append(texts, fmt.Sprintf("%s %.2f", kernel, reached[kernel]))
	}
	return strings.Join(texts, ", ")
}

// leastLaunch is the seconds of a launch of next to nothing, one after another, on an H200.
const leastLaunch = 3.5e-6

// launch is a kind of launch: what all of its blocks do, or a product of the library.
type launch struct {
	kernel                                  string
	products, flops, instructions, specials float64
	bytes                                   float64 // that must come from memory or go there, each once
}

// times is the seconds that a launch takes at least on a GPU, by what limits it.
func (l launch) times(g sheet) map[string]float64 {
	return map[string]float64{
		"tensor cores": l.products / g.products,
		"memory":       l.bytes / g.bandwidth,
		"instructions": l.instructions / (g.multiprocessors * g.clock * issued),
		"exp, div":     l.specials / (g.multiprocessors * g.clock * special),
		"launch":       leastLaunch,
	}
}

// countingGPU is a GPU that notes what is launched. Of launches that are alike one block is interpreted, and stands for
// all.
type countingGPU struct {
	*ptxvm.VM
	sizes   map[driver.Pointer]int
	weights int // bytes
	kinds   map[string]launch
	counts  map[string]float64 // launches of each kind
}

// newCountingGPU makes one that has the kernels for compute capability 9.0, or not.
func newCountingGPU(hopper bool) *countingGPU {
	capability := 80
	if hopper {
		capability = 90
	}
	return &countingGPU{
		VM:    ptxvm.New(ptxvm.Options{Count: true, Capability: capability, Memory: 1 << 40}),
		sizes: map[driver.Pointer]int{}, kinds: map[string]launch{}, counts: map[string]float64{},
	}
}

func (r *countingGPU) Alloc(bytes int) (driver.Pointer, error) {
	at, err := r.VM.Alloc(bytes)
	r.sizes[at] = bytes
	return at, err
}

// CopyIn takes weights, whose numbers decide nothing that is counted.
func (r *countingGPU) CopyIn(_ driver.Pointer, src []byte) error {
	r.weights += len(src)
	return nil
}

type countedModule struct{ driver.Module }

type countedKernel struct {
	name string
	f    driver.Function
}

func (r *countingGPU) LoadModule(ptx []byte) (driver.Module, error) {
	m, err := r.VM.LoadModule(ptx)
	return countedModule{m}, err
}

func (m countedModule) Function(name string) (driver.Function, error) {
	f, err := m.Module.Function(name)
	return countedKernel{name, f}, err
}

func (r *countingGPU) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	k := f.(countedKernel)
	key := fmt.Sprint(k.name, g)
	for i, size := range ptxvm.ParamSizes(k.f) {
		if size == 8 { // an address: is there one?
			key += fmt.Sprint(" ", args[i] != 0)
		} else {
			key += fmt.Sprint(" ", args[i])
		}
	}
	r.counts[key]++
	if _, known := r.kinds[key]; known {
		return nil
	}
	one := g
	one.Blocks = driver.Dim{}
	if err := r.VM.Launch(k.f, one, args...); err != nil {
		return err
	}
	c, n := r.VM.Counts(), g.Blocks.Count()
	l := launch{
		kernel: k.name, products: float64(n * c.Products), flops: float64(n * c.Flops),
		instructions: float64(n * c.Instructions), specials: float64(n * c.Special),
	}
	for _, accessed := range []map[driver.Pointer]int{c.Read, c.Written} {
		for at, bytes := range accessed {
			l.bytes += float64(min(n*bytes, r.sizes[at]))
		}
	}
	r.kinds[key] = l
	return nil
}

// Products is the library.
func (r *countingGPU) Products() (driver.Products, error) { return countedLibrary{r}, nil }

type countedLibrary struct{ r *countingGPU }

func (countedLibrary) Name() string { return "cublasLt" }

func (countedLibrary) Close() error { return nil }

func (l countedLibrary) Multiply(p driver.Product) error {
	m, n, k := float64(p.M), float64(p.N), float64(p.K)
	out := 4.0
	if p.BF16 {
		out = 2
	}
	key := fmt.Sprint("product ", m, n, k, out, p.Add)
	bytes := 2*m*k + 2*n*k + out*m*n
	if p.Add {
		bytes += out * m * n
	}
	l.r.kinds[key] = launch{kernel: "cublasLt", products: 2 * m * n * k, bytes: bytes}
	l.r.counts[key]++
	return nil
}

// recording is the launches of an evaluation, by kind, and the bytes of the model's weights, or of its layers.
type recording struct {
	kinds   map[string]launch
	counts  map[string]float64
	weights float64
}

// record evaluates with guidance for an image of a size, with the model of dir.
func (r *countingGPU) record(ctx context.Context, dir string, size [2]int, of variant) (rec recording, err error) {
	dev, err := cuda.New(r, cuda.Options{Factors: tensor.BF16})
	if err != nil {
		return rec, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	call, end, err := warmEvaluation(ctx, dev, dir, size, of)
	if err != nil {
		return rec, err
	}
	defer func() { err = errors.Join(err, end()) }()
	r.kinds, r.counts = map[string]launch{}, map[string]float64{}
	err = call()
	return recording{r.kinds, r.counts, float64(r.weights)}, err
}

// warmEvaluation opens a model on a device and evaluates once, which computes what the prompt alone decides. call does
// it again; end closes the model.
func warmEvaluation(
	ctx context.Context, d tensor.Device, dir string, size [2]int, of variant,
) (call, end func() error, err error) {
	m, err := families.All().Open(dir, model.Options{Device: d})
	if err != nil {
		return nil, nil, err
	}
	applied, _, err := of.apply(m)
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	end = func() error { return errors.Join(applied.Close(), m.Close()) } // closing twice does nothing
	if call, _, err = evaluation(ctx, applied, size[0], size[1], 1, of.sigmas(newSigmas())); err == nil {
		err = call()
	}
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return call, end, nil
}

// layered is an evaluation of so many layers, by those of one and of two: all further ones are as the second.
func layered(one, two recording, layers int) recording {
	all := recording{
		kinds: maps.Clone(one.kinds), counts: map[string]float64{},
		weights: float64(layers) * (two.weights - one.weights),
	}
	maps.Copy(all.kinds, two.kinds)
	for key := range all.kinds {
		all.counts[key] = one.counts[key] + float64(layers-1)*(two.counts[key]-one.counts[key])
	}
	return all
}

// roofline prints the model of costs.
func (g *gpuBench) roofline(ctx context.Context) error {
	dirs, sizes := []string{"signs"}, [][2]int{{64, 128}}
	if g.small {
		g.of = 1
	} else {
		temp, err := os.MkdirTemp("", "bench-roofline")
		if err != nil {
			return err
		}
		defer os.RemoveAll(temp)
		dirs, sizes = nil, [][2]int{{1024, 1024}, {512, 512}}
		for _, layers := range []int{1, 2} {
			dir := filepath.Join(temp, strconv.Itoa(layers))
			dirs = append(dirs, dir)
			of := checkpoint.Changes{Layers: layers, TextLayers: 1, Vocabulary: 300, Hollow: true}
			if err := checkpoint.WritePublished(dir, of); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(g.out, `A model, not a measurement: the clock decides. The launches are those of the code that runs on a GPU (layers from
the third on as the second). The work of a launch is that of one of its blocks, interpreted, times the blocks; memory
is read and written once. "At least" is what the data sheet's rates make of it: of tensor cores, memory, instructions,
or divisions and exponentials, whatever takes longest; and %.1f µs a launch. "Expected" divides that by the share that
kernels reached on an H200 at 1024 x 1024: %s, others %.2f.
`, leastLaunch*1e6, reachedText(), reachedByOthers)
	for _, size := range sizes {
		for _, v := range []variant{{}, {again: true}, {rank: loraRank}} {
			recs, of := map[bool]recording{}, make([]recording, len(sheets))
			for i, s := range sheets {
				if _, known := recs[s.hopper]; !known {
					rec, err := recordLayers(ctx, s.hopper, dirs, size, g.of, v)
					if err != nil {
						return err
					}
					recs[s.hopper] = rec
				}
				of[i] = recs[s.hopper]
			}
			fmt.Fprintf(g.out, "\nAn evaluation with guidance, %d x %d, batch 1, %d layers%s:\n\n", size[0], size[1],
				g.of, v)
			printRoofline(g.out, of, v == variant{})
		}
	}
	return nil
}

// recordLayers records an evaluation of so many layers: dirs are of models of one layer and of two, or of one with all.
func recordLayers(
	ctx context.Context, hopper bool, dirs []string, size [2]int, layers int, v variant,
) (rec recording, err error) {
	var of []recording
	for _, dir := range dirs {
		r := newCountingGPU(hopper)
		if rec, err = r.record(ctx, dir, size, v); err != nil {
			return rec, err
		}
		of = append(of, rec)
	}
	if len(of) == 2 {
		rec = layered(of[0], of[1], layers)
	}
	return rec, nil
}

// share is what the launches of a kernel, or all, do together on a GPU.
type share struct {
	launch
	n               float64
	least, expected float64            // seconds
	limits          map[string]float64 // seconds at least, by what limits them
}

func (s *share) add(l launch, n float64, g sheet) {
	if s.limits == nil {
		s.limits = map[string]float64{}
	}
	s.n += n
	s.products += n * l.products
	s.flops += n * l.flops
	s.instructions += n * l.instructions
	s.bytes += n * l.bytes
	times := l.times(g)
	limit := longest(times)
	s.least += n * times[limit]
	s.limits[limit] += n * times[limit]
	by := cmp.Or(reached[l.kernel], reachedByOthers)
	s.expected += n * max(times[limit]/by, leastLaunch)
}

// longest is the key of the largest number.
func longest(of map[string]float64) string {
	return slices.MaxFunc(slices.Sorted(maps.Keys(of)), func(a, b string) int { return cmp.Compare(of[a], of[b]) })
}

// printRoofline prints a table of what an evaluation costs each GPU of sheets, by kernel or in all.
func printRoofline(w io.Writer, of []recording, byKernel bool) {
	all, kernels, works := make([]share, len(sheets)), make([]map[string]*share, len(sheets)), map[string]*share{}
	for i, g := range sheets {
		kernels[i] = map[string]*share{}
		for _, key := range slices.Sorted(maps.Keys(of[i].counts)) {
			l, n := of[i].kinds[key], of[i].counts[key]
			if kernels[i][l.kernel] == nil {
				kernels[i][l.kernel] = &share{}
			}
			kernels[i][l.kernel].add(l, n, g)
			all[i].add(l, n, g)
		}
		for kernel, k := range kernels[i] {
			works[kernel] = cmp.Or(works[kernel], k)
		}
	}
	row := func(cell func(i int) string, cells ...string) {
		for i := range sheets {
			cells = append(cells, cell(i))
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
	}
	line := func(name string, work *share, cell func(i int) string) {
		if work == nil {
			row(cell, name, "", "", "", "")
			return
		}
		row(cell, name, fmt.Sprintf("%.0f", work.n), fmt.Sprintf("%.2f", (work.products+work.flops)*1e-12),
			fmt.Sprintf("%.1f", work.bytes*1e-9), fmt.Sprintf("%.0f", work.instructions*1e-6))
	}
	row(func(i int) string {
		return sheets[i].name
	}, "kernel", "launches", "TFLOP", "GB", "million instructions of warps")
	row(func(int) string { return "---" }, "---", "---", "---", "---", "---")
	var names []string
	if byKernel {
		names = slices.SortedFunc(maps.Keys(works), func(a, b string) int {
			return cmp.Or(cmp.Compare(works[b].least, works[a].least), cmp.Compare(a, b))
		})
	}
	for _, kernel := range names {
		line(kernel, works[kernel], func(i int) string {
			k := kernels[i][kernel]
			if k == nil {
				return ""
			}
			return fmt.Sprintf("%.1f ms, %.1f %%, %s", 1e3*k.least, 100*k.least/all[i].least, longest(k.limits))
		})
	}
	line("at least", &all[0], func(i int) string { return fmt.Sprintf("%.1f ms", 1e3*all[i].least) })
	line("expected", nil, func(i int) string { return fmt.Sprintf("%.1f ms", 1e3*all[i].expected) })
	line("MFU, expected", nil, func(i int) string {
		return fmt.Sprintf("%.0f %%", 100*all[i].products/all[i].expected/sheets[i].products)
	})
	line("layers in memory", nil, func(i int) string {
		text := fmt.Sprintf("%.1f of %.0f GB", of[i].weights*1e-9, sheets[i].memory*1e-9)
		if of[i].weights > sheets[i].memory {
			text += ": do not fit; times are as if they did"
		}
		return text
	})
}
