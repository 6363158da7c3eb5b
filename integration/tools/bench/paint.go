package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// timing is how long the parts of painting one batch took, in seconds.
type timing struct {
	Encode  float64 `json:"encode"`
	Denoise float64 `json:"denoise"`
	Decode  float64 `json:"decode"`
	// CPU is the time of all threads, which others on the machine lengthen less.
	CPU float64 `json:"cpu"`
}

func (t timing) total() float64 { return t.Encode + t.Denoise + t.Decode }

func (t *timing) add(o timing) {
	t.Encode += o.Encode
	t.Denoise += o.Denoise
	t.Decode += o.Decode
	t.CPU += o.CPU
}

func (t timing) over(n int) timing {
	f := 1 / float64(n)
	return timing{Encode: t.Encode * f, Denoise: t.Denoise * f, Decode: t.Decode * f, CPU: t.CPU * f}
}

// painter does the sampler service's work without its events.
type painter struct {
	model            model.Model
	plan             flow.Plan
	prompt, negative string
	scale            float64
	threads          int
	seed             uint64
	// onStep is called with each step of each sample; it may be nil.
	onStep func(ctx context.Context, sample int, s *flow.Step, card model.Card) error
}

func newPainter(m model.Model, b *samplerBench, threads int) (*painter, error) {
	card := m.Card()
	schedule, err := sampling.Schedule(images.PolicyOf(card))
	if err != nil {
		return nil, fmt.Errorf("schedule: %w", err)
	}
	tokens, err := card.Tokens(card.Size)
	if err != nil {
		return nil, err
	}
	sigmas, err := schedule.Sigmas(b.steps, tokens)
	if err != nil {
		return nil, fmt.Errorf("schedule: %w", err)
	}
	return &painter{
		model: m, prompt: b.prompt, negative: b.negative, scale: b.scale, threads: threads,
		plan: flow.Plan{
			Sigmas: sigmas, Transitions: flow.Transitions(flow.ODE, nil, b.steps),
			LogProb: flow.Density, Solver: flow.Euler, Storage: tensor.F32,
		},
	}, nil
}

// paint makes n images of the prompt from noise of its own.
func (p *painter) paint(ctx context.Context, n int) (timing, error) {
	var t timing
	cpu, began := cpuSeconds(), time.Now()
	lap := func() float64 {
		now := time.Now()
		d := now.Sub(began)
		began = now
		return d.Seconds()
	}
	conds, err := p.model.Encode(ctx, []string{p.prompt, p.negative})
	if err != nil {
		return t, err
	}
	t.Encode = lap()
	rollouts, err := p.denoise(ctx, n, conds[0], conds[1])
	if err != nil {
		return t, err
	}
	t.Denoise = lap()
	// As in the service, every sample is decoded by the goroutine of its request.
	card := p.model.Card()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(p.threads)
	for _, r := range rollouts {
		g.Go(func() error {
			_, err := p.model.Decode(ctx, r.Latents(), card.Size)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return t, err
	}
	t.Decode = lap()
	t.CPU = cpuSeconds() - cpu
	return t, nil
}

func (p *painter) denoise(ctx context.Context, n int, cond, negative *model.Conditioning) ([]*flow.Rollout, error) {
	card := p.model.Card()
	tokens, err := card.Tokens(card.Size)
	if err != nil {
		return nil, err
	}
	if p.scale <= 1 {
		negative = nil // no guidance
	}
	size := tokens * card.LatentChannels
	rollouts, rows := make([]*flow.Rollout, n), make([]images.GuidedRow, n)
	for i := range rollouts {
		noise := make([]float32, size)
		p.seed++
		flow.InitialNoise(noise, p.seed)
		if rollouts[i], err = flow.NewRollout(p.plan, noise); err != nil {
			return nil, err
		}
		rows[i] = images.GuidedRow{
			Row:      model.Row{Conditioning: cond, Guidance: float32(card.Guidance), Dst: make([]float32, size)},
			Negative: negative, Scale: p.scale,
		}
	}
	velocities := images.NewVelocities(p.model)
	for !rollouts[0].Done() {
		for i, r := range rollouts {
			rows[i].X, rows[i].Sigma = r.Point()
		}
		faults, err := velocities.Eval(ctx, rows, card.Size)
		if err != nil {
			return nil, err
		}
		for i, r := range rollouts {
			if faults[i] != nil {
				return nil, faults[i]
			}
			step, err := r.Advance(rows[i].Dst)
			if err == nil && step != nil && p.onStep != nil {
				err = p.onStep(ctx, i, step, card)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return rollouts, nil
}

// paintFor paints batches of n for at least least and returns the mean of one.
func (p *painter) paintFor(ctx context.Context, n int, least time.Duration) (timing, error) {
	var sum timing
	began := time.Now()
	for k := 1; ; k++ {
		t, err := p.paint(ctx, n)
		if err != nil {
			return sum, err
		}
		sum.add(t)
		if time.Since(began) >= least {
			return sum.over(k), nil
		}
	}
}

// cpuSeconds is the processor time of this process so far.
func cpuSeconds() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
