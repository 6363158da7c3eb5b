package command

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fieldflag"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// check refuses what the flags ask for and no model could do, in the words of the
// flags, before anything starts.
func (p *promptFlags) check(defaults map[string]any) error {
	body := maps.Clone(defaults)
	body["prompt"] = "-"
	body["batch"] = map[string]any{"id": "-", "groups": int64(1)} // joined later, where one is needed
	data, err := prompt{body: body}.encode()
	if err != nil {
		return err
	}
	var e schemas.Prompt
	if err = schemas.Decode(data, &e); err == nil {
		err = e.Validate()
	}
	if err == nil {
		return nil
	}
	return errors.New(blame(err.Error(), p.flagOf))
}

// blame puts the flag that was typed in the place of the field that intake or the
// contract complains of, in each line.
func blame(reason string, flagOf map[string]string) string {
	lines := strings.Split(reason, "\n")
	for i, line := range lines {
		path, rest, ok := strings.Cut(line, ": ")
		for ok && path != "" {
			path, _, _ = strings.Cut(path, "[")
			if flag := flagOf[path]; flag != "" {
				lines[i] = "--" + flag + ": " + rest
				break
			}
			path = path[:max(strings.LastIndexByte(path, '.'), 0)]
		}
	}
	return strings.Join(slices.Compact(lines), "\n")
}

// oneOf is the error of a flag whose value is none of the names.
func oneOf(flag, value string, names []string) error {
	hint := ""
	if near := schemas.Nearest(value, names); near != "" {
		hint = "did you mean " + near + "? "
	}
	return fmt.Errorf("--%s: %q; %smust be one of %s", flag, value, hint, strings.Join(names, ", "))
}

// completions are the values of flags that take a name and are of no field with a list.
var completions = map[string][]string{
	"estimator":       estimator.Names(),
	"log-level":       {"debug", "info", "warn", "error"},
	"optional-reward": scorer.Kinds(),
	"prompts-format":  {string(dataset.Auto), "text", "csv", "json", "meander", "metadata", "verl"},
	"reward":          scorer.Kinds(),
}

// completeNames lets the shell complete the values of flags, of c and of all below it.
func completeNames(c *cobra.Command) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		names := fieldflag.Choices(f)
		if names == nil {
			names = completions[f.Name]
		}
		if names != nil {
			// It fails twice for one flag.
			_ = c.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, sub := range c.Commands() {
		completeNames(sub)
	}
}
