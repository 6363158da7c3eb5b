package view_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// A run is what its groups are, and what a control made of it comes first.
func TestCounts_Run(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		counts view.Counts
		want   string
	}{
		{view.Counts{Groups: view.Groups{"complete": 2}}, "complete"},
		{view.Counts{Groups: view.Groups{"complete": 2, "refilled": 3}}, "complete"},
		{view.Counts{Groups: view.Groups{"complete": 2, "failed": 1}}, "partial"},
		{view.Counts{Groups: view.Groups{"partial": 1}}, "partial"},
		{view.Counts{Groups: view.Groups{"failed": 1, "mixed": 1, "stale": 1}}, "failed"},
		{view.Counts{Groups: view.Groups{"stale": 2}}, "stale"},
		{view.Counts{Groups: view.Groups{"filtered": 2}}, "filtered"},
		{view.Counts{Groups: view.Groups{"refused": 2}, Refused: 2}, "refused"},
		{view.Counts{Refused: 1}, "refused"},
		{view.Counts{Unanswered: 1}, "running"},
		{view.Counts{}, "running"},
		{view.Counts{Groups: view.Groups{"complete": 2, "open": 1}}, "running"},
		{view.Counts{Groups: view.Groups{"complete": 2}, OpenBatches: 1}, "running"},
		{view.Counts{Groups: view.Groups{"complete": 2}, Control: schemas.ControlCancel}, "cancelled"},
		{view.Counts{Groups: view.Groups{"open": 2}, Control: schemas.ControlPause}, "paused"},
		{view.Counts{Groups: view.Groups{"open": 2}, Control: schemas.ControlResume}, "running"},
	} {
		got := c.counts.Run()
		if got != c.want || view.HasEnded(got) != (got != "running" && got != "paused") {
			t.Errorf("%+v: %s, want %s", c.counts, got, c.want)
		}
		if !view.IsOutcome(got) || view.Tone(got) == view.Good && got != "complete" {
			t.Errorf("%s has the tone %s", got, view.Tone(got))
		}
	}
}

// What an event says of a sample is no success because it is there.
func TestSample(t *testing.T) {
	t.Parallel()
	for _, c := range [][4]string{
		{"", "", "", "awaited"},
		{"", "completed", "", "made"},
		{"", "failed", "", "failed"},
		{"", "completed", "failed", "failed"},
		{"", "completed", "scored", "scored"},
		{"", "pruned", "pruned", "pruned"},
		{"missing", "completed", "scored", "missing"},
	} {
		if got := view.Sample(c[0], c[1], c[2]); got != c[3] {
			t.Errorf("%q: %s", c, got)
		}
	}
}

// What holds up a run has one word, the same everywhere.
func TestFacts_HeldBy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		facts view.Facts
		want  string
	}{
		{view.Facts{Full: true, Unmade: 1}, "waiting for space"},
		{view.Facts{Unanswered: 1, Reward: true}, "waiting for a sampler"},
		{view.Facts{Unmade: 1, Reward: true}, "waiting for a sampler"},
		{view.Facts{Unmade: 1, Sampler: true, Unserved: true}, "waiting for a sampler"},
		{view.Facts{Unmade: 1, Sampler: true}, ""},
		{view.Facts{Batches: 1, Sampler: true}, "waiting for the batch"},
		{view.Facts{Batches: 1, Unmade: 1, Sampler: true}, ""},
		{view.Facts{Unscored: 2, Sampler: true}, "waiting for a reward service"},
		{view.Facts{Unscored: 2, Judged: 2}, "waiting for a verdict"},
		{view.Facts{Unscored: 2, Judged: 1, Reward: true}, ""},
	} {
		if got := c.facts.HeldBy().Held(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.facts, got, c.want)
		}
	}
	w := view.Wait{For: view.ForSpace, Says: "MDR_STEPS is full", Fix: "Free old groups"}
	if got := w.Text(); got != "waiting for space: MDR_STEPS is full. Free old groups" {
		t.Error(got)
	}
}
