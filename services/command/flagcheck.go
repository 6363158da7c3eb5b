package command

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// fieldFlags are the flags of a prompt's fields, by the path of the field: those that were given, and all.
type fieldFlags struct {
	set, all map[string]string
	// alone says that all fields come from flags: no file has prompts with fields of their own.
	alone bool
}

// nameFlags replaces the name of a prompt's field, in each line of an error of intake or the contract, by the flag
// that was given or is missing.
func (f fieldFlags) nameFlags(reason string) string {
	lines := strings.Split(reason, "\n")
	for i, line := range lines {
		path, rest, ok := strings.Cut(line, ": ")
		said, rule, _ := strings.Cut(rest, "; ")
		if whole := absent[path]; whole != "" && f.alone && f.set[path] == "" {
			lines[i] = whole
			continue
		}
		if before, _, missing := strings.Cut(line, ": null; "); missing { // it may be within the error of another field
			at := strings.LastIndexByte(before, ' ') + 1
			if whole := absent[before[at:]]; whole != "" {
				lines[i] = before[:at] + whole
				continue
			}
		}
		for ok && path != "" {
			path, _, _ = strings.Cut(path, "[")
			if flag := f.set[path]; flag != "" {
				lines[i] = "--" + flag + ": " + f.nameBeside(rest)
				break
			}
			if flag := f.all[path]; flag != "" && rule != "" && (f.alone || said == "null") {
				lines[i] = "--" + flag + ": not given; " + rule
				break
			}
			if below := f.flagsBelow(path); below != "" && strings.HasPrefix(said, "given") {
				lines[i] = below + ": given; " + rule + instead[path]
				break
			}
			path = path[:max(strings.LastIndexByte(path, '.'), 0)]
		}
	}
	return strings.Join(slices.Compact(lines), "\n")
}

// nameBeside replaces the field that another one is set beside by its flag.
func (f fieldFlags) nameBeside(rest string) string {
	field, rule, ok := strings.Cut(strings.TrimPrefix(rest, "set beside "), ";")
	if flag := f.set["rollout."+field]; ok && flag != "" && strings.HasPrefix(rest, "set beside ") {
		return "set beside --" + flag + ";" + rule
	}
	return rest
}

// flagsBelow lists the flags that were given for fields of one part of a prompt, such as start.
func (f fieldFlags) flagsBelow(path string) string {
	var flags []string
	for _, field := range sortedKeys(f.set) {
		if strings.HasPrefix(field, path+".") {
			flags = append(flags, "--"+f.set[field])
		}
	}
	return strings.Join(flags, ", ")
}

// instead says what to use in place of a part that the model does not have.
var instead = map[string]string{
	"text": ", which have no tokens and no logits; --return-steps keeps their states, --debug tensors of each step",
}

// absent says what is missing if several flags could give it.
var absent = map[string]string{
	"start.latents": "--start-latents: not given; must be there, or --branch-from, or --start-image: " +
		"it says what the samples begin with",
	"start.step_index": "--start-step: not given; must be there, or --start-sigma: " +
		"it says how noisy the samples begin",
	"start.data": "--start-image: not given; must be the images to roll, or use 'meander scheduled'",
	"prune.log_prob_below": "--prune-log-prob-below: not given; " +
		"must be there, or --prune-log-prob-above, else no sample is pruned",
	"tree.branches":         "--tree: not given; must be the tree of --leaf, e.g. 2@2,2@5",
	"text.interaction":      "--interaction: not given; must be there, because it scores the turns",
	"text.interaction.name": "--interaction: not given; must be the interaction that the other flags configure",
	"scheduled_sampling":    "this model can do scheduled sampling only; use 'meander scheduled'",
}

// oneOf returns the error of a flag whose value is none of the names, with the nearest one.
func oneOf(flag, value string, names []string) error {
	hint := ""
	if near := schemas.Nearest(value, names); near != "" {
		hint = "did you mean " + near + "? "
	}
	return fmt.Errorf("--%s: %q; %smust be one of %s", flag, value, hint, strings.Join(names, ", "))
}

// nameFlag adds a flag for the name of a run, a group or a lane. Any name but the default must be a token of
// subjects.
func nameFlag[S ~string](f *pflag.FlagSet, to *S, flag, def, help string) {
	*to = S(def)
	f.Var(&nameValue[S]{to, def}, flag, help)
}

// nameValue is the value of a nameFlag.
type nameValue[S ~string] struct {
	to  *S
	def string
}

func (v *nameValue[S]) String() string { return string(*v.to) }
func (v *nameValue[S]) Type() string   { return "string" }

// Set takes a name; it refuses another text, with the name that may be meant.
func (v *nameValue[S]) Set(text string) error {
	if err := schemas.CheckToken("", text); err != nil && text != v.def {
		said := strings.TrimPrefix(err.Error(), ": ")
		if name := repairedName(text); name != "" {
			said += ", such as " + name
		}
		return errors.New(said)
	}
	*v.to = S(text)
	return nil
}

// completions are the values that the shell suggests for flags that are not fields with a list.
var completions = map[string][]string{
	"estimator":       estimator.Names(),
	"log-level":       {"debug", "info", "warn", "error"},
	"optional-reward": scorer.Kinds(),
	"prompts-format":  wordsOf(dataset.Formats()),
	"reward":          scorer.Kinds(),
}

// completeNames lets the shell complete the values of flags, for c and all commands below it.
func completeNames(c *cobra.Command) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		names := fields.Choices(f)
		if names == nil {
			names = completions[f.Name]
		}
		if names != nil {
			// It fails only if a flag is registered twice.
			_ = c.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, sub := range c.Commands() {
		completeNames(sub)
	}
}
