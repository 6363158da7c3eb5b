package integration_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/janitor"
)

// point is a look at a long run.
type point struct{ samples, heap, disk, steps float64 }

// A run of many samples through streams of a tenth of what they take ends complete with the
// janitor on; neither memory nor disk grow with it, no event is lost to a reader with a durable, and
// no stream holds more than its limit at any time.
func TestJanitor_LongRun(t *testing.T) {
	t.Parallel()
	const size = 8
	groups := soak(t, 400, 100_000) / size
	w := newWorld(t)
	limits := map[string]int64{
		schemas.StreamSteps: 15_000, schemas.StreamTrajectories: 2_800, schemas.StreamRewards: 1_800,
		schemas.StreamAdvantages: 300, schemas.StreamGroups: 250,
	}
	for stream, each := range limits {
		limits[stream] = max(2<<20, each*size*int64(groups)/10)
		if err := w.SetLimits(t.Context(), bus.StreamLimit{Stream: stream, MaxBytes: limits[stream]}); err != nil {
			t.Fatal(err)
		}
	}
	c := defaults()
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	gc := janitor.DefaultConfig()
	gc.Above, gc.Grace, gc.Every = 60, time.Second, 100*time.Millisecond
	w.Serve(t, func(ctx context.Context, b *bus.Bus) error { return janitor.Run(ctx, gc, b, zerolog.Nop()) })
	js, err := jetstream.New(w.Conn())
	if err != nil {
		t.Fatal(err)
	}
	trainer, err := js.CreateConsumer(t.Context(), schemas.StreamAdvantages, jetstream.ConsumerConfig{
		Durable: "trainer", AckPolicy: jetstream.AckExplicitPolicy, FilterSubject: schemas.Prefix + "advantage.>",
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, moved := bustest.WhileItMoves(t)
	go w.ask(ctx, t, groups, size)
	seen := map[schemas.UID]bool{}
	var points []point
	for len(seen) < groups {
		m, err := trainer.Next(jetstream.FetchMaxWait(2 * time.Second))
		if ctx.Err() != nil {
			t.Fatalf("%d of %d groups, then nothing moved", len(seen), groups)
		}
		if err != nil {
			continue
		}
		var a schemas.Advantage
		if err := schemas.DecodeValid(m.Data(), &a); err != nil {
			t.Fatal(err)
		}
		if seen[a.UID] || a.Status != schemas.StatusComplete || len(a.Members) != size {
			t.Fatalf("group %s: %s, %d members; seen before: %v", a.UID, a.Status, len(a.Members), seen[a.UID])
		}
		seen[a.UID] = true
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
		moved()
		if len(seen)%max(1, groups/100) == 0 {
			points = append(points, w.look(t, limits, float64(len(seen)*size)))
		}
	}
	report(t, points)
	w.count(t)
}

// ask publishes the prompts of a long run. Blobs that nothing names stay for a grace, and the store
// grows until the first of them go: a soak lasts ten times as long at least, so that its second
// quarter is behind that.
func (w *world) ask(ctx context.Context, t *testing.T, groups, size int) {
	var pace <-chan time.Time
	if soakSeed(t) != 0 {
		tick := time.NewTicker(10 * bus.BlobGrace / time.Duration(groups))
		defer tick.Stop()
		pace = tick.C
	}
	for i := range groups {
		if pace != nil {
			<-pace
		}
		e := &schemas.Prompt{
			Prompt: "a red fox", UID: schemas.UID(fmt.Sprintf("g%06d", i)), GroupSize: new(int64(size)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(3))},
		}
		data, err := schemas.Encode(e)
		if err == nil {
			_, err = w.PublishPrompt(ctx, "long", data, nil, bus.WaitForSpace())
		}
		if err != nil && ctx.Err() == nil {
			t.Errorf("publish: %v", err)
			return
		}
	}
}

// count holds what meander streams says, once nothing moves any more, to what is read.
func (w *world) count(t *testing.T) {
	t.Helper()
	bustest.Until(t, "streams as they are said to be", func() error {
		stats, err := w.Stats(t.Context())
		if err != nil {
			return err
		}
		for _, s := range stats {
			n := uint64(0)
			if s.Name == schemas.StreamRequests {
				for _, err := range w.Queued(t.Context(), s.Name) {
					if n++; err != nil {
						return err
					}
				}
			} else {
				for _, err := range w.Read(t.Context(), s.Name, nil, bus.ReadOptions{HeadersOnly: true}) {
					if n++; err != nil {
						return err
					}
				}
			}
			if n != s.Messages {
				return fmt.Errorf("%s: %d messages are said, %d there", s.Name, s.Messages, n)
			}
		}
		return nil
	})
}

// look is the state of a world; no stream is above its limit, and each says how full it is.
func (w *world) look(t *testing.T, limits map[string]int64, samples float64) point {
	t.Helper()
	p := point{samples: samples}
	stats, err := w.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stats {
		if most := limits[s.Name]; most > 0 {
			if int64(s.Bytes) > most || s.MaxBytes != most {
				t.Errorf("%s has %d bytes of %d, and says %d", s.Name, s.Bytes, most, s.MaxBytes)
			}
			if room := int64(s.Bytes) < most/5*4; room != (s.State == bus.StateOK) && s.Waiting == 0 {
				t.Errorf("%s with %d bytes of %d is %s", s.Name, s.Bytes, most, s.State)
			}
		}
		if s.Name == schemas.StreamSteps {
			p.steps = float64(s.Bytes)
		}
	}
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	p.heap = float64(mem.HeapInuse)
	err = filepath.WalkDir(w.Options.StoreDir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // it comes and goes
		}
		if info, err := d.Info(); err == nil {
			p.disk += float64(info.Size())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// report says whether a run was flat: the last quarter of it has no more than the second one, with
// some room for the noise. With MEANDER_PLOT it draws the run into that file.
func report(t *testing.T, points []point) {
	t.Helper()
	mean := func(of func(point) float64, from, to int) (sum float64) {
		for _, p := range points[from:to] {
			sum += of(p) / float64(to-from)
		}
		return sum
	}
	n := len(points)
	for name, of := range map[string]func(point) float64{
		"heap": func(p point) float64 { return p.heap },
		"disk": func(p point) float64 { return p.disk },
	} {
		early, late := mean(of, n/4, n/2), mean(of, 3*n/4, n)
		t.Logf("%s: %.1f MiB in the second quarter, %.1f MiB in the last", name, early/(1<<20), late/(1<<20))
		if soakSeed(t) != 0 && late > 1.5*early+32<<20 {
			t.Errorf("%s grows with the run: %.0f to %.0f bytes", name, early, late)
		}
	}
	if file := os.Getenv("MEANDER_PLOT"); file != "" {
		if err := os.WriteFile(file, []byte(plot(points)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// plot draws memory, disk and steps over the samples.
func plot(points []point) string {
	const width, height, edge = 900, 420, 60
	last, most := points[len(points)-1].samples, 0.0
	for _, p := range points {
		most = max(most, p.heap, p.disk, p.steps)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="13"><rect width="100%%" height="100%%" fill="white"/>`, width, height)
	x := func(v float64) float64 { return edge + v/last*(width-2*edge) }
	y := func(v float64) float64 { return height - edge - v/most*(height-2*edge) }
	for i := range 5 {
		v := most * float64(i) / 4
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.0f</text>`, edge,
			y(v), width-edge, edge-8, y(v)+4, v/(1<<20))
		s := last * float64(i) / 4
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.0f</text>`, x(s), height-edge+20, s)
	}
	for i, line := range []struct {
		name, colour string
		of           func(point) float64
	}{
		{"heap of the whole process", "#1f77b4", func(p point) float64 { return p.heap }},
		{"files of the store", "#d62728", func(p point) float64 { return p.disk }},
		{"MDR_STEPS", "#2ca02c", func(p point) float64 { return p.steps }},
	} {
		fmt.Fprintf(&b, `<text x="%d" y="24" fill="%s">%s</text><polyline fill="none" stroke="%s" stroke-width="1.5" points="`, edge+220*i, line.colour, line.name, line.colour)
		for _, p := range points {
			fmt.Fprintf(&b, "%.1f,%.1f ", x(p.samples), y(line.of(p)))
		}
		b.WriteString(`"/>`)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">samples stored, with streams of a tenth of what they take; MiB</text></svg>`+"\n", width/2, height-14)
	return b.String()
}
