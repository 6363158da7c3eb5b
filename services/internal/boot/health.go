package boot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
)

// Health answers /healthz (the process lives) and /readyz (it takes work) over HTTP.
// Both say 200 or 503 and a JSON object {"status","service","version","instance","faults",
// "notes"}: notes name what stands still on purpose, such as a paused run.
// It also serves /metrics, the counters of the process, for Prometheus.
type Health struct {
	service, instance string
	ready             atomic.Bool
	mu                sync.Mutex
	checks            []*check
	notes             []func() []string
}

// check is one condition of readiness: run returns nil if it holds.
type check struct {
	name string
	run  func() error

	mu      sync.Mutex
	pending *answer // of a call of run that has not ended
}

// answer is what a call of a check returned, once done is closed.
type answer struct {
	done chan struct{}
	err  error
}

// checksTimeout bounds how long /readyz waits for its checks: a probe must learn why, before it gives up.
const checksTimeout = 2500 * time.Millisecond

// ask calls run, unless a call of it has not ended, and returns its answer to come.
func (c *check) ask() *answer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending != nil {
		return c.pending
	}
	a := &answer{done: make(chan struct{})}
	c.pending = a
	go func() {
		a.err = c.run()
		c.mu.Lock()
		c.pending = nil
		c.mu.Unlock()
		close(a.done)
	}()
	return a
}

// NewHealth returns a Health that is alive and not ready.
func NewHealth(service, instance string) *Health {
	return &Health{service: service, instance: instance}
}

// SetReady sets whether the program takes work: true once it consumes, false while it drains.
func (h *Health) SetReady(ready bool) { h.ready.Store(ready) }

// Check adds a condition of readiness. run is called per request, in a goroutine of its own, and should be quick; one
// that has not ended after checksTimeout counts as failed.
func (h *Health) Check(name string, run func() error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.checks = append(h.checks, &check{name: name, run: run})
}

// Until adds a condition of readiness that fails with the reason why until done is called.
func (h *Health) Until(name, why string) (done func()) {
	var met atomic.Bool
	h.Check(name, func() error {
		if !met.Load() {
			return errors.New(why)
		}
		return nil
	})
	return func() { met.Store(true) }
}

// Connected adds the conditions of readiness that every program on a server has: b has its server, its user is
// allowed what it does there, its consumers are as the program made them, and the server stores what is published.
func (h *Health) Connected(b *bus.Bus) {
	h.Check("nats", func() error {
		if !b.Conn().IsConnected() {
			return errors.New(strings.ToLower(b.Conn().Status().String()))
		}
		return nil
	})
	h.Check("permissions", b.Denied)
	h.Check("consumers", b.Changed)
	s := &storage{bus: b}
	h.Check("storage", s.check)
	h.Note(s.paused)
}

// Note adds a source of notes: work that stands still on purpose and is no fault. say is called per request and must
// be quick.
func (h *Health) Note(say func() []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notes = append(h.notes, say)
}

// storage asks for the faults of the streams, and for paused runs, at most once every storageEvery.
type storage struct {
	bus   *bus.Bus
	mu    sync.Mutex
	at    time.Time
	err   error
	waits []string
}

const (
	// storageEvery is how long an answer is used, storageTimeout how long one may take.
	storageEvery   = time.Second
	storageTimeout = 2 * time.Second
)

// check returns an error that names every stream that stores nothing, with advice; it is a condition of readiness. It
// asks the server again once the last answer is older than storageEvery.
func (s *storage) check() error {
	if !s.bus.Conn().IsConnected() {
		return nil // said already
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) < storageEvery {
		return s.err
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	faults, err := s.bus.Faults(ctx)
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, bus.ErrNoLeader) {
		err = fmt.Errorf("the server does not say within %v how its streams are; see its log, and start the servers "+
			"of its cluster that are down", storageTimeout)
	}
	var said []string
	for _, f := range faults {
		said = append(said, Advice(f))
	}
	if len(said) > 0 {
		err = errors.New(strings.Join(said, "; "))
	}
	s.waits = nil
	if paused, pausedErr := s.bus.PausedRuns(ctx); pausedErr == nil { // else it is said above
		for _, c := range paused {
			s.waits = append(s.waits, c.Sentence())
		}
	}
	s.at, s.err = time.Now(), err
	return err
}

// paused returns a note for each paused run, as of the last check.
func (s *storage) paused() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.waits)
}

// Handler serves the three paths.
func (h *Health) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, []string{}) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, h.faults()) })
	mux.Handle("GET /metrics", promhttp.Handler())
	return mux
}

// faults returns the failed conditions of readiness as "name: reason"; an empty list, not nil, if all hold.
func (h *Health) faults() []string {
	faults := []string{}
	if !h.ready.Load() {
		faults = append(faults, "service: starting or draining")
	}
	h.mu.Lock()
	checks := slices.Clone(h.checks)
	h.mu.Unlock()
	answers := make([]*answer, len(checks))
	for i, c := range checks {
		answers[i] = c.ask()
	}
	late, stop := context.WithTimeout(context.Background(), checksTimeout)
	defer stop()
	for i, a := range answers {
		select {
		case <-a.done:
			if a.err != nil {
				faults = append(faults, checks[i].name+": "+a.err.Error())
			}
		case <-late.Done():
			faults = append(faults, fmt.Sprintf("%s: not known after %v: the server does not say; see 'meander doctor'",
				checks[i].name, checksTimeout))
		}
	}
	return faults
}

// answer writes the JSON answer of a health endpoint: status 200 without faults, else 503. Notes are shown and change
// nothing.
func (h *Health) answer(w http.ResponseWriter, faults []string) {
	h.mu.Lock()
	standing := slices.Clone(h.notes)
	h.mu.Unlock()
	notes := []string{}
	for _, say := range standing {
		notes = append(notes, say()...)
	}
	status, code := "ok", http.StatusOK
	if len(faults) > 0 {
		status, code = "unavailable", http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	// The client may be gone: an error here has no reader.
	_ = json.NewEncoder(w).Encode(map[string]any{
		"status": status, "service": h.service, "version": Version(), "instance": h.instance, "faults": faults,
		"notes": notes,
	})
}

// Serve listens on addr (host:port; port 0 picks one) and serves the health endpoints until stop is called. setting
// is the flag that named the address, for errors. It returns the address it listens on. An empty addr serves nothing.
// It fails if the address cannot be listened on.
func (h *Health) Serve(setting, addr string, log zerolog.Logger) (listening string, stop func(), err error) {
	if addr == "" {
		return "", func() {}, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w; choose another address, or an empty one for none", setting, err)
	}
	srv := &http.Server{
		Handler: h.Handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10,
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error().Err(err).Msg("health endpoint stopped")
		}
	})
	log.Info().Stringer("addr", l.Addr()).Msg("health endpoint")
	return l.Addr().String(), func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			_ = srv.Close() // end requests that did not end in time
		}
		serving.Wait()
	}, nil
}

// askHealth asks a running program at its health address whether it is ready, for --healthcheck: container health
// checks use it in images without a shell. nil: it is ready.
func askHealth(ctx context.Context, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("health address %q: %w", addr, err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // listening everywhere includes here
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	var said struct {
		Faults []string `json:"faults"`
	}
	err = errors.Join(json.NewDecoder(resp.Body).Decode(&said), resp.Body.Close())
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("readyz: %s: %s", resp.Status, strings.Join(said.Faults, "; "))
	}
	return err
}
