package bus_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// A service that begins with the controls waits for them, and says so, while the server has no answer.
func TestControls_waits(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		if err := e.JetStream().DeleteStream(t.Context(), schemas.StreamControlBucket); err != nil {
			t.Fatal(err)
		}
		said := make(words)
		b, err := bus.Connect(t.Context(), e.Config(), zerolog.New(said.of("controls not known, trying again")))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = b.Close() }()
		ended := make(chan error, 1)
		go func() {
			_, err := b.Controls(t.Context())
			ended <- err
		}()
		bustest.Receive(t, "word that it waits", said)
		e.setup(t)
		if err := bustest.Receive(t, "the controls", ended); err != nil {
			t.Error(err)
		}
	})
}

// words is closed once what is waited for was written.
type words chan struct{}

func (w words) of(text string) writer {
	said := sync.OnceFunc(func() { close(w) })
	return func(line []byte) (int, error) {
		if strings.Contains(string(line), text) {
			said()
		}
		return len(line), nil
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(line []byte) (int, error) { return w(line) }
