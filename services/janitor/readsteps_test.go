package janitor_test

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/janitor"
)

// Steps of groups whose prompts say so go, without a rule and without a grace, once every durable reader has
// acknowledged the group and its batch. What else is stored of them stays, and all of other groups.
func TestRun_FreesReadSteps(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	js, err := jetstream.New(p.Conn())
	if err != nil {
		t.Fatal(err)
	}
	reader := func(name, filter string) (acknowledge func()) {
		c, err := js.CreateConsumer(t.Context(), schemas.StreamAdvantages, jetstream.ConsumerConfig{
			Durable: name, AckPolicy: jetstream.AckExplicitPolicy, FilterSubject: filter,
		})
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			t.Helper()
			m, err := c.Next()
			if err == nil {
				err = m.DoubleAck(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	close := func(batch string, uid schemas.UID) {
		e := &schemas.Batch{
			Run: "r1", Batch: batch, Groups: 1, UIDs: []schemas.UID{uid}, StdBasis: schemas.BasisSample, Closed: 1,
		}
		if _, err := p.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	storeGroup(t, p, "u1", "b1", true)
	storeGroup(t, p, "u2", "b2", true)
	storeGroup(t, p, "u3", "b2", false) // its steps are to be proved
	storeGroup(t, p, "u4", "u4", true)  // alone
	close("b1", "u1")
	pass := janitor.NewPasses()
	left := func(when string, want ...int) {
		t.Helper()
		if r, _, err := pass(t.Context(), janitor.DefaultConfig(), p.Bus); err != nil || r.Groups > 0 {
			t.Fatalf("%s: %+v, %v", when, r, err)
		}
		for i, uid := range []schemas.UID{"u1", "u2", "u3", "u4"} {
			if n := events(t, p, uid); n != want[i] {
				t.Errorf("%s: of %s are left %d events, want %d", when, uid, n, want[i])
			}
		}
	}
	left("without a reader", 4, 4, 4, 4)
	batches := reader("batches", schemas.BatchSubject("r1", "*"))
	left("nothing is read", 4, 4, 4, 4)
	batches()
	left("a batch is read, and another is open", 3, 4, 4, 4)
	close("b2", "u2")
	left("it is closed", 3, 4, 4, 4)
	batches()
	left("and read", 3, 3, 4, 4)
	groups := reader("groups", schemas.AdvantageSubject("r1", "*"))
	left("a group alone has a reader", 3, 3, 4, 4)
	for range 4 {
		groups()
	}
	left("which has read it", 3, 3, 4, 3)
}
