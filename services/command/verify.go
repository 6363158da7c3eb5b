package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

func verifyCommand(a *app) *cobra.Command {
	var run, modelName string
	var options model.OpenOptions
	var tolerance float64
	c := &cobra.Command{
		Use:   "verify",
		Short: "recompute every stored log-prob with the model and compare",
		Long: `verify reads the stored trajectories of a run, evaluates the model at the stored
latents, recomputes the log-prob of every stochastic step from the stored next
latents, and compares: the ratio exp(recomputed - stored) must be exactly 1 with the
same build, model and backend. It also checks schedules, digests of step events and
what each trajectory says of itself.

A step can be recomputed when the latents before and after it were kept
(return_step_indices). What has been removed since, by age or by hand, is counted, and
the rest is checked.

Exit status: 0 only if every log-prob that the run has latents for was recomputed, at
least one, and all are right.`,
		Example: `  meander verify
  meander verify --run demo --model synthetic --json`,
		Args: args(cobra.NoArgs),
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			ctx := c.Context()
			var err error
			if run == "" {
				if run, err = latestRun(ctx, conn.Bus); err != nil {
					return err
				}
			}
			if err := schemas.CheckToken("--run", run); err != nil {
				return usage(err)
			}
			v := &verifier{bus: conn.Bus, modelName: modelName, options: options, report: verifyReport{Run: run, Mismatches: []mismatch{}}}
			defer v.close()
			if err := v.run(ctx, c.ErrOrStderr()); err != nil {
				return err
			}
			return a.printVerify(c.OutOrStdout(), &v.report, tolerance)
		}),
	}
	c.Flags().StringVar(&run, "run", "", "run; default the latest")
	c.Flags().StringVar(&modelName, "model", "", "model to recompute with; default the one the trajectories name")
	c.Flags().StringVar(&options.Adapter, "adapter", "", "LoRA that the samples were made with")
	c.Flags().Float64Var(&options.AdapterScale, "adapter-scale", 1, "how much of the adapter")
	c.Flags().IntVar(&options.Threads, "threads", 0, "threads of the model; 0 for all cores")
	c.Flags().Float64Var(&tolerance, "tolerance", 0, "largest |ratio-1| that passes; above 0 only to compare builds or backends")
	return c
}

// verifyReport is verify's --json.
type verifyReport struct {
	Run          string `json:"run"`
	Trajectories int    `json:"trajectories"`
	// Failed of the trajectories are of samples that could not be made.
	Failed int `json:"failed"`
	// Steps were recomputed; StepsSkipped are stochastic, but their latents were not kept.
	Steps        int `json:"steps"`
	StepsSkipped int `json:"steps_skipped"`
	// StepsGone are events that trajectories name and that are stored no more, or not whole.
	StepsGone  int        `json:"steps_gone"`
	MaxRatio   float64    `json:"max_abs_ratio_minus_1"`
	Mismatches []mismatch `json:"mismatches"`
	// Unproven is why the run counts as not verified although nothing is wrong; empty: it
	// is verified, or something is wrong.
	Unproven string `json:"unproven,omitempty"`
}

type mismatch struct {
	UID         string `json:"uid"`
	SampleIndex int64  `json:"sample_index"`
	StepIndex   int64  `json:"step_index"` // -1: the trajectory as a whole
	What        string `json:"what"`
}

// judge says why nothing, or not all, is proven.
func (r *verifyReport) judge() {
	switch {
	case len(r.Mismatches) > 0:
	case r.StepsGone > 0:
		r.Unproven = fmt.Sprintf("%s gone: removed by age or by hand", count(r.StepsGone, "step event"))
	case r.Steps > 0:
	case r.Failed == r.Trajectories:
		r.Unproven = "nothing was checked: every sample failed"
	case r.StepsSkipped > 0:
		r.Unproven = "nothing was checked: no step has both latents; keep them with --return-steps"
	default:
		r.Unproven = "nothing was checked: no step is stochastic, so there are no log-probs"
	}
}

func (a *app) printVerify(out io.Writer, r *verifyReport, tolerance float64) error {
	r.judge()
	bad := len(r.Mismatches) > 0 || !(r.MaxRatio <= tolerance) || r.Unproven != ""
	if a.json {
		if err := json.NewEncoder(out).Encode(r); err != nil {
			return err
		}
	} else {
		r.print(out)
	}
	if bad {
		return &exitError{status: exitFailed}
	}
	return nil
}

func (r *verifyReport) print(out io.Writer) {
	fmt.Fprintf(out, "run %s: %d trajectories, %d log-probs recomputed", r.Run, r.Trajectories, r.Steps)
	for _, part := range []struct {
		n    int
		what string
	}{{r.Failed, "samples failed"}, {r.StepsSkipped, "more lack stored latents"}, {r.StepsGone, "step events are gone"}} {
		if part.n > 0 {
			fmt.Fprintf(out, ", %d %s", part.n, part.what)
		}
	}
	fmt.Fprintf(out, "\nmax |ratio-1| = %g\n%d mismatches\n", r.MaxRatio, len(r.Mismatches))
	for i, m := range r.Mismatches {
		if i == 20 {
			fmt.Fprintf(out, "  and %d more, see --json\n", len(r.Mismatches)-i)
			break
		}
		fmt.Fprintf(out, "  %s #%d step %d: %s\n", m.UID, m.SampleIndex, m.StepIndex, m.What)
	}
	if r.Unproven != "" {
		fmt.Fprintf(out, "not verified: %s\n", r.Unproven)
	}
}

type verifier struct {
	bus       *bus.Bus
	modelName string
	options   model.OpenOptions
	model     model.Model // opened at the first trajectory, which names it
	report    verifyReport

	velocities *sampler.Velocities // of model
}

func (v *verifier) close() {
	if v.model != nil {
		_ = v.model.Close()
	}
}

func (v *verifier) run(ctx context.Context, stderr io.Writer) error {
	filter := schemas.Prefix + "trajectory." + v.report.Run + ".*.*"
	for m, err := range v.bus.Read(ctx, schemas.StreamTrajectories, []string{filter}, bus.ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("read trajectories: %w", err)
		}
		v.report.Trajectories++
		t := &schemas.Trajectory{}
		if err := schemas.DecodeValid(m.Data, t); err != nil {
			v.report.Mismatches = append(v.report.Mismatches, mismatch{m.Subject, t.SampleIndex, -1, err.Error()})
			continue
		}
		if t.StopReason != schemas.StopCompleted {
			v.report.Failed++
			continue
		}
		if err := v.trajectory(ctx, t); err != nil {
			return fmt.Errorf("%s sample %d: %w", t.UID, t.SampleIndex, err)
		}
		if v.report.Trajectories%100 == 0 {
			fmt.Fprintf(stderr, "verified %d trajectories\n", v.report.Trajectories)
		}
	}
	if v.report.Trajectories == 0 {
		return fmt.Errorf("run %q has no stored trajectories", v.report.Run)
	}
	return nil
}

// trajectory checks one completed trajectory against its steps and the model.
func (v *verifier) trajectory(ctx context.Context, t *schemas.Trajectory) error {
	fault := func(step int64, format string, args ...any) {
		v.report.Mismatches = append(v.report.Mismatches, mismatch{t.UID, t.SampleIndex, step, fmt.Sprintf(format, args...)})
	}
	if v.model == nil {
		name := v.modelName
		if name == "" {
			name = t.Lane
		}
		m, err := model.Open(name, v.options)
		if err != nil {
			return usage(fmt.Errorf("%w; say where it is with --model", err))
		}
		v.model, v.velocities = m, sampler.NewVelocities(m)
	}
	card := v.model.Card()
	if card.WeightsDigest != t.WeightsDigest {
		fault(-1, "weights_digest: trajectory has %.16s, model %q has %.16s", t.WeightsDigest, card.Name, card.WeightsDigest)
		return nil
	}
	request := requestOf(t)
	if got := request.ComputeScheduleDigest(); got != t.ScheduleDigest {
		fault(-1, "schedule_digest: stored %.16s, the fields give %.16s", t.ScheduleDigest, got)
	}
	steps, err := v.steps(ctx, t, fault)
	if err != nil {
		return err
	}
	latents := storedLatents(t, steps, fault)
	plan := planOf(t)
	prompts := []string{t.Prompt}
	if t.TrueCFGScale > 1 {
		prompts = append(prompts, t.NegativePrompt)
	}
	encode := v.model.Encode
	if t.TruncatePrompt {
		encode = v.model.EncodeTruncated
	}
	conds, err := encode(ctx, prompts)
	if err != nil {
		fault(-1, "encode prompt: %v", err)
		return ctx.Err()
	}
	for i, kind := range t.Transitions {
		stored := t.LogProbs[i]
		if !flow.Transition(kind).Stochastic() {
			if stored != nil {
				fault(int64(i), "log_prob: %g on an ode step, which has none", *stored)
			}
			continue
		}
		x, next := latents[int64(i)], latents[int64(i)+1]
		switch {
		case stored == nil:
			fault(int64(i), "log_prob: null on a %s step", kind)
			continue
		case x == nil || next == nil:
			if !slices.Contains(t.LatentStepIndices, int64(i)) || !slices.Contains(t.LatentStepIndices, int64(i)+1) {
				v.report.StepsSkipped++ // else the step event is gone, which is counted
			}
			continue
		}
		velocity, err := v.velocity(ctx, t, x, t.Sigmas[i], conds)
		var got flow.LogProb
		if err == nil {
			got, err = flow.Score(plan, i, x, velocity, next)
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fault(int64(i), "%v", err)
			continue
		}
		v.report.Steps++
		off := math.Abs(math.Exp(got.Mean-*stored) - 1)
		if math.IsNaN(off) {
			off = math.Inf(1)
		}
		v.report.MaxRatio = max(v.report.MaxRatio, off)
	}
	return nil
}

// steps loads the step events the trajectory names and checks them against it. Those that
// are gone are counted and nil.
func (v *verifier) steps(ctx context.Context, t *schemas.Trajectory, fault func(int64, string, ...any)) ([]*schemas.Step, error) {
	if len(t.Steps) != len(t.Transitions) {
		fault(-1, "steps: %d stored, %d were taken", len(t.Steps), len(t.Transitions))
	}
	steps := make([]*schemas.Step, len(t.Steps))
	var content [][32]byte
	for i, ref := range t.Steps {
		m, err := v.bus.Get(ctx, schemas.StreamSteps, ref.Seq)
		var step *schemas.Step
		if err == nil {
			if sum := sha256.Sum256(m.Data); hex.EncodeToString(sum[:]) != ref.Digest {
				fault(int64(i), "digest: the stored event has %x, the trajectory says %.16s", sum[:8], ref.Digest)
				continue
			}
			step, err = v.bus.LoadStep(ctx, m)
		}
		switch {
		case errors.Is(err, bus.ErrNotFound):
			v.report.StepsGone++
			continue
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil && m == nil: // the server does not answer
			return nil, fmt.Errorf("step %d, sequence %d: %w", i, ref.Seq, err)
		case err != nil:
			fault(int64(i), "%v", err)
			continue
		}
		checkStep(t, int64(i), step, ref, fault)
		digest, err := step.ContentDigest()
		if err != nil {
			fault(int64(i), "%v", err)
			continue
		}
		content = append(content, digest)
		steps[i] = step
	}
	if len(content) == len(steps) {
		if got := schemas.StepsDigest(content); got != t.ContentDigest {
			fault(-1, "content_digest: stored %.16s, the steps give %.16s", t.ContentDigest, got)
		}
	}
	return steps, nil
}

// checkStep compares a step event with what its trajectory says of it.
func checkStep(t *schemas.Trajectory, i int64, step *schemas.Step, ref schemas.StepRef, fault func(int64, string, ...any)) {
	if step.UID != t.UID || step.SampleIndex != t.SampleIndex || step.Attempt != t.Attempt || step.StepIndex != i {
		fault(i, "sequence %d holds step %d of %s #%d, attempt %s", ref.Seq, step.StepIndex, step.UID, step.SampleIndex, step.Attempt)
	}
	if step.ScheduleDigest != t.ScheduleDigest {
		fault(i, "schedule_digest: %.16s, the trajectory has %.16s", step.ScheduleDigest, t.ScheduleDigest)
	}
	if int(i) < len(t.LogProbs) && !sameNumber(step.LogProb, t.LogProbs[i]) {
		fault(i, "log_prob: the event has %s, the trajectory %s", number(step.LogProb, "%v"), number(t.LogProbs[i], "%v"))
	}
}

// storedLatents are the latents by index, decoded to float32, of the steps that are there.
func storedLatents(t *schemas.Trajectory, steps []*schemas.Step, fault func(int64, string, ...any)) map[int64][]float32 {
	latents := map[int64][]float32{}
	whole := true
	for i, s := range steps {
		if s == nil {
			whole = false
			continue
		}
		for _, l := range s.Latents {
			if !slices.Equal(l.Tensor.Shape, t.LatentsShape) || len(t.LatentsShape) != 2 {
				fault(int64(i), "latents %d: shape %v, the trajectory has %v", l.Index, l.Tensor.Shape, t.LatentsShape)
				continue
			}
			x := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
			if err := tensor.DType(l.Tensor.DType).DecodeFloats(x, l.Tensor.Data); err != nil {
				fault(int64(i), "latents %d: %v", l.Index, err)
				continue
			}
			latents[l.Index] = x
		}
	}
	if kept := slices.Sorted(maps.Keys(latents)); whole && !slices.Equal(kept, t.LatentStepIndices) {
		fault(-1, "latent_step_indices: stored %v, the trajectory says %v", kept, t.LatentStepIndices)
	}
	return latents
}

// velocity is the guided model output at (x, sigma).
func (v *verifier) velocity(ctx context.Context, t *schemas.Trajectory, x []float32, sigma float32, conds []*model.Conditioning) ([]float32, error) {
	row := sampler.Row{Dst: make([]float32, len(x)), X: x, Sigma: sigma, Cond: conds[0], Scale: t.TrueCFGScale}
	if len(conds) == 2 {
		row.Negative = conds[1]
	}
	faults, err := v.velocities.Eval(ctx, []sampler.Row{row}, int(t.Height), int(t.Width))
	if err == nil {
		err = faults[0]
	}
	return row.Dst, err
}

func planOf(t *schemas.Trajectory) flow.Plan {
	p := flow.Plan{
		Sigmas: t.Sigmas, NoiseLevel: t.NoiseLevel, LogProb: flow.LogProbKind(t.LogProbKind), Solver: flow.Solver(t.Solver),
		Storage: tensor.DType(t.LatentsDType), Seed: t.SampleSeed,
	}
	for _, kind := range t.Transitions {
		p.Transitions = append(p.Transitions, flow.Transition(kind))
	}
	return p
}

// requestOf holds the fields of the schedule digest.
func requestOf(t *schemas.Trajectory) *schemas.Request {
	return &schemas.Request{
		Sigmas: t.Sigmas, Transitions: t.Transitions, NoiseLevel: t.NoiseLevel, Solver: t.Solver, LogProbKind: t.LogProbKind,
		LatentsDType: t.LatentsDType, TrueCFGScale: t.TrueCFGScale, Height: t.Height, Width: t.Width,
	}
}

func sameNumber(a, b *float64) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}
