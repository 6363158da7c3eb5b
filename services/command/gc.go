package command

import (
	"encoding/json"
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/janitor"
)

// gcFlags are the rules of the janitor.
func gcFlags(f *pflag.FlagSet, c *janitor.Config) {
	f.IntVar(&c.Above, "gc-above", c.Above, "free the oldest closed groups while a stream is fuller than this share of its limit, in percent; 0 for never")
	f.DurationVar(&c.Age, "gc-age", c.Age, "free groups that closed so long ago, e.g. 48h; 0 for never")
	f.BoolVar(&c.Read, "gc-read", c.Read, "free groups once every durable consumer of advantages has acknowledged them; without such a consumer, none")
	f.DurationVar(&c.Grace, "gc-grace", c.Grace, "how long a closed group stays whatever the rules say")
}

func gcCommand(a *app) *cobra.Command {
	cfg, dry, blobs, run := janitor.DefaultConfig(), false, false, ""
	c := &cobra.Command{
		Use: "gc", Short: "free closed groups and blobs that nobody needs any more, once", Args: args(cobra.NoArgs),
		Long: `gc frees whole groups, the oldest first: steps, trajectories, verdicts, rewards, the prompt
and the result, then the images and other blobs that no stored event names. What is freed
is gone for good. Never freed are open groups and those of an open batch, what closed
less than --gc-grace ago, and what a durable consumer, such as a trainer's, has
not acknowledged. 'meander up' does the same all the time where it has one of these rules.

With --blobs alone no group goes: only images and other blobs that nothing names, and weights of versions that
no stored sample was made with. Of each lane the newest versions stay to go back to: eight at most, while
they take less than a quarter of the object store, and always the last two. A blob stays for two minutes.`,
		Example: `  meander gc --gc-age 48h --dry-run      # what would go
  meander gc --gc-above 60               # the oldest, until all streams are below 48 %
  meander gc --gc-read --run night       # what every durable consumer has, of one run
  meander gc --blobs                     # images and weights that nothing needs, and no group`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return settingError(err)
			}
			if !cfg.Rules() && !blobs {
				return usage(errors.New("no rule is given; name one of --gc-above, --gc-age and --gc-read, or --blobs"))
			}
			if cfg.Run = schemas.Run(run); run != "" {
				if _, err := theRun(c.Context(), conn.Bus, run); err != nil {
					return err
				}
			}
			report, err := janitor.Pass(c.Context(), cfg, conn.Bus, dry)
			if err != nil {
				return err
			}
			if a.json {
				return json.NewEncoder(c.OutOrStdout()).Encode(report)
			}
			for _, line := range report.Lines(func(n uint64) string { return boot.Bytes(n).Rough() }, dry) {
				printBroken(c.OutOrStdout(), line)
			}
			return nil
		}),
	}
	gcFlags(c.Flags(), &cfg)
	c.Flags().BoolVar(&blobs, "blobs", false,
		"free images and weights that nothing needs, and no group unless another rule is given")
	c.Flags().BoolVar(&dry, "dry-run", false, "print what would be freed, and free nothing")
	c.Flags().StringVar(&run, "run", "", "of this run only; default all")
	return c
}
