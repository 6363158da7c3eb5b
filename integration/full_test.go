package integration_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// ready waits until /readyz answers with the code, and what it says holds the text.
func ready(t *testing.T, addr string, code int, text string) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("readyz of %d", code), func() error {
		resp, err := http.Get("http://" + addr + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && (resp.StatusCode != code || !strings.Contains(string(body), text)) {
			err = fmt.Errorf("%d %s", resp.StatusCode, body)
		}
		return err
	})
}

// command is a command line that runs.
type command struct {
	log   *logbook
	ended chan error
}

// begin starts one, which ends with the test at the latest.
func begin(t *testing.T, dir string, args ...string) *command {
	t.Helper()
	c := &command{&logbook{}, make(chan error, 1)}
	cmd := exec.CommandContext(t.Context(), program(t, "meander"), args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, c.log, c.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { c.ended <- cmd.Wait() }()
	return c
}

// A pipeline whose steps do not fit says so wherever one looks, loses nothing, and goes
// on once there is room.
func TestFull_StepsAndBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	health := harness.FreeAddress(t)
	launch(t, dir, program(t, "meander"), "up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--metrics-addr",
		health, "--max-steps-bytes", "1MiB")
	running(t, dir)
	ready(t, health, http.StatusOK, "ok")

	// A group alone fits; all of them do not.
	args := []string{"run", "--run", "r1", "-n", "4", "--steps", "40", "--out", "-", "a red fox", "two owls", "rain"}
	refused := meander(t, dir, args...).must(t, 2)
	for _, want := range []string{"does not fit", "--max-steps-bytes", "--overfill"} {
		if !strings.Contains(refused.stderr, want) {
			t.Errorf("a run that cannot fit: no %q in\n%s", want, refused.stderr)
		}
	}
	run := begin(t, dir, append(args, "--overfill")...)
	ready(t, health, http.StatusServiceUnavailable, "MDR_STEPS is full")
	bustest.Until(t, "word of the run", func() error {
		if log := run.log.String(); !strings.Contains(log, "MDR_STEPS is full: ") ||
			!strings.Contains(log, "meander streams limit --max-steps-bytes") {
			return fmt.Errorf("it says\n%s", log)
		}
		return nil
	})
	streams := meander(t, dir, "streams", "--json").must(t, 1)
	if !strings.Contains(streams.stderr, "MDR_STEPS is full: ") {
		t.Errorf("streams says\n%s", streams.stderr)
	}
	if state := states(t, streams.stdout); state["MDR_STEPS"] != "full" || state["MDR_PROMPTS"] != "ok" {
		t.Errorf("states %v", state)
	}

	meander(t, dir, "streams", "limit", "--max-steps-bytes", "8MiB").must(t, 0)
	ready(t, health, http.StatusOK, "ok")
	if err := <-run.ended; err != nil {
		t.Errorf("the run, with room again: %v\n%s", err, run.log)
	}
	if log := run.log.String(); !strings.Contains(log, "3 of 3 groups complete") {
		t.Errorf("the run says\n%s", log)
	}
	if v := verifyRun(t, dir, "r1", 0); v.Trajectories != 12 || v.Steps != 480 || v.Gone != 0 {
		t.Errorf("verified %+v", v)
	}
	meander(t, dir, "streams").must(t, 0)
	if out := meander(t, dir, "runs", "rm", "r1").must(t, 0); !strings.Contains(out.stdout, "run r1: ") {
		t.Errorf("purge says %q", out.stdout)
	}
	meander(t, dir, "verify", "--run", "r1").must(t, 1)
}

// states are those of streams --json.
func states(t *testing.T, out string) map[string]string {
	t.Helper()
	state := map[string]string{}
	for line := range strings.Lines(out) {
		var s bus.StreamStats
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		state[s.Name] = s.State
	}
	return state
}

// The limits of streams are settings of the program that sets them up, for streams that
// are there, too; and each program's health says when one is full.
func TestFull_ServicePrograms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url := natsServer(t)
	b, err := bus.Connect(t.Context(), bus.Config{URL: url, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	limit := func() (n int64) {
		stats, err := b.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(stats, func(s bus.StreamStats) bool { return s.Name == schemas.StreamSteps })
		return stats[i].MaxBytes
	}
	health := harness.FreeAddress(t)
	intake := func(t *testing.T, set int64) {
		launch(t, dir, program(t, "meander-intake"), "--nats-url", url, "--health-addr", health, "--max-steps-bytes",
			fmt.Sprintf("%dB", set), "--max-steps-age", "forever")
		ready(t, health, http.StatusOK, "ok")
		if got := limit(); got != set {
			t.Errorf("max_bytes is %d, set to %d", got, set)
		}
	}
	t.Run("a new stream", func(t *testing.T) { intake(t, 2<<20) })
	intake(t, 1<<20)
	reward := harness.FreeAddress(t)
	launch(t, dir, program(t, "meander-reward"), "--nats-url", url, "--health-addr", reward)
	ready(t, reward, http.StatusOK, "ok")
	ctx := limited(t)
	for err == nil {
		_, err = b.PublishRaw(ctx, schemas.StepSubject("r1", "u1", 0, schemas.StageMain, "a1", time.Now().UnixNano()),
			make([]byte, 300_000),
			nil, "")
	}
	for _, addr := range []string{health, reward} {
		ready(t, addr, http.StatusServiceUnavailable, "MDR_STEPS is full")
	}
	if _, err := b.PurgeSubject(ctx, schemas.StreamSteps, ">"); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{health, reward} {
		ready(t, addr, http.StatusOK, "ok")
	}
}

// verified is the report of verify --json.
type verified struct {
	Trajectories, Failed, Steps int
	Gone                        int `json:"steps_gone"`
	Mismatches                  []struct{ What string }
	Unproven                    string
}

// verifyRun runs verify and checks its exit status.
func verifyRun(t *testing.T, dir, run string, code int) (v verified) {
	t.Helper()
	out := meander(t, dir, "verify", "--run", run, "--json").must(t, code)
	if err := json.Unmarshal([]byte(out.stdout), &v); err != nil {
		t.Fatalf("verify: %v\n%s", err, out.stdout)
	}
	return v
}
