package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler"
)

// policyBench is one `bench policy` command.
type policyBench struct {
	model                            string
	pushes, steps, batch, rank, load int

	*plane
	client *client.Client
}

// benchRun is the run of a bench's samples.
const benchRun = "bench"

func benchPolicyCommand() *cobra.Command {
	b := policyBench{}
	c := &cobra.Command{
		Use:   "policy",
		Short: "from a push of weights to the first sample that is made with them, under load",
		Long: `policy has a sampler make samples all the time, pushes adapters of every projection, and reads from the
events how long each took: until it was stored, until the sampler had taken it over, until a sample began with
it, and until one was finished. Every sample must be stored once. The report is Markdown.`,
		Example: `  bench policy
  bench policy --pushes 30 --steps 20`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := errors.Join(checkPositive("pushes", []int{b.pushes}, 10_000),
				checkPositive("steps", []int{b.steps}, schemas.MaxSteps),
				checkPositive("batch", []int{b.batch}, 1024), checkPositive("rank", []int{b.rank},
					1024), checkPositive("load", []int{b.load}, 10_000)); err != nil {
				return usage(err)
			}
			fmt.Fprintf(c.OutOrStdout(), "%s\n", machine())
			return withPlane(c.Context(), c.ErrOrStderr(), func(p *plane) error {
				b.plane, b.client = p, client.New(p.bus)
				return b.run(c.Context(), c.OutOrStdout())
			})
		},
	}
	f := c.Flags()
	f.StringVar(&b.model, "model", "signs", "folder in the diffusers layout, or the name of a shipped model")
	f.IntVar(&b.pushes, "pushes", 12, "versions that are pushed, one after the other")
	f.IntVar(&b.steps, "steps", 10, "denoising steps of a sample")
	f.IntVar(&b.batch, "batch", 8, "samples of a micro-batch")
	f.IntVar(&b.rank, "rank", 16, "rank of the adapters")
	f.IntVar(&b.load, "load", 64, "samples that are asked for at any time")
	return c
}

func (b *policyBench) run(ctx context.Context, out io.Writer) error {
	cfg := sampler.DefaultConfig()
	cfg.Model, cfg.Batch = b.model, b.batch
	work, stop := context.WithCancel(ctx)
	defer stop()
	g, work := errgroup.WithContext(work)
	g.Go(func() error { return intake.Run(work, intake.DefaultConfig(), b.bus, zerolog.Nop()) })
	g.Go(func() error { return sampler.Run(work, cfg, b.bus, zerolog.Nop()) })
	g.Go(func() error {
		defer stop()
		pushed, err := b.push(work)
		if err != nil {
			return err
		}
		return b.report(work, out, pushed)
	})
	return g.Wait()
}

// push pushes all versions while samples are made, and returns when each was begun, by version.
func (b *policyBench) push(ctx context.Context) (map[int64]time.Time, error) {
	loading, enough := context.WithCancel(ctx)
	defer enough()
	g, loading := errgroup.WithContext(loading)
	asked := 0
	g.Go(func() (err error) {
		asked, err = b.keepBusy(loading)
		return err
	})
	pushed := map[int64]time.Time{}
	g.Go(func() error {
		defer enough()
		for i := range b.pushes {
			b.tick("pushes", float64(i)/float64(b.pushes))
			if err := b.pushOne(loading, uint64(i+1), pushed); err != nil {
				return err
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return pushed, poll(ctx, 2*time.Millisecond, func() (bool, error) { // no sample is lost
		made, err := b.made(ctx)
		return made == asked, err
	})
}

// pushOne pushes a version, and waits until a sample was made with it.
func (b *policyBench) pushOne(ctx context.Context, seed uint64, pushed map[int64]time.Time) error {
	var current *schemas.Policy
	if err := poll(ctx, 2*time.Millisecond, func() (ok bool, err error) {
		current, err = b.client.Policy(ctx, schemas.Lineage{})
		return err == nil, nil
	}); err != nil {
		return err
	}
	adapter, err := b.adapter(ctx, current, seed)
	if err != nil {
		return err
	}
	before, err := b.made(ctx)
	if err != nil {
		return err
	}
	if err := poll(ctx, 2*time.Millisecond, func() (bool, error) { // the sampler is busy with the one before
		made, err := b.made(ctx)
		return made >= before+2*b.batch, err
	}); err != nil {
		return err
	}
	began := time.Now()
	p, err := b.client.PushPolicy(ctx, adapter, client.Push{})
	if err != nil {
		return err
	}
	pushed[p.PolicyVersion] = began
	for t, err := range b.client.Trajectories(ctx, benchRun) {
		if err != nil || t.PolicyVersionMin >= p.PolicyVersion {
			return err
		}
	}
	return ctx.Err()
}

// adapter is drawn, of all projections.
func (b *policyBench) adapter(ctx context.Context, p *schemas.Policy, seed uint64) (*lora.Adapter, error) {
	data, err := b.bus.GetBlob(ctx, *p.Modules)
	if err != nil {
		return nil, err
	}
	table, err := lora.ParseTable(data)
	if err != nil {
		return nil, err
	}
	draw := rand.New(rand.NewPCG(seed, 2))
	var tensors []safetensors.Tensor
	for _, module := range slices.Sorted(maps.Keys(table)) {
		n, k := table[module][0], table[module][1]
		r := min(b.rank, n, k)
		for _, m := range []struct {
			name          string
			rows, columns int
		}{{module + ".lora_A.weight", r, k}, {module + ".lora_B.weight", n, r}} {
			x := make([]float32, m.rows*m.columns)
			for i := range x {
				x[i] = float32(0.01 * draw.NormFloat64())
			}
			t, err := safetensors.FloatTensor(m.name, tensor.F32, []int{m.rows, m.columns}, x)
			if err != nil {
				return nil, err
			}
			tensors = append(tensors, t)
		}
	}
	var file bytes.Buffer
	if err := safetensors.Write(&file, tensors, nil); err != nil {
		return nil, err
	}
	return lora.Parse("drawn", file.Bytes(), nil)
}

// keepBusy asks for samples until ctx ends, and returns how many it asked for.
func (b *policyBench) keepBusy(ctx context.Context) (asked int, err error) {
	const n = 8
	err = poll(ctx, 2*time.Millisecond, func() (bool, error) {
		made, err := b.made(ctx)
		if err != nil || asked-made > b.load {
			return false, err
		}
		data, err := schemas.Encode(&schemas.Prompt{
			Prompt: `a red sign that says "FOX"`, UID: schemas.UID(fmt.Sprintf("g%06d", asked)),
			GroupSize:     new(int64(n)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(b.steps))},
			Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
		})
		if err == nil {
			_, err = b.bus.PublishPrompt(ctx, benchRun, data, nil, bus.WaitForSpace())
		}
		if err == nil {
			asked += n
		}
		return false, err
	})
	if ctx.Err() != nil {
		err = nil
	}
	return asked, err
}

// made is how many samples are stored.
func (b *policyBench) made(ctx context.Context) (int, error) {
	info, err := b.bus.StreamInfo(ctx, schemas.StreamTrajectories)
	if err != nil {
		return 0, err
	}
	return int(info.State.Msgs), nil
}

// report reads the events.
func (b *policyBench) report(ctx context.Context, out io.Writer, pushed map[int64]time.Time) error {
	first := map[int64]schemas.SampleTimings{} // the earliest of each version
	samples := 0
	for m, err := range b.bus.Read(ctx, schemas.StreamTrajectories, nil, bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		t := &schemas.Trajectory{}
		if err := bus.Fits(m, t); err != nil {
			return err
		}
		samples++
		v, at := t.PolicyVersionMin, t.Timings
		if f, ok := first[v]; ok {
			at.Started, at.Finished = min(at.Started, f.Started), min(at.Finished, f.Finished)
		}
		first[v] = at
	}
	since := map[string][]float64{}
	note := func(what string, version, at int64) {
		since[what] = append(since[what], float64(at-pushed[version].UnixNano())/1e6)
	}
	const stored, taken, begun, finished = "it is stored", "the sampler has taken it over", "a sample takes its " +
		"first step with it", "a sample is finished"
	for m, err := range b.bus.Read(ctx, schemas.StreamPolicies, nil, bus.ReadOptions{}) {
		p := &schemas.Policy{}
		if err = errors.Join(err, schemas.Decode(m.Data, p)); err != nil {
			return err
		}
		if _, ok := pushed[p.PolicyVersion]; ok {
			note(stored, p.PolicyVersion, m.Time.UnixNano())
			note(begun, p.PolicyVersion, first[p.PolicyVersion].Started)
			note(finished, p.PolicyVersion, first[p.PolicyVersion].Finished)
		}
	}
	answers, err := b.bus.Applied(ctx, schemas.Lane(b.model).Of(""))
	if err != nil {
		return err
	}
	load := []float64{}
	for _, a := range answers {
		if _, ok := pushed[a.PolicyVersion]; ok {
			note(taken, a.PolicyVersion, a.At)
			load = append(load, float64(a.LoadNS)/1e6)
		}
	}
	heading(out, "Weights that are pushed")
	fmt.Fprintf(out, "%d pushes of an adapter of rank %d of all projections of %s, while one sampler makes %d "+
		"samples of %d steps, %d together. Milliseconds from the call of PushPolicy until\n\n",
		len(pushed), b.rank, b.model, samples, b.steps, b.batch)
	fmt.Fprint(out, "| | median | max |\n| --- | --- | --- |\n")
	for _, what := range []string{stored, taken, begun, finished} {
		fmt.Fprintf(out, "| %s | %.0f | %.0f |\n", what, median(since[what]), slices.Max(since[what]))
	}
	fmt.Fprintf(out, "\nOf it to fetch, check, load and try it: %.0f ms, at most %.0f.\n", median(load),
		slices.Max(load))
	return nil
}
