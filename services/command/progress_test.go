package command

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/results"
)

// The progress of a run that is cancelled ends with the steps that it has, and says why.
func TestProgress_Cancelled(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		prompts := []results.Prompt{{UID: "p"}}
		var out text
		p := newProgress(&out, false, "r", prompts, results.NewOutcomes(prompts), &loading{})
		p.expect(6)
		p.countStep("mdr.v1.step.r.p.0.main.a1.0")
		want := "run r: 6/6 steps  0 rewards  1/1 groups\n" // the last steps are counted after their group's end is known
		if cancelled {
			p.cancelled()
			want = "run r: 1/6 steps  0 rewards  1/1 groups  cancelled\n"
		}
		p.groups(1, 0)
		p.close()
		if !strings.HasSuffix(out.String(), want) {
			t.Errorf("cancelled %v: %q, want %q", cancelled, &out, want)
		}
	}
}
