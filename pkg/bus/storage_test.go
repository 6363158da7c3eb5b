package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

func TestBus_SetLimits(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ctx := t.Context()
	if err := e.SetLimits(ctx,
		bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 64 << 20, MaxAge: -1},
		bus.StreamLimit{Stream: schemas.StreamTrajectories, MaxAge: 48 * time.Hour},
		bus.StreamLimit{Stream: schemas.StreamBlobBucket, MaxBytes: 32 << 20},
	); err != nil {
		t.Fatal(err)
	}
	check := func(stream string, maxBytes int64, maxAge time.Duration) {
		t.Helper()
		if c := e.Info(t, stream).Config; c.MaxBytes != maxBytes && maxBytes > 0 || c.MaxAge != maxAge {
			t.Errorf("%s: max_bytes %d, max_age %v; want %d, %v", stream, c.MaxBytes, c.MaxAge, maxBytes, maxAge)
		}
	}
	e.setup(t) // what was set stays
	check(schemas.StreamSteps, 64<<20, 0)
	check(schemas.StreamTrajectories, 0, 48*time.Hour)
	check(schemas.StreamBlobBucket, 32<<20, 0)

	if _, err := e.Publish(ctx, step("u1", 0, "a1", 0, 100_000)); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		limits []bus.StreamLimit
		want   string
	}{
		{[]bus.StreamLimit{{Stream: schemas.StreamSteps, MaxAge: time.Hour}}, "must be at least that of the trajectories"},
		{[]bus.StreamLimit{{Stream: schemas.StreamSteps, MaxAge: 48 * time.Hour}, {Stream: schemas.StreamTrajectories, MaxAge: -1}}, "for ever"},
		{[]bus.StreamLimit{{Stream: schemas.StreamSteps, MaxBytes: 50_000}}, "must be at least the 1"},
		{[]bus.StreamLimit{{Stream: schemas.StreamSteps, MaxBytes: 1 << 60}}, "max_file_store"},
		{[]bus.StreamLimit{{Stream: "elsewhere", MaxBytes: 1}}, "not found"},
		{[]bus.StreamLimit{{Stream: schemas.StreamSteps, MaxBytes: 1 << 30}, {Stream: schemas.StreamSteps, MaxAge: -1}}, "named twice"},
	} {
		if err := e.SetLimits(ctx, test.limits...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: got %v; want %q", test.limits, err, test.want)
		}
	}
	check(schemas.StreamSteps, 64<<20, 0)
	check(schemas.StreamTrajectories, 0, 48*time.Hour)
}

// A mirror drops its oldest messages when it has no more space: it is never full.
func TestBus_Stats_copy(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	js := e.JetStream()
	if err := js.DeleteStream(t.Context(), schemas.StreamVerdicts); err != nil {
		t.Fatal(err)
	}
	for _, c := range []jetstream.StreamConfig{
		{Name: "ORIGIN", Subjects: []string{"origin"}},
		{Name: schemas.StreamVerdicts, Mirror: &jetstream.StreamSource{Name: "ORIGIN"}, MaxBytes: 16 << 10, AllowDirect: true},
	} {
		if _, err := js.CreateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	for range 64 {
		if _, err := js.Publish(t.Context(), "origin", make([]byte, 1024)); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Until(t, "the copy is full and rolls", func() error {
		stats, err := e.Stats(t.Context())
		if err != nil {
			return err
		}
		for _, s := range stats {
			if s.Name == schemas.StreamVerdicts && s.State != bus.StateRolling {
				return fmt.Errorf("%d bytes of %d: %s", s.Bytes, s.MaxBytes, s.State)
			}
		}
		return nil
	})
	if faults, err := e.Faults(t.Context()); err != nil || len(faults) > 0 {
		t.Errorf("faults %+v, %v; want none", faults, err)
	}
}

// Trajectories never outlive their steps, as new streams are.
func TestStreams_StepsOutliveTrajectories(t *testing.T) {
	t.Parallel()
	ages := map[string]time.Duration{}
	for _, s := range schemas.Streams() {
		ages[s.Name] = s.MaxAge
	}
	if steps, named := ages[schemas.StreamSteps], ages[schemas.StreamTrajectories]; steps != 0 &&
		(named == 0 || named >= steps) {
		t.Errorf("steps are kept %v, the trajectories that name them %v", steps, named)
	}
}

// fault returns the fault of a stream.
func fault(t *testing.T, b *bus.Bus, stream string) *bus.Fault {
	t.Helper()
	faults, err := b.Faults(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		if f.Name == stream {
			return &f
		}
	}
	return nil
}

// A full stream is a fault for each reader, until it has room again.
func TestBus_Faults_full(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ctx := t.Context()
	other := e.Connect(t)
	if f := fault(t, e.Bus, schemas.StreamSteps); f != nil {
		t.Fatalf("an empty stream: %+v", f)
	}
	e.resize(t, schemas.StreamSteps, 350_000, -1)
	for i := range 3 {
		if _, err := e.Publish(ctx, step("u1", 0, "a1", int64(i), 100_000)); err != nil {
			t.Fatal(err)
		}
	}
	if f := fault(t, other, schemas.StreamSteps); f == nil || !f.Full() || !f.Since.IsZero() {
		t.Errorf("no room for another step: %+v", f)
	}
	if _, err := e.Publish(ctx, step("u1", 0, "a1", 3, 100_000)); !errors.Is(err, bus.ErrStreamFull) {
		t.Fatalf("got %v", err)
	}
	if f := fault(t, e.Bus, schemas.StreamSteps); f == nil || !f.Full() || f.Since.IsZero() || f.Err == nil {
		t.Errorf("a refused step: %+v", f)
	}
	e.resize(t, schemas.StreamSteps, 1<<20, -1)
	for _, b := range []*bus.Bus{e.Bus, other} {
		if f := fault(t, b, schemas.StreamSteps); f != nil {
			t.Errorf("room again: %+v", f)
		}
	}
	// Messages that differ in size: one is refused while others go through.
	if _, err := e.Publish(ctx, step("u1", 0, "a1", 4, 900_000)); !errors.Is(err, bus.ErrStreamFull) {
		t.Fatalf("got %v", err)
	}
	if _, err := e.Publish(ctx, step("u1", 0, "a1", 5, 1_000)); err != nil {
		t.Fatal(err)
	}
	if f := fault(t, e.Bus, schemas.StreamSteps); f == nil || !f.Full() {
		t.Errorf("a large step is refused: %+v", f)
	}
	// A queue that is full only slows intake down; dead letters roll.
	e.resize(t, schemas.StreamRequests, -1, 1)
	publishRequests(t, e.Bus, 1)
	if f := fault(t, e.Bus, schemas.StreamRequests); f != nil {
		t.Errorf("a full queue: %+v", f)
	}
	stats, err := e.Stats(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stats {
		if want := map[string]string{
			schemas.StreamRequests: bus.StateFull,
			schemas.StreamPrompts:  bus.StateOK,
		}[s.Name]; want != "" && s.State != want {
			t.Errorf("%s is %s, want %s", s.Name, s.State, want)
		}
	}
}

// What one stream gives up another can have, where the server has promised all that it holds.
func TestBus_SetLimits_moves(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process", func(o *natsd.Options) { o.MaxFileStore = 64 << 20 })
	e.setup(t)
	for err := error(nil); err == nil; {
		err = e.SetLimits(t.Context(), bus.StreamLimit{
			Stream: schemas.StreamDead, MaxBytes: e.Info(t, schemas.StreamDead).Config.MaxBytes + 1<<20,
		})
	}
	steps, trajectories := e.Info(t, schemas.StreamSteps).Config.MaxBytes,
		e.Info(t, schemas.StreamTrajectories).Config.MaxBytes
	limits := []bus.StreamLimit{
		{Stream: schemas.StreamTrajectories, MaxBytes: trajectories + 2<<20},
		{Stream: schemas.StreamSteps, MaxBytes: steps - 2<<20},
	}
	if limits[0].MaxBytes >= limits[1].MaxBytes {
		t.Fatalf("%+v; want more for the smaller one", limits)
	}
	if err := e.SetLimits(t.Context(), limits[0]); err == nil {
		t.Fatal("there was room, so this proves nothing")
	}
	if err := e.SetLimits(t.Context(), limits...); err != nil {
		t.Error(err)
	}
}

// A server that confirms nothing is a fault, however much room there is.
func TestBus_Faults_unconfirmed(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	if err := e.JetStream().DeleteStream(t.Context(), schemas.StreamVerdicts); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 7*time.Second)
	defer stop()
	if _, err := e.Publish(ctx, &schemas.Verdict{
		Run: "r1", UID: "u1", Name: "external", Value: new(1.0), At: 1,
	}); err == nil {
		t.Fatal("published to a stream that is not there")
	}
	if _, err := e.Faults(t.Context()); err == nil || !strings.Contains(err.Error(), schemas.StreamVerdicts) {
		t.Fatalf("the stream is gone: %v", err)
	}
	e.setup(t)
	if f := fault(t, e.Bus, schemas.StreamVerdicts); f == nil || f.Full() || f.Err == nil {
		t.Errorf("nothing was confirmed: %+v", f)
	}
	if _, err := e.Publish(t.Context(), &schemas.Verdict{
		Run: "r1", UID: "u1", Name: "external", Value: new(1.0), At: 1,
	}); err != nil {
		t.Fatal(err)
	}
	if f := fault(t, e.Bus, schemas.StreamVerdicts); f != nil {
		t.Errorf("confirmed again: %+v", f)
	}
}
