package command

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// printPass is the table for people: the run before, the pass after.
func printPass(w io.Writer, p *results.Pass) error {
	t := newColumns(w)
	if len(p.Groups) <= fewGroups {
		fmt.Fprintln(t, "GROUP\tSAMPLE\tREAD\tREWARD\tNOW\tADVANTAGE\tNOW")
		for _, g := range p.Groups {
			for _, m := range g.Members {
				after := m.Status
				if m.Reward != nil {
					after = results.Number(m.Reward, "%.3f")
				}
				fmt.Fprintf(t, "%s\t#%d\t%s\t%s\t%s\t%s\t%s\n", g.UID, m.SampleIndex, readText(m.Scores),
					results.Number(m.SourceReward, "%.3f"), after, results.Number(m.SourceAdvantage, "%+.3f"), results.Number(m.Advantage, "%+.3f"))
			}
		}
	} else {
		fmt.Fprintln(t, "GROUP\tSTATUS\tMEAN\tNOW\tSTD\tNOW")
		for _, g := range p.Groups {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", g.UID, g.Status, results.Number(g.SourceMean, "%.3f"), results.Number(g.Mean, "%.3f"), results.Number(g.SourceStd, "%.3f"), results.Number(g.Std, "%.3f"))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	s := p.Summary
	fmt.Fprintf(w, "\npass %s over run %s: %d of %d groups complete, %d of %d samples scored, %.1f s\ndigest %s\n",
		s.Run, s.Source, s.Complete, s.Groups, s.Scored, s.Samples, s.Seconds, s.Digest)
	for _, line := range faultsOf(p) {
		fmt.Fprintln(w, line)
	}
	if s.Out != "" {
		fmt.Fprintf(w, "results %s\n", filepath.Join(s.Out, "results.jsonl"))
	}
	return nil
}

// readText is what a reader among the reward functions read.
func readText(scores []results.Score) string {
	for _, s := range scores {
		if scorer.Reads(s.Name) {
			return (&results.Member{Scores: scores}).ReadBy(s.Name)
		}
	}
	return ""
}

// faultsOf says what went wrong, each text once.
func faultsOf(p *results.Pass) []string {
	counts := map[string]int{}
	for _, g := range p.Groups {
		for _, m := range g.Members {
			if m.Status != schemas.StatusScored && m.Error != "" {
				counts[firstLine(m.Error)]++
			}
		}
	}
	const most = 5
	var out []string
	for _, text := range sortedKeys(counts) {
		if len(out) == most {
			return append(out, fmt.Sprintf("and %d others", len(counts)-most))
		}
		out = append(out, fmt.Sprintf("%s failed: %s", count(counts[text], "sample"), strings.TrimSpace(text)))
	}
	return out
}
