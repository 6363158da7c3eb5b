package harness

import (
	"encoding/hex"
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Books are what the streams hold of one run at the end.
type Books struct {
	Trajectories map[string]*schemas.Trajectory     // by uid and sample, and stage unless main
	Advantages   map[schemas.UID]*schemas.Advantage // by uid
	Batches      map[string]*schemas.Batch          // by batch id
	// Digests are those of the content of trajectories, rewards, advantages and batches, by kind and key.
	Digests map[string]string
	// Staged are the stages of each prompt that has some; the audit sets it.
	Staged map[schemas.UID][]StageOf
	// Steps is how many are stored, needed or not.
	Steps int
	// Twice are keys with more than one event, with how many more.
	Twice map[string]int
}

// ReadBooks reads everything a run stored. Keys come from the events and not from their
// subjects, so that it does not depend on the guard being there.
func ReadBooks(t testing.TB, b *bus.Bus, run schemas.Run) *Books {
	t.Helper()
	k := &Books{
		Trajectories: map[string]*schemas.Trajectory{}, Advantages: map[schemas.UID]*schemas.Advantage{},
		Batches: map[string]*schemas.Batch{},
		Digests: map[string]string{}, Twice: map[string]int{},
	}
	note := func(key string, e schemas.Event) {
		sum, err := schemas.ContentDigest(e)
		if err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		if _, ok := k.Digests[key]; ok {
			k.Twice[key]++
		}
		k.Digests[key] = hex.EncodeToString(sum[:])
	}
	Each(t, b, schemas.StreamTrajectories, schemas.Address{Kind: schemas.KindTrajectory, Run: run},
		func(e *schemas.Trajectory) {
			key := keyOf(e.UID, e.SampleIndex, e.Stage)
			note("trajectory "+key, e)
			k.Trajectories[key] = e
		})
	Each(t, b, schemas.StreamRewards, schemas.Address{Kind: schemas.KindReward, Run: run}, func(e *schemas.Reward) {
		note(fmt.Sprintf("reward %s/%d", e.UID, e.SampleIndex), e)
	})
	Each(t, b, schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindAdvantage, Run: run},
		func(e *schemas.Advantage) {
			note(string("advantage "+e.UID), e)
			k.Advantages[e.UID] = e
		})
	Each(t, b, schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindBatch, Run: run}, func(e *schemas.Batch) {
		note("batch "+e.Batch, e)
		k.Batches[e.Batch] = e
	})
	for _, n := range Subjects(t, b, schemas.StreamSteps, schemas.StepsFilter(run, "*", "*", "*")) {
		k.Steps += n
	}
	return k
}

// Each decodes the stored events of an address.
func Each[T any, E interface {
	*T
	schemas.Event
}](t testing.TB, b *bus.Bus, stream string, of schemas.Address, do func(E)) {
	t.Helper()
	for m, err := range b.Read(t.Context(), stream, []string{of.Filter()}, bus.ReadOptions{}) {
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

// Subjects counts the messages of each subject.
func Subjects(t testing.TB, b *bus.Bus, stream, filter string) map[string]int {
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

// NoDead reports every dead letter.
func NoDead(t testing.TB, b *bus.Bus) {
	t.Helper()
	for _, d := range bustest.Dead(t, b, 0) {
		t.Errorf("dead letter: stage %s, code %s, %s after %d deliveries: %s", d.Service, d.Code, d.OriginalSubject,
			d.Deliveries, d.Reason)
	}
}

// AwaitIdle waits until no consumer of the pipeline has anything waiting or in hand, and
// returns how many deliveries were more than one per message.
func AwaitIdle(t testing.TB, b *bus.Bus) (redelivered int) {
	t.Helper()
	bustest.Until(t, "all consumers done", func() error {
		redelivered = 0
		for _, stream := range []string{
			schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamTrajectories, schemas.StreamRewards,
		} {
			s, consumers, err := bustest.Consumers(t, b, stream)
			if err != nil {
				return err
			}
			redelivered -= int(s.CachedInfo().State.LastSeq)
			for _, c := range consumers {
				if c.Config.Durable == "" {
					continue // of a reader: a killed one leaves it behind for some minutes
				}
				if c.NumPending > 0 || c.NumAckPending > 0 {
					return fmt.Errorf("%s of %s: %d waiting, %d in hand", c.Name, stream, c.NumPending, c.NumAckPending)
				}
				redelivered += int(c.Delivered.Consumer)
			}
		}
		return nil
	})
	return redelivered
}
