package command

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// argsKey is the key of the command line in the context of a command.
type argsKey struct{}

// rewritten is the command line of c with each argument replaced by what change makes of it, to be pasted; change
// returns false for one that is left out. It is empty where c was not run by Execute.
func rewritten(c *cobra.Command, change func(arg string) (string, bool)) string {
	given, _ := c.Context().Value(argsKey{}).([]string)
	words := []string{c.Root().Name()}
	for _, arg := range given {
		if arg, keep := change(arg); keep {
			words = append(words, present.ShellWord(arg))
		}
	}
	return strings.Join(words, " ")
}

// explainFlag names what was meant by a flag that c does not have: the flag, and the command line with it.
func explainFlag(c *cobra.Command, name, near string) string {
	names := flagsLike(c.Flags(), name)
	if near != "" && !strings.HasSuffix(name, "port") {
		names = []string{near}
	}
	switch {
	case len(names) == 0:
		return commandsWithFlag(name)
	case name == "prompt" && names[0] == "prompts":
		return "; a prompt is an argument: " + rewritten(c, func(arg string) (string, bool) {
			return strings.TrimPrefix(arg, "--prompt="), arg != "--prompt"
		})
	case name == "size" || name == "resolution":
		names = []string{"height", "width"}
	}
	said := "; did you mean --" + strings.Join(names, " or --") + "?"
	if len(names) > 1 {
		return said
	}
	inValue := false
	line := rewritten(c, func(arg string) (string, bool) {
		if inValue {
			inValue = false
			return valueFor(names[0], name, arg), true
		}
		given, value, assigned := strings.Cut(arg, "=")
		if given != "--"+name {
			return arg, true
		}
		if assigned {
			return "--" + names[0] + "=" + valueFor(names[0], name, value), true
		}
		inValue = c.Flags().Lookup(names[0]).NoOptDefVal == ""
		return "--" + names[0], true
	})
	if inValue { // there is none
		return said
	}
	return said + " Write: " + line
}

// valueFor is the value of a flag that stands for another one: an address for a port.
func valueFor(flag, asked, value string) string {
	if _, err := strconv.ParseUint(value, 10, 16); err != nil || !strings.HasSuffix(asked, "port") {
		return value
	}
	if flag == "nats" {
		return "nats://127.0.0.1:" + value
	}
	return net.JoinHostPort("127.0.0.1", value)
}

// flagsLike returns the flags that are meant by a name: that of the prompt's field with this path, or of the part of
// the prompt around it; a name without its first words; a port, for an address; or a word of flags.
func flagsLike(f *pflag.FlagSet, name string) (names []string) {
	path := strings.ReplaceAll(strings.ToLower(name), "-", "_")
	dashed := strings.NewReplacer("_", "-", ".", "-").Replace(path)
	find := func(name string) bool {
		if name != "" && f.Lookup(name) != nil {
			names = []string{name}
		}
		return len(names) > 0
	}
	flags := flagsOfPaths()
	for at := path; strings.Contains(at, "."); at = at[:strings.LastIndexByte(at, '.')] {
		if find(flags[at]) {
			return names
		}
	}
	words := strings.Split(dashed, "-")
	for i := range words { // the first parts may be left out
		if find(strings.Join(words[i:], "-")) {
			return names
		}
	}
	for _, at := range sortedKeys(flags) { // a field's own name
		if (at == path || strings.HasSuffix(at, "."+path)) && find(flags[at]) {
			return names
		}
	}
	if words[len(words)-1] == "port" && (find("listen") || find("nats")) {
		return names
	}
	f.VisitAll(func(flag *pflag.Flag) {
		if slices.Contains(strings.Split(flag.Name, "-"), dashed) && !flag.Hidden {
			names = append(names, flag.Name)
		}
	})
	if len(names) > 4 {
		return nil
	}
	return names
}

// flagsOfPaths has the flags of a prompt's fields by the path of the field.
var flagsOfPaths = sync.OnceValue(func() map[string]string { return fieldsOfPrompt().Flags(true) })

// otherCommands are names that other tools have for what a command here does.
var otherCommands = map[string]string{
	"log": "watch", "logs": "watch", "tail": "watch", "events": "watch", "follow": "watch",
	"kill": "cancel", "abort": "cancel", "end": "cancel", "delete": "runs rm", "remove": "runs rm",
	"start": "up", "serve": "up", "server": "up", "daemon": "up", "launch": "up",
	"generate": "run", "gen": "run", "sample": "run", "rollout": "run", "infer": "run",
	"ps": "status", "info": "status", "state": "status", "queue": "top",
	"describe": "show", "get": "show", "view": "show", "cat": "show", "inspect": "show", "results": "show",
	"submit": "publish", "send": "publish", "enqueue": "publish", "add": "publish",
	"check": "doctor", "health": "doctor", "diagnose": "doctor", "score": "rescore", "reward": "rescore",
	"web": "ui", "dashboard": "ui", "page": "ui", "gui": "ui", "clean": "gc", "ls": "runs ls", "list": "runs ls",
	"download": "model info", "models": "model", "weights": "policy", "lora": "policy push", "user": "auth",
}

// commandsLike returns the commands that are meant by a name that c does not have: those below other commands, one of
// another name, or the nearest one. The last words say how it is called.
func commandsLike(c *cobra.Command, name string) (paths []string) {
	var names []string
	for _, sub := range c.Commands() {
		names = append(names, sub.Name())
	}
	if c.HasParent() {
		if near := schemas.Nearest(name, names); near != "" {
			return []string{c.CommandPath() + " " + near}
		}
		return nil
	}
	add := func(c *cobra.Command) {
		_, arguments, _ := strings.Cut(c.Use, " ")
		paths = append(paths, strings.TrimSpace(c.CommandPath()+" "+arguments))
	}
	if slices.Contains([]string{"stop", "down", "quit", "shutdown"}, name) {
		return []string{c.CommandPath() + " cancel RUN' to end a run, or Ctrl-C to end '" + c.CommandPath() + " up"}
	}
	if other := otherCommands[strings.ToLower(name)]; other != "" {
		if found, _, err := c.Find(strings.Fields(other)); err == nil {
			add(found)
			return paths
		}
	}
	for _, sub := range c.Commands() {
		for _, below := range sub.Commands() {
			if below.Name() == strings.ToLower(name) {
				add(below)
			}
		}
	}
	if near := schemas.Nearest(name, names); near != "" && len(paths) == 0 {
		return []string{c.CommandPath() + " " + near}
	}
	return paths
}

// wordsOfSentences are words that no prompt consists of.
var wordsOfSentences = strings.Fields("a an the of in on at to with and or that is are by for from its his her this")

// quotedPrompts is the Args of commands whose arguments are prompts. It refuses the words of one that has no quotes:
// each would be a prompt of its own.
func quotedPrompts(c *cobra.Command, given []string) error {
	sentence := false
	for _, word := range given {
		if strings.ContainsFunc(word, unicode.IsSpace) {
			return nil
		}
		sentence = sentence || slices.Contains(wordsOfSentences, strings.ToLower(word))
	}
	if last := len(given) - 1; last < 1 || !sentence || len([]rune(given[last])) < 3 {
		return nil
	}
	at := 0
	line := rewritten(c, func(arg string) (string, bool) {
		if at == len(given) || arg != given[at] {
			return arg, true
		}
		at++
		return strings.Join(given, " "), at == 1
	})
	return usage(fmt.Errorf("%d prompts of one word each; write a prompt of several words in quotes: %s", len(given),
		line))
}

// checkAddress refuses the value of a flag that is no address to listen on, with the one that is meant.
func checkAddress(c *cobra.Command, flag, value, port string) error {
	if _, _, err := net.SplitHostPort(value); err == nil {
		return nil
	}
	meant := net.JoinHostPort(value, port)
	if _, err := strconv.ParseUint(value, 10, 16); err == nil {
		meant = net.JoinHostPort("127.0.0.1", value)
	}
	line := rewritten(c, func(arg string) (string, bool) {
		switch arg {
		case value:
			return meant, true
		case "--" + flag + "=" + value:
			return "--" + flag + "=" + meant, true
		}
		return arg, true
	})
	return usage(fmt.Errorf("--%s: %q; must be host:port; write: %s", flag, value, line))
}

// repairedName is a text as a name of a run, a group or a lane; empty: it has no letter that such a name may have.
func repairedName(text string) string {
	name := strings.Map(func(r rune) rune {
		if schemas.CheckToken("", string(r)) != nil {
			return ' '
		}
		return r
	}, text)
	name = strings.Join(strings.Fields(name), "-")
	return name[:min(len(name), 64)]
}

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
		"must be there, or --prune-log-prob-above, --prune-reward-below or --prune-keep, else no sample is pruned",
	"tree.branches":         "--tree: not given; must be the tree of --leaf, e.g. 2@2,2@5",
	"text.interaction":      "--interaction: not given; must be there, because it scores the turns",
	"text.interaction.name": "--interaction: not given; must be the interaction that the other flags configure",
	"scheduled_sampling":    "this model can do scheduled sampling only; use 'meander scheduled'",
}

// oneOf returns the error of a flag whose value is none of the names, with the nearest one.
func oneOf(flag, value string, names []string) error {
	near := schemas.Nearest(value, names)
	return fmt.Errorf("--%s: %q; %smust be one of %s", flag, value, present.When(near != "", "did you mean %s? ", near),
		strings.Join(names, ", "))
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
