package command

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/janitor"
)

func gcFlags(f *pflag.FlagSet, c *janitor.Config) {
	f.IntVar(&c.Above, "gc-above", c.Above,
		"free the oldest closed groups while a stream is fuller than this percentage of its limit; 0: never")
	f.DurationVar(&c.Age, "gc-age", c.Age, "free groups that closed this long ago, e.g. 48h; 0: never")
	f.BoolVar(&c.Read, "gc-read", c.Read,
		"free groups that every durable consumer of advantages has acknowledged; without such a consumer, none")
	f.DurationVar(&c.Grace, "gc-grace", c.Grace, "keep every closed group for this long")
}

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
--dry-run the size of a few events of the run.

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
	gcFlags(c.Flags(), &cfg)
	c.Flags().BoolVar(&blobs, "blobs", false,
		"free unused images and weights; no groups unless another rule is given")
	c.Flags().StringVar(&cfg.WeightsDir, "weights-dir", "",
		"shared folder of weights that are pushed by path: also free the copies there that nothing needs")
	c.Flags().BoolVar(&dry, "dry-run", false, "print what gc would free, and free nothing")
	c.Flags().StringVar(&run, "run", "", "only groups of this run; default all runs")
	return c
}
