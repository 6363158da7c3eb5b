package advantage

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// A group whose result is beyond what an event takes gets one that says so, once, and
// holds up nothing: neither the stream nor the groups after it.
func TestService_ResultTooLarge(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	const n, steps = 1024, 100
	var rewards []*schemas.Reward
	for i := range int64(n) {
		r := made("r", "large", i, n, float64(i%7), func(g *schemas.Group) {
			g.Batch, g.BatchGroups = "b", 1
			g.Advantage = schemas.AdvantageSpec{
				Estimator: "reinforce_plus_plus", Std: "global", StdBasis: "expanded", Epsilon: new(1e-8),
				Gamma: new(0.9),
			}
		})
		r.TrainedSteps = steps
		rewards = append(rewards, r)
	}
	p.put(t, rewards...)
	p.put(t, made("r", "small", 0, 2, 1, nil), made("r", "small", 1, 2, 2, nil))
	results := p.results(t, "r", 3)
	var a schemas.Advantage
	if err := schemas.DecodeValid(results[schemas.AdvantageSubject("r", "large")], &a); err != nil {
		t.Fatal(err)
	}
	if a.Status != schemas.StatusFailed || !strings.Contains(a.Error, "too large") || len(a.Members) != n {
		t.Errorf("%s with %d members: %s", a.Status, len(a.Members), a.Error)
	}
	if err := schemas.DecodeValid(results[schemas.AdvantageSubject("r", "small")], &a); err != nil ||
		a.Status != schemas.StatusComplete {
		t.Errorf("the group after it: %s, %v", a.Status, err)
	}
	bustest.Drained(t, p.Bus, schemas.StreamRewards, schemas.RewardPartitions)
}

// A result that can be stored in no form moves the rewards to the dead letters.
func TestService_ResultNeverStored(t *testing.T) {
	p := newPlane(t)
	p.Change(t, schemas.StreamAdvantages, func(c *jetstream.StreamConfig) { c.MaxMsgSize = 100 })
	p.serve(t, testConfig())
	p.put(t, made("r", "u", 0, 2, 1, nil), made("r", "u", 1, 2, 2, nil))
	subject := schemas.DeadSubject("advantage", "r", "u")
	bustest.Until(t, "a dead letter of each reward and of the group's record", func() error {
		letters, err := p.Subjects(t.Context(), schemas.StreamDead, subject)
		if err == nil && letters[subject] != 3 {
			err = fmt.Errorf("dead letters %v", letters)
		}
		return err
	})
	bustest.Drained(t, p.Bus, schemas.StreamRewards, schemas.RewardPartitions)
}
