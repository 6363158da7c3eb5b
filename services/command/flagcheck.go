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
	names := p.names
	names.alone = true
	return errors.New(names.blame(err.Error()))
}

// fieldFlags are the flags of the fields of a prompt, by the path of the field: those that were typed, and all.
type fieldFlags struct {
	set, all map[string]string
	// alone: there is no prompt of a file, which would have fields of its own.
	alone bool
}

// blame puts the flag that was typed, or the one that is missing, in the place of the field that intake or the
// contract complains of, in each line.
func (f fieldFlags) blame(reason string) string {
	lines := strings.Split(reason, "\n")
	for i, line := range lines {
		path, rest, ok := strings.Cut(line, ": ")
		said, rule, _ := strings.Cut(rest, "; ")
		if whole := absent[path]; whole != "" && f.alone && f.set[path] == "" {
			lines[i] = whole
			continue
		}
		if before, _, missing := strings.Cut(line, ": null; "); missing { // perhaps within what is wrong with another field
			at := strings.LastIndexByte(before, ' ') + 1
			if whole := absent[before[at:]]; whole != "" {
				lines[i] = before[:at] + whole
				continue
			}
		}
		for ok && path != "" {
			path, _, _ = strings.Cut(path, "[")
			if flag := f.set[path]; flag != "" {
				lines[i] = "--" + flag + ": " + rest
				break
			}
			if flag := f.all[path]; flag != "" && rule != "" && (f.alone || said == "null") {
				lines[i] = "--" + flag + ": not given; " + rule
				break
			}
			if below := f.below(path); below != "" && strings.HasPrefix(said, "given") {
				lines[i] = below + ": given; " + rule + instead[path]
				break
			}
			path = path[:max(strings.LastIndexByte(path, '.'), 0)]
		}
	}
	return strings.Join(slices.Compact(lines), "\n")
}

// below are the flags that were typed of the fields of a part of a prompt.
func (f fieldFlags) below(path string) string {
	var flags []string
	for _, field := range sortedKeys(f.set) {
		if strings.HasPrefix(field, path+".") {
			flags = append(flags, "--"+f.set[field])
		}
	}
	return strings.Join(flags, ", ")
}

// instead says what there is in place of a part of a prompt that the model has not.
var instead = map[string]string{
	"text": ", which have no tokens and no logits; --return-steps keeps their states, --debug tensors of each step",
}

// absent says what is missing where several flags could give it.
var absent = map[string]string{
	"start.latents": "--start-latents: not given, nor --branch-from, nor --start-image; must be one of them, " +
		"which says what the samples begin with",
	"start.step_index": "--start-step: not given, nor --start-sigma; must be one of them, " +
		"which says how noisy the samples begin",
	"start.data": "--start-image: not given; must be the images that are rolled, or use 'meander scheduled'",
	"prune.log_prob_below": "--prune-log-prob-below: not given, nor --prune-log-prob-above; " +
		"must be one of them, else no sample would be pruned",
	"tree.branches":         "--tree: not given; must be the tree that --leaf is of, e.g. 2@2,2@5",
	"text.interaction":      "--interaction: not given; must be there: it scores the turns",
	"text.interaction.name": "--interaction: not given; must be the interaction that its other flags are of",
	"scheduled_sampling": "scheduled sampling is not asked for, " +
		"and it is all that this model can do: use 'meander scheduled'",
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
