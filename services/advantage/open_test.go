package advantage

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// open stores records of groups, as intake does.
func (p *plane) open(t testing.TB, records ...*schemas.Opening) {
	t.Helper()
	for _, r := range records {
		if _, err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
}

// opening is the record of a group of two.
func opening(uid schemas.UID, change func(g *schemas.Group)) *schemas.Opening {
	return openingOf(made("r", uid, 0, 2, 1, change))
}

// A deadline holds for a group that no reward came of, wherever it is and whichever worker has it
// then; what comes later changes nothing.
func TestOpening_Deadline(t *testing.T) {
	var p *plane
	var end time.Time
	due := func(g *schemas.Group) { g.Deadline = end.UnixNano() }
	in := func(id, std string, groups int64) func(g *schemas.Group) {
		return func(g *schemas.Group) {
			due(g)
			g.Batch, g.BatchGroups, g.Advantage.Std = id, groups, std
		}
	}
	bustest.Before(t, func(deadline time.Time) {
		p, end = newPlane(t), deadline
		first := p.serve(t, testConfig())
		p.open(t, opening("alone", due), opening("one-of-two", due),
			opening("past", func(g *schemas.Group) { g.Deadline = 1 }),
			opening("b0", in("b", "group", 2)), opening("b1", in("b", "group", 2)),
			opening("c0", in("c", "global", 3)), opening("c1", in("c", "global", 3))) // the third prompt never comes
		p.put(t, made("r", "one-of-two", 1, 2, 1, due), made("r", "c0", 0, 2, 1, in("c", "global", 3)),
			made("r", "c0", 1, 2, 3, in("c", "global", 3)))
		first.Kill() // the groups are another worker's then
	})
	p.serve(t, testConfig())
	results := p.results(t, "r", 9)
	if early := time.Until(end); early > 0 {
		t.Errorf("closed %v before the deadline", early)
	}
	for uid, want := range map[schemas.UID]string{
		"alone": "failed", "one-of-two": "partial", "past": "failed", "b0": "failed", "b1": "failed", "c0": "complete",
		"c1": "failed",
	} {
		a := advantageOf(t, results, "r", uid)
		if a.Status != want || (want == "failed") != strings.Contains(a.Error,
			"no sample was scored: 0 failed, 2 did not come") || len(a.Members) != 2 {
			t.Errorf("%s: %s %q with %d members, want %s", uid, a.Status, a.Error, len(a.Members), want)
		}
		if a.Status == "failed" && (a.Members[0].Status != "missing" || a.Opened != 1 || a.Closed != end.UnixNano() &&
			uid != "past") {
			t.Errorf("%s: %+v", uid, a)
		}
	}
	if b := batchOf(t, results, "r", "b"); b.Status != "short" || b.Groups != 0 ||
		!slices.Equal(b.Dropped, []schemas.UID{"b0", "b1"}) {
		t.Errorf("batch %+v", b)
	}
	if b := batchOf(t, results, "r", "c"); b.Status != "partial" || !slices.Equal(b.UIDs, []schemas.UID{"c0"}) ||
		b.Samples != 2 {
		t.Errorf("batch %+v", b)
	}
	p.put(t, made("r", "alone", 0, 2, 1, due), made("r", "alone", 1, 2, 1, due),
		made("r", "b0", 0, 2, 1, in("b", "group", 2)))
	for _, d := range bustest.Dead(t, p.Bus, 3) {
		if d.Code != schemas.CodeLate {
			t.Errorf("dead letter %s %s of %s", d.Code, d.Reason, d.UID)
		}
	}
	if a := advantageOf(t, p.results(t, "r", 9), "r", "alone"); a.Status != "failed" {
		t.Errorf("alone is %s afterwards", a.Status)
	}
}

// A batch without a deadline closes after the time that it has from its first reward on,
// also with a group that is known and has nothing yet. A worker that takes over after that
// makes the same of it, whatever has come since.
func TestOpening_BatchTimeout(t *testing.T) {
	for _, std := range []string{schemas.StdGroup, schemas.StdGlobal} {
		t.Run(std, func(t *testing.T) {
			in := func(g *schemas.Group) { g.Batch, g.BatchGroups, g.Advantage.Std = "b", 2, std }
			var p *plane
			cfg := testConfig()
			bustest.Before(t, func(deadline time.Time) {
				cfg.GroupTimeout = max(time.Second, time.Until(deadline)) // the least that there is
				p = newPlane(t)
				p.open(t, opening("waits", in))
				p.put(t, made("r", "a", 0, 2, 1, in), made("r", "a", 1, 2, 3, in))
			})
			time.Sleep(cfg.GroupTimeout) // no one looks; then it is too late
			p.put(t, made("r", "waits", 0, 2, 5, in), made("r", "waits", 1, 2, 7, in))
			p.serve(t, cfg)
			results := p.results(t, "r", 3)
			if b := batchOf(t, results, "r", "b"); b.Status != "partial" || b.Samples != 2 ||
				!slices.Equal(b.UIDs, []schemas.UID{"a"}) || !slices.Equal(b.Dropped, []schemas.UID{"waits"}) {
				t.Errorf("batch %+v", b)
			}
			if a := advantageOf(t, results, "r", "waits"); a.Status != "failed" ||
				!strings.Contains(a.Error, "0 failed, 2 did not come") {
				t.Errorf("waits: %s %s", a.Status, a.Error)
			}
			if a := advantageOf(t, results, "r", "a"); a.Status != "complete" || a.Members[0].Advantage == nil {
				t.Errorf("a: %+v", a)
			}
			for _, d := range bustest.Dead(t, p.Bus, 2) {
				if d.Code != schemas.CodeLate || d.UID != "waits" {
					t.Errorf("dead letter %s of %s", d.Code, d.UID)
				}
			}
		})
	}
}

// A group without a deadline that nothing came of yet waits for its samplers, however long
// the timeout for stragglers is over.
func TestOpening_Waits(t *testing.T) {
	p := newPlane(t)
	cfg := testConfig()
	cfg.GroupTimeout = time.Second
	other := "v0" // of the same worker
	for i := 1; schemas.Partition(other) != schemas.Partition("u"); i++ {
		other = fmt.Sprint("v", i)
	}
	p.open(t, opening("u", nil))
	p.serve(t, cfg)
	p.put(t, made("other", schemas.UID(other), 0, 2, 1, nil))
	if a := advantageOf(t, p.results(t, "other", 1), "other", schemas.UID(other)); a.Status != "partial" {
		t.Errorf("%s %s; want a group whose time is over", a.Status, a.Error)
	}
	p.put(t, made("r", "u", 0, 2, 1, nil), made("r", "u", 1, 2, 3, nil))
	if a := advantageOf(t, p.results(t, "r", 1), "r", "u"); a.Status != "complete" {
		t.Errorf("%s %s", a.Status, a.Error)
	}
}

// The record of a refused prompt is a refused group at once, alone and in a batch.
func TestOpening_Refused(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	refused := func(uid schemas.UID, change func(g *schemas.Group)) *schemas.Opening {
		r := opening(uid, change)
		r.Error, r.PromptDigest, r.Lane, r.ScheduleDigest, r.Group.Reward = "height: 100; must be a multiple of 16", "",
			"", "", nil
		return r
	}
	in := func(g *schemas.Group) { g.Batch, g.BatchGroups, g.Advantage.Std = "b", 2, schemas.StdGlobal }
	p.open(t, refused("alone", nil), refused("place", in))
	p.put(t, made("r", "good", 0, 2, 1, in), made("r", "good", 1, 2, 3, in))
	results := p.results(t, "r", 4)
	for _, uid := range []schemas.UID{"alone", "place"} {
		a := advantageOf(t, results, "r", uid)
		if a.Status != "refused" || a.Error != "height: 100; must be a multiple of 16" || len(a.Members) != 2 ||
			a.Members[0].Status != "missing" {
			t.Errorf("%s: %+v", uid, a)
		}
	}
	if b := batchOf(t, results, "r", "b"); b.Status != "short" || !slices.Equal(b.UIDs, []schemas.UID{"good"}) ||
		!slices.Equal(b.Dropped, []schemas.UID{"place"}) {
		t.Errorf("batch %+v", b)
	}
}

// What a group is, is in its record: a reward that says otherwise is refused, or not heard.
func TestOpening_Facts(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	p.open(t, opening("u", nil))
	for _, r := range []*schemas.Reward{made("r", "nobody", 0, 2, 1, nil), made("r", "u", 0, 3, 1, nil)} {
		if _, err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range bustest.Dead(t, p.Bus, 2) {
		if d.Code != schemas.CodeInvalid {
			t.Errorf("dead letter %s %s", d.Code, d.Reason)
		}
	}
	p.open(t, opening("v", nil))
	p.put(t, made("r", "v", 0, 2, 1, func(g *schemas.Group) { g.Advantage.Std = schemas.StdNone }),
		made("r", "v", 1, 2, 3, func(g *schemas.Group) { g.Advantage.Estimator, g.Deadline = "nonsense", 1 }))
	a := advantageOf(t, p.results(t, "r", 1), "r", "v")
	if a.Status != "complete" || a.Scale != schemas.StdGroup || a.Estimator != "flow_grpo" ||
		*a.Members[1].Advantage > .71 || *a.Members[1].Advantage < .7 {
		t.Errorf("%+v", a)
	}
}

// The largest group fits into the least that a partition may hold.
func TestOpening_LeastHeld(t *testing.T) {
	cfg := testConfig()
	cfg.MaxHeld = schemas.MaxGroupSize
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "max_held: 1024; must be at least 1025") {
		t.Errorf("%v", err)
	}
	cfg.MaxHeld++
	p := newPlane(t)
	p.serve(t, cfg)
	var rewards []*schemas.Reward
	for i := range int64(schemas.MaxGroupSize) {
		rewards = append(rewards, made("r", "u", i, schemas.MaxGroupSize, float64(i), nil))
	}
	p.put(t, rewards...)
	if a := advantageOf(t, p.results(t, "r", 1), "r", "u"); a.Status != "complete" {
		t.Errorf("%s %s", a.Status, a.Error)
	}
}
