package command

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/meander-rl/meander/services/internal/boot"
)

// manCommand makes the command 'meander man'.
func manCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use:   "man FOLDER",
		Short: "write the manual pages of all commands",
		Long: `Writes a manual page for each command into a folder, which is made. 'man -M' takes the folder above one that
is called man1. The pages have the date of SOURCE_DATE_EPOCH, or today's.`,
		Example: `  meander man ~/.local/share/man/man1
  man meander-run`,
		RunE: func(c *cobra.Command, given []string) error {
			err := os.MkdirAll(given[0], 0o755)
			if err == nil {
				root := newRoot()
				addCompletion(root)
				root.DisableAutoGenTag = true // equal builds make equal pages
				err = doc.GenManTree(root, &doc.GenManHeader{
					Section: "1", Source: "meander " + boot.Version(), Manual: "meander",
				}, given[0])
			}
			if err != nil {
				return fmt.Errorf("man: %w", err)
			}
			return nil
		},
	}
}
