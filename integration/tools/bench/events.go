package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// eventsBench is one `bench events` command.
type eventsBench struct {
	sizes      []int // KiB of latents
	transports []string
	rounds     int
	volume     int // MiB of a round
	profile    time.Duration
	rate       int
	latency    time.Duration
	loop       time.Duration
	model      string
	grow       []int // samples
	settle     time.Duration

	*plane
	key []byte
}

func benchEventsCommand() *cobra.Command {
	b := eventsBench{settle: settleTime}
	c := &cobra.Command{
		Use:   "events",
		Short: "steps per second through the event plane beside a bare publisher, where its time goes, latency",
		Long: `events starts an embedded server on a store in a temporary folder and measures four things.

Throughput: the steps of samples, eight of them side by side and 28 steps each, go the way
that a sampler's steps go: digest, seal, encode, validate, publish without waiting, and at
the end of a sample wait until all are stored. A bare publisher sends messages of the same
size, subjects and headers, encoded beforehand, with the client library's own asynchronous
publish. Both have the same window, store on the same guarded stream, take turns at
going first, and have the server in the same process. The ratio is that of each round. A
profile then says what the processor's time of a message goes into.

Latency: steps come at a moderate rate; the time from handing one over to its arrival at a
subscriber with a connection of its own.

Loop: batches of a real model with all their steps recorded, and without: what the loop that makes
them waits for, and the processor's time of all of it.

Growth: what publishing and looking up steps costs when the stream holds more and more of them.

The report is Markdown.`,
		Example: `  bench events
  bench events --sizes 4 --rounds 21 --latency 0 --grow 0
  bench events --transport TCP`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.IntSliceVar(&b.sizes, "sizes", []int{4, 64, 512}, "KiB of latents in a step")
	f.StringSliceVar(&b.transports, "transport", []string{inProcess, loopback},
		"how publishers reach the server: "+inProcess+", "+loopback)
	f.IntVar(&b.rounds, "rounds", 9, "measured rounds of each; the medians are reported")
	f.IntVar(&b.volume, "volume", 192, "MiB of each round, at most 20000 steps")
	f.DurationVar(&b.profile, "profile", 5*time.Second,
		"time spent on what the processor does, for each size; 0 for none")
	f.IntVar(&b.rate, "rate", 100, "steps per second while latency is measured")
	f.DurationVar(&b.latency, "latency", 10*time.Second, "how long latency is measured, for each size; 0 for not")
	f.DurationVar(&b.loop, "loop", 15*time.Second,
		"how long a sampler's loop is measured with and without events; 0 for not")
	f.StringVar(&b.model, "model", "signs",
		"the model of that loop: a folder in the diffusers layout, or the name of a shipped model")
	f.IntSliceVar(&b.grow, "grow", []int{1000, 10_000, 100_000},
		"samples in the stream, ascending, when growth is looked at; 0 for not")
	return c
}

func (b *eventsBench) check() error {
	err := errors.Join(checkPositive("sizes", b.sizes, 900), checkPositive("rounds", []int{b.rounds}, 10_000),
		checkPositive("volume", []int{b.volume}, 16<<10), checkPositive("rate", []int{b.rate}, 10_000))
	for _, t := range b.transports {
		if t != inProcess && t != loopback {
			err = errors.Join(err, fmt.Errorf("--transport: %q; must be %s or %s", t, inProcess, loopback))
		}
	}
	if b.growing() {
		err = errors.Join(err, checkPositive("grow", b.grow, 10_000_000))
		if !slices.IsSorted(b.grow) {
			err = errors.Join(err, fmt.Errorf("--grow: %v; must ascend", b.grow))
		}
	}
	for flag, d := range map[string]time.Duration{"profile": b.profile, "latency": b.latency, "loop": b.loop} {
		if d < 0 || d > time.Hour {
			err = errors.Join(err, fmt.Errorf("--%s: %v; must be between 0 and 1h", flag, d))
		}
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

func (b *eventsBench) run(ctx context.Context, out, stderr io.Writer) error {
	if err := b.check(); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n", machine())
	return withPlane(ctx, stderr, func(p *plane) (err error) {
		b.plane = p
		if b.key, err = p.bus.SealKey(ctx); err != nil {
			return err
		}
		heading(out, "Throughput")
		fmt.Fprintf(out, "Rounds of %d MiB, at most %d steps: medians of %d, and the ratio of each round's rates "+
			"with its quartiles. Processor time includes the server's.\n\n", b.volume, maxRoundSteps, b.rounds)
		fmt.Fprint(out, "| step | connection | bare, steps/s | MB/s | event plane, steps/s | MB/s | ratio | CPU us "+
			"per step (bare, plane) | CPU ratio |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
		for i, kib := range b.sizes {
			for j, transport := range b.transports {
				b.tick("throughput", float64(i*len(b.transports)+j)/float64(len(b.sizes)*len(b.transports)))
				if err := b.throughput(ctx, out, kib, transport); err != nil {
					return err
				}
			}
		}
		if b.profile > 0 {
			heading(out, "Where the processor's time goes")
			for _, kib := range b.sizes {
				if err := b.profiles(ctx, out, kib); err != nil {
					return err
				}
			}
		}
		if b.latency > 0 {
			if err := b.latencies(ctx, out); err != nil {
				return err
			}
		}
		if b.loop > 0 {
			if err := b.overhead(ctx, out); err != nil {
				return err
			}
		}
		if b.growing() {
			return b.growth(ctx, out)
		}
		return nil
	})
}

// growing says whether growth is to be measured.
func (b *eventsBench) growing() bool { return !slices.Equal(b.grow, []int{0}) && len(b.grow) > 0 }

const (
	maxRoundSteps = 20_000
	// What the window of a sampler is by default.
	windowSteps, windowBytes = 4096, 64 << 20
	benchSteps               = 28 // of a sample
	benchBatch               = 8  // samples side by side
)

// stepMaker makes the steps of one size: what an engine hands over. Their tensors are of a few
// that differ.
type stepMaker struct {
	run     schemas.Run
	tensors [8][]byte
	shape   []int64
}

func newStepMaker(run schemas.Run, kib int) *stepMaker {
	m := &stepMaker{run: run, shape: []int64{int64(kib << 10 / 128), 64}}
	for i := range m.tensors {
		m.tensors[i] = make([]byte, kib<<10)
		for j := range m.tensors[i] {
			m.tensors[i][j] = byte(j*7 + j>>8*31 + i*13)
		}
	}
	return m
}

// step is a step of a sample with its names.
func (m *stepMaker) step(sample, index int) *schemas.Step {
	mean, sum := -1.21, -1.21*float64(m.shape[0]*m.shape[1])
	return &schemas.Step{
		Run: m.run, UID: schemas.UID(fmt.Sprintf("p%07d", sample/benchBatch)),
		SampleIndex: int64(sample % benchBatch), Stage: schemas.StageMain,
		Attempt:   "k3v9x2pq-17",
		StepIndex: int64(index), NumInferenceSteps: benchSteps, Transition: "sde", NoiseLevel: 0.7, Sigma: 0.5,
		SigmaNext: 0.4, Timestep: 500,
		StdDevT: 0.7, NoiseStd: 0.22, LogProb: &mean, LogProbSum: &sum, LogProbKind: "density",
		ElementCount: m.shape[0] * m.shape[1],
		Latents: []schemas.IndexedTensor{
			{Index: int64(index), Tensor: schemas.Tensor{
				DType: "F16", Shape: m.shape, Data: m.tensors[index%len(m.tensors)],
			}},
		},
		Debug: []schemas.NamedTensor{}, PolicyVersion: 3, WeightsDigest: strings.Repeat("1", 64),
		ScheduleDigest: strings.Repeat("0", 64),
		Sampler:        "sampler-k3v9x2pq", Backend: "cuda/sm_90", DeviceNS: 412_345,
	}
}

// place is the k-th step of samples that are stepped side by side.
func place(k int) (sample, index int) {
	group, rest := k/(benchBatch*benchSteps), k%(benchBatch*benchSteps)
	return group*benchBatch + rest%benchBatch, rest / benchBatch
}

// messages are those that the event plane makes of the same steps, but for the attempt's names.
func (m *stepMaker) messages(n int) ([]*nats.Msg, error) {
	payloads := make([][]byte, 64)
	var err error
	for k := range payloads {
		sample, index := place(k)
		e := m.step(sample, index)
		e.Seal = e.WeightsDigest
		if payloads[k], err = schemas.Encode(e); err != nil {
			return nil, err
		}
	}
	out := make([]*nats.Msg, n)
	for k := range out {
		e := m.step(place(k))
		subject := e.Subject()
		out[k] = &nats.Msg{Subject: subject, Data: payloads[k%len(payloads)], Header: nats.Header{
			schemas.HeaderType: {e.Type()}, schemas.HeaderContentType: {schemas.ContentType},
			jetstream.MsgIDHeader: {schemas.MessageID(subject)},
		}}
	}
	return out, nil
}

// window is how many steps of a size may be on their way.
func window(kib int) int { return max(1, min(windowSteps, windowBytes/(kib<<10))) }

// bare publishes messages with the client library and waits until all are stored.
func (b *eventsBench) bare(ctx context.Context, c *bus.Bus, kib, n int) (run func() error, err error) {
	messages, err := newStepMaker(b.nextRun(), kib).messages(n)
	if err != nil {
		return nil, err
	}
	return func() error {
		var failed error
		js, err := jetstream.New(c.Conn(), jetstream.WithPublishAsyncMaxPending(window(kib)),
			jetstream.WithPublishAsyncErrHandler(
				func(_ jetstream.JetStream, _ *nats.Msg, err error) { failed = err }))
		if err != nil {
			return err
		}
		defer js.CleanupPublisher()
		for _, m := range messages {
			if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(time.Minute)); err != nil {
				return fmt.Errorf("bare publisher: %w", err)
			}
		}
		select {
		case <-js.PublishAsyncComplete():
			return failed
		case <-ctx.Done():
			return ctx.Err()
		}
	}, nil
}

// record publishes steps as a sampler does and waits until all are stored.
func (b *eventsBench) record(ctx context.Context, c *bus.Bus, kib, n int) (run func() error, err error) {
	maker := newStepMaker(b.nextRun(), kib)
	return func() error {
		p := c.NewPublisher(windowSteps, windowBytes)
		defer p.Close()
		g, ctx := errgroup.WithContext(ctx)
		var batch [benchBatch]*recorder.Recording
		for k := range n {
			sample, index := place(k)
			at := sample % benchBatch
			if index == 0 {
				batch[at] = recorder.NewRecording(b.key, p)
			}
			r := batch[at]
			if err := r.Step(ctx, maker.step(sample, index)); err != nil {
				return err
			}
			if index == benchSteps-1 || k >= n-benchBatch {
				g.Go(func() error {
					_, err := r.Stored(ctx)
					return err
				})
			}
		}
		err := g.Wait()
		if retried := p.Stats().Retried; err == nil && retried > 0 {
			err = fmt.Errorf("%d steps had to be sent again", retried)
		}
		return err
	}, nil
}

// timed is the time and the processor's time of one round, whose messages are gone then.
func (b *eventsBench) timed(ctx context.Context, n int, run func() error) (took, cpu float64, err error) {
	runtime.GC()
	cpu = -cpuSeconds()
	began := time.Now()
	err = run()
	took = time.Since(began).Seconds()
	cpu += cpuSeconds()
	if err != nil {
		return 0, 0, err
	}
	info, err := b.bus.StreamInfo(ctx, schemas.StreamSteps)
	if err == nil && info.State.Msgs != uint64(n) {
		err = fmt.Errorf("%d of %d steps are stored", info.State.Msgs, n)
	}
	return took, cpu, errors.Join(err, b.clear(ctx, schemas.StreamSteps))
}

// steps of a round.
func (b *eventsBench) steps(kib int) int {
	return max(benchBatch, min(maxRoundSteps, b.volume<<10/kib))
}

type publishing func(ctx context.Context, c *bus.Bus, kib, n int) (run func() error, err error)

func (b *eventsBench) throughput(ctx context.Context, out io.Writer, kib int, transport string) (err error) {
	c, err := b.connect(ctx, transport)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	n := b.steps(kib)
	engines := []publishing{b.bare, b.record}
	var rate, cpu [2][]float64
	var ratios, ratiosCPU []float64
	for round := -1; round < b.rounds; round++ { // the first warms up
		var took, busy [2]float64
		for k := range engines {
			e := (k + round + 1) % len(engines)
			run, err := engines[e](ctx, c, kib, n)
			if err != nil {
				return err
			}
			if took[e], busy[e], err = b.timed(ctx, n, run); err != nil {
				return err
			}
		}
		if round < 0 {
			continue
		}
		for e := range engines {
			rate[e], cpu[e] = append(rate[e], float64(n)/took[e]), append(cpu[e], busy[e]/float64(n)*1e6)
		}
		ratios, ratiosCPU = append(ratios, took[0]/took[1]), append(ratiosCPU, busy[0]/busy[1])
	}
	bare, plane, ratio := median(rate[0]), median(rate[1]), median(ratios) // sorts
	mb := float64(kib) * 1024 / 1e6
	fmt.Fprintf(out, "| %d KiB | %s | %.0f | %.0f | %.0f | %.0f | **%.2f** (%.2f - %.2f) | %.1f, %.1f | %.2f |\n",
		kib, transport, bare, bare*mb, plane, plane*mb, ratio, percentile(ratios, .25), percentile(ratios,
			.75), median(cpu[0]), median(cpu[1]), median(ratiosCPU))
	return nil
}

// publishClasses are what the time of a message is for.
var publishClasses = []class{
	{"server.(*", "server: receive, store, acknowledge"},
	{"schemas.(*Step).TensorSums", "digests of the tensors, for all digests that they are in"},
	{"schemas.(*Step).ContentDigest", "content digest: equal samples have equal digests"},
	{"recorder.(*Sealer)", "seal: steps that an attempt may go on from"},
	{"schemas.payloadDigest", "payload digest: the trajectory names its steps by it"},
	{"schemas.precheck", "check of the structure"},
	{"schemas.appendEncode", "encode"},
	{").Validate", "validate: nothing invalid is stored"},
	{"bus.(*Publisher).ack", "acks"},
	{"jetstream.(*jetStream).handleAsyncReply", "acks"},
	{"nats.(*Conn).readLoop", "client: receive"},
	{"nats.(*Conn).waitForMsgs", "client: receive"},
	{"nats.(*Conn).publish", "client: send"},
	{"nats.(*Conn).flusher", "client: send"},
	{"bus.", "names, headers, window"},
	{"jetstream.", "names, headers, window"},
	{"main.(*stepMaker)", "the bench: steps as an engine makes them"},
	{"runtime.gcBgMarkWorker", "garbage collection"},
	{"runtime.bgsweep", "garbage collection"},
	{"runtime.mcall", "runtime: goroutines, timers"},
	{"runtime.systemstack", "runtime: goroutines, timers"},
	{"runtime.mstart", "runtime: goroutines, timers"},
}

// profiles says what both publishers have the processor do for a message.
func (b *eventsBench) profiles(ctx context.Context, out io.Writer, kib int) error {
	n := b.steps(kib)
	shares := [2]map[string]float64{}
	for e, engine := range []publishing{b.bare, b.record} {
		shares[e] = map[string]float64{}
		var samples, cpu float64
		steps := 0
		for began := time.Now(); time.Since(began) < b.profile/2; steps += n {
			b.tick("profile", float64(e)/2)
			run, err := engine(ctx, b.bus, kib, n)
			if err != nil {
				return err
			}
			var profile bytes.Buffer
			_, busy, err := b.timed(ctx, n, func() error {
				if err := pprof.StartCPUProfile(&profile); err != nil {
					return fmt.Errorf("profile: %w", err)
				}
				defer pprof.StopCPUProfile()
				return run()
			})
			if err != nil {
				return err
			}
			stacks, err := readProfile(profile.Bytes())
			if err != nil {
				return fmt.Errorf("read profile: %w", err)
			}
			for _, s := range stacks {
				shares[e][classOf(s.functions, publishClasses)] += float64(s.count)
				samples += float64(s.count)
			}
			cpu += busy
		}
		for class := range shares[e] {
			shares[e][class] *= cpu / float64(steps) * 1e6 / max(1, samples)
		}
	}
	fmt.Fprintf(out, "Steps of %d KiB, %s; microseconds per step:\n\n| what for | bare | event plane |\n| --- | --- "+
		"| --- |\n", kib, inProcess)
	both := maps.Clone(shares[0])
	maps.Copy(both, shares[1])
	for _, class := range slices.SortedFunc(maps.Keys(both), func(x, y string) int {
		return cmp.Or(cmp.Compare(shares[1][y], shares[1][x]), cmp.Compare(x, y))
	}) {
		fmt.Fprintf(out, "| %s | %.1f | %.1f |\n", class, shares[0][class], shares[1][class])
	}
	fmt.Fprintln(out)
	return nil
}
