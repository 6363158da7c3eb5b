package advantage

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// hold is a control that intake has accepted.
func (p *plane) hold(t *testing.T, run schemas.Run, uid schemas.UID, action string, seq uint64) {
	t.Helper()
	c := &schemas.Control{Run: run, UID: uid, Action: action, By: "ada", Seq: seq, At: 1, Stored: time.Now().UnixNano()}
	if _, mine, err := p.PutControl(t.Context(), c); err != nil || !mine {
		t.Fatalf("%s: %v", action, err)
	}
}

// The time of a group without a deadline stands still while its run is paused, and counts anew
// from when it is resumed.
func TestControl_PausedGroupsWait(t *testing.T) {
	p := newPlane(t)
	cfg := testConfig()
	cfg.GroupTimeout = time.Second
	p.serve(t, cfg)
	p.hold(t, "paused", "", schemas.ControlPause, 1)
	p.put(t, made("paused", "u", 0, 2, 1, nil))
	// The same worker closes another group that was opened later, at the same timeout.
	same := schemas.UID("")
	for i := 0; same == ""; i++ {
		if uid := "v" + strconv.Itoa(i); schemas.Partition(uid) == schemas.Partition("u") {
			same = schemas.UID(uid)
		}
	}
	p.put(t, made("other", same, 0, 2, 1, nil))
	p.results(t, "other", 1)
	if n, err := p.Subjects(t.Context(), schemas.StreamAdvantages,
		schemas.AdvantageSubject("paused", "*")); err != nil || len(n) > 0 {
		t.Fatalf("a paused group has closed: %v, %v", n, err)
	}
	p.put(t, made("paused", "u", 1, 2, 3, nil))
	p.put(t, made("paused", "w", 0, 2, 1, nil))
	if a := advantageOf(t, p.results(t, "paused", 1), "paused", "u"); a.Status != schemas.StatusComplete {
		t.Errorf("what came while the run was paused, after the timeout: %+v", a)
	}
	p.hold(t, "paused", "", schemas.ControlResume, 2)
	if a := advantageOf(t, p.results(t, "paused", 2), "paused", "w"); a.Status != schemas.StatusPartial {
		t.Errorf("at its timeout, resumed: %+v", a)
	}
}

// A batch whose last rewards come while its run is paused, of samples that were in flight, is complete, and closes.
func TestControl_PausedBatchCloses(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	batch := func(g *schemas.Group) { g.Batch, g.BatchGroups = "b", 2 }
	p.put(t, made("r", "a", 0, 2, 1, batch), made("r", "a", 1, 2, 3, batch))
	p.results(t, "r", 1)
	p.hold(t, "r", "", schemas.ControlPause, 1)
	p.put(t, made("r", "b", 0, 2, 1, batch), made("r", "b", 1, 2, 3, batch))
	if b := batchOf(t, p.results(t, "r", 3), "r", "b"); b.Status != schemas.StatusComplete || b.Groups != 2 {
		t.Errorf("batch %+v", b)
	}
}

// A cancelled group closes with the rewards that have been taken in; others of its batch count, and it is not
// refilled.
func TestControl_Cancelled(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	batch := func(g *schemas.Group) {
		g.Batch, g.BatchGroups, g.GroupPolicy = "b", 2, &schemas.GroupPolicy{
			Failed: schemas.GroupRefill, ZeroStd: schemas.GroupRefill,
		}
	}
	p.put(t, made("r", "a", 0, 2, 1, batch), made("r", "b", 0, 2, 1, batch), made("r", "b", 1, 2, 3, batch))
	p.hold(t, "r", "a", schemas.ControlCancel, 1)
	results := p.results(t, "r", 3)
	a := advantageOf(t, results, "r", "a")
	if a.Status != schemas.StatusCancelled || a.RefilledBy != "" ||
		!strings.Contains(a.Error, "group a was cancelled by ada") ||
		a.Members[0].Status == schemas.StatusMissing || a.Members[0].Advantage != nil ||
		a.Members[1].Status != schemas.StatusCancelled {
		t.Errorf("cancelled: %+v", a)
	}
	if b := batchOf(t, results, "r", "b"); b.Status != schemas.StatusShort || b.Groups != 1 || len(b.Dropped) != 1 ||
		b.Refills != 0 {
		t.Errorf("batch %+v", b)
	}
}
