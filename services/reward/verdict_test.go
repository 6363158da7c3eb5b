package reward

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

func verdict(uid schemas.UID, i int64, name string, value *float64) *schemas.Verdict {
	v := &schemas.Verdict{
		Run: "r", UID: uid, SampleIndex: i, Name: name, Value: value, Comment: "well done", Author: "lin", At: 1,
	}
	if value == nil {
		v.Error = "skipped"
	}
	return v
}

// A verdict may come before its trajectory or after; what did not come by the deadline
// has failed, and the samples of the group still get their rewards in time.
func TestService_Verdicts(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	now := time.Now() // what is left of a deadline's time counts from the prompt
	sample := func(uid schemas.UID, i int64, deadline time.Duration, rewards ...string) *schemas.Trajectory {
		tr := trajectory(t, "r", uid, i, 4, 7, rewards...)
		tr.Group.Created, tr.Group.Deadline = now.UnixNano(), now.Add(deadline).UnixNano()
		return tr
	}
	p.put(t, verdict("u", 0, "human", new(0.5)), verdict("two", 1, "a", new(1.0))) // before everything
	p.serve(t, testConfig())
	p.put(t, sample("u", 0, time.Hour, "external:human", "jpeg_incompressibility"),
		sample("u", 1, time.Hour, "external:human"))
	p.put(t, sample("u", 2, time.Hour, "external"), sample("u", 3, 2*time.Second, "external:human?", "synthetic"))
	p.put(t, sample("two", 0, time.Hour, "external:a", "external:b"),
		sample("two", 1, 1500*time.Millisecond, "external:a", "external:b"))
	p.handled(t)
	p.put(t, verdict("u", 1, "human", new(0.25)), verdict("u", 2, "external", nil), verdict("two", 0, "a", new(1.0)))
	p.handled(t)
	p.put(t, verdict("two", 0, "b", new(2.0)))
	got := p.rewards(t, "r", 6)
	if r := got["u.0"]; r.Status != "scored" || *r.Reward != 0.5+*r.Scores[1].Value ||
		r.Scores[0].Detail != "well done" {
		t.Errorf("verdict before the sample: %+v", r)
	}
	if r := got["u.1"]; r.Status != "scored" || *r.Reward != 0.25 {
		t.Errorf("verdict after the sample: %+v", r)
	}
	if r := got["u.2"]; r.Status != "failed" || !strings.Contains(r.Error, "skipped") {
		t.Errorf("verdict that there is none: %+v", r)
	}
	if r := got["u.3"]; r.Status != "scored" || r.Scores[0].Status != "failed" ||
		!strings.Contains(r.Scores[0].Error, "no verdict came by") {
		t.Errorf("no verdict, optional: %+v", r)
	}
	if r := got["two.0"]; r.Status != "scored" || *r.Reward != 3 {
		t.Errorf("two verdicts: %+v", r)
	}
	if r := got["two.1"]; r.Status != "failed" {
		t.Errorf("one of two verdicts: %+v", r)
	}
	// One too late, and one for no group.
	p.put(t, verdict("two", 1, "b", new(2.0)), verdict("u", 0, "robot", new(2.0)))
	codes := map[string]int{}
	for _, d := range bustest.Dead(t, p.Bus, 2) {
		codes[d.Code]++
	}
	if codes[schemas.CodeLate] != 1 || codes[schemas.CodeInvalid] != 1 {
		t.Errorf("dead letters %v, want one late and one invalid", codes)
	}
}

// A sample is finished a tenth of its time before the deadline of its group, 2 s at most,
// so that the group closes with the reasons.
func TestDue(t *testing.T) {
	created := time.Unix(1000, 0)
	for left, want := range map[time.Duration]time.Duration{
		time.Second: 900 * time.Millisecond, 10 * time.Second: 9 * time.Second, time.Hour: time.Hour - 2*time.Second,
		-time.Second: -time.Second,
	} {
		tr := &schemas.Trajectory{Group: schemas.Group{
			Created: created.UnixNano(), Deadline: created.Add(left).UnixNano(),
		}}
		if due := (&service{}).due(tr).Sub(created); due != want {
			t.Errorf("%v: due after %v, want %v", left, due, want)
		}
	}
}

// A malformed verdict, or one that no sample waits for, does not keep out the right one.
func TestService_MalformedVerdicts(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	forge := func(v *schemas.Verdict) {
		t.Helper()
		p.Forge(t, schemas.VerdictSubject("r", "u", v.SampleIndex, v.Name), bustest.Encode(t, v))
	}
	forge(verdict("u", 0, "human", new(math.NaN()))) // before the service, and before its sample
	sample := func(i int64) *schemas.Trajectory { return trajectory(t, "r", "u", i, 3, 7, "external:human") }
	p.put(t, sample(0), sample(1), sample(2))
	p.serve(t, testConfig())
	forge(verdict("u", 1, "human", new(math.Inf(1))))
	forge(verdict("elsewhere", 2, "human", new(1.0)))
	for i := range int64(3) {
		bustest.Free(t, p.Bus, schemas.StreamVerdicts, schemas.VerdictSubject("r", "u", i, "human"))
		if ack, err := p.Publish(t.Context(), verdict("u", i, "human", new(float64(i)))); err != nil || ack.Duplicate {
			t.Errorf("sample %d: got %+v, %v; want stored", i, ack, err)
		}
	}
	for name, r := range p.rewards(t, "r", 3) {
		if r.Status != "scored" || *r.Reward != float64(r.SampleIndex) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// A verdict and the rest of the group, in any order: whichever comes last completes the
// sample, and the samples that lack nothing do not wait for those that do.
func TestService_VerdictsAndGroups(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	sample := func(uid schemas.UID, i int64) *schemas.Trajectory {
		tr := trajectory(t, "r", uid, i, 3, uint8(100*i), "diversity", "external:human")
		tr.Group.Deadline = prompted.Add(time.Hour).UnixNano()
		return tr
	}
	one := 1.0
	p.put(t, sample("a", 0), sample("a", 1), verdict("a", 0, "human", &one), verdict("a", 2, "human", &one))
	p.handled(t)
	p.put(t, sample("a", 2)) // the last of the group: 0 and 2 are complete, 1 lacks its verdict
	got := p.rewards(t, "r", 2)
	if got["a.0"] == nil || got["a.2"] == nil {
		t.Errorf("rewards of %d samples, want 0 and 2", len(got))
	}
	p.put(t, verdict("a", 1, "human", &one))
	got = p.rewards(t, "r", 3)
	for i := range 3 {
		if r := got[fmt.Sprint("a.", i)]; r == nil || r.Status != schemas.StatusScored ||
			*r.Reward != 1+*r.Scores[0].Value {
			t.Errorf("sample %d: %+v", i, r)
		}
	}
}
