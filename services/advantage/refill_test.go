package advantage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// plots are the rewards of each group that is asked for, by uid; any other varies.
var plots = map[schemas.UID][]float64{
	"b": {1, 1, 1}, // its second try is fine
	"c": {missing, missing, missing}, "c-r1": {0, 0, 0},
	"d": {1, 1, 1}, "d-r1": {1, 1, 1}, "d-r2": {.5, .5, .5},
}

// plot is the rewards of a group.
func plot(run schemas.Run, uid schemas.UID, p *schemas.Prompt, seq uint64) []*schemas.Reward {
	values, ok := plots[uid]
	if !ok {
		values = []float64{0, .5, 1}
	}
	var out []*schemas.Reward
	for i, v := range values {
		out = append(out, made(run, uid, int64(i), 3, v, func(g *schemas.Group) {
			g.Batch, g.BatchGroups, g.PromptSeq, g.Refill = p.Batch.ID, p.Batch.Groups, seq, p.Refill
			g.Advantage.Std = p.Advantage.Std
			g.GroupPolicy = &schemas.GroupPolicy{
				ZeroStd: "refill", Failed: "refill", RefillRounds: new(int64(2)), MaxPolicySpan: new(int64(1)),
			}
		}))
	}
	return out
}

// sampled stands for the stages before: it answers every prompt of a run with rewards.
func (p *plane) sampled(t *testing.T, run schemas.Run) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go func() {
		for m, err := range p.Read(ctx, schemas.StreamPrompts, []string{schemas.PromptSubject(run)},
			bus.ReadOptions{Live: true}) {
			var prompt schemas.Prompt
			if err == nil {
				err = schemas.Decode(m.Data, &prompt)
			}
			for i, r := range plot(run, prompt.UID, &prompt, m.Seq) {
				if err == nil && i == 0 {
					_, err = p.Publish(ctx, openingOf(r))
				}
				if err == nil {
					_, err = p.Publish(ctx, r)
				}
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, bus.ErrClosed) {
				t.Errorf("answer prompts: %v", err)
				return
			}
		}
	}()
}

func (p *plane) ask(t *testing.T, run schemas.Run, uids []schemas.UID, std string) {
	t.Helper()
	for _, uid := range uids {
		data, err := schemas.Encode(&schemas.Prompt{
			UID: uid, Prompt: "x", Batch: &schemas.BatchSpec{ID: "b", Groups: int64(len(uids))},
			Advantage: schemas.AdvantageSpec{Std: std},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.PublishPrompt(t.Context(), run, data, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// delivered waits until the worker of a batch has all of its rewards in hand.
func (p *plane) delivered(t *testing.T, batch string) {
	t.Helper()
	bustest.Until(t, "all rewards of "+batch+" in hand", func() error {
		c, err := p.JetStream().Consumer(t.Context(), schemas.StreamRewards,
			testConfig().consumer(schemas.Partition(batch)).Name)
		if err != nil {
			return err
		}
		if n := c.CachedInfo().NumPending; n > 0 {
			return fmt.Errorf("%d are not", n)
		}
		return nil
	})
}

// Groups that do not count are replaced until the batch is full, at most twice each, and
// all is counted; with one scale for all and with one each.
func TestRefill(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	for _, std := range []string{"group", "global"} {
		t.Run("full, "+std, func(t *testing.T) {
			run := schemas.Run("full-" + std)
			p.sampled(t, run)
			p.ask(t, run, []schemas.UID{"a", "b", "c"}, std)
			results := p.results(t, run, 7)
			b := batchOf(t, results, run, "b")
			if b.Status != "complete" || b.Groups != 3 || b.Expected != 3 || b.Refills != 3 || b.Samples != 9 ||
				!slices.Equal(b.UIDs, []schemas.UID{"a", "b-r1", "c-r2"}) ||
				!slices.Equal(b.Dropped, []schemas.UID{"b", "c", "c-r1"}) {
				t.Errorf("batch %+v", b)
			}
			for uid, want := range map[schemas.UID]string{
				"a": "complete ", "b": "filtered b-r1", "b-r1": "complete ", "c": "failed c-r1",
				"c-r1": "filtered c-r2", "c-r2": "complete ",
			} {
				a := advantageOf(t, results, run, uid)
				if got := a.Status + " " + string(a.RefilledBy); got != want {
					t.Errorf("%s: %s, want %s", uid, got, want)
				}
				for _, m := range a.Members {
					if (m.Advantage != nil) != (a.Status == "complete") {
						t.Errorf("%s: member %+v", uid, m)
					}
				}
			}
		})
		t.Run("rounds used up, "+std, func(t *testing.T) {
			run := schemas.Run("short-" + std)
			p.sampled(t, run)
			p.ask(t, run, []schemas.UID{"a", "d"}, std)
			b := batchOf(t, p.results(t, run, 5), run, "b")
			if b.Status != "short" || b.Groups != 1 || b.Refills != 2 ||
				!slices.Equal(b.Dropped, []schemas.UID{"d", "d-r1", "d-r2"}) {
				t.Errorf("batch %+v", b)
			}
		})
	}
}

// A group that is a batch of its own is replaced, too; one whose prompt is no longer
// stored is not.
func TestRefill_Alone(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	p.ask(t, "r", []schemas.UID{"b"}, "group")
	var prompt schemas.Prompt
	for _, uid := range []schemas.UID{"b", "gone"} {
		seq := uint64(1)
		if uid == "gone" {
			seq = 999
		}
		for i := range int64(2) {
			p.put(t, made("r", uid, i, 2, 1, func(g *schemas.Group) {
				g.PromptSeq = seq
				g.GroupPolicy = &schemas.GroupPolicy{
					ZeroStd: "refill", Failed: "keep", RefillRounds: new(int64(1)), MaxPolicySpan: new(int64(1)),
				}
			}))
		}
	}
	results := p.results(t, "r", 2)
	if a := advantageOf(t, results, "r", "b"); a.Status != "filtered" || a.RefilledBy != "b-r1" {
		t.Errorf("%+v", a)
	}
	if a := advantageOf(t, results, "r", "gone"); a.Status != "filtered" || a.RefilledBy != "" {
		t.Errorf("%+v", a)
	}
	// The prompt is published after the result is stored.
	bustest.Until(t, "the prompt of b-r1", func() error {
		m, err := p.Newest(t.Context(), schemas.StreamPrompts)
		if err != nil {
			return err
		}
		prompt = schemas.Prompt{}
		if err := schemas.Decode(m.Data, &prompt); err != nil {
			return err
		}
		if prompt.UID != "b-r1" {
			return fmt.Errorf("the newest prompt is of %s", prompt.UID)
		}
		return nil
	})
	if prompt.Refill.Root != "b" || prompt.Refill.Round != 1 {
		t.Errorf("refill %+v", prompt.Refill)
	}
}

// A batch waits for the groups that were replaced, too, when they come after those in
// their place, as they do when the worker that had them in hand is killed.
func TestRefill_ReplacedComeLast(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	for _, std := range []string{"group", "global"} {
		run := schemas.Run("r-" + std)
		p.ask(t, run, []schemas.UID{"a", "c"}, std)
		last, err := p.Newest(t.Context(), schemas.StreamPrompts)
		if err != nil {
			t.Fatal(err)
		}
		prompt := &schemas.Prompt{
			Batch: &schemas.BatchSpec{ID: "b", Groups: 2}, Advantage: schemas.AdvantageSpec{Std: std},
		}
		put := func(uid schemas.UID, round int64) {
			if prompt.Refill = nil; round > 0 {
				prompt.Refill = &schemas.Refill{Root: "c", Round: round}
			}
			p.put(t, plot(run, uid, prompt, last.Seq)...)
		}
		put("a", 0)
		put("c-r2", 2)
		p.delivered(t, "b")
		put("c-r1", 1)
		p.delivered(t, "b")
		put("c", 0)
		b := batchOf(t, p.results(t, run, 5), run, "b")
		if b.Status != "complete" || b.Groups != 2 || b.Refills != 2 ||
			!slices.Equal(b.UIDs, []schemas.UID{"a", "c-r2"}) || !slices.Equal(b.Dropped, []schemas.UID{"c", "c-r1"}) {
			t.Errorf("%s: batch %+v", std, b)
		}
	}
}

// The worker is killed again and again, wherever it is, while batches with replacements
// close: what is stored is what an undisturbed worker stores, each once.
func TestRefill_Killed(t *testing.T) {
	const batches = 12
	run := func(i int) schemas.Run { return schemas.Run(fmt.Sprintf("r%02d", i)) }
	uids := []schemas.UID{"a", "b", "c", "d"}
	begin := func(p *plane, i int) {
		p.sampled(t, run(i))
		p.ask(t, run(i), uids, []string{"group", "global"}[i%2])
	}
	calm := newPlane(t)
	calm.serve(t, testConfig())
	rough := newPlane(t)
	cfg := testConfig()
	worker := rough.serve(t, cfg)
	rng := rand.New(rand.NewPCG(8, 15))
	kills := 0
	for i := range batches {
		begin(calm, i)
		begin(rough, i)
		for range 3 {
			time.Sleep(time.Duration(rng.IntN(12)) * time.Millisecond) // wherever it is
			worker.Kill()
			kills++
			worker = rough.serve(t, cfg)
		}
	}
	for i := range batches {
		want, got := calm.results(t, run(i), 10), rough.results(t, run(i), 10)
		for subject, data := range want {
			switch {
			case strings.HasPrefix(subject, schemas.Prefix+"batch."):
				a, err := schemas.ContentDigest(batchOf(t, want, run(i), "b"))
				b, err2 := schemas.ContentDigest(batchOf(t, got, run(i), "b"))
				if a != b || errors.Join(err, err2) != nil {
					t.Errorf("%s: %+v, want %+v", subject, batchOf(t, got, run(i), "b"), batchOf(t, want, run(i), "b"))
				}
			case !bytes.Equal(got[subject], data):
				t.Errorf("%s: %+v, want %+v", subject,
					advantageOf(t, got, run(i), schemas.UID(strings.Split(subject, ".")[4])), advantageOf(t, want,
						run(i), schemas.UID(strings.Split(subject, ".")[4])))
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s: %d results, want %d", run(i), len(got), len(want))
		}
	}
	t.Logf("%d kills", kills)
}

// A batch closes at its deadline with what was stored before, and a worker that takes
// over while it closes counts no more than the first: results that are stored already
// and rewards that came after the deadline change nothing.
func TestBatch_TakeoverAtTheDeadline(t *testing.T) {
	const size = 2
	var p *plane
	var end time.Time
	in := func(g *schemas.Group) {
		g.Batch, g.BatchGroups, g.Advantage.Std, g.Deadline = "b", 3, schemas.StdGlobal, end.UnixNano()
	}
	bustest.Before(t, func(deadline time.Time) {
		p, end = newPlane(t), deadline
		first := p.serve(t, testConfig())
		p.put(t, made("r", "a", 0, size, 1, in), made("r", "a", 1, size, 3, in), made("r", "b", 0, size, 0, in))
		p.delivered(t, "b")
		first.Kill()
	})
	// No worker runs at the deadline; then the rest of b and a whole group come, too late.
	time.Sleep(time.Until(end))
	p.put(t, made("r", "b", 1, size, 100, in), made("r", "c", 0, size, 50, in), made("r", "c", 1, size, 70, in))
	p.serve(t, testConfig())
	results := p.results(t, "r", 4)
	b := batchOf(t, results, "r", "b")
	if b.Status != "partial" || !slices.Equal(b.UIDs, []schemas.UID{"a", "b"}) || b.Samples != 3 {
		t.Errorf("batch %+v; want a and the first sample of b", b)
	}
	if a := advantageOf(t, results, "r", "b"); a.Status != "partial" || a.Members[1].Status != "missing" ||
		a.BatchSamples != 3 {
		t.Errorf("b: %+v", a)
	}
	if a := advantageOf(t, results, "r", "c"); a.Status != "failed" ||
		!strings.Contains(a.Error, "closed without the group") {
		t.Errorf("c: %+v", a)
	}
	for _, d := range bustest.Dead(t, p.Bus, 3) {
		if d.Code != schemas.CodeLate || len(d.Data) == 0 {
			t.Errorf("dead letter %+v", d)
		}
	}
}
