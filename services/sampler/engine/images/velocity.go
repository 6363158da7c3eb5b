package images

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// GuidedRow is a row with classifier-free guidance.
type GuidedRow struct {
	model.Row
	// Negative is the conditioning that guidance leads away from; nil: no guidance.
	Negative *model.Conditioning
	// Scale of the guidance; 1 is the velocity of the prompt alone.
	Scale float64
	// Rescale is the share in which the guided velocity is brought to the deviation of the prompt's own.
	Rescale float64
}

// Point is where a sample is evaluated: state X [S, C] at Sigma, for step Step. Eval sets Dst.
type Point struct {
	Step  int64
	X     []float32
	Sigma float32
	Dst   []float32
}

// RowOf returns the row that evaluates a sample at a point; negative is nil without guidance.
func RowOf(s *schemas.Sampling, cond, negative *model.Conditioning, at Point) GuidedRow {
	r := GuidedRow{
		Row:   model.Row{X: at.X, Sigma: at.Sigma, Conditioning: cond, Guidance: float32(s.Guidance), Dst: at.Dst},
		Scale: s.CFGScale(at.Step, at.Sigma), Rescale: s.GuidanceRescale,
	}
	if r.Scale > 1 {
		r.Negative = negative
	}
	if cond != nil && cond.Recipe != nil && r.Scale != s.TrueCFGScale { // a pipeline guides by it
		r.Guidance = float32(r.Scale)
	}
	return r
}

// uses are the settings that the sampler, verify and the teacher compute with, in this package and in pkg/sampling.
// One that is not here is refused where it is set.
var uses = []string{
	"prompt", "prompt_2", "prompt_3", "negative_prompt", "truncate_prompt", "sample_seed", "noise_seed", "step_seeds",
	"start", "stop", "scheduled_sampling", "sigmas", "transitions", "noise_level", "solver", "log_prob_kind",
	"latents_dtype", "height", "width", "frames", "guidance", "guidance_rescale", "cfg_scales", "network_timesteps",
	"initial_std",
}

// CheckSettings refuses a sample with a setting that is not computed with, and one whose guidance does not fit the
// network: the card says whether the network has a guidance input, and where a second network takes over.
func CheckSettings(c model.Card, s *schemas.Sampling) error {
	uses := uses
	if c.Pipeline != nil {
		uses = slices.Concat(uses, []string{"conditions", "arguments", "no_negative_prompt"})
	}
	switch err := s.CheckUses(uses); {
	case err != nil:
		return err
	case s.Guidance != 0 && c.Guidance == 0:
		return fmt.Errorf("guidance: %g; must be absent, the network of %s has no such input", s.Guidance, c.Name)
	case s.Guidance == 0 && c.Guidance != 0:
		return fmt.Errorf("guidance: absent; must be there, the network of %s has such an input", c.Name)
	case s.BoundaryRatio != 0 && s.BoundaryRatio != c.BoundaryRatio:
		return fmt.Errorf("boundary_ratio: %g; must be that of %s, %g", s.BoundaryRatio, c.Name, c.BoundaryRatio)
	}
	return nil
}

// Velocities evaluates a model with classifier-free guidance. One goroutine at a time may use it.
type Velocities struct {
	model model.Model
	card  model.Card

	rows     []model.Row
	negative [][]float32 // results of the negative prompts
}

// NewVelocities returns Velocities of model m.
func NewVelocities(m model.Model) *Velocities { return &Velocities{model: m, card: m.Card()} }

// Eval sets the Dst of rows of samples of one size; faults are errors of single rows, each found with the row alone.
func (v *Velocities) Eval(ctx context.Context, rows []GuidedRow, size model.Size) (faults map[int]error, err error) {
	return engine.Isolate(ctx, rows, func(rows []GuidedRow) (map[int]error, error) { return v.eval(ctx, rows, size) })
}

// eval evaluates all rows, and the negative prompts of those with guidance, in one call of the model.
func (v *Velocities) eval(ctx context.Context, rows []GuidedRow, size model.Size) (map[int]error, error) {
	v.rows = v.rows[:0]
	guided := 0
	for _, r := range rows {
		v.rows = append(v.rows, r.Row)
		if r.Negative != nil {
			r.Conditioning, r.Dst = r.Negative, v.scratch(guided, len(r.X))
			v.rows = append(v.rows, r.Row)
			guided++
		}
	}
	if err := v.model.Velocity(ctx, v.rows, size); err != nil {
		err = fmt.Errorf("evaluate model: %w", err)
		if errors.Is(err, model.ErrLatents) {
			err = bus.Terminal(schemas.CodeFailed, err)
		}
		return nil, err
	}
	faults := map[int]error{}
	guided = 0
	for i, r := range rows {
		if r.Negative != nil {
			if err := v.guide(&r, v.negative[guided]); err != nil {
				faults[i] = bus.Terminal(schemas.CodeFailed, err)
			}
			guided++
		}
		if j := slices.IndexFunc(r.Dst, func(x float32) bool { return x-x != 0 }); j >= 0 && faults[i] == nil {
			faults[i] = engine.Failed("velocity: element %d is %v; must be finite", j, r.Dst[j])
		}
	}
	return faults, nil
}

// scratch returns memory of n values for the i-th negative result; it is kept for the next call.
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

// guide combines a row's velocity, its Dst, with that of its negative prompt, by the rule of the model's card.
func (v *Velocities) guide(r *GuidedRow, negative []float32) (err error) {
	own := 0.0
	if r.Rescale > 0 {
		own = flow.Deviation(r.Dst)
	}
	switch v.card.CFGRule {
	case model.CFGRescaled:
		err = flow.Guide(r.Dst, r.Dst, negative, r.Scale, v.card.LatentChannels)
	case model.CFGPlain:
		err = flow.GuidePlain(r.Dst, r.Dst, negative, r.Scale)
	case model.CFGPlainClamped:
		err = flow.GuideClamped(r.Dst, r.Dst, negative, r.Scale)
	default:
		err = errors.New("guidance: the model has no rule for it")
	}
	if err == nil && r.Rescale > 0 {
		flow.RescaleDeviation(r.Dst, own, r.Rescale)
	}
	return err
}
