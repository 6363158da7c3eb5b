package command

import (
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/services/sampler/models"
)

// certifyCommand makes the command 'meander certify', which Python does.
func certifyCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use:   "certify trainer|engine SUBJECT",
		Short: "hold what a trainer computes, or an engine draws, against the formulas",
		Long: `certify holds losses, gradients, log-probs and advantages of a trainer against public vectors, and
measures what an engine draws: seeds, batches, noise, schedule, steps, log-probs, weights. It says what
each is, and what explains a difference. It needs no pipeline, but the Python package of meander.

Exit status: 0 nothing differs, 1 something does, 2 wrong usage.`,
		Example: `  meander certify trainer my_loss.py:ppo
  meander certify engine my_engine.py:Engine
  meander certify engine lane=DIR                      # a model in 'meander up'
  meander certify vectors                              # the formulas, each with its source
  meander certify engine -h                            # all of its flags`,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true,
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 || given[0] == "-h" || given[0] == "--help" {
				return c.Help()
			}
			status, err := models.Module(c.Context(), c.OutOrStdout(), c.ErrOrStderr(), "meander.certify", given...)
			if err != nil {
				return usage(err)
			}
			if status != 0 {
				err = &exitError{status: status}
			}
			return err
		},
	}
}
