package integration_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
	proof "github.com/meander-rl/meander/services/verify"
)

// brake is the closed-form model, which stops in each sample at a point of its own: when as many
// velocities of a prompt as after says have been taken, or before the image is decoded.
type brake struct {
	model.Model
	after   map[string]int
	release chan struct{}
	fails   bool // once, instead of stopping
	goesOn  bool // when released
	decodes bool

	mu    sync.Mutex
	taken map[string]int
	held  int
}

func (b *brake) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	prompt := rows[0].Conditioning.Prompt
	b.mu.Lock()
	b.taken[prompt]++
	after, braked := b.after[prompt]
	hold := braked && b.taken[prompt] > after
	if hold && b.fails {
		b.fails, b.after[prompt] = false, 1<<30
		b.mu.Unlock()
		return errors.New("out of luck")
	}
	b.mu.Unlock()
	if hold {
		if err := b.hold(ctx); err != nil {
			return err
		}
	}
	return b.Model.Velocity(ctx, rows, size)
}

func (b *brake) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	if b.decodes {
		return b.Model.Decode(ctx, latents, size)
	}
	return model.Media{}, b.hold(ctx)
}

func (b *brake) hold(ctx context.Context) error {
	b.mu.Lock()
	b.held++
	b.mu.Unlock()
	select {
	case <-b.release:
		if b.goesOn {
			return nil
		}
		return errors.New("released")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// holds waits until the brake has stopped n samples and so many steps are stored.
func (b *brake) holds(t *testing.T, w *world, n int, steps uint64) {
	t.Helper()
	bustest.Until(t, "all samples are where they shall be cut off", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if stored := w.Info(t, schemas.StreamSteps).State.Msgs; b.held < n || stored < steps {
			return fmt.Errorf("%d of %d samples, %d of %d steps", b.held, n, stored, steps)
		}
		return nil
	})
}

// config of a sampler with one sample in each micro-batch, so that one can stop by itself. b is
// nil for a model without a brake.
func resumeConfig(b *brake, places int) sampler.Config {
	c := sampler.DefaultConfig()
	c.Model, c.Batch, c.Workers, c.AckWait, c.DrainTimeout = "synthetic", 1, places, time.Second, 10*time.Millisecond
	if b != nil {
		family := synthetic.Family()
		open := family.Open
		family.Open = func(dir string, o model.Options) (m model.Model, err error) {
			b.Model, err = open(dir, o)
			return b, err
		}
		c.Models = model.Registry{family}
	}
	return c
}

func (w *world) sampler(t *testing.T, c sampler.Config) *bustest.Service {
	t.Helper()
	return w.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, c, b, zerolog.Nop()) })
}

// resumeSteps is T.
const resumeSteps = 8

type resumeCase struct {
	name    string
	rollout schemas.Rollout
	begin   int64 // of a segment
	// from are the states that it can go on from, in order, besides the one that it begins with.
	from []int64
}

func resumeCases() []resumeCase {
	none, two := []int64{}, []int64{2, 5}
	every := func(k int64) *int64 { return &k }
	return []resumeCase{
		{"all", schemas.Rollout{}, 0, []int64{1, 2, 3, 4, 5, 6, 7}},
		{
			"all, with every",
			schemas.Rollout{CheckpointEvery: every(3), LatentsDType: "BF16"},
			0,
			[]int64{1, 2, 3, 4, 5, 6, 7},
		},
		{"none", schemas.Rollout{ReturnStepIndices: none}, 0, nil},
		{
			"every 3",
			schemas.Rollout{ReturnStepIndices: none, CheckpointEvery: every(3), SDEType: "dance_sde"},
			0,
			[]int64{3, 6},
		},
		{"every 2, half", schemas.Rollout{
			ReturnStepIndices: []int64{8}, CheckpointEvery: every(2), LatentsDType: "F16",
			SDEType: "cps", LogProbKind: "squared",
		}, 0, []int64{2, 4, 6}},
		{
			"evaluated",
			schemas.Rollout{SDEType: "ode", ReturnStepIndices: none, CheckpointEvery: every(1)},
			0,
			[]int64{1, 2, 3, 4, 5, 6, 7},
		},
		{"heun", schemas.Rollout{Solver: "heun", SDEStepIndices: two, CheckpointEvery: every(4)}, 0, []int64{2, 3, 5, 6}},
		{"rk4", schemas.Rollout{
			Solver: "rk4", SDEStepIndices: none, ReturnStepIndices: none, CheckpointEvery: every(3),
			Debug: []string{"mean", "noise"},
		}, 0, []int64{3, 6}},
		{"dpm", schemas.Rollout{Solver: "dpm", SDEStepIndices: two}, 0, []int64{2, 3, 5, 6}},
		{
			"unipc",
			schemas.Rollout{Solver: "unipc", SDEStepIndices: two, ReturnStepIndices: none, CheckpointEvery: every(2)},
			0,
			[]int64{2, 3, 5, 6},
		},
		{"dpm alone", schemas.Rollout{Solver: "dpm", SDEType: "ode"}, 0, nil},
		{"a part", schemas.Rollout{SDEStepIndices: two, ReturnStepIndices: none, CheckpointEvery: every(2)}, 3, []int64{5}},
	}
}

// prompt is the one that is cut off when m steps of T are made.
func (c resumeCase) prompt(m int64) *schemas.Prompt {
	p := &schemas.Prompt{
		UID: schemas.UID(fmt.Sprint("m", m)), Prompt: fmt.Sprintf("%s, cut off at %d", c.name, m), Seed: new(int64(5)),
		GroupSize:     new(int64(1)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(resumeSteps)), Height: new(int64(32)), Width: new(int64(32)), Rollout: c.rollout},
		Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
	}
	if c.begin > 0 {
		p.Start = &schemas.Start{Latents: resumeStates(4), StepIndex: new(c.begin)}
		p.Stop = &schemas.Stop{StepIndex: new(int64(resumeSteps - 1))}
	}
	return p
}

// resumeStates are those of one sample, for all.
func resumeStates(tokens int64) *schemas.Tensor {
	t := &schemas.Tensor{DType: "F32", Shape: []int64{1, tokens, 64}, Data: make([]byte, 4*64*tokens)}
	for i := range t.Data {
		if i%4 < 2 {
			t.Data[i] = byte(i)
		} else if i%4 == 3 {
			t.Data[i] = 0x3f
		}
	}
	return t
}

func publish(t *testing.T, w *world, run schemas.Run, prompts ...*schemas.Prompt) {
	t.Helper()
	for _, p := range prompts {
		if _, err := w.client.Publish(t.Context(), run, p); err != nil {
			t.Fatalf("%q: %v", p.Prompt, err)
		}
	}
}

func trajectories(t *testing.T, w *world, run schemas.Run, n int) map[schemas.UID]*schemas.Trajectory {
	t.Helper()
	out := map[schemas.UID]*schemas.Trajectory{}
	for _, m := range bustest.Await(t, w.Bus, n, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "*")) {
		tr := bustest.Decode[schemas.Trajectory](t, m)
		out[tr.UID] = tr
	}
	return out
}

// A sampler killed after any number of steps, of any kind: another one goes on from the last
// state that was stored, makes again what came after it and no more, and comes to the content
// of a rollout that nothing disturbed. verify proves it.
func TestResume_KilledAtEachStep(t *testing.T) {
	t.Parallel()
	for _, c := range resumeCases() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.Serve(t, defaults().run("intake"))
			end, cuts := int64(resumeSteps), []*schemas.Prompt{}
			if c.begin > 0 {
				end--
			}
			b := &brake{after: map[string]int{}, taken: map[string]int{}, release: make(chan struct{})}
			steps := uint64(0)
			for m := c.begin; m <= end; m++ {
				p := c.prompt(m)
				cuts = append(cuts, p)
				steps += uint64(m - c.begin)
				b.after[p.Prompt] = 0
				for i := c.begin; i < m; i++ {
					b.after[p.Prompt] += c.evaluations(i)
				}
			}
			if c.begin > 0 { // which has no image to stop before
				cuts, steps = cuts[:len(cuts)-1], steps-uint64(end-c.begin)
			}
			var killed *bus.Bus
			first := w.Serve(t, func(ctx context.Context, own *bus.Bus) error {
				killed = own
				return sampler.Run(ctx, resumeConfig(b, len(cuts)), own, zerolog.Nop())
			})
			publish(t, w, "cut", cuts...)
			b.holds(t, w, len(cuts), steps)
			b.releasedWhenClosed(killed)
			first.Kill()

			next := resumeConfig(nil, len(cuts))
			counted := prometheus.NewRegistry()
			next.Metrics = counted
			w.sampler(t, next)
			resumed := trajectories(t, w, "cut", len(cuts))
			publish(t, w, "calm", cuts...)
			calm := trajectories(t, w, "calm", len(cuts))
			samples, taken, made := 0., 0., 0.
			for _, p := range cuts {
				m, _ := strconv.ParseInt(string(p.UID[1:]), 10, 64)
				n := c.check(t, m, end, resumed[p.UID], calm[p.UID])
				if made += float64(end - c.begin - n); n > 0 {
					samples, taken = samples+1, taken+float64(n)
				}
				if steps, err := w.client.Steps(t.Context(), resumed[p.UID]); err != nil ||
					int64(len(steps)) != end-c.begin {
					t.Errorf("cut off at %d: %d steps, %v", m, len(steps), err)
				}
			}
			made += float64(len(cuts)) * float64(end-c.begin) // of the calm run
			got := []float64{
				counter(t, counted, "resumed_total"), counter(t, counted, "resumed_steps_total"),
				counter(t, counted, "steps_total"),
			}
			if want := []float64{samples, taken, made}; !slices.Equal(got, want) {
				t.Errorf("counted samples that went on, steps taken over and steps made %v, want %v", got, want)
			}
			if report, err := proof.Run(t.Context(), w.Bus, "cut", proof.Options{}); err != nil ||
				len(report.Mismatches) > 0 ||
				report.MaxRatio != 0 {
				t.Errorf("verify: %+v, %v", report, err)
			}
		})
	}
}

// counter is the value of a sampler's counter, or gauge.
func counter(t *testing.T, of prometheus.Gatherer, name string) float64 {
	t.Helper()
	all, err := of.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "meander_sampler_"+name {
			return f.GetMetric()[0].GetCounter().GetValue() + f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no counter %s", name)
	return 0
}

// A try that fails, where the next does not, is gone on with by the same sampler.
func TestResume_TriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Serve(t, defaults().run("intake"))
	c := resumeCase{name: "failed", rollout: schemas.Rollout{
		SDEStepIndices: []int64{}, ReturnStepIndices: []int64{}, CheckpointEvery: new(int64(2)),
	}, from: []int64{2, 4, 6}}
	p := c.prompt(5)
	w.sampler(t, resumeConfig(&brake{
		after: map[string]int{p.Prompt: 5}, taken: map[string]int{}, fails: true,
		decodes: true,
	}, 1))
	publish(t, w, "cut", p)
	got := trajectories(t, w, "cut", 1)[p.UID]
	publish(t, w, "calm", p)
	c.check(t, 5, resumeSteps, got, trajectories(t, w, "calm", 1)[p.UID])
}

// A sampler that is taken for dead in the middle of a sample, and goes on when another one has made it:
// it leaves none of its steps, those that it has stored since either.
func TestResume_SlowerThanAnother(t *testing.T) {
	t.Parallel()
	const samples = 2 // as many as the slow sampler takes: it has no place for what it is to lose
	w := newWorld(t)
	w.Serve(t, defaults().run("intake"))
	p := resumeCase{name: "slow", rollout: schemas.Rollout{ReturnStepIndices: []int64{}}}.prompt(5)
	p.GroupSize = new(int64(samples))
	slow := &brake{
		after: map[string]int{p.Prompt: 5}, taken: map[string]int{}, release: make(chan struct{}), goesOn: true,
		decodes: true,
	}
	w.sampler(t, resumeConfig(slow, 1))
	publish(t, w, "r", p)
	slow.holds(t, w, 1, 5)
	bustest.Until(t, "the slow sampler has both", func() error {
		return inHand(t, w.Bus, schemas.StreamRequests,
			"sampler-synthetic", samples)
	})
	w.sampler(t, resumeConfig(nil, 1))
	for i := 1; i <= samples; i++ { // the first delivery of each request is void, as when the ack wait is over
		if err := w.Conn().Publish(fmt.Sprintf("$JS.ACK.%s.sampler-synthetic.1.%d.%d.0.0", schemas.StreamRequests, i,
			i),
			[]byte("-NAK")); err != nil {
			t.Fatal(err)
		}
	}
	made := bustest.Await(t, w.Bus, samples, schemas.StreamTrajectories, schemas.TrajectoryFilter("r", "*"))
	close(slow.release)
	bustest.Until(t, "the steps of the slow sampler are made and gone", func() error {
		const all = samples * resumeSteps
		if s := w.Info(t, schemas.StreamSteps).State; s.LastSeq < all+resumeSteps || s.Msgs != all {
			return fmt.Errorf("%d were stored, %d are", s.LastSeq, s.Msgs)
		}
		return nil
	})
	for _, m := range made {
		tr := bustest.Decode[schemas.Trajectory](t, m)
		if n := len(harness.Subjects(t, w.Bus, schemas.StreamSteps,
			strings.TrimSuffix(tr.StepSubject(0), "0")+">")); n != resumeSteps {
			t.Errorf("%d steps of sample %d are stored, want %d", n, tr.SampleIndex, resumeSteps)
		}
	}
}

// releasedWhenClosed has the brake released once a bus is closed.
func (b *brake) releasedWhenClosed(killed *bus.Bus) {
	closed := killed.Conn().StatusChanged(nats.CLOSED)
	go func() {
		<-closed
		close(b.release)
	}()
}

func (c resumeCase) evaluations(step int64) int {
	r := c.rollout
	if r.SDEType == "ode" || r.SDEStepIndices != nil && !slices.Contains(r.SDEStepIndices, step) {
		return max(1, flow.Solver(r.Solver).Evaluations())
	}
	return 1
}

// check compares a rollout that was cut off when m steps were made with one that was not, and
// returns how many steps were taken over.
func (c resumeCase) check(t *testing.T, m, end int64, got, calm *schemas.Trajectory) int64 {
	t.Helper()
	from := c.begin
	for _, s := range c.from {
		if s < m {
			from = s
		}
	}
	if got == nil || got.StopReason != schemas.StopCompleted {
		t.Fatalf("cut off at %d: %+v", m, got)
	}
	a, err1 := schemas.ContentDigest(got)
	b, err2 := schemas.ContentDigest(calm)
	if err := errors.Join(err1, err2); err != nil || a != b || got.ContentDigest != calm.ContentDigest {
		t.Errorf("cut off at %d: digests differ from those of the calm run: %v", m, err)
	}
	if k := c.rollout.CheckpointEvery; k != nil && c.rollout.Solver != "unipc" && m-from > *k {
		t.Errorf("cut off at %d: goes on from state %d, more than %d steps back", m, from, *k)
	}
	for i, ref := range got.Steps {
		if taken := c.begin+int64(i) < from; (ref.Attempt != "") != taken {
			t.Errorf("cut off at %d, gone on from %d: step %d is of attempt %q", m, from, c.begin+int64(i), ref.Attempt)
		}
	}
	if n := len(got.Attempts()); n != 1 && from == c.begin || n != 2 && from > c.begin {
		t.Errorf("cut off at %d: attempts %v", m, got.Attempts())
	}
	return from - c.begin
}
