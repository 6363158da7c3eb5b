package outcomes_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// A run is what its groups are, and what a control made of it comes first.
func TestCounts_Run(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		counts outcomes.Counts
		want   string
	}{
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2}}, "complete"},
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2, "refilled": 3}}, "complete"},
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2, "failed": 1}}, "partial"},
		{outcomes.Counts{Groups: outcomes.Groups{"partial": 1}}, "partial"},
		{outcomes.Counts{Groups: outcomes.Groups{"failed": 1, "mixed": 1, "stale": 1}}, "failed"},
		{outcomes.Counts{Groups: outcomes.Groups{"stale": 2}}, "stale"},
		{outcomes.Counts{Groups: outcomes.Groups{"filtered": 2}}, "filtered"},
		{outcomes.Counts{Groups: outcomes.Groups{"refused": 2}, Refused: 2}, "refused"},
		{outcomes.Counts{Refused: 1}, "refused"},
		{outcomes.Counts{Unanswered: 1}, "running"},
		{outcomes.Counts{}, "running"},
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2, "open": 1}}, "running"},
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2}, OpenBatches: 1}, "running"},
		{outcomes.Counts{Groups: outcomes.Groups{"complete": 2}, Control: schemas.ControlCancel}, "cancelled"},
		{outcomes.Counts{Groups: outcomes.Groups{"open": 2}, Control: schemas.ControlPause}, "paused"},
		{outcomes.Counts{Groups: outcomes.Groups{"open": 2}, Control: schemas.ControlResume}, "running"},
	} {
		got := c.counts.Run()
		if got != c.want || outcomes.HasEnded(got) != (got != "running" && got != "paused") {
			t.Errorf("%+v: %s, want %s", c.counts, got, c.want)
		}
		if !outcomes.IsOutcome(got) || outcomes.Tone(got) == outcomes.Good && got != "complete" {
			t.Errorf("%s has the tone %s", got, outcomes.Tone(got))
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
		if got := outcomes.Sample(c[0], c[1], c[2]); got != c[3] {
			t.Errorf("%q: %s", c, got)
		}
	}
}

// What holds up a run has one word, the same everywhere.
func TestFacts_HeldBy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		facts outcomes.Facts
		want  string
	}{
		{outcomes.Facts{Full: true, Unmade: 1}, "waiting for space"},
		{outcomes.Facts{Unanswered: 1, Reward: true}, "waiting for a sampler"},
		{outcomes.Facts{Unmade: 1, Reward: true}, "waiting for a sampler"},
		{outcomes.Facts{Unmade: 1, Sampler: true, Unserved: true}, "waiting for a sampler"},
		{outcomes.Facts{Unmade: 1, Sampler: true}, ""},
		{outcomes.Facts{Batches: 1, Sampler: true}, "waiting for the batch"},
		{outcomes.Facts{Batches: 1, Unmade: 1, Sampler: true}, ""},
		{outcomes.Facts{Unscored: 2, Sampler: true}, "waiting for a reward service"},
		{outcomes.Facts{Unscored: 2, Judged: 2}, "waiting for a verdict"},
		{outcomes.Facts{Unscored: 2, Judged: 1, Reward: true}, ""},
	} {
		if got := c.facts.HeldBy().Held(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.facts, got, c.want)
		}
	}
	w := outcomes.Wait{For: outcomes.ForSpace, Says: "MDR_STEPS is full", Fix: "Free old groups"}
	if got := w.Text(); got != "waiting for space: MDR_STEPS is full. Free old groups" {
		t.Error(got)
	}
}

// Each outcome without all its rewards is explained, and has what to do; so has each dead letter.
func TestFixes(t *testing.T) {
	t.Parallel()
	for _, outcome := range outcomes.GroupOutcomes() {
		fix := outcomes.FixGroup("r", "u", outcome, "height: 17; must be less")
		complete := outcome == "complete" || outcome == "refilled"
		if (outcomes.Lacks(outcome) == "") != complete {
			t.Errorf("%s lacks %q", outcome, outcomes.Lacks(outcome))
		}
		if fixed := fix != ""; fixed == (complete || outcome == "open" || outcome == "partial") {
			t.Errorf("%s: %q", outcome, fix)
		}
	}
	for _, c := range [][2]string{
		{outcomes.FixGroup("r", "u", "refused", "height: 17; must be less"), `Correct height, and publish the prompt again with another uid: "u" is used`},
		{outcomes.FixGroup("r", "u", "refused", "no such model"), `Correct the prompt, and publish the prompt again with another uid: "u" is used`},
		{outcomes.FixSample("r", "failed", true), "The sample is stored: when the cause is gone, score it with 'meander rescore --run r'"},
		{outcomes.FixSample("r", "failed", false), "End the cause, see 'meander doctor', and publish the prompt again with another uid"},
		{outcomes.FixSample("r", "scored", true), ""},
		{outcomes.FixLetter("intake", "invalid"), "Correct the prompt, and publish it again with another uid"},
		{outcomes.FixLetter("reward", "invalid"), "Mend the program that published it"},
		{outcomes.FixLetter("", "odd"), "Read the reason, and end the cause"},
	} {
		if c[0] != c[1] {
			t.Errorf("%q, want %q", c[0], c[1])
		}
	}
}
