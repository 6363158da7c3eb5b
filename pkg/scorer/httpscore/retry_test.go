package httpscore_test

import (
	"context"
	"errors"
	"fmt"
	"image/color"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/scorer"
)

// Which failures are tried again, and what the last one is.
func TestScorer_Retries(t *testing.T) {
	status := func(code int, header ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
			fmt.Fprint(w, "the server\nsays no")
		}
	}
	crash := func(w http.ResponseWriter, r *http.Request) {
		conn, buf, err := w.(http.Hijacker).Hijack()
		if err == nil {
			fmt.Fprint(buf, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"scores\":")
			buf.Flush()
			conn.Close()
		}
	}
	hang := func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() }
	tests := []struct {
		name   string
		handle http.HandlerFunc
		final  bool
		fault  string
	}{
		{"400", status(400), true, `status 400: "the server\nsays no"`},
		{"401", status(401), true, "status 401"},
		{"404", status(404), true, "status 404"},
		{"204", status(204), true, "status 204"},
		{"301", status(301, "Location", "http://127.0.0.1:1/elsewhere"), true, "status 301, a redirect"},
		{"408", status(408), false, "status 408"},
		{"429", status(429), false, "status 429"},
		{"500", status(500), false, "status 500"},
		{"503", status(503), false, `status 503: "the server\nsays no"`},
		{"crash in the reply", crash, false, "unexpected EOF"},
		{"hang", hang, false, "no reply within 50ms"},
		{"not HTTP", func(w http.ResponseWriter, r *http.Request) {
			if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
				fmt.Fprint(conn, "SSH-2.0-OpenSSH\r\n")
				conn.Close()
			}
		}, false, "malformed HTTP response"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var requests atomic.Int32
			cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				tt.handle(w, r)
			}))
			cfg.Timeout = 50 * time.Millisecond
			if tt.final {
				cfg.Timeout = 5 * time.Second
			}
			_, err := open(t, cfg).Score(t.Context(), flat(color.NRGBA{A: 255}))
			if err == nil || !strings.Contains(err.Error(), tt.fault) ||
				errors.Is(err, scorer.ErrUnavailable) == tt.final {
				t.Errorf("error %v, want %q, final %v", err, tt.fault, tt.final)
			}
			want := int32(3)
			if tt.final {
				want = 1
			}
			if got := requests.Load(); got != want {
				t.Errorf("%d requests, want %d", got, want)
			}
		})
	}
}

func TestScorer_NoConnection(t *testing.T) {
	t.Run("refused", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close() // a port no one listens on
		_, err = open(t, config("http://"+l.Addr().String())).Score(t.Context(), flat(color.NRGBA{A: 255}))
		if err == nil || !errors.Is(err, scorer.ErrUnavailable) ||
			!strings.Contains(err.Error(), "connection refused (try 3)") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a certificate of an unknown authority", func(t *testing.T) {
		server := httptest.NewTLSServer(http.NotFoundHandler())
		defer server.Close()
		_, err := open(t, config(server.URL)).Score(t.Context(), flat(color.NRGBA{A: 255}))
		if err == nil || errors.Is(err, scorer.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("error %v, want a final one about the certificate", err)
		}
	})
}

// A server that is away for a while costs time, nothing else.
func TestScorer_Recovers(t *testing.T) {
	var requests atomic.Int32
	cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) <= 2 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, `{"scores":[0.75]}`)
	}))
	if got, err := open(t, cfg).Score(t.Context(), flat(color.NRGBA{A: 255})); got != 0.75 || err != nil ||
		requests.Load() != 3 {
		t.Errorf("%v, %v after %d requests; want 0.75 after 3", got, err, requests.Load())
	}
}

func TestScorer_RetryAfter(t *testing.T) {
	for _, value := range []func() string{
		func() string { return "1" },
		// whole seconds: at least 1 s left
		func() string { return time.Now().Add(2 * time.Second).UTC().Format(http.TimeFormat) },
	} {
		var at []time.Time
		cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
			at = append(at, time.Now())
			if len(at) == 1 {
				w.Header().Set("Retry-After", value())
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			fmt.Fprint(w, `{"scores":[1]}`)
		}))
		if _, err := open(t, cfg).Score(t.Context(), flat(color.NRGBA{A: 255})); err != nil {
			t.Fatal(err)
		}
		if waited := at[1].Sub(at[0]); waited < 950*time.Millisecond {
			t.Errorf("tried again after %v, want 1s", waited)
		}
	}
}

// When the next try would come too late, the call ends now, not at its deadline or once its caller's patience is over.
func TestScorer_GivesUpEarly(t *testing.T) {
	var calls atomic.Int64
	cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		w.Header().Set("Retry-After", "3600")
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	limited, cancel := context.WithTimeout(t.Context(), 25*time.Second) // a server may ask for 30 s at most
	defer cancel()
	for name, ctx := range map[string]context.Context{
		"deadline": limited,
		"patience": scorer.WithRetryDeadline(t.Context(), time.Now().Add(25*time.Second)),
	} {
		calls.Store(0)
		if _, err := open(t, cfg).Score(ctx, flat(color.NRGBA{A: 255})); !errors.Is(err, scorer.ErrUnavailable) ||
			ctx.Err() != nil || calls.Load() != 1 {
			t.Errorf("%s: %v after %d calls, and %v of the deadline; want unavailable after one", name, err,
				calls.Load(), ctx.Err())
		}
	}
}

func TestScorer_Cancel(t *testing.T) {
	in := make(chan struct{}, 1)
	cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		in <- struct{}{}
		<-r.Context().Done()
	}))
	cfg.Concurrency = 1
	s := open(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	for range 3 { // one in the server, two before its door
		wait.Go(func() {
			if _, err := s.Score(ctx, flat(color.NRGBA{A: 255})); !errors.Is(err, context.Canceled) ||
				errors.Is(err, scorer.ErrUnavailable) {
				t.Errorf("error %v, want that of the caller who left", err)
			}
		})
	}
	select {
	case <-in:
	case <-time.After(2 * time.Minute):
		t.Error("the server was not asked")
	}
	cancel()
	wait.Wait()
}

func TestScorer_Bounds(t *testing.T) {
	t.Run("concurrency", func(t *testing.T) {
		var now, most atomic.Int32
		two := make(chan struct{})
		cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
			n := now.Add(1)
			defer now.Add(-1)
			for {
				if old := most.Load(); n <= old || most.CompareAndSwap(old, n) {
					break
				}
			}
			if n == 2 {
				select {
				case <-two:
				default:
					close(two)
				}
			}
			<-two // the first waits for a second: they do overlap
			time.Sleep(2 * time.Millisecond)
			fmt.Fprint(w, `{"scores":[1]}`)
		}))
		cfg.Concurrency = 2
		s := open(t, cfg)
		var wait sync.WaitGroup
		for range 12 {
			wait.Go(func() {
				if _, err := s.Score(t.Context(), flat(color.NRGBA{A: 255})); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		if most.Load() != 2 {
			t.Errorf("%d requests at once, want 2", most.Load())
		}
	})
	t.Run("rate", func(t *testing.T) {
		var requests atomic.Int32
		cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			fmt.Fprint(w, `{"scores":[1]}`)
		}))
		cfg.Rate, cfg.Concurrency = 50, 8
		s := open(t, cfg)
		began := time.Now()
		var wait sync.WaitGroup
		for range 16 {
			wait.Go(func() {
				if _, err := s.Score(t.Context(), flat(color.NRGBA{A: 255})); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		// The first starts at once, the other 15 one every 20 ms.
		if took := time.Since(began); took < 290*time.Millisecond || requests.Load() != 16 {
			t.Errorf("%d requests in %v, want 16 in 300ms or more", requests.Load(), took)
		}
	})
}
