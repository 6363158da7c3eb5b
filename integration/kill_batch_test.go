package integration_test

import (
	"fmt"
	"math"
	"slices"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// inBatch makes a reward part of an explicit batch with one scale over all groups.
func inBatch(r *schemas.Reward, batch string, groups int64) *schemas.Reward {
	r.Group.Batch, r.Group.BatchGroups, r.Group.Advantage.Std = batch, groups, schemas.StdGlobal
	return r
}

func (c *crew) reward(t *testing.T, r *schemas.Reward) {
	t.Helper()
	putReward(t, c.Bus, r)
}

// batch waits for the result of a batch.
func (c *crew) batch(t *testing.T, run schemas.Run, id string) *schemas.Batch {
	t.Helper()
	subject := schemas.BatchSubject(run, id)
	bustest.Until(t, "batch "+id, func() error {
		_, err := c.Last(t.Context(), schemas.StreamAdvantages, subject)
		return err
	})
	return harness.ReadBooks(t, c.Bus, run).Batches[id]
}

const pairSize = 3

// pairValues are the rewards of the two groups of a batch, by uid.
var pairValues = map[schemas.UID][]float64{"a": {1, 2, 3}, "b": {10, 14, 18}}

// pairTest publishes the rewards of the batch in many orders.
type pairTest struct{ want *harness.Books }

func (*pairTest) publish(t *testing.T, c *crew, run schemas.Run, uid schemas.UID, samples ...int64) {
	t.Helper()
	for _, i := range samples {
		c.reward(t, inBatch(rewardOf(run, uid, i, pairSize, pairValues[uid][i]), "pair", 2))
	}
}

// open says that the batch has not closed with what is there.
func (*pairTest) open(t *testing.T, c *crew, run schemas.Run) {
	t.Helper()
	// A group that the same worker gets after them has closed.
	uid := schemas.UID("after")
	for i := 0; schemas.Partition(string(uid)) != schemas.Partition("pair"); i++ {
		uid = schemas.UID(fmt.Sprint("after-", i))
	}
	c.reward(t, rewardOf(run+"-after", uid, 0, 1, 1))
	c.advantages(t, run+"-after", 1)
	if k := harness.ReadBooks(t, c.Bus, run); len(k.Advantages)+len(k.Batches) != 0 {
		t.Errorf("%d advantages and %d batches before the batch is complete", len(k.Advantages), len(k.Batches))
	}
}

func (x *pairTest) check(t *testing.T, c *crew, run schemas.Run) {
	t.Helper()
	b := c.batch(t, run, "pair")
	harness.AwaitIdle(t, c.Bus)
	k := harness.ReadBooks(t, c.Bus, run)
	if len(k.Batches) != 1 || len(k.Advantages) != 2 || len(k.Twice) != 0 {
		t.Errorf("%d batches, %d advantages, twice: %v; want 1, 2, none", len(k.Batches), len(k.Advantages), k.Twice)
	}
	if b.Groups != 2 || b.Samples != 2*pairSize || !slices.Equal(b.UIDs, []schemas.UID{"a", "b"}) {
		t.Errorf("batch %+v; want 2 groups, 6 samples, uids a and b", b)
	}
	// One scale: the sample standard deviation over all six rewards.
	all := slices.Concat(pairValues["a"], pairValues["b"])
	mean, square := 0.0, 0.0
	for _, v := range all {
		mean += v / float64(len(all))
	}
	for _, v := range all {
		square += (v - mean) * (v - mean) / float64(len(all)-1)
	}
	for uid, v := range pairValues {
		a := k.Advantages[uid]
		if a == nil || a.Status != schemas.StatusComplete {
			t.Errorf("group %s: %+v; want complete", uid, a)
			continue
		}
		for i, m := range a.Members {
			if got := (v[i] - v[1]) / (math.Sqrt(square) + 1e-4); math.Abs(*m.Advantage-got) > 1e-12 {
				t.Errorf("group %s, sample %d: advantage %v, want %v", uid, i, *m.Advantage, got)
			}
		}
	}
	harness.NoDead(t, c.Bus)
	if x.want == nil {
		x.want = k
	}
	k.Same(t, x.want)
}

// The groups of a batch with one scale close together, with one Batch event and the
// numbers of both: in whatever order they come, and when the worker that has the first
// of them goes away before the second comes, with a word or without.
func TestBatch_ClosesTogether(t *testing.T) {
	t.Parallel()
	var x pairTest
	c := assemble(t)
	c.up(t, "advantage")
	x.publish(t, c, "calm", "a", 0, 1, 2)
	x.open(t, c, "calm")
	x.publish(t, c, "calm", "b", 0, 1, 2)
	x.check(t, c, "calm")

	t.Run("interleaved, second first", func(t *testing.T) {
		x.publish(t, c, "mixed", "b", 2, 0)
		x.publish(t, c, "mixed", "a", 1)
		x.publish(t, c, "mixed", "b", 1)
		x.publish(t, c, "mixed", "a", 2)
		x.open(t, c, "mixed")
		x.publish(t, c, "mixed", "a", 0)
		x.check(t, c, "mixed")
	})
	t.Run("worker restarted between the groups", func(t *testing.T) {
		x.publish(t, c, "restart", "a", 0, 1, 2)
		x.open(t, c, "restart")
		c.serving["advantage"].Stop()
		x.publish(t, c, "restart", "b", 0)
		c.up(t, "advantage")
		x.open(t, c, "restart")
		x.publish(t, c, "restart", "b", 1, 2)
		x.check(t, c, "restart")
	})
	c.serving["advantage"].Stop()
	t.Run("worker killed between the groups", func(t *testing.T) {
		listening := assemble(t)
		v := harness.Raise(t, &harness.Process{
			Name: "advantage", Path: program(t, "meander-advantage"), Dir: t.TempDir(),
			Args: []string{
				"--nats-url", listening.Server.ClientURL(), "--health-addr", "", "--ack-wait", "1s",
			},
		})
		x.publish(t, listening, "killed", "a", 0, 1, 2)
		x.publish(t, listening, "killed", "b", 1)
		x.open(t, listening, "killed")
		v.Kill()
		x.open(t, listening, "killed")
		x.publish(t, listening, "killed", "b", 0)
		v.Kill()
		x.publish(t, listening, "killed", "b", 2)
		x.check(t, listening, "killed")
		v.End(syscall.SIGTERM)
	})
}
