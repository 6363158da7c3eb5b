// Package command is the command line meander: the whole pipeline in one process with an embedded NATS server, and
// commands for services that run elsewhere. There is one file for each command: its flags, and what it prints. The
// work is in other packages, for Go programs too.
//
// A function xCommand makes the command 'meander x'; newRoot calls it. Execute runs one command line, prints the
// error that the command returns and sets the exit status: usage makes an error one of wrong usage (status 2), an
// exitError has a status of its own (without an error of its own nothing more is printed), all others are failures
// (status 1). Functions that print return the error of the writer, or of what they read.
//
// All commands share an app, the global flags. A connection is an app's way to the pipeline; where this process
// serves the pipeline itself, services has its settings. promptFlags and datasetFlags are the flags of prompts, which
// load turns into prompts. A runner is 'meander run', an estimated the estimate that it prints first; a pusher is
// 'meander policy push', a controller a command such as 'meander cancel', a watcher 'meander watch', a rescorer
// 'meander rescore'.
//
// 'meander run' calls, in this order: load (the prompts), estimateOwn, connectServing, checkAndEstimate,
// publishAndWait (claimAndPublish, awaitOutcomes), report. Functions printX, xLine and xLines make what a
// command prints of its results.
package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/heap"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// Exit statuses.
const (
	exitOK     = boot.ExitOK
	exitFailed = boot.ExitFailure
	exitUsage  = boot.ExitUsage
	// exitInterrupted is the status that shells give to commands that Ctrl-C ended.
	exitInterrupted = 130
)

// exitError is an error with an exit status. Without err it was printed already.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usage makes err a usage error (exit status 2).
func usage(err error) error { return &exitError{status: exitUsage, err: err} }

// Main runs the command line of this process and exits with its status: 0 done, 1 failed, 2 called wrongly, 130
// interrupted.
func Main() {
	heap.Bound()
	ctx := untilSignal(drainLimit, func() {
		fmt.Fprintf(os.Stderr,
			"meander: not stopped after %v; ends now. Stored events stay and are used at the next start\n", drainLimit)
		os.Exit(exitFailed)
	})
	os.Exit(Execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// drainLimit is how long the process may take to end after the first signal. The services drain for 10 s, and a
// denoising step or the disk may take longer.
const drainLimit = time.Minute

// untilSignal returns a context that ends at the first signal, so that the command drains. The second signal ends the
// process at once. Without one, overdue is called after the limit.
func untilSignal(limit time.Duration, overdue func()) context.Context {
	ctx, stop := signal.NotifyContext(context.Background(), boot.EndSignals()...)
	context.AfterFunc(ctx, func() {
		stop()
		time.AfterFunc(limit, overdue)
	})
	return ctx
}

// Execute runs one command line, without the program's name, until it is done or ctx ends, and returns its exit
// status. Results go to stdout; errors, progress and logs go to stderr.
func Execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	setTimeFormat()
	root := newRoot(args...)
	args = wantAll(root, args)
	root.SetArgs(args)
	out := &output{Writer: stdout}
	root.SetIn(stdin)
	root.SetOut(out)
	root.SetErr(&output{Writer: stderr})
	addCompletion(root)
	err := checkHelp(root, args)
	if err == nil {
		err = root.ExecuteContext(context.WithValue(ctx, argsKey{}, args))
	}
	if failed := out.failure(); failed != nil && !errors.Is(err, failed) {
		present.Lines(stderr, fmt.Sprintf("meander: stdout: %v; this output is lost, stored events are not", failed))
		if err == nil {
			return exitFailed
		}
	}
	if err == nil {
		return exitOK
	}
	var exit *exitError
	canceled := ctx.Err() != nil && errors.Is(err, context.Canceled)
	switch {
	case errors.As(err, &exit) && (exit.status != exitUsage || !canceled):
	case canceled:
		what := strings.ReplaceAll(err.Error(), ": "+context.Canceled.Error(), "")
		err = fmt.Errorf("interrupted (%s); stored events are unchanged", what)
		exit = &exitError{status: exitInterrupted, err: err}
	default:
		exit = &exitError{status: exitFailed, err: err}
	}
	if exit.err != nil {
		present.PrintEscaped(stderr, "meander: "+exit.err.Error())
	}
	return exit.status
}

// output is stdout. It keeps the first write error: a command fails if any of its output was lost. Commands need not
// check their writes, except in endless loops.
//
// What strangers wrote is made safe on its way: on a terminal colours stay, and elsewhere there are none.
type output struct {
	io.Writer
	asIs bool // for bytes that are no text, and for a screen
	mu   sync.Mutex
	err  error
}

// asIs lets bytes pass as they are.
func asIs(out io.Writer) io.Writer {
	if o, ok := out.(*output); ok {
		o.asIs = true
	}
	return out
}

// Under returns the writer below, which may be a terminal.
func (o *output) Under() io.Writer { return o.Writer }

// Write writes a text that is safe. A failure is the writer's, and is kept.
func (o *output) Write(p []byte) (int, error) {
	text := string(p)
	if !o.asIs {
		text = boot.SafeOutput(text, boot.IsTerminal(o.Writer))
	}
	o.mu.Lock() // services log side by side
	defer o.mu.Unlock()
	_, err := io.WriteString(o.Writer, text)
	if o.err == nil {
		o.err = err
	}
	return len(p), err
}

func (o *output) failure() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// setTimeFormat sets the form of times in logs, which all command lines of a process share: milliseconds matter here.
var setTimeFormat = sync.OnceFunc(func() { zerolog.TimeFieldFormat = time.RFC3339Nano })

type app struct {
	store    string
	nats     boot.NATS
	json     bool
	logLevel string
	// fromEnv has the variables that settings came from, by the name of the flag.
	fromEnv map[string]string
	// asItIs connects without setting anything up.
	asItIs bool
	// waits for a server that is away, as views do: they go on by themselves when it comes.
	waits  bool
	stderr io.Writer
}

// commands makes each command of meander, by its name.
func commands() map[string]func(*app) *cobra.Command {
	return map[string]func(*app) *cobra.Command{
		"auth": authCommand, "cancel": cancelCommand, "certify": certifyCommand, "dead": deadCommand,
		"decode": decodeCommand, "doctor": doctorCommand, "examples": examplesCommand, "gc": gcCommand,
		"man": manCommand, "model": modelCommand, "parity": parityCommand, "pause": pauseCommand,
		"policy": policyCommand, "prompts": promptsCommand, "prove": proveCommand, "prune": pruneCommand,
		"publish": publishCommand, "report": reportCommand, "rescore": rescoreCommand,
		"resume": resumeCommand, "run": runCommand, "runs": runsCommand, "scheduled": scheduledCommand,
		"show": showCommand, "status": statusCommand, "streams": streamsCommand, "teacher": teacherCommand,
		"top": topCommand, "trace": traceCommand, "ui": uiCommand, "up": upCommand,
		"verdict": verdictCommand, "verify": verifyCommand, "version": versionCommand, "watch": watchCommand,
	}
}

// newRoot makes the command meander with the global flags and all subcommands, for Execute. Where args begin with the
// name of a command, it makes that one alone: a look at a store is over before all their flags are made.
func newRoot(args ...string) *cobra.Command {
	a := &app{stderr: os.Stderr}
	root := &cobra.Command{
		Use:   "meander",
		Short: "event-streamed rollouts for reinforcement learning on diffusion models",
		Long: `meander makes rollouts for reinforcement learning on diffusion models and on language models.
For each prompt it makes a group of samples: images with their denoising trajectories, or texts
with their tokens. Each sample gets log-probs, a reward and an advantage. All of it is a durable
stream of events.

Without --nats a command works on the store folder (--store). If a pipeline runs on that store, the
command joins it, and takes over when it ends. If none runs, the command opens the store itself,
with an embedded NATS server.`,
		Example: `  # four images of one prompt, everything in this process
  meander run --group-size 4 'a red sign that says "OPEN"'

  # a long-running pipeline on this machine, and in another terminal a client of it
  meander up
  meander publish --run demo 'a red sign that says "OPEN"'
  meander watch --run demo

  # show the results, and check that the log-probs are right
  meander show
  meander verify`,
		Version: versionLine(),

		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			a.stderr = c.ErrOrStderr()
			if err := cmp.Or(a.fromEnvironment(c.Flags()), a.useContext(c.Flags())); err != nil {
				return usage(err)
			}
			if level, err := zerolog.ParseLevel(a.logLevel); err != nil || level == zerolog.NoLevel {
				return usage(fmt.Errorf("%s: %q; must be debug, info, warn or error", a.flag("log-level"), a.logLevel))
			}
			if err := c.ValidateFlagGroups(); err != nil {
				return usage(err)
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	a.addFlags(root.PersistentFlags())
	root.SetVersionTemplate("{{.Version}}\n")
	setHelp(root)
	make := commands()
	if len(args) > 0 && make[args[0]] != nil {
		make = map[string]func(*app) *cobra.Command{args[0]: make[args[0]]}
	}
	for _, one := range make {
		root.AddCommand(one(a))
	}
	setArguments(root)
	completeNames(root)
	nameFields(root)
	return root
}

// addFlags adds the global flags.
func (a *app) addFlags(f *pflag.FlagSet) {
	f.StringVar(&a.store, "store", envOr("MEANDER_STORE", "meander-data"),
		"folder with the files of the embedded NATS server [$MEANDER_STORE]")
	server := fields.Bind("", &a.nats)
	server.As(f, "nats.url", "nats")
	f.Lookup("nats").Usage = "NATS server to use instead of the store, or several with commas [$MEANDER_NATS_URL]"
	server.Register(f)
	f.BoolVar(&a.json, "json", false, "print JSON lines on stdout; progress and logs go to stderr")
	f.StringVar(&a.logLevel, "log-level", envOr("MEANDER_LOG_LEVEL", "warn"),
		"debug, info, warn or error [$MEANDER_LOG_LEVEL]")
}

// fromEnvironment sets the global settings that were not given as flags from the environment, before a command runs.
// They are no defaults of the flags, because --help would print the secrets; store and log-level are.
func (a *app) fromEnvironment(f *pflag.FlagSet) (err error) {
	a.fromEnv = map[string]string{}
	f.VisitAll(func(flag *pflag.Flag) {
		name := cmp.Or(fields.Variable(flag), globalVariables[flag.Name])
		given := os.Getenv(name)
		ofShell := flag.Name == "context" // it is for all programs of a shell
		if given == "" || flag.Changed || ofShell && f.Changed("store") {
			return
		}
		a.fromEnv[flag.Name] = name
		if wrong := flag.Value.Set(given); wrong != nil {
			err = errors.Join(err, fmt.Errorf("%s: %q; must be true or false", a.flag(flag.Name), given))
		}
	})
	return err
}

// useContext takes what the context says in place of variables.
func (a *app) useContext(f *pflag.FlagSet) error {
	err := a.nats.UseContext(func(flag string) bool {
		if flag == "nats-url" {
			flag = "nats"
		}
		return f.Changed(flag)
	})
	if err != nil {
		return errors.New(strings.Replace(err.Error(), "context", a.flag("context"), 1))
	}
	return nil
}

// globalVariables are those of flags that are no fields.
var globalVariables = map[string]string{"store": "MEANDER_STORE", "log-level": "MEANDER_LOG_LEVEL"}

// flag names a global flag in an error, with the variable that its value came from.
func (a *app) flag(name string) string {
	if variable := a.fromEnv[name]; variable != "" {
		return "--" + name + " (from " + variable + ")"
	}
	return "--" + name
}

// setArguments gives each command the check of arguments that its use line says: NAME is one, [NAME] may be left out,
// ... stands for any number. A command of others prints its help if it does nothing itself.
func setArguments(c *cobra.Command) {
	names, _, _ := strings.Cut(c.Use, " --")
	needed, optional, _ := strings.Cut(names, " [")
	least := len(strings.Fields(strings.TrimSuffix(needed, "..."))) - 1
	most := least + len(strings.Fields(optional))
	if strings.Contains(names, "...") {
		most = math.MaxInt
	}
	check := cobra.RangeArgs(least, most)
	if c.HasSubCommands() {
		check = noSuchCommand
		if c.RunE == nil {
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
	if c.Args == nil {
		c.Args = args(check)
	}
	for _, sub := range c.Commands() {
		setArguments(sub)
	}
}

// args turns the error of a wrong number of arguments into a usage error that says how the command is called.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		err := check(c, given)
		switch {
		case err == nil:
			return nil
		case c.HasSubCommands(): // noSuchCommand has said it
		case !strings.Contains(c.Use, " "):
			err = fmt.Errorf("%q; '%s' takes no arguments", given[0], c.CommandPath())
		default:
			err = fmt.Errorf("%s; must be '%s %s'", present.Count(len(given), "argument"), c.Parent().CommandPath(),
				c.Use)
		}
		return usage(fmt.Errorf("%w\nSee '%s --help'", err, c.CommandPath()))
	}
}

// encode writes values as lines of JSON.
func encode[V any](out io.Writer, values ...V) error {
	lines := json.NewEncoder(out)
	for _, v := range values {
		if err := lines.Encode(v); err != nil {
			return err
		}
	}
	return nil
}

// logger returns a logger to stderr: lines for people, or JSON with --json.
func (a *app) logger() zerolog.Logger {
	level, _ := zerolog.ParseLevel(a.logLevel) // it was checked before the command ran
	out := a.stderr
	if !a.json {
		out = zerolog.ConsoleWriter{Out: out, TimeFormat: "15:04:05.000", NoColor: !present.Colourful(out)}
	}
	return zerolog.New(out).Level(level).With().Timestamp().Logger()
}

// envOr returns an environment variable, or def if it is empty.
func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

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
