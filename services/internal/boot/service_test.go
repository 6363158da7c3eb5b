package boot_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/services/internal/boot"
)

// stage is the configuration of a small service. It shares two keys with the common settings.
type stage struct {
	Slots        int           `key:"slots" help:"work at once"`
	Instance     string        `key:"instance" help:"own name"`
	DrainTimeout time.Duration `key:"drain_timeout" help:"patience"`
}

func (c stage) Validate() error {
	if c.Slots < 1 {
		return fmt.Errorf("slots: %d; must be at least 1", c.Slots)
	}
	return nil
}

func service(run func(context.Context, stage, *bus.Bus, zerolog.Logger) error) boot.Service[stage] {
	return boot.Service[stage]{
		Name: "stage", Summary: "does nothing, for a test", Examples: []string{"meander-stage --slots 2"},
		Default: stage{Slots: 4, DrainTimeout: 3 * time.Second}, HealthAddr: "127.0.0.1:0", Run: run,
	}
}

// freeAddress returns an address of this machine that no process listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr().String()
}

// output is a buffer that a program writes while the test reads.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

func TestExecute_CommandLine(t *testing.T) {
	never := func(context.Context, stage, *bus.Bus, zerolog.Logger) error { return errors.New("was run") }
	for _, tc := range []struct {
		name           string
		args, env      []string
		want           int
		stdout, stderr string
	}{
		{name: "help", args: []string{"--help"}, stdout: "meander-stage --slots 2"},
		{name: "help tells the shared default", args: []string{"-h"}, stdout: "patience [$MEANDER_STAGE_DRAIN_TIMEOUT] (default 3s)"},
		{name: "version", args: []string{"--version"}, stdout: "meander-stage " + boot.Version()},
		{name: "print config", args: []string{"--print-config", "--slots=9"}, stdout: "slots: 9\n"},
		{name: "print config hides the token", args: []string{"--print-config"}, env: []string{"MEANDER_NATS_TOKEN=hunter2"}, stdout: `token: "***"`},
		{name: "unknown flag", args: []string{"--slotz"}, want: 2, stderr: "unknown flag: --slotz; did you mean --slots?"},
		{name: "bad flag", args: []string{"--drain-timeout=5"}, want: 2, stderr: `--drain-timeout: "5"; must be a duration with its unit, such as 5s or 5m`},
		{name: "argument", args: []string{"now"}, want: 2, stderr: `"now" is not a flag`},
		{name: "bad setting", args: []string{"--slots=0"}, want: 2, stderr: "slots: 0; must be at least 1"},
		{name: "bad common setting", args: []string{"--log-level=loud", "--drain-timeout=0s"}, want: 2, stderr: "drain_timeout: 0s; must be positive"},
		{name: "unknown variable", env: []string{"MEANDER_STAGE_SLOT=1"}, want: 2, stderr: "MEANDER_STAGE_SLOT: unknown variable; did you mean MEANDER_STAGE_SLOTS?"},
		{name: "bad health address", args: []string{"--health-addr=nowhere"}, want: 1, stderr: "--health-addr: listen"},
		{
			name: "health of no program", args: []string{"--healthcheck", "--health-addr=127.0.0.1:1"},
			want: 1, stderr: "127.0.0.1:1",
		},
		{name: "health without an address", args: []string{"--healthcheck", "--health-addr="}, want: 1, stderr: "health address"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var stdout, stderr output
			got := service(never).Execute(t.Context(), tc.args, tc.env, &stdout, &stderr)
			if got != tc.want {
				t.Errorf("exit status %d, want %d\n%s", got, tc.want, &stderr)
			}
			if !strings.Contains(stdout.String(), tc.stdout) || !strings.Contains(stderr.String(), tc.stderr) {
				t.Errorf("stdout\n%s\nwant %q\nstderr\n%s\nwant %q", &stdout, tc.stdout, &stderr, tc.stderr)
			}
			if tc.want == 0 && stderr.String() != "" {
				t.Errorf("stderr %q on success", &stderr)
			}
		})
	}
}

// Two programs of a kind run beside each other: the second has a free port for its health, and says so. A port that was
// chosen is not changed.
func TestExecute_UsualHealthAddressIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	server := bustest.Bare(t, bustest.TCP).Server
	taken := l.Addr().String()
	s := service(func(context.Context, stage, *bus.Bus, zerolog.Logger) error { return nil })
	s.HealthAddr, s.Setup = taken, true
	var stdout, stderr output
	if code := s.Execute(t.Context(), []string{"--nats-url", server.ClientURL()}, nil, &stdout, &stderr); code != 0 ||
		!strings.Contains(stderr.String(), "a free port is used instead") {
		t.Errorf("exit %d: %s", code, &stderr)
	}
	if code := s.Execute(t.Context(), []string{"--health-addr", taken}, nil, &stdout, &stderr); code != 1 ||
		!strings.Contains(stderr.String(), "address already in use; choose another address") {
		t.Errorf("exit %d: %s", code, &stderr)
	}
}

func TestExecute_PrintedConfigIsReadBack(t *testing.T) {
	s := service(nil)
	var first, second, stderr output
	if code := s.Execute(t.Context(), []string{"--print-config", "--slots=7", "--log-format=json", "--instance=here"},
		nil, &first, &stderr); code != 0 {
		t.Fatalf("exit status %d: %s", code, &stderr)
	}
	path := filepath.Join(t.TempDir(), "stage.yaml")
	if err := os.WriteFile(path, []byte(first.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if code := s.Execute(t.Context(), []string{"--print-config", "--config", path}, nil, &second, &stderr); code != 0 {
		t.Fatalf("exit status %d: %s", code, &stderr)
	}
	if first.String() != second.String() {
		t.Errorf("got\n%s\nwant\n%s", &second, &first)
	}
}

func TestExecute_Serves(t *testing.T) {
	server := bustest.Bare(t, bustest.TCP).Server
	health := freeAddress(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	running, drained := make(chan stage, 1), make(chan struct{})
	s := service(func(ctx context.Context, cfg stage, b *bus.Bus, log zerolog.Logger) error {
		running <- cfg
		<-ctx.Done()
		close(drained)
		return ctx.Err()
	})
	s.Setup = true
	var stdout, stderr output
	exit := make(chan int, 1)
	go func() {
		exit <- s.Execute(ctx, []string{"--nats-url", server.ClientURL(), "--health-addr", health, "--slots=2"}, nil,
			&stdout, &stderr)
	}()

	var cfg stage
	select {
	case cfg = <-running:
	case code := <-exit:
		t.Fatalf("exit status %d\n%s", code, &stderr)
	case <-time.After(bustest.Patience):
		t.Fatalf("not running\n%s", &stderr)
	}
	if cfg.Slots != 2 || cfg.Instance == "" {
		t.Errorf("service got %+v; want its flag and an instance name", cfg)
	}

	// Ready, by its own health check.
	var out, errs output
	if code := s.Execute(t.Context(), []string{"--healthcheck", "--health-addr", health}, nil, &out, &errs); code != 0 {
		t.Errorf("health check: exit status %d: %s", code, &errs)
	}
	// Found by service discovery, under the name the service was given.
	nc, err := nats.Connect(server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	reply, err := nc.Request("$SRV.PING.meander-stage", nil, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var ping micro.Ping
	if err := json.Unmarshal(reply.Data, &ping); err != nil || ping.Metadata["instance"] != cfg.Instance {
		t.Errorf("discovery says %+v, %v; want instance %s", ping, err, cfg.Instance)
	}

	cancel()
	select {
	case code := <-exit:
		if code != 0 {
			t.Errorf("exit status %d after a stop, want 0\n%s", code, &stderr)
		}
	case <-time.After(bustest.Patience):
		t.Fatalf("did not stop\n%s", &stderr)
	}
	select {
	case <-drained:
	default:
		t.Error("ended before the service had drained")
	}
	if !strings.Contains(stderr.String(), `"message":"serving"`) {
		t.Errorf("log\n%s", &stderr)
	}
}

// While a service waits for what others make, its readiness says for what.
func TestExecute_Waits(t *testing.T) {
	server := bustest.Bare(t, bustest.TCP).Server
	health := freeAddress(t)
	s := service(func(context.Context, stage, *bus.Bus, zerolog.Logger) error { return nil })
	ctx, stop := context.WithCancel(t.Context())
	exit := make(chan int, 1)
	go func() {
		var stdout, stderr output
		exit <- s.Execute(ctx, []string{"--nats-url", server.ClientURL(), "--health-addr", health}, nil, &stdout,
			&stderr)
	}()
	bustest.Until(t, "the reason", func() error {
		var out, errs output
		s.Execute(t.Context(), []string{"--healthcheck", "--health-addr", health}, nil, &out, &errs)
		if said := out.String() + errs.String(); !strings.Contains(said, "streams: not all there yet: meander-intake") {
			return errors.New(said)
		}
		return nil
	})
	stop()
	bustest.Receive(t, "the end", exit)
}

func TestExecute_Fails(t *testing.T) {
	server := bustest.Bare(t, bustest.TCP).Server
	args := []string{"--nats-url", server.ClientURL(), "--setup"}

	s := service(func(context.Context, stage, *bus.Bus, zerolog.Logger) error { return errors.New("lost it") })
	var stdout, stderr output
	if code := s.Execute(t.Context(), args, nil, &stdout, &stderr); code != 1 ||
		!strings.Contains(stderr.String(), "lost it") {
		t.Errorf("exit status %d, want 1 and the reason\n%s", code, &stderr)
	}
	// The reason is in the log, too, for who collects only faults; a stop that was asked for is none.
	level := func(o *output) (level, reason string) {
		for line := range strings.Lines(o.String()) {
			var e struct{ Level, Message, Error string }
			if json.Unmarshal([]byte(line), &e) == nil && e.Message == "stopped" {
				return e.Level, e.Error
			}
		}
		return "", ""
	}
	if l, why := level(&stderr); l != "error" || why != "lost it" {
		t.Errorf("the end is logged at level %q with the reason %q; want error, and lost it", l, why)
	}
	ctx, stop := context.WithCancel(t.Context())
	asked := service(func(ctx context.Context, _ stage, _ *bus.Bus, _ zerolog.Logger) error {
		stop()
		<-ctx.Done()
		return ctx.Err()
	})
	var asks output
	if code := asked.Execute(ctx, args, nil, &stdout, &asks); code != 0 {
		t.Errorf("exit status %d of a stop that was asked for\n%s", code, &asks)
	}
	if l, why := level(&asks); l != "info" || why != "" {
		t.Errorf("a stop that was asked for is logged at level %q with the reason %q; want info", l, why)
	}

	// A health port that is taken.
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	var out, errs output
	if code := s.Execute(t.Context(), append(args, "--health-addr", taken.Addr().String()), nil, &out,
		&errs); code != 1 || !strings.Contains(errs.String(), "--health-addr") {
		t.Errorf("exit status %d, want 1 and a hint\n%s", code, &errs)
	}
}
