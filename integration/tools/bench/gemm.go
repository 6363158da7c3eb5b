package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// gemmBench is one `bench gemm` command.
type gemmBench struct {
	model            string
	batches          []int
	prompt, negative string
	kernels          string
	round            time.Duration
}

func (g *gemmBench) register(
	text func(*string, string, string, string), span func(*time.Duration, string, time.Duration, string),
) {
	text(&g.model, "model", "signs", "folder in the diffusers layout, or the name of a shipped model")
	text(&g.prompt, "prompt", `a blue sign that says "4071"`, "prompt, for its length")
	text(&g.negative, "negative-prompt", "", "negative prompt, for its length; default the model's")
	text(&g.kernels, "kernels", "", "inner loops to measure; default the fastest of this machine")
	span(&g.round, "round", 300*time.Millisecond, "time spent on each shape")
}

func (g *gemmBench) run(ctx context.Context, dir string, out io.Writer) error {
	if err := checkPositive("batch", g.batches, 1024); err != nil {
		return usage(err)
	}
	kernels := cpu.Kernels(g.kernels)
	if kernels == "" {
		kernels = cpu.AvailableKernels()[0]
	}
	c, err := cpu.NewCPUWith(nil, kernels)
	if err != nil {
		return usage(fmt.Errorf("--kernels: %w", err))
	}
	fmt.Fprintf(out, "One thread, kernels %s, with bias; times in one evaluation; best of rounds of a fraction of a "+
		"millisecond within %v.\n\n", kernels, g.round)
	fmt.Fprint(out, "| batch | times | rows | n | k | GFLOP/s | share of the peak |\n| --- | --- | --- | --- | --- "+
		"| --- | --- |\n")
	least, peak := math.Inf(1), 0.0
	for _, batch := range g.batches {
		products, err := productsOf(ctx, dir, batch, g.prompt, g.negative)
		if err != nil {
			return err
		}
		for _, p := range products {
			if err := ctx.Err(); err != nil {
				return err
			}
			got, most := g.measure(c, p.gemmShape)
			share := "unknown"
			if most > 0 { // plain Go has no loop that shows it
				peak, least = max(peak, most), min(least, got/most)
				share = fmt.Sprintf("%.0f %%", 100*got/most)
			}
			fmt.Fprintf(out, "| %d | %d | %d | %d | %d | %.1f | %s |\n", batch, p.times, p.m, p.n, p.k, got, share)
		}
	}
	if peak > 0 {
		fmt.Fprintf(out, "\nPeak %.0f GFLOP/s; the least share is %.0f %%.\n", peak, 100*least)
	}
	return nil
}

// measure returns the best rate of the product and of the peak loop, in GFLOP/s.
func (g *gemmBench) measure(c *cpu.CPU, s gemmShape) (best, peak float64) {
	fill := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(i%17)/8 - 1
		}
		return x
	}
	x, y := cpu.NewMatrix(fill(s.m*s.k), s.m, s.k), cpu.NewMatrix(fill(s.m*s.n), s.m, s.n)
	w, bias := cpu.Pack(fill(s.n*s.k), s.n, s.k), fill(s.n)
	flops := 2 * float64(s.m) * float64(s.n) * float64(s.k)
	rounds := max(1, int(2e7/flops))
	for began := time.Now(); time.Since(began) < g.round || best == 0; {
		t := time.Now()
		for range rounds {
			c.Linear(y, x, w, cpu.Epilogue{Bias: bias})
		}
		best = max(best, flops*float64(rounds)/float64(time.Since(t).Nanoseconds()))
		peak = max(peak, c.MeasurePeak(time.Microsecond))
	}
	return best, peak
}
