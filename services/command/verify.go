package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/verify"
)

// verifyCommand makes the command 'meander verify'.
func verifyCommand(a *app) *cobra.Command {
	var run schemas.Run
	var uid schemas.UID
	options := verify.Options{Compute: models.Compute{Device: devices.Auto, DType: devices.Auto}}
	var passes struct {
		Tolerance float64 `key:"tolerance" range:"0.." help:"largest |ratio-1|, distance of a state computed again, or difference of a token's numbers that passes; use more than 0 only to compare builds or backends"`
	}
	c := &cobra.Command{
		Use:   "verify [RUN]",
		Short: "recompute every stored log-prob with the model and compare",
		Long: `verify reads the stored trajectories of a run, evaluates the model at the stored latents, and computes
the log-prob of every stochastic step again. The ratio exp(recomputed - stored) must be exactly 1 with
the same build, model and backend. A sample without a stochastic step is made again from its start; the
states that are stored of it must be equal. verify also checks schedules, digests of step events, the states
that samples started with, and the facts in each trajectory.

For texts it draws every token again from the logits of the model, and compares log-probs,
log-sum-exps, entropies and stored logits. All differences must be exactly 0.

The request of each stage of a sample is made again, out of the group's record and of what was made
before it, and compared with what is stored: templates, conditions, seeds and settings.

A server (--engine) draws tokens with its own random generator: they cannot be drawn again. Its numbers
are compared with those of the model here. Of images that a server made in float32, the noise is
drawn again, each step is made again, and states, texts and log-probs are compared. --engine-tolerance is
the largest difference that passes; by default the precision that the server shows decides. A server that
says exact must give the same bits.

Each trajectory is recomputed with its own model: the one with its weights, else the one of its lane.
Name models that are not shipped with --model, once for each model of the run.

A log-prob can be recomputed if the latents before and after its step were kept (return_step_indices). Events
that were removed since, by age or by hand, are counted; the rest is checked.

Exit status: 0 if at least one log-prob or state was recomputed, all that can be recomputed were, and all are
right. Otherwise the last lines say why not. Weights of a version that the model cannot load end verify:
they say nothing about the samples.`,
		Example: `  meander verify
  meander verify demo --json
  meander verify demo --model ./base --model ./critic    # of a run of two checkpoints of your own
  meander verify demo --lane signs --uid 0000-a-red-sign-that-says-open`,
		PreRunE: func(_ *cobra.Command, given []string) error { return runArgument(&run, given) },
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, _ []string) error {
			out := c.ErrOrStderr()
			options.Progress = func(n int) {
				if n%100 == 0 {
					fmt.Fprintf(out, "verified %d trajectories\n", n)
				}
			}
			if options.EngineKey = engineKey(options.Engine); uid != "" {
				options.UIDs = []schemas.UID{uid}
			}
			if err := checkCompute(options); err != nil {
				return settingError(err)
			}
			for _, name := range append([]string{""}, options.Model...) {
				if err := a.fetch(c.Context(), name, options.Open.Adapter, hub.Model); err != nil {
					return err
				}
			}
			report, err := verify.Run(c.Context(), conn.Bus, run, options)
			if err != nil {
				return verifyError(err, len(options.Model) > 0)
			}
			return a.printVerify(c.OutOrStdout(), report, passes.Tolerance)
		}),
	}
	nameFlag(c.Flags(), &run, "run", "", "run; default the latest")
	nameFlag(c.Flags(), &options.Lane, "lane", "", "only trajectories of this lane")
	nameFlag(c.Flags(), &uid, "uid", "", "only trajectories of this group")
	c.Flags().StringVar(&options.Open.Adapter, "adapter", "", "LoRA adapter of the samples")
	c.Flags().Float64Var(&options.Open.AdapterScale, "adapter-scale", 1, "scale of the adapter")
	fields.Bind("", &options.Compute).Register(c.Flags())
	flagsOf(c, &options)
	flagsOf(c, &passes)
	return c
}

// verifyError makes a wrong request a usage error. named says that the models were named.
func verifyError(err error, named bool) error {
	if wrong, ok := errors.AsType[*verify.SettingError](err); ok {
		return settingError(wrong)
	}
	failed, ofModel := errors.AsType[*verify.ModelError](err)
	switch {
	case ofModel && named:
		return usage(fmt.Errorf("--model: %w", failed))
	case ofModel:
		return usage(fmt.Errorf("%w; name its folder with --model", failed))
	case errors.Is(err, devices.ErrUnavailable):
		return usage(err)
	}
	return err
}

// checkCompute checks how verify is to compute. Without --engine it refuses only what neither this program nor a worker
// does: the trajectories say which of them computes.
func checkCompute(o verify.Options) error {
	worker := models.TorchAt(cmp.Or(o.Engine, "torch"), o.EngineKey, o.Compute).Check
	if models.IsTorch(o.Engine) {
		return worker()
	}
	err := errors.Join(schemas.CheckFields(&o.Compute), o.Compute.Validate())
	if o.Engine == "" && err != nil && worker() == nil {
		return nil
	}
	return err
}

// printVerify prints the report of 'meander verify'. A run that is not verified gives exit status 1.
func (a *app) printVerify(out io.Writer, r *verify.Report, tolerance float64) error {
	faults := r.Faults(tolerance)
	if a.json {
		line := struct {
			*verify.Report
			Verified    bool     `json:"verified"`
			NotVerified []string `json:"not_verified,omitempty"`
		}{r, len(faults) == 0, faults}
		if err := encode(out, line); err != nil {
			return err
		}
	} else {
		printReport(out, r)
		if len(faults) == 0 {
			fmt.Fprintln(out, "verified")
		}
		for _, f := range faults {
			present.Lines(out, "not verified: "+f)
		}
		for _, m := range r.Missing {
			present.Lines(out,
				fmt.Sprintf("  add --model %s, or choose other trajectories with --lane or --uid",
					cmp.Or(m.Source, fmt.Sprintf("with the folder of %q", m.Model))))
		}
	}
	if len(faults) > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

// printReport prints the numbers of a report, and the first mismatches, for people.
func printReport(to io.Writer, r *verify.Report) {
	out := &strings.Builder{}
	fmt.Fprintf(out, "run %s: %d trajectories, ", r.Run, r.Trajectories)
	switch {
	case r.Drawn > 0:
		fmt.Fprintf(out, "%s drawn again, %d not, because %s drew them with its own generator",
			present.Count(r.Tokens, "token"), r.Drawn, strings.Join(r.DrawnBy, ", "))
	case r.Tokens > 0:
		fmt.Fprintf(out, "%s drawn again", present.Count(r.Tokens, "token"))
	default:
		fmt.Fprintf(out, "%d log-probs recomputed", r.Steps)
	}
	for _, part := range []struct {
		n    int
		what string
	}{
		{r.Failed, "samples not completed"},
		{r.Predictions, "predictions at steps made again"},
		{r.Said, "answers of interactions, which no model computes again"},
		{r.Requests, "requests of stages made again"},
		{r.StagesGone, "not, because what they come out of is gone"},
		{r.StepsSkipped, "more lack stored latents"},
		{r.StepsGone, "step events are gone"},
		{r.StartsGone, "starts are gone"},
		{r.ConditioningGone, "tensors of texts are gone"},
		{r.Unscored, "numbers that the server did not give"},
	} {
		fmt.Fprint(out, present.When(part.n > 0, ", %d %s", part.n, part.what))
	}
	fmt.Fprint(out, present.When(r.Versions > 0, ", %s fetched", present.Count(r.Versions, "pushed version")))
	switch {
	case r.Drawn > 0:
		fmt.Fprintf(out,
			"\nmax difference of the server's numbers of a token from those of the model folder = %g, of which %g "+
				"passes", r.MaxDrawnDifference, r.EngineTolerance)
	case len(r.DrawnBy) > 0:
		fmt.Fprintf(out,
			"\nmax |ratio-1| of steps that %s made, and distance of %s made again = %g, of which %g passes",
			strings.Join(r.DrawnBy, ", "), present.Count(r.States, "state"), r.MaxDrawnDifference, r.EngineTolerance)
	}
	if r.Drawn > 0 && r.Tokens == 0 {
		fmt.Fprintln(out)
	} else if r.Tokens > 0 {
		fmt.Fprintf(out, "\nmax difference of a log-prob, log-sum-exp or entropy, and of the logits of %s = %g\n",
			present.Count(r.Logits, "token"), r.MaxTokenDifference)
	} else if r.Steps > 0 && (len(r.DrawnBy) == 0 || r.MaxRatio > 0) {
		fmt.Fprintf(out, "\nmax |ratio-1| = %g\n", r.MaxRatio)
	} else {
		fmt.Fprintln(out)
	}
	fmt.Fprint(out, present.When(r.Conditionings > 0, "%d prompt embeddings and masks compared, max distance = %g\n",
		r.Conditionings, r.MaxConditioning))
	fmt.Fprint(out, present.When(r.Rolled > 0, "%d states computed again, max distance = %g\n",
		r.Rolled, r.MaxRolled))
	fmt.Fprintf(out, "%d mismatches\n", len(r.Mismatches))
	for i, m := range r.Mismatches {
		if i == 20 {
			fmt.Fprintf(out, "  and %d more, see --json\n", len(r.Mismatches)-i)
			break
		}
		fmt.Fprintf(out, "  %s #%d%s step %d: %s\n", m.UID, m.SampleIndex, present.When(m.Stage != "", " %s", m.Stage),
			m.StepIndex, m.What)
	}
	present.Lines(to, strings.TrimSuffix(out.String(), "\n"))
}
