package command

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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

// withArgs puts the command line into a context.
func withArgs(ctx context.Context, given []string) context.Context {
	return context.WithValue(ctx, argsKey{}, given)
}

// explainFlag names what was meant by a flag that c does not have: the flag, and the command line with it.
func explainFlag(c *cobra.Command, name, near string) string {
	names := flagsLike(c.Flags(), name)
	if near != "" && !strings.HasSuffix(name, "port") {
		names = []string{near}
	}
	switch {
	case len(names) == 0:
		return commandsWithFlag(c, name)
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
