package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
)

// Row is one place where a velocity is wanted.
type Row struct {
	// Dst and X are [S, C]; X is read.
	Dst, X []float32
	Sigma  float32
	Cond   *model.Conditioning
	// Negative is what guidance of scale Scale leads away from; nil: no guidance.
	Negative *model.Conditioning
	Scale    float64
}

// Velocities evaluates a model with classifier-free guidance: the one way to a velocity of
// the sampler, of verify and of the benches. It reuses its memory, so one goroutine uses it.
type Velocities struct {
	model model.Model
	card  model.Card

	dst, x   [][]float32
	sigma    []float32
	cond     []*model.Conditioning
	negative [][]float32 // results of the negative prompts
}

// NewVelocities evaluates m.
func NewVelocities(m model.Model) *Velocities { return &Velocities{model: m, card: m.Card()} }

// Eval sets each row's Dst, the rows being images of height x width pixels. Rows do not
// depend on each other: faults says which of them cannot be computed, tried alone.
func (v *Velocities) Eval(ctx context.Context, rows []Row, height, width int) (faults map[int]error, err error) {
	return isolate(ctx, rows, func(rows []Row) (map[int]error, error) { return v.eval(ctx, rows, height, width) })
}

func (v *Velocities) eval(ctx context.Context, rows []Row, height, width int) (map[int]error, error) {
	v.dst, v.x, v.sigma, v.cond = v.dst[:0], v.x[:0], v.sigma[:0], v.cond[:0]
	add := func(dst, x []float32, sigma float32, cond *model.Conditioning) {
		v.dst, v.x, v.sigma, v.cond = append(v.dst, dst), append(v.x, x), append(v.sigma, sigma), append(v.cond, cond)
	}
	guided := 0
	for _, r := range rows {
		add(r.Dst, r.X, r.Sigma, r.Cond)
		if r.Negative != nil {
			add(v.scratch(guided, len(r.X)), r.X, r.Sigma, r.Negative)
			guided++
		}
	}
	if err := v.model.Velocity(ctx, v.dst, v.x, v.sigma, v.cond, height, width); err != nil {
		return nil, fmt.Errorf("evaluate model: %w", err)
	}
	faults := map[int]error{}
	guided = 0
	for i, r := range rows {
		if r.Negative != nil {
			if err := v.guide(r.Dst, v.negative[guided], r.Scale); err != nil {
				faults[i] = bus.Terminal(schemas.CodeFailed, err)
			}
			guided++
		}
		if j := slices.IndexFunc(r.Dst, func(x float32) bool { return x-x != 0 }); j >= 0 && faults[i] == nil {
			faults[i] = bus.Terminal(schemas.CodeFailed, fmt.Errorf("velocity: element %d is %v; must be finite", j, r.Dst[j]))
		}
	}
	return faults, nil
}

// scratch is the memory for the i-th negative result.
func (v *Velocities) scratch(i, n int) []float32 {
	if i == len(v.negative) {
		v.negative = append(v.negative, nil)
	}
	if cap(v.negative[i]) < n {
		v.negative[i] = make([]float32, n)
	}
	v.negative[i] = v.negative[i][:n]
	return v.negative[i]
}

func (v *Velocities) guide(dst, negative []float32, scale float64) error {
	switch v.card.CFGRule {
	case model.CFGRescaled:
		return flow.Guide(dst, dst, negative, scale, v.card.LatentChannels)
	case model.CFGPlain:
		return flow.GuidePlain(dst, dst, negative, scale)
	}
	return errors.New("guidance: the model has no rule for it")
}
