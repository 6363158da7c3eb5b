package command

import (
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// Events of a run come in their order, one line each.
func TestWatch(t *testing.T) {
	inStore(t)
	got := expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "trajectory,step", "--count", "8")
	if steps, trajectories := strings.Count(got, "  step "), strings.Count(got, "  trajectory "); steps != 6 ||
		trajectories != 2 {
		t.Errorf("%d steps and %d trajectories; want 6 and 2:\n%s", steps, trajectories, got)
	}
	lines := linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--uid", "p", "--kinds", "advantage", "--count",
		"1", "--json"))
	if len(lines) != 1 {
		t.Errorf("JSON %v", lines)
	}
	var kinds []string
	last := 0.0
	for _, e := range linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--json", "--count", "12")) {
		if at := e["time"].(float64); at < last {
			t.Errorf("%v is before what it follows", e)
		} else {
			last = at
		}
		kinds = append(kinds, e["kind"].(string))
	}
	if kinds[0] != "prompt" || kinds[11] != "advantage" {
		t.Errorf("begins with %s and ends with %s", kinds[0], kinds[11])
	}
	slices.Sort(kinds)
	if all := strings.Join(kinds, " "); all != "advantage prompt reward reward "+strings.Repeat("step ",
		6)+"trajectory trajectory" {
		t.Errorf("printed %s", all)
	}
	expect(t, exitUsage, `--kinds: "stepp"; did you mean step?`, "watch", "--kinds", "stepp")
	expect(t, exitUsage, "--count: -1; must not be negative", "watch", "--count", "-1")
	expect(t, exitUsage, "--since: -5m0s; must not be negative", "watch", "--since", "-5m")
	expect(t, exitUsage, `--uid: "a b"`, "watch", "--uid", "a b")
	expect(t, exitUsage, `--run: "a b"`, "watch", "--run", "a b")
	expect(t, exitUsage, "[all since] were all set", "watch", "--since", "1m", "--all")
}

// A view that is opened while the server is away goes on by itself when it comes.
func TestViews_ServerAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	inEmptyDir(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan int, 2)
	views := map[string]*text{"watch": {}, "ui": {}}
	for name, errs := range views {
		args := map[string][]string{
			"watch": {"watch", "--run", "r", "--count", "1"}, "ui": {"ui", "--listen", "127.0.0.1:0"},
		}[name]
		go func() {
			ended <- Execute(ctx, append(args, "--nats", "nats://"+address), strings.NewReader(""), io.Discard, errs)
		}()
	}
	says := func(name, what string) {
		t.Helper()
		bustest.Until(t, name+": "+what, func() error {
			if !strings.Contains(views[name].String(), what) {
				return errNotYet
			}
			return nil
		})
	}
	says("watch", "waiting for the server at")
	says("ui", "waiting for the server at")
	p := bustest.New(t, func(o *natsd.Options) { o.Listen = address })
	says("ui", "the page of nats://"+address+" is at")
	if _, err := p.PublishPrompt(t.Context(), "r", bustest.Encode(t, &schemas.Prompt{Prompt: "a fox"}),
		nil); err != nil {
		t.Fatal(err)
	}
	if status := bustest.Receive(t, "the end of watch", ended); status != exitOK {
		t.Errorf("watch: exit status %d: %s", status, views["watch"])
	}
	stop()
	bustest.Receive(t, "the end of ui", ended)
}
