package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// gpuBench is one `bench gpu` command.
type gpuBench struct {
	device, dtype, peer string
	layers, of          int
	small, model        bool
	round               time.Duration

	out   io.Writer
	set   *devices.Set
	other *peer
	times map[string]time.Duration // by kernel
	sigma func() float32
}

func benchGPUCommand() *cobra.Command {
	g := gpuBench{of: 60}
	c := &cobra.Command{
		Use:   "gpu",
		Short: "a GPU's matrix products, attention, copies, launches and forward passes, beside PyTorch's",
		Long: `gpu measures one device: the products and the attention of a 20-billion-parameter transformer, copies,
launches, and forward passes with guidance at 512 and 1024 pixels on --layers of its 60 layers with random
weights, a time that it scales to all of them: at new sigmas, at one that came before, and with a LoRA. With
--peer it asks another engine for the same, such as deploy/bench/gpu_peer.py. What cannot be measured says why. The
report is Markdown.

With --roofline it needs no GPU and measures nothing: it runs the forward passes on an interpreter of the kernels, notes
their launches, and prints what these cost by a model.`,
		Example: `  bench gpu --peer 'python3 deploy/bench/gpu_peer.py'
  bench gpu --roofline
  bench gpu --device cpu --dtype f32 --small    # is the bench itself right?`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			g.out = c.OutOrStdout()
			if g.model {
				for _, name := range []string{"device", "dtype", "layers", "round", "peer"} {
					if c.Flags().Changed(name) {
						return usage(fmt.Errorf("--%s: set; must be absent with --roofline, which measures nothing",
							name))
					}
				}
				return g.roofline(c.Context())
			}
			return g.run(c.Context(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&g.device, "device", "cuda:0", "what is measured: cuda:0, cpu")
	f.StringVar(&g.dtype, "dtype", "bf16", "products on a GPU: f32, bf16")
	f.IntVar(&g.layers, "layers", 8, "layers of the forward passes, of 60")
	f.DurationVar(&g.round, "round", time.Second, "each measurement repeats its call for at least this long")
	f.BoolVar(&g.small, "small", false, "tiny shapes, to try the bench where nothing is fast")
	f.StringVar(&g.peer, "peer", "", "command line of another engine to measure beside")
	f.BoolVar(&g.model, "roofline", false, "a model instead: what an evaluation costs an H200, H100, A100, RTX 4090")
	return c
}

func (g *gpuBench) run(ctx context.Context, stderr io.Writer) (err error) {
	if err := errors.Join(checkPositive("layers", []int{g.layers}, g.of), devices.Available(g.device)); err != nil {
		return usage(err)
	}
	if g.set, err = g.open(nil); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.set.Close()) }()
	if g.peer != "" {
		other, fault := startPeer(ctx, g.peer, peerConfig{}, stderr)
		if fault != nil {
			fmt.Fprintf(g.out, "The other engine is missing: %v\n\n", fault)
		} else {
			g.other = other
			defer func() { err = errors.Join(err, other.close()) }()
		}
	}
	g.sigma = newSigmas()
	name := "none"
	if g.other != nil {
		name = g.other.name
	}
	fmt.Fprintf(g.out, "%s on %s; the other engine is %s.\n\n| what | meander | other | ratio |\n| --- | --- | --- "+
		"| --- |\n", g.set.Devices[0].Name(), machine(), name)
	g.products(ctx)
	g.attention(ctx)
	g.copies(ctx)
	g.launches(ctx)
	return g.forwards(ctx)
}

func (g *gpuBench) open(profile func(string, time.Duration)) (*devices.Set, error) {
	factors := tensor.F32
	if g.dtype == "bf16" && g.device != devices.CPU {
		factors = tensor.BF16
	}
	return devices.One(g.device, devices.Options{Factors: factors, Profile: profile})
}

// gpuCall is a question to the other engine: the seconds of one such call.
type gpuCall struct {
	What    string  `json:"what"`
	M       int     `json:"m,omitempty"`
	N       int     `json:"n,omitempty"`
	K       int     `json:"k,omitempty"`
	Tokens  int     `json:"tokens,omitempty"`
	Text    int     `json:"text,omitempty"`
	Heads   int     `json:"heads,omitempty"`
	Dim     int     `json:"dim,omitempty"`
	Layers  int     `json:"layers,omitempty"`
	Batch   int     `json:"batch,omitempty"`
	Bytes   int     `json:"bytes,omitempty"`
	Seconds float64 `json:"seconds"`
}

// row prints a measurement: work per second of unit, or what hinders it. Without work it is the time.
func (g *gpuBench) row(what string, work float64, unit string, call gpuCall, measure func() (float64, error)) {
	show := func(seconds float64, err error) string {
		switch {
		case err != nil:
			return "not measured: " + strings.ReplaceAll(err.Error(), "\n", " ")
		case work == 0:
			return fmt.Sprintf("%.4g ms", seconds*1e3)
		}
		return fmt.Sprintf("%.4g %s", work/seconds, unit)
	}
	ours, err := measure()
	cell, other, ratio := show(ours, err), "", ""
	if g.other != nil && call.What != "" {
		call.Seconds = g.round.Seconds()
		var answer struct {
			Seconds float64 `json:"seconds"`
			Error   string  `json:"error"`
		}
		fault := g.other.ask(call, &answer)
		if fault == nil && answer.Error != "" {
			fault = errors.New(answer.Error)
		}
		other = show(answer.Seconds, fault)
		if err == nil && fault == nil {
			ratio = fmt.Sprintf("%.2f", answer.Seconds/ours)
		}
	}
	fmt.Fprintf(g.out, "| %s | %s | %s | %s |\n", what, cell, other, ratio)
}

// timed is the least seconds of one of n calls of f in a session. prepare makes what f needs.
func (g *gpuBench) timed(
	ctx context.Context, n int, prepare func(d tensor.Device, s tensor.Session) (func(), error),
) (best float64, err error) {
	d := g.set.Devices[0]
	err = d.Run(ctx, true, func(s tensor.Session) error {
		f, err := prepare(d, s)
		if err != nil {
			return err
		}
		one, wait := make([]float32, 1), tensor.NewMatrix(s, 1, 1)
		s.CopyIn(wait, one)
		for began := time.Now(); best == 0 || time.Since(began) < g.round; {
			s.CopyOut(one, wait) // waits for what was before
			start := time.Now()
			for range n {
				f()
			}
			s.CopyOut(one, wait)
			if took := time.Since(start).Seconds() / float64(n); best == 0 || took < best {
				best = took
			}
		}
		return nil
	})
	return best, err
}

// numbers are as random as it takes.
func numbers(n int) []float32 {
	x := make([]float32, n)
	state := uint32(1)
	for i := range x {
		state = state*1664525 + 1013904223
		x[i] = float32(state>>8)/(1<<24) - 0.5
	}
	return x
}

func filled(s tensor.Session, rows, cols int) tensor.Matrix {
	m := tensor.NewFactors(s, rows, cols)
	s.CopyIn(m, numbers(rows*cols))
	return m
}

func (g *gpuBench) products(ctx context.Context) {
	shapes := []gemmShape{{4096, 3072, 3072}, {4096, 9216, 3072}, {4096, 12288, 3072}, {4096, 3072, 12288}}
	if g.small {
		shapes = []gemmShape{{64, 96, 64}}
	}
	for _, p := range shapes {
		g.row(fmt.Sprintf("product %d x %d x %d", p.m, p.n, p.k), 2e-12*float64(p.m)*float64(p.n)*float64(p.k),
			"TFLOP/s",
			gpuCall{What: "product", M: p.m, N: p.n, K: p.k}, func() (float64, error) {
				return g.timed(ctx, 10, func(d tensor.Device, s tensor.Session) (func(), error) {
					w, err := d.Weight(tensor.Array{
						DType: tensor.BF16, Shape: []int{p.n, p.k},
						Data: tensor.BF16.AppendFloats(nil, numbers(p.n*p.k)),
					})
					x, y := filled(s, p.m, p.k), tensor.NewFactors(s, p.m, p.n)
					return func() { s.Linear(y, x, w, tensor.Epilogue{}) }, err
				})
			})
	}
}

func (g *gpuBench) attention(ctx context.Context) {
	lengths, heads, dim := []int{1024 + 64, 4096 + 64}, 24, 128
	if g.small {
		lengths, heads, dim = []int{40}, 2, 32
	}
	for _, n := range lengths {
		g.row(fmt.Sprintf("attention, %d tokens, %d heads of %d", n, heads, dim),
			4e-12*float64(n)*float64(n)*float64(heads*dim), "TFLOP/s",
			gpuCall{What: "attention", Tokens: n, Heads: heads, Dim: dim}, func() (float64, error) {
				return g.timed(ctx, 5, func(_ tensor.Device, s tensor.Session) (func(), error) {
					q, k, v, o := filled(s, n, heads*dim), filled(s, n, heads*dim), filled(s, n,
						heads*dim), tensor.NewFactors(s, n, heads*dim)
					return func() { s.Attention(o, q, k, v, tensor.Attention{Heads: heads}) }, nil
				})
			})
	}
}

// copies measures a session with one copy, as an evaluation has one.
func (g *gpuBench) copies(ctx context.Context) {
	n := 16 << 20
	if g.small {
		n = 1 << 10
	}
	d, x := g.set.Devices[0], numbers(n)
	for _, way := range []string{"in", "out"} {
		g.row(fmt.Sprintf("copy %s, %d KiB", way, 4*n>>10), 4e-9*float64(n), "GB/s",
			gpuCall{What: "copy " + way, Bytes: 4 * n}, func() (best float64, err error) {
				one := make([]float32, 1)
				for began := time.Now(); best == 0 || time.Since(began) < g.round; {
					var took float64
					if err := d.Run(ctx, true, func(s tensor.Session) error {
						m := tensor.NewMatrix(s, 1, n)
						s.CopyIn(m.SliceCols(0, 1), one)
						s.CopyOut(one, m.SliceCols(0, 1)) // waits for what was before
						start := time.Now()
						if way == "in" {
							s.CopyIn(m, x)
							s.CopyOut(one, m.SliceCols(0, 1))
						} else {
							s.CopyOut(x, m)
						}
						took = time.Since(start).Seconds()
						return nil
					}); err != nil {
						return 0, err
					}
					if best == 0 || took < best {
						best = took
					}
				}
				return best, nil
			})
	}
}

func (g *gpuBench) launches(ctx context.Context) {
	n := 1000
	if g.small {
		n = 10
	}
	g.row("a launch of next to nothing", 0, "", gpuCall{What: "launch"}, func() (float64, error) {
		return g.timed(ctx, n, func(_ tensor.Device, s tensor.Session) (func(), error) {
			m := tensor.NewMatrix(s, 1, 4)
			s.CopyIn(m, numbers(4))
			return func() { s.SiLUMul(m, m, m) }, nil
		})
	})
}

// forwards measures evaluations with guidance of the model at the published size.
func (g *gpuBench) forwards(ctx context.Context) error {
	dir, sizes, batches := "signs", [][2]int{{64, 128}}, []int{1}
	if !g.small {
		temp, err := os.MkdirTemp("", "bench-gpu")
		if err != nil {
			return err
		}
		defer os.RemoveAll(temp)
		dir, sizes, batches = filepath.Join(temp, "random"), [][2]int{{512, 512}, {1024, 1024}}, []int{1, 4, 8}
		of := checkpoint.Changes{Layers: g.layers, TextLayers: 1, Vocabulary: 300}
		if err := checkpoint.WritePublished(dir, of); err != nil {
			return err
		}
	} else {
		g.layers, g.of = 1, 1
	}
	m, err := families.All().Open(dir, model.Options{Device: g.set.Devices[0].Device})
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	for _, size := range sizes {
		for _, batch := range batches {
			g.forward(ctx, m, size[0], size[1], batch, variant{})
		}
		g.forward(ctx, m, size[0], size[1], 1, variant{again: true})
		g.forward(ctx, m, size[0], size[1], 1, variant{rank: loraRank})
	}
	if u, ok := g.set.Devices[0].Device.(tensor.Metered); ok {
		u := u.Usage()
		fmt.Fprintf(g.out, "| memory: most of the pool, of all | %.0f of %.0f MiB | | |\n", mib(u.Used+u.Idle),
			mib(u.Total))
	}
	return g.shares(ctx, dir, sizes[len(sizes)-1])
}

// variant is how evaluations are made: at a new sigma each, unless they are as those after the first group of a run.
type variant struct {
	again bool // all at one sigma
	rank  int  // of a LoRA of all projections; 0 is none
}

// loraRank is a usual one.
const loraRank = 64

// String is empty for the plain variant.
func (v variant) String() string {
	switch {
	case v.again:
		return ", at a sigma that came before"
	case v.rank > 0:
		return fmt.Sprintf(", with a LoRA of rank %d of all projections", v.rank)
	}
	return ""
}

// apply returns the model of a variant, which the caller closes if it is another one, and how long the device took to
// get its LoRA.
func (v variant) apply(m model.Model) (of model.Model, took time.Duration, err error) {
	if v.rank == 0 {
		return m, 0, nil
	}
	base := m.(lora.Adaptable[model.Model])
	a, err := randomLoRA(base.Modules(), v.rank)
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	of, err = base.Adapted(lora.Weighted{Adapter: a, Weight: 1e-3}) // activations stay as large as they are
	return of, time.Since(began), err
}

// sigmas returns the sigmas of a variant's evaluations, one with each call; fresh gives another one each time.
func (v variant) sigmas(fresh func() float32) func() float32 {
	if v.again {
		return func() float32 { return 0.5 }
	}
	return fresh
}

// newSigmas returns a function that gives another sigma with each call. What depends on sigma alone is computed then,
// as PyTorch computes it each time.
func newSigmas() func() float32 {
	calls := float32(0)
	return func() float32 {
		calls++
		return 1 / (1 + calls/64)
	}
}

// evaluation calls a model once for a batch with guidance, at the sigma that the function says.
func evaluation(
	ctx context.Context, m model.Model, height, width, batch int, sigma func() float32,
) (call func() error, text int, err error) {
	card := m.Card()
	conds, err := m.Encode(ctx, []string{`a blue sign that says "4071"`, " "})
	if err != nil {
		return nil, 0, err
	}
	size := media.ImageSize(height, width)
	tokens, err := card.Tokens(size)
	if err != nil {
		return nil, 0, err
	}
	rows := make([]images.GuidedRow, batch)
	for i := range rows {
		n := tokens * card.LatentChannels
		rows[i] = images.GuidedRow{
			Row: model.Row{
				X: numbers(n), Sigma: 0.5, Conditioning: conds[0], Guidance: float32(card.Guidance),
				Dst: make([]float32, n),
			},
			Negative: conds[1], Scale: 4,
		}
	}
	v := images.NewVelocities(m)
	return func() error {
		at := sigma()
		for i := range rows {
			rows[i].Sigma = at
		}
		faults, err := v.Eval(ctx, rows, size)
		return cmp.Or(err, faults[0])
	}, conds[0].Tensors[0].Shape[0], nil
}

// randomLoRA makes a LoRA of some rank of all modules of a table.
func randomLoRA(modules lora.Table, rank int) (*lora.Adapter, error) {
	var factors []safetensors.Tensor
	for module, shape := range modules {
		for part, size := range map[string][]int{"lora_A": {rank, shape[1]}, "lora_B": {shape[0], rank}} {
			factors = append(factors, safetensors.Tensor{
				Name: "transformer." + module + "." + part + ".weight", DType: tensor.BF16, Shape: size,
				Data: tensor.BF16.AppendFloats(nil, numbers(size[0]*size[1])),
			})
		}
	}
	var file bytes.Buffer
	if err := safetensors.Write(&file, factors, nil); err != nil {
		return nil, err
	}
	return lora.Parse("random", file.Bytes(), nil)
}

// forward measures evaluations of a variant.
func (g *gpuBench) forward(ctx context.Context, m model.Model, height, width, batch int, v variant) {
	scale := float64(g.of) / float64(g.layers)
	var call func() error
	var text int
	of, took, err := v.apply(m)
	if err == nil {
		call, text, err = evaluation(ctx, of, height, width, batch, v.sigmas(g.sigma))
	}
	if v.rank > 0 && err == nil {
		defer func() { _ = of.Close() }()
		fmt.Fprintf(g.out, "| putting a LoRA of rank %d on the device, scaled | %.4g ms | | |\n", v.rank,
			took.Seconds()*1e3*scale)
	}
	g.row(fmt.Sprintf("evaluation with guidance, %d x %d, batch %d, %d layers of %d, scaled%s", height, width, batch,
		g.layers, g.of, v), 0, "",
		gpuCall{
			What: "forward", Tokens: height / 16 * (width / 16), Text: text, Heads: 24, Dim: 128, Layers: g.layers,
			M: g.of, Batch: 2 * batch,
		},
		func() (best float64, _ error) {
			for began := time.Now(); err == nil && (best == 0 || time.Since(began) < g.round); {
				start := time.Now()
				if err = call(); err == nil && (best == 0 || time.Since(start).Seconds() < best) {
					best = time.Since(start).Seconds()
				}
			}
			if err == nil {
				fmt.Fprintf(g.out, "| images/s of it, 50 steps without the VAE | %.4g | | |\n",
					float64(batch)/(50*best*scale))
			}
			return best * scale, err
		})
}

// shares prints what part of an evaluation each kernel takes, waiting for each.
func (g *gpuBench) shares(ctx context.Context, dir string, size [2]int) (err error) {
	if g.device == devices.CPU {
		return nil // bench sampler samples it
	}
	g.times = map[string]time.Duration{}
	on := false
	set, err := g.open(func(kernel string, took time.Duration) {
		if on {
			g.times[kernel] += took
		}
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, set.Close()) }()
	call, end, err := warmEvaluation(ctx, set.Devices[0].Device, dir, size, variant{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	on = true
	if err := call(); err != nil {
		return err
	}
	all := time.Duration(0)
	for _, took := range g.times {
		all += took
	}
	fmt.Fprintf(g.out, "\nShare of an evaluation of %d x %d, each kernel waited for:\n\n| kernel | ms | share |\n| "+
		"--- | --- | --- |\n", size[0], size[1])
	for _, kernel := range slices.SortedFunc(maps.Keys(g.times),
		func(a, b string) int { return cmp.Compare(g.times[b], g.times[a]) }) {
		fmt.Fprintf(g.out, "| %s | %.3f | %.1f %% |\n", kernel, g.times[kernel].Seconds()*1e3,
			100*g.times[kernel].Seconds()/all.Seconds())
	}
	return nil
}
