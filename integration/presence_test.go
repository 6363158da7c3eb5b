package integration_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// plane is a server with its streams, on which services leave soon after they die.
func plane(t *testing.T) (*world, string) {
	t.Helper()
	w := newWorld(t, bustest.TCP)
	w.Change(t, schemas.StreamPresenceBucket, func(c *jetstream.StreamConfig) {
		c.MaxAge, c.Duplicates = 2*time.Second,
			2*time.Second
	})
	return w, w.Server.ClientURL()
}

// intake runs one until the test ends.
func (w *world) intake(t *testing.T, change func(*intake.Config)) *bustest.Service {
	t.Helper()
	c := defaults()
	change(&c.intake)
	return w.Serve(t, c.run("intake"))
}

// services waits until so many of a kind are present.
func (w *world) services(t *testing.T, kind string, n int) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("%d of service %s", n, kind), func() error {
		present, err := w.Present(t.Context())
		if err != nil {
			return err
		}
		count := 0
		for _, p := range present {
			if p.Service == kind {
				count++
			}
		}
		if count != n {
			return fmt.Errorf("%d", count)
		}
		return nil
	})
}

// standIn says until the test ends that a lane is served, and serves nothing.
func (w *world) standIn(t *testing.T, lane schemas.Lane) {
	t.Helper()
	w.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return b.Announce(ctx, func() *schemas.Presence {
			return &schemas.Presence{Service: schemas.ServiceSampler, Instance: "stand-in", Lane: lane}
		}, nil)
	})
}

func oneImage(uid schemas.UID, model schemas.Lane) *schemas.Prompt {
	return &schemas.Prompt{
		UID: uid, Prompt: "a red fox",
		Routing:       schemas.Routing{Model: model},
		GroupSize:     new(int64(1)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(2))},
	}
}

// A lane whose sampler was killed takes no prompts: they are held, and say why, health
// too; other lanes go on; and they are sampled once the lane is served again.
func TestLane_Ghost(t *testing.T) {
	t.Parallel()
	w, url := plane(t)
	w.intake(t, func(c *intake.Config) { c.Hold = time.Hour })
	sampler := func(name string, lane string) *harness.Process {
		return harness.Raise(t, &harness.Process{
			Name: name, Path: program(t, "meander-sampler"), Dir: t.TempDir(),
			Args: []string{"--nats-url", url, "--model", "synthetic", "--lane", lane, "--health-addr", ""},
		})
	}
	ghost := sampler("ghost", "ghost")
	sampler("alive", "alive")
	w.services(t, schemas.ServiceSampler, 2)
	if _, err := w.client.Publish(t.Context(), "r", oneImage("first", "ghost")); err != nil {
		t.Fatal(err)
	}
	ghost.End(syscall.SIGKILL)
	w.services(t, schemas.ServiceSampler, 1)

	// The client waits until its deadline. On a busy machine a short one ends before intake has answered.
	var held *client.HeldError
	var err error
	for window := 4 * time.Second; held == nil && window < bustest.Patience; window *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), window)
		_, err = w.client.Publish(ctx, "r", oneImage("held", "ghost"))
		cancel()
		errors.As(err, &held)
	}
	if held == nil || !strings.Contains(held.Reason,
		`model: no sampler serves "ghost" now; start one (the last announced itself at `) ||
		!strings.Contains(held.Reason, "or name one of alive; held until") {
		t.Fatalf("a prompt for a lane that nobody serves: %v", err)
	}
	for i := range 100 { // more than wait in hand
		data, err := schemas.Encode(oneImage(schemas.UID(fmt.Sprintf("more%d", i)), "ghost"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.PublishPrompt(t.Context(), "r", data, nil); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := w.client.Publish(t.Context(), "r", oneImage("other", "alive")); err != nil || !r.Accepted {
		t.Fatalf("a prompt for another lane: %+v, %v", r, err)
	}
	if r, err := w.client.Publish(t.Context(), "r", oneImage("unnamed", "")); err != nil || !r.Accepted {
		t.Fatalf("a prompt that names no model: %+v, %v", r, err)
	}

	sampler("again", "ghost")
	for m, err := range w.Read(t.Context(), schemas.StreamTrajectories,
		[]string{schemas.TrajectorySubject("r", "held", 0, schemas.StageMain)}, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		var tr schemas.Trajectory
		if err := schemas.Decode(m.Data, &tr); err != nil || tr.StopReason != schemas.StopCompleted ||
			tr.Lane != "ghost" {
			t.Errorf("trajectory %+v, %v", tr, err)
		}
		break
	}
}

// intakeHealth runs an intake that holds prompts for so long, and returns it and its check of health.
func (w *world) intakeHealth(t *testing.T, hold time.Duration) (service *bustest.Service, check func() error) {
	t.Helper()
	hook := make(chan func() error, 1)
	service = w.intake(t, func(c *intake.Config) {
		c.Hold = hold
		c.Health = func(_ string, check func() error) { hook <- check }
	})
	return service, bustest.Receive(t, "the check of intake's health", hook)
}

// What no one comes for is refused at last, with what it waited for.
func TestLane_HeldPromptIsRefused(t *testing.T) {
	t.Parallel()
	w, _ := plane(t)
	patient, stuck := w.intakeHealth(t, time.Minute) // the alarm is at a tenth of it
	if err := w.SetPolicy(t.Context(), &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "gone", Model: "gone", LatentChannels: 1, PixelsPerToken: 16, Height: 16, Width: 16, NumInferenceSteps: 1,
		MaxPixels: 256,
	}, nil); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		receipt *schemas.Receipt
		err     error
	}
	answered := make(chan answer, 1)
	go func() {
		r, err := w.client.Publish(t.Context(), "r", oneImage("u", "gone"))
		answered <- answer{r, err}
	}()
	bustest.Until(t, "an alarm of intake's health", func() error { // where the server is slow, it says that first
		if err := stuck(); err == nil || !strings.Contains(err.Error(), `1 prompts wait: model: no sampler serves "gone" now`) {
			return fmt.Errorf("it says %w", err)
		}
		return nil
	})
	patient.Stop()
	_, stuck = w.intakeHealth(t, time.Second)
	w.Serve(t, defaults().run("advantage")) // it gets the record of the refused prompt, which would wait for it
	a := bustest.Receive(t, "the answer of intake", answered)
	var refused *client.RefusedError
	if !errors.As(a.err, &refused) || a.receipt.Code != schemas.CodeUnknownModel ||
		!strings.Contains(a.receipt.Error, `model: no sampler serves "gone" now; start one (the last announced itself at `) {
		t.Errorf("receipt %+v, %v", a.receipt, a.err)
	}
	bustest.Until(t, "health when nothing waits", stuck)
	if d := bustest.Dead(t, w.Bus, 1)[0]; d.Code != schemas.CodeUnknownModel {
		t.Errorf("dead letter %+v", d)
	}
}

// Samples that no service scores are a fault of the pipeline's health: its work stands still.
func TestIntake_HealthWithoutReward(t *testing.T) {
	t.Parallel()
	w, _ := plane(t)
	_, stuck := w.intakeHealth(t, time.Second)
	bustest.Until(t, "health of an empty pipeline", stuck)
	if _, err := w.JetStream().Publish(t.Context(), schemas.TrajectorySubject("r", "u", 0, schemas.StageMain),
		[]byte("x")); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "an alarm of intake's health", func() error {
		if err := stuck(); err == nil || err.Error() != "1 messages wait for the reward service, and none runs" {
			return fmt.Errorf("it says %w", err)
		}
		return nil
	})
}

// Intake asks the reward services that run what they can score, before an image is made.
func TestReward_UnknownIsRefusedByIntake(t *testing.T) {
	t.Parallel()
	w, url := plane(t)
	service := func(name string, args ...string) *harness.Process {
		return harness.Raise(t, &harness.Process{
			Name: name, Path: program(t, "meander-"+name), Dir: t.TempDir(), Env: []string{"PATH="}, // without tesseract
			Args: append([]string{"--nats-url", url, "--health-addr", ""}, args...),
		})
	}
	service("intake", "--hold", "1h")
	service("sampler", "--model", "synthetic")
	publish := func(want int, text string, args ...string) {
		t.Helper()
		o := meander(t, t.TempDir(), append([]string{"publish", "--nats", url, "--run", "r"}, args...)...)
		if o.code != want || !strings.Contains(o.stdout, text) {
			t.Errorf("publish %q: exit %d, want %d and %q\n%s%s", args, o.code, want, text, o.stdout, o.stderr)
		}
	}
	w.services(t, schemas.ServiceSampler, 1)
	// No one can say yet whether there is such a function; one that each service has is taken.
	publish(1, `held      "a sign"  reward[0]: no reward service runs to say whether it has "http:none"; start one; held until`,
		"--wait", "5s", "--reward", "http:none", "a sign")
	publish(0, "accepted", "-n", "2", "--reward", "jpeg_compressibility", "a sign")

	dead := service("reward")
	w.services(t, schemas.ServiceReward, 1)
	for _, tt := range []struct{ reward, want string }{
		{"http:none", `"http:none" is not configured at the reward service (--scorers); must be one of diversity, glyph, jpeg_compressibility`},
		{"http:none", `"http:none" is not configured at the reward service`},
		{"ocr", `"ocr" cannot be scored here: `},
	} {
		publish(1, "refused   \"a sign that says \\\"A\\\"\"  reward[0]: "+tt.want, "--reward", tt.reward,
			`a sign that says "A"`)
	}
	publish(0, "accepted", "--reward", "diversity", "-n", "2", "a sign")
	// What was held meanwhile is refused now: its service has come, and has it not.
	for _, d := range bustest.Dead(t, w.Bus, 4) {
		if d.Service != "intake" || d.Code != schemas.CodeUnknownReward {
			t.Errorf("dead letter of %s: %s: %s", d.Service, d.Code, d.Reason)
		}
	}
	dead.End(syscall.SIGKILL)
	w.services(t, schemas.ServiceReward, 0)
	publish(1, "no reward service runs to say whether it has \"ocr\"", "--wait", "5s", "--reward", "ocr",
		`a sign that says "B"`)
}

// A run that joins a pipeline without a sampler says so instead of standing still.
func TestRun_SaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	w, url := plane(t)
	w.intake(t, func(*intake.Config) {})
	cmd := exec.Command(program(t, "meander"), "run", "--nats", url, "--out", "-", "a red fox")
	cmd.Dir = t.TempDir()
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := false
	for lines := bufio.NewScanner(stderr); !said && lines.Scan(); {
		said = strings.HasPrefix(lines.Text(), "waiting: model: no sampler runs; start one; held until ")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if !said {
		t.Error("it ended without a word")
	}
}
