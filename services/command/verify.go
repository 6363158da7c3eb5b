package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
	"github.com/meander-rl/meander/services/verify"
)

func verifyCommand(a *app) *cobra.Command {
	var run schemas.Run
	var options verify.Options
	var tolerance float64
	c := &cobra.Command{
		Use:   "verify [RUN]",
		Short: "recompute every stored log-prob with the model and compare",
		Long: `verify reads the stored trajectories of a run, evaluates the model at the stored
latents, recomputes the log-prob of every stochastic step from the stored next
latents, and compares: the ratio exp(recomputed - stored) must be exactly 1 with the
same build, model and backend. It also checks schedules, digests of step events, the
states that samples started with, and what each trajectory says of itself.

Of texts it draws every token again, from the logits that the model gives to the tokens
before it, and compares log-probs, log-sum-exps, entropies and stored logits: differences
must be exactly 0.

Tokens that a server drew (--engine) come from its own generator, and are not drawn again. What
it says of them is compared with what the weights of the folder give here, which other code
computes: --engine-tolerance says how far apart they may be, 0.001 where the server computes in float32.

Each trajectory is recomputed with its own model: that of its weights, else that of its lane. Models that are
not shipped are named with --model, several where a run has several.

A step can be recomputed when the latents before and after it were kept
(return_step_indices); what a sample started with is known all the same. What has been removed since, by age or by hand, is counted, and
the rest is checked.

Exit status: 0 only if every log-prob that the run has latents for was recomputed, at
least one, and all are right. Otherwise the last lines say why not.`,
		Example: `  meander verify
  meander verify demo --json
  meander verify demo --model ./base --model ./critic    # of a run of two checkpoints of your own
  meander verify demo --lane signs --uid 0000-a-red-sign-that-says-open`,
		Args: args(cobra.MaximumNArgs(1)),
		PreRunE: func(_ *cobra.Command, given []string) error {
			return errors.Join(runArgument(&run, given), optionalToken("--lane", options.Lane),
				optionalToken("--uid", options.UID))
		},
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, _ []string) error {
			out := c.ErrOrStderr()
			options.Progress = func(n int) {
				if n%100 == 0 {
					fmt.Fprintf(out, "verified %d trajectories\n", n)
				}
			}
			if err := options.Compute.Validate(); err != nil {
				return settingError(err)
			}
			report, err := verify.Run(c.Context(), conn.Bus, run, options)
			if errors.Is(err, devices.ErrUnavailable) {
				return usage(err)
			}
			if failed, ok := errors.AsType[*verify.ModelError](err); ok {
				return usage(fmt.Errorf("%w; say where it is with --model", failed))
			}
			if err != nil {
				return err
			}
			return a.printVerify(c.OutOrStdout(), report, tolerance)
		}),
	}
	c.Flags().StringVar((*string)(&run), "run", "", "run; default the latest")
	c.Flags().StringArrayVar(&options.Model, "model", nil,
		"model to recompute with, a folder or a name; again for each of the run; default those that its trajectories name")
	c.Flags().StringVar((*string)(&options.Lane), "lane", "", "only the trajectories of this lane")
	c.Flags().StringVar((*string)(&options.UID), "uid", "", "only the trajectories of this group")
	c.Flags().StringVar(&options.Open.Adapter, "adapter", "", "LoRA that the samples were made with")
	c.Flags().Float64Var(&options.Open.AdapterScale, "adapter-scale", 1, "how much of the adapter")
	c.Flags().StringVar(&options.Compute.Device, "device", devices.Auto, "what computes: auto (a GPU if there is one, else the CPU), cpu or cuda:0")
	c.Flags().StringVar(&options.Compute.DType, "dtype", devices.Auto, sampler.Help("DType"))
	c.Flags().BoolVar(&options.Compute.Deterministic, "deterministic", false, sampler.Help("Deterministic"))
	c.Flags().IntVar(&options.Compute.Threads, "threads", 0, sampler.Help("Threads"))
	c.Flags().Float64Var(&tolerance, "tolerance", 0, "largest |ratio-1|, distance of a rolled state, or difference of a number of a token that passes; above 0 only to compare builds or backends")
	c.Flags().Float64Var(&options.EngineTolerance, "engine-tolerance", verify.DefaultEngineTolerance, "largest difference of a log-prob, or another number of a token that a server drew, that passes")
	return c
}

func (a *app) printVerify(out io.Writer, r *verify.Report, tolerance float64) error {
	faults := r.Faults(tolerance)
	if a.json {
		line := struct {
			*verify.Report
			Verified    bool     `json:"verified"`
			NotVerified []string `json:"not_verified,omitempty"`
		}{r, len(faults) == 0, faults}
		if err := json.NewEncoder(out).Encode(line); err != nil {
			return err
		}
	} else {
		printReport(out, r)
		if len(faults) == 0 {
			fmt.Fprintln(out, "verified")
		}
		for _, f := range faults {
			printBroken(out, "not verified: "+f)
		}
		for _, m := range r.Missing {
			printBroken(out, fmt.Sprintf("  add --model, the folder of %q; or choose others with --lane or --uid", m.Model))
		}
	}
	if len(faults) > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

// printReport is the report for people. It ends with why the run is not verified wherever the exit status says so.
func printReport(out io.Writer, r *verify.Report) {
	fmt.Fprintf(out, "run %s: %d trajectories, ", r.Run, r.Trajectories)
	switch {
	case r.Drawn > 0:
		fmt.Fprintf(out, "%s drawn again, %d not, as %s drew them from a generator of its own", count(r.Tokens, "token"), r.Drawn, strings.Join(r.DrawnBy, ", "))
	case r.Tokens > 0:
		fmt.Fprintf(out, "%s drawn again", count(r.Tokens, "token"))
	default:
		fmt.Fprintf(out, "%d log-probs recomputed", r.Steps)
	}
	for _, part := range []struct {
		n    int
		what string
	}{{r.Failed, "samples failed"}, {r.StepsSkipped, "more lack stored latents"}, {r.StepsGone, "step events are gone"}, {r.StartsGone, "starts are gone"}, {r.ConditioningGone, "tensors of texts are gone"}} {
		if part.n > 0 {
			fmt.Fprintf(out, ", %d %s", part.n, part.what)
		}
	}
	if r.Versions > 0 {
		fmt.Fprintf(out, ", %s fetched", count(r.Versions, "pushed version"))
	}
	if r.Drawn > 0 {
		fmt.Fprintf(out, "\nmax difference of what the server says of a token from what the weights of the folder give = %g, of which %g passes", r.MaxDrawnDifference, r.EngineTolerance)
	}
	if r.Drawn > 0 && r.Tokens == 0 {
		fmt.Fprintln(out)
	} else if r.Tokens > 0 {
		fmt.Fprintf(out, "\nmax difference of a log-prob, log-sum-exp or entropy, and of the logits of %s = %g\n", count(r.Logits, "token"), r.MaxTokenDifference)
	} else if r.Steps > 0 {
		fmt.Fprintf(out, "\nmax |ratio-1| = %g\n", r.MaxRatio)
	} else {
		fmt.Fprintln(out)
	}
	if r.Conditionings > 0 {
		fmt.Fprintf(out, "%d prompt embeddings and masks compared, max distance = %g\n", r.Conditionings, r.MaxConditioning)
	}
	if r.Rolled > 0 {
		fmt.Fprintf(out, "%d states of scheduled sampling rolled again, max distance = %g\n", r.Rolled, r.MaxRolled)
	}
	fmt.Fprintf(out, "%d mismatches\n", len(r.Mismatches))
	for i, m := range r.Mismatches {
		if i == 20 {
			fmt.Fprintf(out, "  and %d more, see --json\n", len(r.Mismatches)-i)
			break
		}
		fmt.Fprintf(out, "  %s #%d step %d: %s\n", m.UID, m.SampleIndex, m.StepIndex, m.What)
	}
}
