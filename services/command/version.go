package command

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// versionCommand makes the command 'meander version'.
func versionCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the versions of the program and of the event contract",
		Example: "  meander version --json",
		RunE: func(c *cobra.Command, _ []string) error {
			out := c.OutOrStdout()
			if a.json {
				return encode(out, map[string]any{
					"version": boot.Version(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
					"subjects": schemas.AllSubjects, "schema_version": schemas.Version,
				})
			}
			_, err := fmt.Fprintln(out, versionLine())
			return err
		},
	}
}

func versionLine() string {
	return fmt.Sprintf("meander %s (%s, %s/%s), subjects %s, event schemas %d",
		boot.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, schemas.AllSubjects, schemas.Version)
}
