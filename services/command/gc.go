package command

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/janitor"
)

// gcRules are the settings that are rules of the janitor.
var gcRules = []string{"gc_above", "gc_age", "gc_read", "gc_grace"}

// gcCommand makes the command 'meander gc'.
func gcCommand(a *app) *cobra.Command {
	cfg, dry, blobs, run := janitor.DefaultConfig(), false, false, ""
	c := &cobra.Command{
		Use: "gc", Short: "free closed groups and unused blobs, once",
		Long: `gc removes whole groups for ever, the oldest first: steps, trajectories, verdicts, rewards, the prompt
and the result, then images and other blobs that no stored event names. It never removes open groups,
groups of an open batch, groups that closed less than --gc-grace ago, and groups that a durable
consumer (a trainer) has not acknowledged. 'meander up' with one of these rules does the same all the
time.

With --blobs alone gc removes no group. It removes images and other blobs that no event names, and
weights of versions that made no stored sample. Of each lane it keeps the newest versions, so that you
can roll back: up to eight while they need less than a quarter of the object store, and always the
last two. Blobs that are younger than two minutes stay.

Bytes of groups are an estimate: the number of events, times the mean size in the stream, or with
--dry-run of the run's own.

With --weights-dir it also frees, by the same rule, the files of weights that pushes by path have
copied to that folder. Files that people put there stay.`,
		Example: `  meander gc --gc-age 48h --dry-run      # shows what it would free
  meander gc --gc-above 60               # frees the oldest until all streams are below 48 %
  meander gc --gc-read --run night       # groups of one run that every consumer has read
  meander gc --blobs                     # unused images and weights, no groups
  meander gc --weights-dir /shared       # also what pushes by path have copied there`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return settingError(err)
			}
			if !cfg.Rules() && !blobs && cfg.WeightsDir == "" {
				return usage(errors.New("no rule given; give one of --gc-above, --gc-age and --gc-read, or --blobs " +
					"or --weights-dir"))
			}
			if cfg.Run = schemas.Run(run); run != "" {
				if _, err := storedRun(c.Context(), conn.Bus, run); err != nil {
					return err
				}
			}
			report, err := janitor.Pass(c.Context(), cfg, conn.Bus, dry)
			if err != nil {
				return err
			}
			if a.json {
				return encode(c.OutOrStdout(), report)
			}
			for _, line := range report.Lines(func(n uint64) string { return boot.Bytes(n).Rough() }, dry) {
				present.Lines(c.OutOrStdout(), line)
			}
			return nil
		}),
	}
	settings := fields.Bind("", &cfg)
	settings.Register(c.Flags(), gcRules...)
	c.Flags().BoolVar(&blobs, "blobs", false,
		"free unused images and weights; no groups unless another rule is given")
	settings.As(c.Flags(), "gc_weights_dir", "weights-dir")
	c.Flags().BoolVar(&dry, "dry-run", false, "print what gc would free, and free nothing")
	c.Flags().StringVar(&run, "run", "", "only groups of this run; default all runs")
	return c
}
