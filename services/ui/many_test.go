package ui_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// spent returns the time of the CPUs that this process has taken.
func spent(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// The list of 10 000 runs is sent and drawn a page at a time: what it costs is printed, its bytes and elements are
// bounded.
func TestPage_ManyRuns(t *testing.T) {
	if os.Getenv("MEANDER_UI_AXE") == "" {
		t.Skip("make ui-test runs it: it stores 10 000 runs")
	}
	const runs = 10_000
	s := servePage(t, nil)
	pipeline := s.startPipeline(t)
	s.publish(t, "first", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	record, err := s.Group(t.Context(), "first", "a")
	if err != nil {
		t.Fatal(err)
	}
	result := bustest.Decode[schemas.Advantage](t, bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages,
		schemas.AdvantageSubject("first", "a"))[schemas.AdvantageSubject("first", "a")])
	pipeline.Stop()
	var storing sync.WaitGroup
	const workers = 8
	for w := range workers {
		storing.Go(func() {
			for i := w; i < runs-1; i += workers {
				g, a := *record, *result
				g.Run, a.Run = schemas.Run(fmt.Sprintf("run-%05d", i)), schemas.Run(fmt.Sprintf("run-%05d", i))
				a.Mean = new(float64(i%97) / 97)
				if _, err := s.Publish(t.Context(), &g); err != nil {
					t.Error(err)
				}
				if _, err := s.Publish(t.Context(), &a); err != nil {
					t.Error(err)
				}
			}
		})
	}
	storing.Wait()
	for _, c := range []struct {
		what, query string
		matched     float64
		shown       int
	}{
		{"the first look", "?limit=100", runs, 100},
		{"the list again", "?limit=100", runs, 100},
		{"by mean reward", "?limit=100&order=-mean", runs, 100},
		{"a search", "?limit=100&text=run-04071", 1, 1},
		{"the last page", "?limit=100&offset=9900", runs, 100},
	} {
		before := spent(t)
		status, _, body := s.ask(t, http.MethodGet, "/api/runs"+c.query, nil)
		cpu := spent(t) - before
		var x object
		if err := json.Unmarshal(body, &x); err != nil || status != http.StatusOK || x["total"] != float64(runs) ||
			x["matched"] != c.matched {
			t.Fatalf("%s: %d, %v, %.200s", c.what, status, err, body)
		}
		t.Logf("%s: %v of CPU, %d bytes", c.what, cpu.Round(100*time.Microsecond), len(body))
		if n := len(x["runs"].([]any)); n != c.shown || len(body) > 1000*(c.shown+1) {
			t.Errorf("%s: %d runs in %d bytes", c.what, n, len(body))
		}
	}
	p := startBrowser(t).open(t, s.url)
	p.shows("1 to 100 of 10,000 runs")
	j := p.measure()
	t.Logf("the page: longest task %d ms, %d elements, %.1f MiB", j.Longest, j.Elements, float64(j.Heap)/(1<<20))
	if j.Elements > 4000 {
		t.Errorf("the page has %d elements", j.Elements)
	}
}
