package bus_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// All samplers of an event plane have one secret, whichever asked first.
func TestBus_SealKey(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		keys := make(chan []byte)
		for range 8 {
			b := e.Connect(t)
			go func() {
				key, err := b.SealKey(t.Context())
				if err != nil {
					t.Error(err)
				}
				keys <- key
			}()
		}
		first := bustest.Receive(t, "the first key", keys)
		for range 7 {
			if key := bustest.Receive(t, "another key", keys); len(key) != 32 || !bytes.Equal(key, first) {
				t.Errorf("keys %x and %x; want one of 32 bytes", first, key)
			}
		}
		kv, err := e.JetStream().KeyValue(t.Context(), schemas.SealBucket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Put(t.Context(), "steps", []byte("short")); err != nil {
			t.Fatal(err)
		}
		if _, err := e.SealKey(t.Context()); !errors.Is(err, bus.ErrCorrupt) {
			t.Errorf("a short key: %v, want ErrCorrupt", err)
		}
		if err := kv.Delete(t.Context(), "steps"); err != nil {
			t.Fatal(err)
		}
		if key, err := e.SealKey(t.Context()); err != nil || len(key) != 32 || bytes.Equal(key, first) {
			t.Errorf("after it was removed: %x, %v; want a new one", key, err)
		}
	})
}
