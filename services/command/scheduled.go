package command

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// mostRolls is the most samples of a group that the table shows.
const mostRolls = 32

// scheduledCommand makes the command 'meander scheduled'. It is a run command whose prompts are the captions of
// images.
func scheduledCommand(a *app) *cobra.Command {
	r := &runner{app: a, services: defaultServices()}
	var caption string
	c := &cobra.Command{
		Use:   "scheduled IMAGE|FOLDER ...",
		Short: "roll images from noisier timesteps to the timestep of training (scheduled sampling)",
		Long: `scheduled makes training latents from images. It encodes each image, adds noise up to a timestep that
is somewhat noisier than the one of training, and lets the model step down to the timestep of
training. The latents, their drift from data plus noise, and which samples roll are stored like any
rollout; 'meander verify' checks them.

The caption of NAME.png is the text of NAME.txt beside it, else --prompt; one of them must be there.
Images with the same caption are the samples of one group. By default all images roll, from 0 to 10
timesteps noisier. scheduled writes a sheet for each group: the original, noised, rolled and
teacher-forced latents as images, and the difference of the last two.

Exit status: 0 all groups are complete, 1 some are not, 2 wrong usage or every prompt was refused.`,
		Example: `  meander scheduled images --prompt 'a red sign that says "OPEN"'
  meander scheduled images --timesteps 50 --base-timesteps 20 --rollout-sampler dpm --rollout-order 3
  meander scheduled images --probability 0.5 --max-step-offset 20 --offset-strategy biased_early
  meander scheduled images --ramp-steps 1000 --prob-start 0 --prob-end 0.5 --train-step 250 --json
  meander scheduled images --compat simpletuner      # like the trainer SimpleTuner`,
		RunE: func(c *cobra.Command, given []string) error {
			if err := r.check(); err != nil {
				return err
			}
			if r.prompts.File != "" {
				return usage(errors.New("--prompts: given; must be absent: the images are the prompts, with their " +
					"captions beside them"))
			}
			var files []string
			for _, arg := range given {
				more, err := imageFiles(arg)
				if err != nil {
					return usage(fmt.Errorf("images: %w", err))
				}
				files = append(files, more...)
			}
			var otherwise *string
			if c.Flags().Changed("prompt") {
				otherwise = &caption
			}
			captions, groups, err := groupByCaption(files, otherwise)
			if err != nil {
				return usage(err)
			}
			if err := r.prompts.setScheduledDefaults(c.Flags()); err != nil {
				return usage(err)
			}
			r.prompts.images = &images{flag: "images", groups: groups}
			return r.start(c, captions)
		},
	}
	addSection(c.Flags(), outputSection, func(f *pflag.FlagSet) { r.output(f, "out") })
	r.prompts.addFlags(c.Flags())
	// The prompts are the images, and no sample gets a reward: hide the flags of prompts and rewards.
	c.Flags().VisitAll(func(f *pflag.Flag) {
		switch title := f.Annotations[sectionKey][0]; {
		case title == rewardSection, title == advantageSection, title == groupSection:
			f.Hidden = true
		case title == promptSection && f.Name != "dry-run" && f.Name != "overfill":
			f.Hidden = true
		}
	})
	addSection(c.Flags(), scheduledSection, func(f *pflag.FlagSet) {
		f.StringVar(&caption, "prompt", "", "caption of images without a text file beside them")
	})
	addSection(c.Flags(), pipelineSection, func(f *pflag.FlagSet) { pipelineFlags(f, &r.services) })
	addSection(c.Flags(), limitSection, r.services.limits.Flags)
	return c
}

// setScheduledDefaults sets the flags that the command has other defaults for than prompts have.
func (p *promptFlags) setScheduledDefaults(f *pflag.FlagSet) error {
	defaults := map[string]string{"max-step-offset": "10", "rollout-decode": "true"}
	if p.probabilityHasEffect() {
		defaults["probability"] = "1"
	}
	for name, value := range defaults {
		if flag := f.Lookup(name); !flag.Changed {
			if err := f.Set(name, value); err != nil {
				return fmt.Errorf("--%s: %w", name, err)
			}
		}
	}
	return nil
}

// probabilityHasEffect reports whether --probability decides anything: it is for the ends of a ramp that the flags
// leave out. Compat simpletuner takes an end of 0 as left out, and has 0.5 for the last one.
func (p *promptFlags) probabilityHasEffect() bool {
	roll, ramp := p.scheduled.GivenValues(), p.ramp.GivenValues()
	if steps, _ := ramp["ramp_steps"].(int64); steps <= 0 {
		return true
	}
	simple := roll["compat"] == schemas.CompatSimpleTuner
	start, end := ramp["prob_start"], ramp["prob_end"]
	return start == nil || end == nil && !simple || simple && (start == 0.0 || end == 0.0)
}

// checkScheduledFlags refuses flags of scheduled sampling that others leave without effect. The records of a file have
// settings of their own, so it checks none beside --prompts.
func (p *promptFlags) checkScheduledFlags() error {
	if p.File != "" {
		return nil
	}
	roll, ramp, reflex := p.scheduled.GivenValues(), p.ramp.GivenValues(), p.reflexflow.GivenValues()
	var errs []error
	if steps, _ := ramp["ramp_steps"].(int64); steps <= 0 {
		delete(ramp, "ramp_steps")
		if names := p.ramp.NamesOf(ramp); names != "" {
			errs = append(errs, fmt.Errorf("%s: given; must be absent without --ramp-steps above 0: there is no ramp",
				names))
		}
	}
	if x, given := roll["probability"]; given && !p.probabilityHasEffect() {
		errs = append(errs, fmt.Errorf("--probability: %v; must be absent: --ramp-steps has it go from --prob-start "+
			"to --prob-end", x))
	}
	if reflex["mode"] == schemas.ReflexOff {
		delete(reflex, "mode")
		if names := p.reflexflow.NamesOf(reflex); names != "" {
			errs = append(errs, fmt.Errorf("%s: given; must be absent without --reflexflow on or auto", names))
		}
	}
	return errors.Join(errs...)
}

// printRolls shows the samples of a group of scheduled sampling. It returns false, and prints nothing, for another
// group.
func printRolls(w io.Writer, g *results.Group) bool {
	shown, all := 0, 0
	t := present.Samples()
	for _, m := range g.Members {
		r := m.Roll
		if r == nil {
			continue
		}
		if all == 0 {
			t.Row("sample", "from", "to", "noisier", "noise", "drift", "forwards", "exposure", "why not")
		}
		if all++; shown == mostRolls {
			continue
		}
		shown++
		from, exposure := fmt.Sprint(r.Source), "-"
		if r.Terms != nil {
			exposure = fmt.Sprintf("%.4g", r.Terms.ExposureL1)
		}
		if r.Reason != "" {
			from = "-"
		}
		t.Row(fmt.Sprintf("#%d", m.SampleIndex), from, r.Timestep, r.Steps(), fmt.Sprintf("%.4f", r.U),
			results.Number(r.Drift, "%.5f"), r.Forwards, exposure, strings.ReplaceAll(r.Reason, "_", " "))
	}
	if all == 0 {
		return false
	}
	t.Print(w)
	printNotes(w, all-shown, failureLines(g.Members))
	return true
}

// rollSummary returns the lines about scheduled sampling of a run's summary, from its metrics.
func rollSummary(m map[string]float64) []string {
	lines := []string{fmt.Sprintf("scheduled sampling: probability %.3g, %.0f %% rolled, offset %.3g (at most %.0f), "+
		"%.0f evaluations of the model, drift %.4g", m["scheduled_sampling/probability"],
		100*m["scheduled_sampling/rolled_fraction"], m["scheduled_sampling/offset_mean"],
		m["scheduled_sampling/offset_max"],
		m["scheduled_sampling/extra_forwards"], m["scheduled_sampling/drift_l2"])}
	if _, on := m["reflexflow/exposure_l1"]; on {
		lines = append(lines,
			fmt.Sprintf("reflexflow: exposure %.4g, weights %.4f to %.4f, fc loss %.4g, adr loss %.4g",
				m["reflexflow/exposure_l1"], m["reflexflow/weight_min"], m["reflexflow/weight_max"],
				m["reflexflow/fc_loss"], m["reflexflow/adr_loss"]))
	}
	return lines
}
