package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/sampler"
)

// cycle is how many prompts are published at least before it may end: a batch is whole then.
const cycle = 6

// prompt is the i-th of the load: a plain group, one with checkpoints to go on from, two that are a batch, thoughts
// that are painted twice each, and rounds of thinking and painting that a judge may end.
func prompt(i int) *schemas.Prompt {
	p := &schemas.Prompt{
		UID: schemas.UID(fmt.Sprintf("g%04d", i)), Prompt: fmt.Sprintf("image %d", i), GroupSize: new(int64(group)),
		Seed: new(int64(7)),
		ImageSettings: schemas.ImageSettings{
			Height: new(int64(64)), Width: new(int64(64)), NumInferenceSteps: new(int64(steps)),
			Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 3}},
		},
	}
	switch p.Model = "synthetic"; i % cycle {
	case 1:
		p.Rollout.CheckpointEvery = new(int64(5))
	case 2, 3:
		p.Batch = &schemas.BatchSpec{ID: batchOf(i), Groups: 2}
		p.Advantage = schemas.AdvantageSpec{Std: schemas.StdGlobal}
	case 4, 5:
		p.Prompt = fmt.Sprintf("%d+%d=?", 10+i%40, 10+i%30)
		p.Stages, p.ImageSettings, p.Model = stagesOf(p.ImageSettings), schemas.ImageSettings{}, ""
		if i%cycle == 4 {
			p.Stages[1].Children = new(int64(2))
			break
		}
		p.Rounds, p.Stages[0].Prompt = new(int64(2)), "{prompt}{judge.text}"
		p.Stages = append(p.Stages, schemas.StageSpec{
			Name: "judge", Interaction: &schemas.Interaction{Name: "sums"}, Prompt: "{think.text}",
		})
	}
	return p
}

// stagesOf are a thinker and a painter.
func stagesOf(paint schemas.ImageSettings) []schemas.StageSpec {
	return []schemas.StageSpec{
		{Name: "think", Routing: schemas.Routing{Model: "sums"}, Text: &schemas.Text{MaxNewTokens: new(int64(4))}},
		{Name: "paint", Routing: schemas.Routing{Model: "synthetic"}, Prompt: `a sign that says "{think.text}"`, ImageSettings: paint},
	}
}

// staged are the stages of each of n prompts, in the order in which a sample runs them.
func staged(n int) map[schemas.UID][]harness.StageOf {
	all := map[schemas.UID][]harness.StageOf{}
	for i := range n {
		switch uid := prompt(i).UID; i % cycle {
		case 4:
			all[uid] = []harness.StageOf{
				{Stage: "think", Every: 2, Steps: harness.AnySteps},
				{Stage: "paint", Every: 1, Steps: steps},
			}
		case 5:
			for _, round := range []schemas.Stage{"", "-2"} {
				all[uid] = append(all[uid], harness.StageOf{Stage: "think" + round, Every: 1, Steps: harness.AnySteps},
					harness.StageOf{Stage: "paint" + round, Every: 1, Steps: steps},
					harness.StageOf{Stage: "judge" + round, Every: 1})
			}
		}
	}
	return all
}

// books are what is stored of the run, with the stages that were asked for.
func (f *feed) books(t *testing.T, b *bus.Bus) *harness.Books {
	t.Helper()
	k := harness.ReadBooks(t, b, f.run)
	k.Staged = staged(len(f.asked))
	return k
}

func batchOf(i int) string { return fmt.Sprintf("b%04d", i/cycle) }

// feed publishes groups as others close.
type feed struct {
	client  *client.Client
	run     schemas.Run
	open    chan struct{}
	stop    func() // returns when every prompt is stored
	abandon func() // stops, and lets be what is open

	mu     sync.Mutex
	asked  map[schemas.UID]int64 // samples by uid
	closed map[schemas.UID]bool
}

// publishing publishes a group whenever one closes, and no sooner than pace after the one before.
func publishing(t *testing.T, b *bus.Bus, run schemas.Run, pace time.Duration) *feed {
	ctx, end := context.WithCancel(t.Context())
	alive, abandon := context.WithCancel(t.Context())
	f := &feed{
		client: client.New(b), run: run, open: make(chan struct{}, window), asked: map[schemas.UID]int64{},
		closed: map[schemas.UID]bool{},
	}
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		f.follow(t)
	}()
	t.Cleanup(func() { <-followed })
	var work sync.WaitGroup
	work.Go(func() {
		for i := 0; ; i++ {
			if ctx.Err() != nil && i%cycle == 0 {
				return
			}
			select {
			case f.open <- struct{}{}:
			case <-alive.Done():
				return
			}
			time.Sleep(pace)
			p := prompt(i)
			f.mu.Lock()
			f.asked[p.UID] = group
			f.mu.Unlock()
			work.Go(func() { f.publish(alive, t, p) })
			if i%5 == 0 { // a client that is not sure publishes twice
				work.Go(func() { f.publish(alive, t, p) })
			}
		}
	})
	var stored atomic.Bool
	done := sync.OnceFunc(func() {
		work.Wait()
		stored.Store(true)
	})
	f.stop = func() {
		end()
		go done()
		bustest.Until(t, "the last prompts are stored", func() error {
			if stored.Load() {
				return nil
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			return fmt.Errorf("%d asked, %d closed", len(f.asked), len(f.closed))
		})
	}
	f.abandon = func() {
		abandon()
		done()
	}
	return f
}

// follow notes the groups that close, and lets as many others in.
func (f *feed) follow(t *testing.T) {
	for g, err := range f.client.Groups(t.Context(), f.run, "") {
		if err != nil {
			if t.Context().Err() == nil {
				t.Errorf("advantages: %v", err)
			}
			return
		}
		f.mu.Lock()
		first := !f.closed[g.UID]
		f.closed[g.UID] = true
		f.mu.Unlock()
		if first {
			<-f.open
		}
	}
}

// publish until the prompt is stored; whether intake lives to answer does not matter.
func (f *feed) publish(alive context.Context, t *testing.T, p *schemas.Prompt) {
	for alive.Err() == nil {
		ctx, cancel := context.WithTimeout(alive, 3*time.Second)
		_, err := f.client.Publish(ctx, f.run, p)
		cancel()
		var refused *client.RefusedError
		switch {
		case err == nil, errors.Is(err, client.ErrNoAnswer):
			return
		case errors.As(err, &refused):
			t.Errorf("prompt %s: %v", p.UID, err)
			return
		}
	}
}

func (f *feed) wait(t *testing.T) {
	t.Helper()
	bustest.Until(t, "all groups closed", func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		var open []schemas.UID
		for uid := range f.asked {
			if !f.closed[uid] {
				open = append(open, uid)
			}
		}
		if len(open) > 0 {
			return fmt.Errorf("%d of %d; open: %v", len(f.closed), len(f.asked), open)
		}
		return nil
	})
}

// calm is what the same prompts give, under the same run id, where nothing is hurt.
func (f *feed) calm(t *testing.T) *harness.Books {
	t.Helper()
	p := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Intake.Models = "synthetic", []schemas.Lane{"synthetic", "sums"}
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	texts := config.Sampler
	texts.Model = textModel(t)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, texts, b, zerolog.Nop()) })
	c := client.New(p.Bus)
	for i := range len(f.asked) {
		ctx, cancel := context.WithTimeout(t.Context(), bustest.Patience)
		_, err := c.Publish(ctx, f.run, prompt(i))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, moved := bustest.WhileItMoves(t)
	closed := map[schemas.UID]bool{}
	for g, err := range c.Groups(ctx, f.run, "") {
		if err != nil {
			t.Fatalf("the calm run: %v; %d of %d groups", err, len(closed), len(f.asked))
		}
		moved()
		if closed[g.UID] = true; len(closed) == len(f.asked) {
			break
		}
	}
	harness.AwaitIdle(t, p.Bus)
	return f.books(t, p.Bus)
}

// textModel is the folder of the language model.
func textModel(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../../../deploy/models/sums")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// batchFaults says which batches are missing, or were not asked for.
func (f *feed) batchFaults(k *harness.Books) (found []harness.Fault) {
	want := map[string]bool{}
	for i := range len(f.asked) {
		if prompt(i).Batch != nil {
			want[batchOf(i)] = true
		}
	}
	for id := range want {
		if b := k.Batches[id]; b == nil {
			found = append(found, harness.Fault{Kind: harness.Lost, UID: id, What: "no batch"})
		} else if b.Groups != 2 || b.Samples != 2*group {
			found = append(found, harness.Fault{
				Kind: harness.Wrong, UID: id,
				What: fmt.Sprintf("batch of %d groups and %d samples; want 2 and %d", b.Groups, b.Samples, 2*group),
			})
		}
	}
	for id := range k.Batches {
		if !want[id] {
			found = append(found, harness.Fault{Kind: harness.Wrong, UID: id, What: "a batch that nobody asked for"})
		}
	}
	return found
}
