package command

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// printPass prints the table of a pass for people: each value of the run, and beside it that of the pass.
func printPass(w io.Writer, p *results.Pass) {
	var t *present.Table
	if len(p.Groups) <= fewGroups {
		t = present.New("GROUP", "SAMPLE", "READ", "REWARD", "NOW", "ADVANTAGE", "NOW")
		for _, g := range p.Groups {
			for _, m := range g.Members {
				after := m.Status
				if m.Reward != nil {
					after = results.Number(m.Reward, "%.3f")
				}
				t.Row(g.UID, fmt.Sprintf("#%d", m.SampleIndex), readText(m.Scores),
					results.Number(m.SourceReward, "%.3f"), after, results.Number(m.SourceAdvantage, "%+.3f"),
					results.Number(m.Advantage, "%+.3f"))
			}
		}
	} else {
		t = present.New("GROUP", "STATUS", "MEAN", "NOW", "STD", "NOW")
		for _, g := range p.Groups {
			t.Row(g.UID, g.Status, results.Number(g.SourceMean, "%.3f"), results.Number(g.Mean, "%.3f"),
				results.Number(g.SourceStd, "%.3f"), results.Number(g.Std, "%.3f"))
		}
	}
	t.Print(w)
	s := p.Summary
	fmt.Fprintf(w, "\npass %s over run %s: %d of %d groups complete, %d of %d samples scored, %.1f s\ndigest %s\n",
		s.Run, s.Source, s.Complete, s.Groups, s.Scored, s.Samples, s.Seconds, s.Digest)
	for _, line := range faultsOf(p) {
		fmt.Fprintln(w, line)
	}
	if s.Out != "" {
		fmt.Fprintf(w, "results %s\n", filepath.Join(s.Out, "results.jsonl"))
	}
}

// readText returns what the first reward function that reads images has read; "" if there is none.
func readText(scores []view.Score) string {
	for _, s := range scores {
		if scorer.Reads(s.Name) {
			return (&view.Member{Scores: scores}).ReadBy(s.Name)
		}
	}
	return ""
}

// faultsOf says why samples of a pass failed, each reason once with its number.
func faultsOf(p *results.Pass) []string {
	counts := map[string]int{}
	for _, g := range p.Groups {
		for _, m := range g.Members {
			if m.Status != schemas.StatusScored && m.Error != "" {
				counts[present.FirstLine(m.Error)]++
			}
		}
	}
	const most = 5
	var out []string
	for _, text := range sortedKeys(counts) {
		if len(out) == most {
			return append(out, fmt.Sprintf("and %d others", len(counts)-most))
		}
		out = append(out, fmt.Sprintf("%s failed: %s", present.Count(counts[text], "sample"), strings.TrimSpace(text)))
	}
	return out
}
