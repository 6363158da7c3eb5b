package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/schemas"
)

// version is set by the linker (see the Makefile); else the module's build info tells.
var version string

func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "devel"
}

func versionCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the version of the program and of the event contract", Args: args(cobra.NoArgs),
		Example: "  meander version --json",
		RunE: func(c *cobra.Command, _ []string) error {
			out := c.OutOrStdout()
			if a.json {
				return json.NewEncoder(out).Encode(map[string]any{
					"version": buildVersion(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
					"subjects": schemas.Prefix + ">", "schema_version": schemas.Version,
				})
			}
			_, err := fmt.Fprintln(out, versionLine())
			return err
		},
	}
}

func versionLine() string {
	return fmt.Sprintf("meander %s (%s, %s/%s), subjects %s>, event schemas %d",
		buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH, schemas.Prefix, schemas.Version)
}
