package integration_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// books is what the streams hold of one run at the end.
type books struct {
	trajectories map[string]*schemas.Trajectory     // by uid and sample
	advantages   map[schemas.UID]*schemas.Advantage // by uid
	batches      map[string]*schemas.Batch          // by batch id
	// digests of the content of trajectories, rewards and advantages, by kind and key.
	digests map[string]string
	// steps stored, needed or not, by subject.
	steps int
	// twice are keys with more than one event, with how many.
	twice map[string]int
}

// readBooks reads everything a run stored. Keys come from the events and not from their
// subjects, so that it does not depend on the guard being there.
func readBooks(t *testing.T, b *bus.Bus, run schemas.Run) *books {
	t.Helper()
	k := &books{
		trajectories: map[string]*schemas.Trajectory{}, advantages: map[schemas.UID]*schemas.Advantage{}, batches: map[string]*schemas.Batch{},
		digests: map[string]string{}, twice: map[string]int{},
	}
	note := func(key string, e schemas.Event) {
		sum, err := schemas.ContentDigest(e)
		if err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		if _, ok := k.digests[key]; ok {
			k.twice[key]++
		}
		k.digests[key] = hex.EncodeToString(sum[:])
	}
	each(t, b, schemas.StreamTrajectories, string("trajectory."+run+".*.*"), func(e *schemas.Trajectory) {
		key := fmt.Sprintf("%s/%d", e.UID, e.SampleIndex)
		note("trajectory "+key, e)
		k.trajectories[key] = e
	})
	each(t, b, schemas.StreamRewards, string("reward.*."+run+".*.*.*"), func(e *schemas.Reward) {
		note(fmt.Sprintf("reward %s/%d", e.UID, e.SampleIndex), e)
	})
	each(t, b, schemas.StreamAdvantages, string("advantage."+run+".*"), func(e *schemas.Advantage) {
		note(string("advantage "+e.UID), e)
		k.advantages[e.UID] = e
	})
	each(t, b, schemas.StreamAdvantages, string("batch."+run+".*"), func(e *schemas.Batch) {
		note("batch "+e.Batch, e)
		k.batches[e.Batch] = e
	})
	for _, n := range subjects(t, b, schemas.StreamSteps, string(schemas.Prefix+"step."+run+".>")) {
		k.steps += n
	}
	return k
}

// each decodes the stored events of one kind.
func each[T any, E interface {
	*T
	schemas.Event
}](t *testing.T, b *bus.Bus, stream, filter string, do func(E)) {
	t.Helper()
	for m, err := range b.Read(t.Context(), stream, []string{schemas.Prefix + filter}, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		e := E(new(T))
		if err := schemas.DecodeValid(m.Data, e); err != nil {
			t.Fatalf("%s: %v", m.Subject, err)
		}
		do(e)
	}
}

// subjects counts the messages of each subject.
func subjects(t *testing.T, b *bus.Bus, stream, filter string) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for m, err := range b.Read(t.Context(), stream, []string{filter}, bus.ReadOptions{HeadersOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		counts[m.Subject]++
	}
	return counts
}

// duplicates is how many messages of a stream have a predecessor on their subject.
func duplicates(t *testing.T, b *bus.Bus, stream, filter string) (n int) {
	t.Helper()
	for _, count := range subjects(t, b, stream, filter) {
		n += count - 1
	}
	return n
}

// check holds the books against what was asked for: every group complete, each sample
// with one trajectory and one reward, each step of a trajectory its own and once.
func (k *books) check(t *testing.T, asked map[schemas.UID]int64, steps int64) {
	t.Helper()
	for key, n := range k.twice {
		t.Errorf("%s: stored %d times", key, n+1)
	}
	samples := 0
	for uid, size := range asked {
		samples += int(size)
		a := k.advantages[uid]
		if a == nil || a.Status != schemas.StatusComplete || int64(len(a.Members)) != size {
			t.Errorf("group %s: %+v; want complete with %d members", uid, a, size)
			continue
		}
		for i := range size {
			key := fmt.Sprintf("%s/%d", uid, i)
			if tr := k.trajectories[key]; tr == nil || tr.StopReason != schemas.StopCompleted {
				t.Errorf("trajectory %s: %+v; want a completed one", key, tr)
			}
			if k.digests["reward "+key] == "" {
				t.Errorf("reward %s: none", key)
			}
		}
	}
	if len(k.advantages) != len(asked) || len(k.trajectories) != samples {
		t.Errorf("%d advantages and %d trajectories, want %d and %d", len(k.advantages), len(k.trajectories), len(asked), samples)
	}
	named := map[uint64]string{}
	for key, tr := range k.trajectories {
		if int64(len(tr.Steps)) != steps {
			t.Errorf("trajectory %s names %d steps, want %d", key, len(tr.Steps), steps)
		}
		for i, s := range tr.Steps {
			here := fmt.Sprintf("%s step %d", key, i)
			if other, ok := named[s.Seq]; ok {
				t.Errorf("sequence %d is %s and %s", s.Seq, other, here)
			}
			named[s.Seq] = here
		}
	}
	if k.steps < len(named) {
		t.Errorf("%d steps are stored, trajectories name %d", k.steps, len(named))
	}
}

// same compares the content of two runs of the same prompts.
func (k *books) same(t *testing.T, calm *books) {
	t.Helper()
	for key, want := range calm.digests {
		if got := k.digests[key]; got != want {
			t.Errorf("%s: content %.16s, without kills %.16s", key, got, want)
		}
	}
	if len(k.digests) != len(calm.digests) {
		t.Errorf("%d events, without kills %d", len(k.digests), len(calm.digests))
	}
}

// noDead reports every dead letter.
func noDead(t *testing.T, b *bus.Bus) {
	t.Helper()
	for _, d := range bustest.Dead(t, b, 0) {
		t.Errorf("dead letter: stage %s, code %s, %s after %d deliveries: %s", d.Stage, d.Code, d.OriginalSubject, d.Deliveries, d.Reason)
	}
}

// settled waits until no consumer of the pipeline has anything waiting or in hand, and
// returns how many deliveries were more than one per message.
func settled(t *testing.T, b *bus.Bus) (redelivered int) {
	t.Helper()
	bustest.Until(t, "all consumers done", func() error {
		redelivered = 0
		for _, stream := range []string{schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamTrajectories, schemas.StreamRewards} {
			s, err := b.JetStream().Stream(t.Context(), stream)
			if err != nil {
				return err
			}
			redelivered -= int(s.CachedInfo().State.LastSeq)
			consumers := s.ListConsumers(t.Context())
			for c := range consumers.Info() {
				if c.Name == "naive" {
					continue
				}
				if c.NumPending > 0 || c.NumAckPending > 0 {
					return fmt.Errorf("%s of %s: %d waiting, %d in hand", c.Name, stream, c.NumPending, c.NumAckPending)
				}
				redelivered += int(c.Delivered.Consumer)
			}
			if err := consumers.Err(); err != nil {
				return err
			}
		}
		return nil
	})
	return redelivered
}

// verify runs the program that recomputes every log-prob and every digest.
func verify(t *testing.T, url string, run schemas.Run, trajectories int) {
	t.Helper()
	var report struct {
		Trajectories int               `json:"trajectories"`
		Steps        int               `json:"steps"`
		Max          float64           `json:"max_abs_ratio_minus_1"`
		Mismatches   []json.RawMessage `json:"mismatches"`
	}
	out := meander(t, t.TempDir(), "verify", "--nats", url, "--run", string(run), "--json")
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		t.Fatalf("verify: %v\n%s%s", err, out.stdout, out.stderr)
	}
	if out.code != 0 || report.Trajectories != trajectories || report.Steps == 0 || report.Max != 0 || len(report.Mismatches) != 0 {
		t.Errorf("verify: status %d, %d trajectories, %d log-probs, max |ratio-1| %g, mismatches %s; want 0, %d, some, 0, none",
			out.code, report.Trajectories, report.Steps, report.Max, report.Mismatches, trajectories)
	}
}

// logged counts the lines of the victims' logs with a message.
func logged(t *testing.T, victims []*victim, messages ...string) (n int) {
	t.Helper()
	for _, v := range victims {
		data, err := os.ReadFile(v.log)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			n += bytes.Count(data, []byte(`"message":"`+m+`"`))
		}
	}
	return n
}

// limited bounds a context by a test's patience.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), bustest.Patience)
	t.Cleanup(cancel)
	return ctx
}
