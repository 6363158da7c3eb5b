package command

import (
	"bytes"
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// commandsBelow are a command and all below it that people call.
func commandsBelow(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		all = append(all, commandsBelow(sub)...)
	}
	return all
}

func TestHelp_FlagsOfRunHaveHeadings(t *testing.T) {
	root := newRoot()
	if got := wantAll(root, []string{"run", "--help-all"}); !slices.Equal(got, []string{"run", "--help"}) {
		t.Errorf("--help-all is %q", got)
	}
	run, _, err := root.Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	help := flagHelp(run, 100)
	last := -1
	for _, title := range []string{
		outputSection, promptSection, samplingSection, rewardSection, advantageSection,
		groupSection, pipelineSection,
	} {
		at := strings.Index(help, "\n"+title+":\n")
		if at <= last {
			t.Errorf("heading %q at %d, after one at %d", title, at, last)
		}
		last = at
	}
	run.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" && f.Annotations[sectionKey] == nil {
			t.Errorf("--%s has no heading", f.Name)
		}
	})
}

// The help of the command with most flags fits on two screens, names all of them, and leads to the whole help.
func TestHelp_OfRunIsShort(t *testing.T) {
	var out, all bytes.Buffer
	for args, to := range map[string]*bytes.Buffer{"--help": &out, "--help-all": &all} {
		if status := Execute(context.Background(), []string{"run", args}, strings.NewReader(""), to,
			to); status != exitOK {
			t.Fatalf("run %s: exit status %d", args, status)
		}
	}
	if n := strings.Count(out.String(), "\n"); n > 2*48 {
		t.Errorf("run --help has %d lines, of %d in all; must be at most two screens of 48", n,
			strings.Count(all.String(), "\n"))
	}
	run, _, err := newRoot().Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	run.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(out.String(), f.Name) {
			t.Errorf("run --help does not name --%s", f.Name)
		}
		if !strings.Contains(all.String(), "--"+f.Name) {
			t.Errorf("run --help-all does not have --%s", f.Name)
		}
	})
	for _, name := range commonFlags {
		if !strings.Contains(all.String(), "--"+name) &&
			!slices.Contains([]string{"listen", "auth", "ui", "gc-above", "gc-age"}, name) {
			t.Errorf("--%s is common, and no flag of run or up", name)
		}
	}
	list, _, _ := strings.Cut(out.String(), "says what all flags do")
	at := -1
	for _, name := range []string{"model", "prompts", "group-size", "reward", "steps", "seed", "template", "device"} {
		next := strings.LastIndex(list, " --"+name+" ")
		if next < at {
			t.Errorf("--%s comes too early", name)
		}
		at = next
	}
	if !strings.Contains(out.String(), "meander run --help-all") {
		t.Error("run --help does not lead to --help-all")
	}
}

// Help for a command that there is not is refused, and names the command.
func TestHelp_NoSuchCommand(t *testing.T) {
	for _, given := range []string{"help nosuch", "nosuch --help", "nosuch -h"} {
		expect(t, exitUsage, `meander has no command "nosuch"`, strings.Fields(given)...)
	}
	for _, given := range []string{"help runs exprt", "runs exprt --help"} {
		expect(t, exitUsage, `meander runs has no command "exprt"; did you mean 'meander runs export'?`, strings.Fields(given)...)
	}
	for _, given := range []string{
		"help", "help run", "help runs ls", "runs --help", "--store x --help",
		"run nosuch --help", "help help",
	} {
		expect(t, exitOK, "Usage:", strings.Fields(given)...)
	}
}

// No line of help is wider than the terminal, but for words that are.
func TestHelp_Fits(t *testing.T) {
	for _, columns := range []int{60, 80, 200} {
		for _, c := range commandsBelow(newRoot()) {
			if c.Example == "" {
				t.Errorf("%s has no example", c.CommandPath())
			}
			for _, line := range strings.Split(flagHelp(c, columns)+"\n"+present.Reflow(c.Long, columns), "\n") {
				word := 0
				for _, w := range strings.Fields(line) {
					word = max(word, utf8.RuneCountInString(w))
				}
				if n := utf8.RuneCountInString(line); n > columns && word < columns/2 &&
					!strings.HasPrefix(line, "  ") {
					t.Errorf("%s at %d columns: %d wide: %s", c.CommandPath(), columns, n, line)
				}
			}
		}
	}
}

func TestMisspelt(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"runn"}, `meander has no command "runn"; did you mean 'meander run'?`},
		{[]string{"xyzzy"}, `meander has no command "xyzzy"` + "\n"},
		{[]string{"dead", "list-all"}, `meander dead has no command "list-all"`},
		{[]string{"run", "--grup-size", "3", "x"}, "unknown flag: --grup-size; did you mean --group-size?"},
		{[]string{"show", "--nast", "x"}, "unknown flag: --nast; did you mean --nats?"},
		{[]string{"run", "--plan", "x"}, "unknown flag: --plan; did you mean --dry-run?"},
		{[]string{"show", "--frobnicate"}, "unknown flag: --frobnicate\n"},
		{[]string{"publish", "--guidance_scale", "5", "x"}, "unknown flag: --guidance_scale; did you mean --true-cfg-scale?"},
		{[]string{"show", "--height", "5"}, "unknown flag: --height; it is a flag of 'meander parity', 'meander publish', 'meander run', " +
			"'meander scheduled'\n"},
		{[]string{"publish", "--model", "signs", "x"}, "unknown flag: --model; did you mean --lane?"},
		{[]string{"gc", "--gc-age", "5"}, `--gc-age: "5"; must be a duration with its unit, such as 5s or 5m` + "\n"},
		{[]string{"gc", "--gc-above", "many"}, `--gc-above: "many"; must be an integer` + "\n"},
		{[]string{"streams", "limit", "--max-steps-bytes", "5"}, `--max-steps-bytes: "5"; must be a size with its unit, such as "64MiB"` + "\n"},
		{[]string{"up", "now"}, `"now"; 'meander up' takes no arguments` + "\n"},
		{[]string{"prune", "demo"}, "1 argument; must be 'meander prune RUN UID SAMPLE'\n"},
	} {
		root := newRoot(tt.args...)
		root.SetArgs(tt.args)
		root.SetOut(&bytes.Buffer{})
		root.SetErr(&bytes.Buffer{})
		err := root.ExecuteContext(context.Background())
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want one about %s", tt.args, err, tt.want)
		}
	}
}

// A command is found by its name, and made without the others, but for the commands of any command line.
func TestCommands_OneAlone(t *testing.T) {
	for name, command := range commands() {
		if c := command(&app{}); c.Name() != name {
			t.Errorf("command %q is found as %q", c.Name(), name)
		}
		if all := newRoot(name, "x").Commands(); len(all) != 1 || all[0].Name() != name {
			t.Errorf("%s: %d commands are made", name, len(all))
		}
	}
	if all := newRoot("--json", "top").Commands(); len(all) != len(commands()) {
		t.Errorf("%d commands for a command line that begins with a flag; want all %d", len(all), len(commands()))
	}
}

// A name that another tool has for a flag leads to one that there is, and is none itself.
func TestFlagNames(t *testing.T) {
	run, _, err := newRoot().Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	for other, name := range flagNames {
		if run.Flag(other) != nil || run.Flag(name) == nil {
			t.Errorf("--%s is said to be --%s; the first must be no flag of run, the second one", other, name)
		}
	}
}

// Every flag that takes a name completes it, and no completion is of a flag that is gone.
func TestCompletions(t *testing.T) {
	var flags []string
	for _, c := range commandsBelow(newRoot()) {
		c.Flags().VisitAll(func(f *pflag.Flag) { flags = append(flags, f.Name) })
		c.PersistentFlags().VisitAll(func(f *pflag.Flag) { flags = append(flags, f.Name) })
	}
	for flag := range completions {
		if !slices.Contains(flags, flag) {
			t.Errorf("--%s is completed, and is no flag", flag)
		}
	}
	var out bytes.Buffer
	root := newRoot()
	root.SetArgs([]string{"__complete", "run", "--estimator", "dance"})
	root.SetOut(&out)
	root.SetErr(&bytes.Buffer{})
	if err := root.ExecuteContext(context.Background()); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "dance_grpo\n") {
		t.Errorf("completes to %q", out.String())
	}
}

// Every field that has a flag is one of run and publish, under that name.
func TestFlags_AreThoseOfTheFields(t *testing.T) {
	root := newRoot()
	for _, name := range []string{"run", "publish"} {
		c, _, err := root.Find([]string{name})
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []reflect.Type{
			reflect.TypeFor[schemas.Prompt](), reflect.TypeFor[schemas.Rollout](), reflect.TypeFor[schemas.Start](),
			reflect.TypeFor[schemas.Stop](), reflect.TypeFor[schemas.RewardSpec](),
			reflect.TypeFor[schemas.Data](), reflect.TypeFor[schemas.ScheduledSampling](),
			reflect.TypeFor[schemas.ProbabilityRamp](), reflect.TypeFor[schemas.ReflexFlow](),
			reflect.TypeFor[schemas.AdvantageSpec](), reflect.TypeFor[schemas.GroupPolicy](),
			reflect.TypeFor[schemas.BatchSpec](), reflect.TypeFor[schemas.RuleSpec](),
		} {
			for _, f := range schemas.Fields(of) {
				if f.Flag == "" {
					continue
				}
				if flag := c.Flags().Lookup(f.Flag); flag == nil {
					t.Errorf("meander %s has no --%s for %s.%s", name, f.Flag, of.Name(), f.Name)
				}
			}
		}
	}
}
