// Command bench measures the whole product, the sampler, language models, matrix products, the advantage service, the
// event plane, updates of weights, looks at a store and workers of PyTorch on this machine: it serves the targets
// bench-NAME of deploy/bench/Makefile. It also writes model folders of the published size to measure with.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := execute(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
	os.Exit(exitCode(err))
}

func execute(ctx context.Context, args []string) error {
	c := &cobra.Command{
		Use: "bench", Short: "measure this machine", SilenceUsage: true, SilenceErrors: true,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
		Args: noArgs,
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	c.AddCommand(benchE2ECommand(), benchSamplerCommand(), benchGEMMCommand(), benchTokensCommand(),
		benchAdvantageCommand(), benchUpdateCommand(),
		benchEventsCommand(), benchSwarmCommand(), benchPolicyCommand(), benchWeightsCommand(), benchTorchCommand(),
		benchLooksCommand(),
		benchFolderCommand(),
		benchGPUCommand())
	c.SetArgs(args)
	return c.ExecuteContext(ctx)
}

// noArgs makes an argument a usage error.
func noArgs(c *cobra.Command, args []string) error { return usage(cobra.NoArgs(c, args)) }

func benchSamplerCommand() *cobra.Command {
	b := samplerBench{prompt: `a blue sign that says "4071"`, scale: 4, steps: 20}
	c := &cobra.Command{
		Use:   "sampler",
		Short: "images per second, time per step, share of each operation, memory",
		Long: `sampler measures what a sampler does for a group of samples of one prompt: encode the
prompt and the negative prompt, follow the ODE with guidance, decode the images.
Prompt embeddings are not taken from the cache. No events are stored.

With --peer it measures another engine beside it: rounds of both take turns, so that
other work on the machine disturbs both alike. The peer is a program that reads one
JSON object per line and answers with one; deploy/bench/diffusers_peer.py is such a
program. The report is Markdown.`,
		Example: `  bench sampler
  bench sampler --peer "python3 deploy/bench/diffusers_peer.py"
  bench sampler --model deploy/models/signs --batch 8 --threads 1 --rounds 20`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&b.model, "model", "signs", "folder in the diffusers layout, or the name of a shipped model")
	f.IntSliceVar(&b.batches, "batch", []int{1, 8}, "samples per call")
	f.IntSliceVar(&b.threads, "threads", []int{1, min(2, runtime.NumCPU())}, "threads of each engine")
	f.IntVar(&b.steps, "steps", b.steps, "denoising steps")
	f.Float64Var(&b.scale, "true-cfg-scale", b.scale, "guidance scale, above 1")
	f.StringVar(&b.prompt, "prompt", b.prompt, "prompt of all samples")
	f.StringVar(&b.negative, "negative-prompt", b.negative, "what guidance leads away from; default the model's")
	f.IntVar(&b.rounds, "rounds", 7, "measured rounds of each engine; the medians are reported")
	f.DurationVar(&b.round, "round", 500*time.Millisecond, "a round repeats its call for at least this long")
	f.DurationVar(&b.profile, "profile", 4*time.Second, "time spent on the share of each operation; 0 for none")
	f.StringVar(&b.peer, "peer", "", "command line of another engine to measure in turns")
	return c
}

func benchGEMMCommand() *cobra.Command {
	g := gemmBench{}
	c := &cobra.Command{
		Use:   "gemm",
		Short: "GFLOP/s of matrix products at a model's shapes, against the multiply-add peak",
		Long: `gemm measures, on one thread, the products that a transformer step of the model makes
with guidance, and between them a loop of nothing but independent multiply-adds: the
peak of the core. Both numbers are the best of many short rounds, since whatever else
runs on the core only ever makes a round longer. The report is Markdown.`,
		Example: `  bench gemm
  bench gemm --batch 8 --kernels avx2`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			dir, card, err := findFolder(g.model)
			if err != nil {
				return err
			}
			g.negative = cmp.Or(g.negative, card.NegativePrompt)
			fmt.Fprintf(c.OutOrStdout(), "%s\n\n", machine())
			return g.run(c.Context(), dir, c.OutOrStdout())
		},
	}
	f := c.Flags()
	g.register(f.StringVar, f.DurationVar)
	f.IntSliceVar(&g.batches, "batch", []int{1, 8}, "samples per call")
	return c
}

// findFolder is the folder and the card of what is measured here: real checkpoints only.
func findFolder(name string) (string, model.Card, error) {
	dir, family, err := families.All().Find(name)
	if err == nil && dir == "" {
		err = fmt.Errorf("--model: the %s model has no network to measure; name a folder in the diffusers layout",
			family.Name)
	}
	if err != nil {
		return "", model.Card{}, usage(err)
	}
	info, err := family.Inspect(dir)
	if err != nil {
		return "", model.Card{}, err
	}
	return dir, info.Card, nil
}

// machine describes what was measured on, without its name.
func machine() string {
	return fmt.Sprintf("%s/%s, %s, %d cores, kernels %s, %s, load %s",
		runtime.GOOS, runtime.GOARCH, processor(), runtime.NumCPU(), cpu.AvailableKernels()[0], runtime.Version(),
		load())
}

// processor is what the kernel calls the first core, where it says.
func processor() string {
	if v, ok := procField("/proc/cpuinfo", "model name"); ok {
		return v
	}
	return "unknown processor"
}

// load is the running tasks averaged over a minute, where the kernel says.
func load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(data), " ")
	return first
}

// residentBytes returns the peak resident memory of this process; ok is false where the
// kernel does not say.
func residentBytes() (peak int, ok bool) {
	peak = memoryOf(os.Getpid(), "VmHWM")
	return max(peak, 0), peak >= 0
}

// procField is the first line "name: value" of a file.
func procField(path, name string) (string, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value), true
		}
	}
	return "", false
}

// median of values, which it sorts; 0 without any.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// checkPositive joins what is wrong with a list of counts.
func checkPositive(flag string, values []int, most int) error {
	var errs []error
	if len(values) == 0 {
		errs = append(errs, fmt.Errorf("--%s: empty; needs at least one number", flag))
	}
	for _, v := range values {
		if v < 1 || v > most {
			errs = append(errs, fmt.Errorf("--%s: %d; must be between 1 and %d", flag, v, most))
		}
	}
	return errors.Join(errs...)
}

// takeTurns measures engines in rounds, of which the first warms up and does not count. Who
// goes first alternates.
func takeTurns[T any](ctx context.Context, rounds int, engines []func() (T, error)) ([][]T, error) {
	times := make([][]T, len(engines))
	for i := -1; i < rounds; i++ {
		for k := range engines {
			e := (k + i + 1) % len(engines)
			if err := pause(ctx); err != nil {
				return nil, err
			}
			t, err := engines[e]()
			if err != nil {
				return nil, err
			}
			if i >= 0 {
				times[e] = append(times[e], t)
			}
		}
	}
	return times, nil
}

// pause lets helper threads of either engine fall asleep before the other is measured.
func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(20 * time.Millisecond):
		return nil
	}
}

// heading writes a Markdown heading.
func heading(w io.Writer, title string) { fmt.Fprintf(w, "\n## %s\n\n", title) }
