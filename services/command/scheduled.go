package command

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/results"
)

// mostRolls is how many samples of a group the table shows.
const mostRolls = 32

func scheduledCommand(a *app) *cobra.Command {
	r := &runner{app: a, services: defaultServices()}
	var caption string
	c := &cobra.Command{
		Use:   "scheduled IMAGE|FOLDER ...",
		Short: "roll images from noisier timesteps down to those they are trained at (scheduled sampling)",
		Long: `scheduled makes latents to train on from images: each is encoded, noised to a timestep a few
noisier than the one it is trained at, and stepped down to that by the model itself. What comes
out, how far it drifts from the latent of data and noise alone, and which samples roll, is
stored like any rollout, and 'meander verify' proves it.

The caption of NAME.png is the text of NAME.txt beside it, else --prompt. Images of one caption are
the samples of one group. Unless told otherwise all images roll, from 0 to 10 timesteps noisier.
It writes a sheet of each group: the original, noised, rolled and teacher-forced latents as images,
and the difference of the last two.

Exit status: 0 all groups complete, 1 some are not, 2 wrong usage or every prompt refused.`,
		Example: `  meander scheduled images --prompt 'a red sign that says "OPEN"'
  meander scheduled images --timesteps 50 --base-timesteps 20 --rollout-sampler dpm --rollout-order 3
  meander scheduled images --probability 0.5 --max-step-offset 20 --offset-strategy biased_early
  meander scheduled images --ramp-steps 1000 --prob-start 0 --prob-end 0.5 --train-step 250 --json
  meander scheduled images --compat simpletuner      # as the trainer of that name does it`,
		Args: args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			if err := r.check(); err != nil {
				return err
			}
			if r.prompts.file != "" {
				return usage(errors.New("--prompts: given; must be absent: the images are the prompts, with the captions beside them"))
			}
			var files []string
			for _, arg := range given {
				more, err := imageFiles(arg)
				if err != nil {
					return usage(fmt.Errorf("images: %w", err))
				}
				files = append(files, more...)
			}
			captions, groups, err := captioned(files, caption)
			if err != nil {
				return usage(err)
			}
			for name, value := range map[string]string{"max-step-offset": "10", "probability": "1", "rollout-decode": "true"} {
				if flag := c.Flags().Lookup(name); !flag.Changed {
					if err := c.Flags().Set(name, value); err != nil {
						return usage(fmt.Errorf("--%s: %w", name, err))
					}
				}
			}
			r.prompts.images = &images{flag: "images", groups: groups}
			prompts, err := r.prompts.load(captions, c.InOrStdin(), true)
			if err != nil {
				return err
			}
			if r.prompts.dryRun {
				return r.dryRun(c.Context(), &r.prompts.datasetFlags, &r.services, prompts, c.OutOrStdout())
			}
			return r.run(c.Context(), prompts, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	section(c.Flags(), outputSection, r.output)
	r.prompts.register(c.Flags())
	// The prompts are the images, and nothing is judged: flags of prompts and rewards would say nothing.
	c.Flags().VisitAll(func(f *pflag.Flag) {
		switch title := f.Annotations[sectionKey][0]; {
		case title == rewardSection, title == advantageSection, title == groupSection:
			f.Hidden = true
		case title == promptSection && f.Name != "dry-run" && f.Name != "overfill":
			f.Hidden = true
		}
	})
	section(c.Flags(), scheduledSection, func(f *pflag.FlagSet) {
		f.StringVar(&caption, "prompt", "", "caption of images that have no text beside them")
	})
	section(c.Flags(), pipelineSection, func(f *pflag.FlagSet) { samplerFlags(f, &r.services) })
	section(c.Flags(), limitSection, r.services.limits.Flags)
	return c
}

// printRolls shows the samples of a group of scheduled sampling; false: it is none.
func printRolls(w io.Writer, g *results.Group) bool {
	shown, of := 0, 0
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	for _, m := range g.Members {
		r := m.Roll
		if r == nil {
			continue
		}
		if of == 0 {
			fmt.Fprintln(t, strings.Join([]string{"sample", "from", "to", "noisier", "noise", "drift", "forwards", "exposure", "  why not"}, "\t"))
		}
		if of++; shown == mostRolls {
			continue
		}
		shown++
		exposure := "-"
		if r.Terms != nil {
			exposure = fmt.Sprintf("%.4g", r.Terms.ExposureL1)
		}
		cells := []string{
			fmt.Sprintf("#%d", m.SampleIndex), fmt.Sprint(r.Source), fmt.Sprintf("%g", r.Timestep), fmt.Sprint(r.Steps()), fmt.Sprintf("%.4f", r.U),
			results.Number(r.Drift, "%.5f"), fmt.Sprint(r.Forwards), exposure, "  " + strings.ReplaceAll(r.Reason, "_", " "),
		}
		if r.Reason != "" {
			cells[1] = "-"
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	if of == 0 {
		return false
	}
	_ = t.Flush() // as of the whole table, a terminal that has gone is told by the last line
	if of > shown {
		fmt.Fprintf(w, "%sand %s\n", gridGap, count(of-shown, "more sample"))
	}
	for _, line := range failures(g.Members) {
		printBroken(w, gridGap+line)
	}
	return true
}

// rollMeasures are the lines of the summary on scheduled sampling.
func rollMeasures(m map[string]float64) []string {
	lines := []string{fmt.Sprintf("scheduled sampling: probability %.3g, %.0f %% rolled, offset %.3g (at most %.0f), %.0f evaluations of the model, drift %.4g",
		m["scheduled_sampling/probability"], 100*m["scheduled_sampling/rolled_fraction"], m["scheduled_sampling/offset_mean"], m["scheduled_sampling/offset_max"],
		m["scheduled_sampling/extra_forwards"], m["scheduled_sampling/drift_l2"])}
	if _, on := m["reflexflow/exposure_l1"]; on {
		lines = append(lines, fmt.Sprintf("reflexflow: exposure %.4g, weights %.4f to %.4f, fc loss %.4g, adr loss %.4g",
			m["reflexflow/exposure_l1"], m["reflexflow/weight_min"], m["reflexflow/weight_max"], m["reflexflow/fc_loss"], m["reflexflow/adr_loss"]))
	}
	return lines
}
