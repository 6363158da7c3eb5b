package boot_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/services/internal/boot"
)

func TestHealth(t *testing.T) {
	h := boot.NewHealth("thing", "here-1")
	addr, stop, err := h.Serve("--health-addr", "127.0.0.1:0", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var broken error
	h.Check("nats", func() error { return broken })

	get := func(path string) (int, map[string]any) {
		t.Helper()
		resp, err := client.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		data, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		var body map[string]any
		if resp.Header.Get("Content-Type") == "application/json" {
			if err := json.Unmarshal(data, &body); err != nil {
				t.Fatalf("%s: %v in %q", path, err, data)
			}
		}
		return resp.StatusCode, body
	}
	expect := func(path string, code int, fault string) {
		t.Helper()
		got, body := get(path)
		if got != code {
			t.Errorf("%s: got %d %v, want %d", path, got, body, code)
		}
		if faults, _ := json.Marshal(body["faults"]); fault != "" && !strings.Contains(string(faults), fault) {
			t.Errorf("%s: faults %s, want %q", path, faults, fault)
		}
	}

	expect("/healthz", 200, "")
	expect("/readyz", 503, "starting or draining")
	done := h.Until("model", "loading")
	h.SetReady(true)
	expect("/readyz", 503, "model: loading")
	done()
	expect("/readyz", 200, "")
	broken = errors.New("no server")
	expect("/readyz", 503, "nats: no server")
	expect("/healthz", 200, "")
	expect("/other", 404, "")
	broken = nil
	hung := make(chan struct{})
	h.Check("lanes", func() error { <-hung; return nil })
	expect("/readyz", 503, "lanes: not known after 2.5s")
	close(hung)
	expect("/readyz", 200, "")
	if _, body := get("/healthz"); body["service"] != "thing" || body["instance"] != "here-1" {
		t.Errorf("got %v, want the service and the instance", body)
	}

	if _, _, err := boot.NewHealth("x", "y").Serve("--health-addr", addr, zerolog.Nop()); err == nil ||
		!strings.Contains(err.Error(), "--health-addr") {
		t.Errorf("taken port: got %v, want a hint at --health-addr", err)
	}
	stop()
	if _, err := client.Get("http://" + addr + "/healthz"); err == nil {
		t.Error("still served after stop")
	}
}

// Probes come from the first moment on: they are answered while the connection is added.
func TestHealth_ProbedWhileConnecting(t *testing.T) {
	h := boot.NewHealth("thing", "here-1")
	probe := h.Handler()
	b := bustest.Bare(t).Connect(t)
	started, connected, ended := make(chan bool), make(chan bool), make(chan bool)
	go func() {
		defer close(ended)
		for i := 0; ; i++ {
			answer := httptest.NewRecorder()
			probe.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/healthz", nil))
			if answer.Code != http.StatusOK {
				t.Errorf("got %d %s, want 200", answer.Code, answer.Body)
			}
			if i == 0 {
				close(started)
			}
			select {
			case <-connected:
				return
			default:
			}
		}
	}()
	<-started
	h.Connected(b)
	close(connected)
	<-ended
}

func TestHealth_Off(t *testing.T) {
	addr, stop, err := boot.NewHealth("x", "y").Serve("--health-addr", "", zerolog.Nop())
	if addr != "" || err != nil {
		t.Errorf("got %q, %v; want nothing served", addr, err)
	}
	stop()
}

func TestLog_Fields(t *testing.T) {
	var out bytes.Buffer
	log := boot.DefaultLog().Logger(&out, "thing", "here-1")
	log.Debug().Msg("hidden")
	log.Info().Int("n", 3).Msg("shown")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v in %q", err, &out)
	}
	for key, want := range map[string]any{
		"service": "thing", "instance": "here-1", "version": boot.Version(),
		"message": "shown", "level": "info", "n": 3.0,
	} {
		if line[key] != want {
			t.Errorf("%s: got %v, want %v", key, line[key], want)
		}
	}
	if line["time"] == nil {
		t.Error("no time")
	}
}

func TestNewInstance(t *testing.T) {
	a, b := boot.NewInstance(), boot.NewInstance()
	if a == b {
		t.Errorf("got %q twice", a)
	}
	for _, r := range a {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-", r) {
			t.Errorf("%q has %q, which a subject cannot carry", a, r)
		}
	}
	if len(a) > 64 {
		t.Errorf("%q is longer than 64", a)
	}
}
