package command

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/deploy"
	"github.com/meander-rl/meander/services/internal/present"
)

// examplesCommand makes the command 'meander examples'.
func examplesCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "examples [FOLDER]",
		Short: "write the files that the documents use: prompts, data sets, reward functions, small models",
		Long: `Writes the files that ship inside the program, into the folder deploy by default, where the documents
have them: prompts and data sets in demo, reward functions in scorers, small models and an adapter in models. Files
that are there already stay; if one has other content, nothing is written.`,
		Example: `  meander examples
  meander run --prompts deploy/demo/prompts.txt --reward glyph
  python deploy/scorers/worker.py --name colour`,
		RunE: func(c *cobra.Command, given []string) error {
			dir := append(given, "deploy")[0]
			differ, err := deploy.Differing(dir, deploy.Files())
			if err != nil {
				return fmt.Errorf("examples: %w", err)
			}
			if len(differ) > 0 {
				some := strings.Join(differ[:min(len(differ), 3)], ", ")
				return usage(fmt.Errorf("examples: %s; other content is there, and nothing was written; choose "+
					"another folder, or move it away: %s", present.Count(len(differ), "file"), some))
			}
			if err := deploy.Write(dir, deploy.Files(), "."); err != nil {
				return fmt.Errorf("examples: %w", err)
			}
			return printExamples(c, a, dir)
		},
	}
}

// printExamples names the files and folders that were written.
func printExamples(c *cobra.Command, a *app, dir string) error {
	names, err := fs.Glob(deploy.Files(), "*/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if a.json {
			err = encode(c.OutOrStdout(), map[string]string{"path": path})
		} else {
			_, err = fmt.Fprintln(c.OutOrStdout(), path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
