package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Requests that nothing stores carry the trace context of their caller: dry ones, those to teachers, and for what the
// network sees.
func TestRequests_Trace(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	asked := make(chan nats.Header, 1)
	for _, subject := range []string{schemas.DrySubject("r"), schemas.TeacherSubject("t"), schemas.SeenSubject("l")} {
		if _, err := p.Conn().Subscribe(subject, func(m *nats.Msg) {
			asked <- m.Header
			_ = m.Respond(nil) // no answer that can be read: each call ends at once
		}); err != nil {
			t.Fatal(err)
		}
	}
	c := client.New(p.Bus)
	want := tracing.Context{
		Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", State: "a=1", Baggage: "k=v",
	}
	ctx, stop := context.WithTimeout(tracing.With(t.Context(), want), time.Minute)
	defer stop()
	for what, ask := range map[string]func() error{
		"dry": func() error { _, err := c.Try(ctx, "r", &schemas.Prompt{Prompt: "a fox"}); return err },
		"teacher": func() error {
			_, err := c.TeacherReply(ctx, schemas.TeacherRequest{Name: "t", Run: "r", UID: "u"})
			return err
		},
		"seen": func() error {
			_, err := c.Seen(ctx, &schemas.Trajectory{Identity: schemas.Identity{Run: "r", UID: "u", Lane: "l"}}, 1)
			return err
		},
	} {
		err := ask()
		if got, bad := tracing.Of(bustest.Receive(t, what, asked)); got != want || bad != nil {
			t.Errorf("%s: %+v, %v (%v); want %+v", what, got, bad, err, want)
		}
	}
}
