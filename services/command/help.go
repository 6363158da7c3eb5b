package command

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// Headings of --help, in the order in which commands register them.
const (
	promptSection    = "Prompts"
	samplingSection  = "Sampling"
	textSection      = "Texts, of language models"
	scheduledSection = "Scheduled sampling"
	rewardSection    = "Rewards"
	advantageSection = "Advantages"
	groupSection     = "Groups and batches"
	outputSection    = "Run and output"
	pipelineSection  = "Pipeline, if this command runs it"
	gcSection        = "Janitor: rules for automatic removal; none by default"
	limitSection     = "Limits of streams; default unchanged"
)

// sectionKey annotates a flag with its heading.
const sectionKey = "meander_section"

// addSection adds the flags that register makes to f, under a heading of --help.
func addSection(f *pflag.FlagSet, title string, register func(*pflag.FlagSet)) {
	own := pflag.NewFlagSet(title, pflag.ContinueOnError)
	own.SortFlags = false
	register(own)
	own.VisitAll(func(flag *pflag.Flag) {
		if flag.Annotations == nil {
			flag.Annotations = map[string][]string{}
		}
		flag.Annotations[sectionKey] = []string{title}
		f.AddFlag(flag)
	})
	f.SortFlags = false
}

// flagsOf adds a flag for each tagged field of options, whose values are the defaults. What is out of the range of its
// tag is refused before the command runs.
func flagsOf(c *cobra.Command, options any) {
	fields.Bind("", options).Register(c.Flags())
	before := c.PreRunE
	c.PreRunE = func(c *cobra.Command, given []string) error {
		if err := schemas.CheckFields(options); err != nil || before == nil {
			return settingError(err)
		}
		return before(c, given)
	}
}

// manyFlags is the number of flags of a command from which on --help shows the common ones, and names the others.
const manyFlags = 40

// commonFlags are those that most command lines have, the most used first, in the help of commands with many.
var commonFlags = strings.Fields(`model prompts group-size reward steps height width true-cfg-scale seed out run dry-run
	sde-steps sde-window max-new-tokens temperature estimator batch-size template listen auth ui device gc-above
	gc-age store nats json`)

// helpAll asks for all flags of a command.
const helpAll = "help-all"

// isShort reports whether the help of a command leaves flags out.
func isShort(c *cobra.Command) bool {
	n := 0
	c.LocalFlags().VisitAll(func(*pflag.Flag) { n++ })
	return n >= manyFlags && c.Root().Annotations[helpAll] == ""
}

// briefly returns a flag, in short help with the first clause of what it does.
func briefly(flag *pflag.Flag, short bool) *pflag.Flag {
	brief := *flag
	if short {
		brief.Usage, _, _ = strings.Cut(flag.Usage, "; ")
	}
	return &brief
}

// flagHelp lists a command's own flags under their headings, in that many columns, for --help. Short help has the
// common ones, and the names of the others.
func flagHelp(c *cobra.Command, columns int) string {
	const common = "Common flags"
	sections, others := map[string]*pflag.FlagSet{}, map[string][]string{}
	var titles []string
	short := isShort(c)
	visit := func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		title := "Flags"
		if names := flag.Annotations[sectionKey]; len(names) > 0 {
			title = names[0]
		}
		isCommon := slices.Contains(commonFlags, flag.Name)
		if short && isCommon {
			title = common
		}
		if sections[title] != nil && sections[title].Lookup(flag.Name) != nil {
			return // it came first
		}
		if sections[title] == nil {
			sections[title] = pflag.NewFlagSet(title, pflag.ContinueOnError)
			sections[title].SortFlags = c.Flags().SortFlags && !short
			titles = append(titles, title)
		}
		if short && !isCommon {
			others[title] = append(others[title], flag.Name)
			return
		}
		sections[title].AddFlag(briefly(flag, short))
	}
	for _, name := range commonFlags {
		if flag := c.LocalFlags().Lookup(name); short && flag != nil {
			visit(flag)
		}
	}
	c.LocalFlags().VisitAll(visit)
	var s strings.Builder
	for _, title := range titles {
		if sections[title].HasFlags() {
			fmt.Fprintf(&s, "\n%s:\n%s", present.Paint(os.Stdout, present.Bold, title),
				sections[title].FlagUsagesWrapped(columns))
		}
	}
	if short {
		said := fmt.Sprintf("'%s --%s' says what all flags do. The others are:", c.CommandPath(), helpAll)
		fmt.Fprintf(&s, "\n%s\n", present.Wrap(said, columns, 0))
		for _, title := range titles {
			if len(others[title]) > 0 && title != "Flags" {
				fmt.Fprintln(&s, "  "+present.Wrap(title+": "+strings.Join(others[title], ", "), columns-2, 4))
			}
		}
	}
	return s.String()
}

// usageTemplate is cobra's, with the flags of a command under headings.
const usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} COMMAND{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}
{{if .HasAvailableSubCommands}}
Commands:
{{commandHelp .}}{{end}}{{flagHelp .}}{{if .HasAvailableInheritedFlags}}
Everywhere:
{{globalHelp .}}{{end}}{{if .HasAvailableSubCommands}}
See '{{.CommandPath}} COMMAND --help' for a command.
{{end}}`

// addHelpFuncs gives the templates of help their functions. All commands of a process share them.
var addHelpFuncs = sync.OnceFunc(func() {
	cobra.AddTemplateFunc("flagHelp", func(c *cobra.Command) string { return flagHelp(c, present.Width(os.Stdout)) })
	cobra.AddTemplateFunc("globalHelp", func(c *cobra.Command) string {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		short := isShort(c)
		c.InheritedFlags().VisitAll(func(f *pflag.Flag) {
			if !short || slices.Contains(commonFlags, f.Name) {
				flags.AddFlag(briefly(f, short))
			}
		})
		return flags.FlagUsagesWrapped(present.Width(os.Stdout))
	})
	cobra.AddTemplateFunc("commandHelp", func(c *cobra.Command) string {
		var list [][2]string
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				list = append(list, [2]string{sub.Name(), sub.Short})
			}
		}
		return present.Terms(list, present.Width(os.Stdout))
	})
	cobra.AddTemplateFunc("reflow", func(text string) string {
		return present.Reflow(text, min(present.Width(os.Stdout), present.PlainWidth))
	})
})

// setHelp gives a command, and all commands below it, help with headings, and errors that suggest the nearest flag or
// command.
func setHelp(root *cobra.Command) {
	addHelpFuncs()
	root.SetHelpTemplate("{{reflow (or .Long .Short)}}\n\n{{.UsageString}}")
	root.SetUsageTemplate(usageTemplate)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		said := fields.FlagError(err, c.Flags(), flagNames)
		if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
			name := unknown.GetSpecifiedName()
			said = fmt.Errorf("%w%s", err, explainFlag(c, name, fields.NearFlag(name, c.Flags(), flagNames)))
		}
		return usage(fmt.Errorf("%w\nSee '%s --help'", said, c.CommandPath()))
	})
}

// addCompletion adds the command 'meander completion' of cobra, which otherwise comes too late for its own help. It
// writes where root does by now, and refuses unknown shells.
func addCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	c, _, _ := root.Find([]string{"completion"})
	c.Args, c.RunE = args(noSuchCommand), func(c *cobra.Command, _ []string) error { return c.Help() }
}

// commandsWithFlag names, for an error about an unknown flag, the commands that have it; "" if none has it.
func commandsWithFlag(flag string) string {
	var names []string
	for _, c := range newRoot().Commands() {
		if f := c.Flags().Lookup(flag); f != nil && !f.Hidden {
			names = append(names, "'"+c.CommandPath()+"'")
		}
	}
	if len(flag) < 2 || len(names) == 0 {
		return ""
	}
	return "; it is a flag of " + strings.Join(names, ", ")
}

// flagNames are former names of flags, and names in other tools (diffusers, transformers, vLLM, verl and trainers),
// that are too different from today's to be found as misspellings.
var flagNames = map[string]string{
	"plan": "dry-run",

	"inference-steps": "steps", "num-steps": "steps", "sampling-steps": "steps",
	"sample-steps": "steps", "guidance-scale": "true-cfg-scale",
	"cfg-scale": "true-cfg-scale", "cfg": "true-cfg-scale", "negative": "negative-prompt",
	"image-height": "height", "image-width": "width", "resolution": "height", "size": "height",
	"num-images-per-prompt": "group-size", "num-generations": "group-size", "num-return-sequences": "group-size",
	"num-samples": "group-size", "n": "group-size", "n-samples": "group-size", "rollout-n": "group-size",
	"best-of": "group-size", "num-images": "group-size", "scheduler": "solver", "eta": "noise-level",
	"sde-window-size": "sde-window", "generator": "seed", "manual-seed": "seed", "random-seed": "seed",
	"image": "start-image", "init-image": "start-image", "latents": "start-latents", "strength": "start-step",

	"max-tokens": "max-new-tokens", "max-length": "max-new-tokens", "max-completion-length": "max-new-tokens",
	"response-length": "max-new-tokens", "max-completion-tokens": "max-new-tokens",
	"eos-token-id": "stop-token-ids", "stop-strings": "stop", "logprobs": "logits", "top-logprobs": "logits",
	"prompt-logprobs": "logits", "chat": "messages", "conversation": "messages",

	"prompt-file": "prompts", "input": "prompts", "data": "prompts", "dataset": "prompts",
	"train-files": "prompts", "train-batch-size": "batch-size", "reward-fn": "reward",
	"reward-function": "reward", "reward-model": "reward", "rewards": "reward", "adv-estimator": "estimator",
	"advantage-estimator": "estimator",

	"checkpoint": "model", "model-path": "model", "model-id": "model", "model-name": "model",
	"pretrained-model-name-or-path": "model", "pretrained": "model", "lora": "adapter", "lora-path": "adapter",
	"lora-weights": "adapter", "lora-scale": "adapter-scale", "gpu": "device", "gpus": "device", "cuda": "device",
	"torch-dtype": "dtype", "precision": "dtype", "micro-batch-size": "batch", "num-workers": "workers",

	"output": "out", "output-dir": "out", "outdir": "out", "save-dir": "out", "output-path": "out",
	"run-id": "run", "run-name": "run", "server": "nats", "url": "nats", "nats-url": "nats", "addr": "nats",
	"address": "nats", "host": "nats", "verbose": "log-level", "quiet": "log-level", "loglevel": "log-level",
	"output-format": "json", "data-dir": "store",
}

// noSuchCommand is the Args of commands that only have subcommands: it refuses an unknown one.
func noSuchCommand(c *cobra.Command, given []string) error {
	if len(given) == 0 {
		return nil
	}
	paths := commandsLike(c, given[0])
	return fmt.Errorf("%s has no command %q%s", c.CommandPath(), given[0],
		present.When(len(paths) > 0, "; did you mean '%s'?", strings.Join(paths, "' or '")))
}

// wantAll takes --help-all for --help, and notes that the help is to have all flags.
func wantAll(root *cobra.Command, given []string) []string {
	at := slices.Index(given, "--"+helpAll)
	if at < 0 || slices.Contains(given[:at], "--") {
		return given
	}
	root.Annotations = map[string]string{helpAll: "yes"}
	given = slices.Clone(given)
	given[at] = "--help"
	return given
}

// checkHelp refuses help for a command that there is not: cobra would print that of the command above it.
func checkHelp(root *cobra.Command, given []string) error {
	if len(given) > 0 && given[0] == "help" {
		given = given[1:]
	} else if !slices.Contains(given, "--help") && !slices.Contains(given, "-h") {
		return nil
	}
	c, rest, err := root.Find(given)
	if err != nil || !c.HasSubCommands() || len(rest) == 0 || strings.HasPrefix(rest[0], "-") || rest[0] == "help" {
		return nil // cobra says what is wrong, if anything is
	}
	return args(noSuchCommand)(c, rest)
}
