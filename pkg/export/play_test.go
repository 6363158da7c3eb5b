package export_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// recorded stores events of two runs, one after the other, in several streams.
func recorded(t *testing.T) *bustest.Plane {
	t.Helper()
	p := bustest.New(t)
	put := func(subject string, e schemas.Event) {
		if _, err := p.PublishRaw(t.Context(), subject, bustest.Encode(t, e), nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	put(schemas.PromptSubject("r"), &schemas.Prompt{Prompt: "a red fox", UID: "u"})
	put(schemas.PromptSubject("other"), &schemas.Prompt{Prompt: "a red fox"})
	for i := range int64(3) {
		step := &schemas.Step{Stage: schemas.StageMain, Run: "r", UID: "u", SampleIndex: i, Attempt: "a"}
		put(step.Subject(), step)
		made := &schemas.Trajectory{Identity: schemas.Identity{
			Stage: schemas.StageMain, Run: "r", UID: "u", SampleIndex: i,
		}}
		put(made.Subject(), made)
		put(schemas.RewardSubject("r", "u", "u", i), &schemas.Reward{Run: "r", UID: "u", SampleIndex: i})
	}
	put(schemas.AdvantageSubject("r", "u"), &schemas.Advantage{Run: "r", UID: "u"})
	return p
}

// play plays the run, and returns its events and when each was due.
func play(t *testing.T, b *bus.Bus, pace export.Pace, kinds ...string) (played []*bus.Message, due []time.Duration) {
	t.Helper()
	pace.Wait = func(_ context.Context, d time.Duration) error {
		due = append(due, d)
		return nil
	}
	for m, err := range export.Play(t.Context(), b, export.Sources("r", kinds), pace) {
		if err != nil {
			t.Fatal(err)
		}
		played = append(played, m)
	}
	return played, due
}

// Events of a run come in their order, with the pauses that were between them.
func TestPlay(t *testing.T) {
	t.Parallel()
	p := recorded(t)
	played, due := play(t, p.Bus, export.Pace{Speed: 0.5}, export.Kinds()...)
	var kinds []string
	for i, m := range played {
		a, _ := schemas.ParseSubject(m.Subject)
		kinds = append(kinds, a.Kind)
		if want := 2 * m.Time.Sub(played[0].Time); due[i] != want {
			t.Errorf("event %d is due after %v, want %v", i, due[i], want)
		}
	}
	if got, want := strings.Join(kinds, " "), "prompt"+strings.Repeat(" step trajectory reward",
		3)+" advantage"; got != want {
		t.Errorf("played %s, want %s", got, want)
	}
	if due[len(due)-1] == 0 {
		t.Error("there are no pauses")
	}
	longest := time.Duration(1)
	if _, due := play(t, p.Bus, export.Pace{Speed: 1, MaxPause: longest},
		export.Kinds()...); due[len(due)-1] > time.Duration(len(due)-1)*longest {
		t.Errorf("with short pauses they are due after %v", due)
	}
	if played, due := play(t, p.Bus, export.Pace{}, schemas.KindReward, schemas.KindAdvantage); len(played) != 4 ||
		len(due) != 0 {
		t.Errorf("at once, of two kinds: %d events, %d pauses", len(played), len(due))
	}
}

// A pause ends with the context, and the replay with it.
func TestPlay_Stopped(t *testing.T) {
	t.Parallel()
	p := recorded(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var errs []error
	for _, err := range export.Play(ctx, p.Bus, export.Sources("r", export.Kinds()), export.Pace{Speed: 1e-12}) {
		if errs = append(errs, err); err == nil {
			stop() // the next one is due in years
		}
	}
	if len(errs) != 2 || errs[0] != nil || !errors.Is(errs[1], context.Canceled) {
		t.Errorf("%v; want an event, and why there are no more", errs)
	}
}

// A pause that takes longer than a time.Duration is as long as one can be.
func TestPlay_LongPause(t *testing.T) {
	t.Parallel()
	_, due := play(t, recorded(t).Bus, export.Pace{Speed: 1e-300}, export.Kinds()...)
	if years := due[1].Hours() / 24 / 365; years != 100 || due[len(due)-1] != due[1] {
		t.Errorf("due after %v", due)
	}
}

// A pause that has begun ends with the context; one whose context has ended does not begin, due or not.
func TestSleepUntil(t *testing.T) {
	t.Parallel()
	why := errors.New("enough")
	ctx, stop := context.WithCancelCause(t.Context())
	slept := make(chan error)
	go func() { slept <- export.SleepUntil(ctx, time.Now().Add(time.Hour)) }()
	stop(why)
	if err := <-slept; !errors.Is(err, why) {
		t.Errorf("a pause ended with %v", err)
	}
	for range 64 {
		if err := export.SleepUntil(ctx, time.Time{}); !errors.Is(err, why) {
			t.Fatalf("a pause that was over ended with %v", err)
		}
	}
}

// A message has a subject of its own, says where the event is stored, and has nothing that a server would act on.
func TestPlayMessage(t *testing.T) {
	t.Parallel()
	stored := &bus.Message{
		Subject: "mdr.v1.trajectory.r.u.0.main", Stream: schemas.StreamTrajectories, Seq: 7,
		Time:   time.Date(2026, 5, 4, 3, 2, 1, 9, time.UTC),
		Header: map[string][]string{schemas.HeaderType: {"trajectory/1"}, "Nats-Msg-Id": {"x"}, "Nats-Expected-Last-Sequence": {"6"}, schemas.HeaderReply: {"inbox"}},
	}
	subject, header, err := export.PlayMessage("replay.night", stored)
	if err != nil {
		t.Fatal(err)
	}
	var headers []string
	for name, v := range header {
		headers = append(headers, fmt.Sprint(name, v))
	}
	slices.Sort(headers)
	if got, want := strings.Join(headers, " "), "Mdr-Type[trajectory/1] Nats-Sequence[7] "+
		"Nats-Stream[MDR_TRAJECTORIES] "+
		"Nats-Subject[mdr.v1.trajectory.r.u.0.main] Nats-Time-Stamp[2026-05-04T03:02:01.000000009Z]"; got != want {
		t.Errorf("headers %s, want %s", got, want)
	}
	if subject != "replay.night.trajectory.r.u.0.main" {
		t.Errorf("on %s", subject)
	}
	for _, prefix := range []string{
		"", "mdr", "mdr.v1", "replays", "replay.", "replay.*", "replay.>", "$JS.replay",
		"replay.a b",
	} {
		if _, _, err := export.PlayMessage(prefix, stored); err == nil || !strings.Contains(err.Error(), `must be "replay"`) {
			t.Errorf("prefix %q: %v", prefix, err)
		}
	}
}

// No stream of the pipeline stores what begins with Root.
func TestRoot_IsInNoStream(t *testing.T) {
	t.Parallel()
	for _, s := range schemas.Streams() {
		for _, subject := range s.Subjects {
			if first, _, _ := strings.Cut(subject, "."); first == export.Root || first == "*" || first == ">" {
				t.Errorf("%s stores %s", s.Name, subject)
			}
		}
	}
}

func ExamplePlay() {
	ctx := context.Background()
	b := &bus.Bus{} // of bus.Connect
	sources := export.Sources("night", []string{schemas.KindReward, schemas.KindAdvantage})
	for m, err := range export.Play(ctx, b, sources, export.Pace{Speed: 10, MaxPause: time.Second}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(m.Time, m.Subject, len(m.Data))
	}
}
