package interaction_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// A worker gets the trace context of the sample that it answers. It may answer in JSON.
func TestAsk_Trace(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	asked := make(chan nats.Header, 1)
	if _, err := p.Conn().Subscribe(schemas.InteractSubject("game"), func(m *nats.Msg) {
		asked <- m.Header
		_ = m.Respond([]byte(`{"v": 1, "content": "go on"}`)) // in JSON
	}); err != nil {
		t.Fatal(err)
	}
	want := tracing.Context{
		Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", State: "a=1", Baggage: "k=v",
	}
	for _, of := range []struct {
		ctx  context.Context
		want tracing.Context
	}{{t.Context(), tracing.Context{}}, {tracing.With(t.Context(), want), want}} {
		reply, err := interaction.Ask(of.ctx, p.Conn(), &schemas.InteractRequest{Name: "game"}, time.Minute)
		if got, bad := tracing.Of(bustest.Receive(t, "the question", asked)); got != of.want || bad != nil ||
			err != nil || reply.Content != "go on" {
			t.Errorf("got %+v, %v, %+v, %v; want %+v", got, bad, reply, err, of.want)
		}
	}
}
