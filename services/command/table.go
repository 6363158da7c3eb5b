package command

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/meander-rl/meander/schemas"
)

// Runs of at most fewGroups groups are shown sample by sample, larger ones a line each;
// of a group at most fewSamples.
const (
	fewGroups  = 8
	fewSamples = 8
)

// print is the table for people.
func (r *results) print(w io.Writer) error {
	if len(r.Groups) <= fewGroups {
		r.printGroups(w)
	} else if err := r.printLines(w); err != nil {
		return err
	}
	s := r.Summary
	lines := append([]string{
		fmt.Sprintf("run %s: %d of %d groups complete, %d samples, %d steps stored, %.1f s", s.Run, s.Complete, s.Groups, s.Samples, s.StepsStored, s.Seconds),
	}, s.measures()...)
	fmt.Fprintln(w)
	for _, line := range lines {
		fmt.Fprintln(w, breakLines(line, lineWidth(w), "\n  "))
	}
	fmt.Fprintf(w, "digest %s\n", s.Digest)
	if s.Out != "" {
		fmt.Fprintf(w, "results %s\n", filepath.Join(s.Out, "results.jsonl"))
	}
	if s.Sheet != "" {
		fmt.Fprintf(w, "contact sheet %s\n", s.Sheet)
	}
	return nil
}

// printGroups shows every sample, the best first: its reward, the single scores where
// there are several, what was read, and the advantage; then why samples failed.
func (r *results) printGroups(w io.Writer) {
	for i, g := range r.Groups {
		if i > 0 {
			fmt.Fprintln(w)
		}
		head := paintStatus(w, g.Status)
		if g.Mean != nil {
			head += fmt.Sprintf(", mean reward %s, std %s", number(g.Mean, "%.3f"), number(g.Std, "%.3f"))
		}
		if g.Group != "" {
			head += ", stood in for by " + g.Group
		}
		if g.Error != "" {
			head += ": " + firstLine(g.Error)
		}
		between := "  "
		if utf8.RuneCountInString(g.Prompt)+utf8.RuneCountInString(head) > lineWidth(w) {
			between = "\n  "
		}
		fmt.Fprintf(w, "%s%s%s\n", g.Prompt, between, breakLines(head, lineWidth(w), "\n  "))
		members := slices.Clone(g.Members)
		slices.SortStableFunc(members, func(a, b memberResult) int {
			return cmp.Or(compareDown(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
		})
		more := max(0, len(members)-fewSamples)
		members = members[:len(members)-more]
		if len(members) == 0 {
			continue
		}
		table := &grid{}
		row := func(name string, cell func(m *memberResult) string) {
			cells := make([]string, len(members))
			filled := false
			for k := range members {
				cells[k] = cell(&members[k])
				filled = filled || cells[k] != ""
			}
			if filled {
				table.row(name, cells)
			}
		}
		row("sample", func(m *memberResult) string { return fmt.Sprintf("#%d", m.SampleIndex) })
		row("read", (*memberResult).detail)
		names := scoreNames(members)
		if len(names) > 1 {
			for _, name := range names {
				row(name, func(m *memberResult) string { return m.score(name) })
			}
		}
		row("reward", func(m *memberResult) string {
			if m.Status != "scored" {
				return m.Status
			}
			return number(m.Reward, "%.3f")
		})
		row("advantage", func(m *memberResult) string { return number(m.Advantage, "%+.3f") })
		table.print(w, width(w))
		if more > 0 {
			fmt.Fprintf(w, "%sand %s\n", gridGap, count(more, "more sample"))
		}
		for _, line := range failures(g.Members) {
			fmt.Fprintf(w, "%s%s\n", gridGap, line)
		}
	}
}

// failures says of samples without a reward why, each reason once.
func failures(members []memberResult) []string {
	var reasons []string
	samples := map[string][]string{}
	for _, m := range members {
		if m.Status == schemas.StatusScored {
			continue
		}
		reason := m.Status
		if m.Error != "" {
			reason += ": " + firstLine(m.Error)
		}
		if samples[reason] == nil {
			reasons = append(reasons, reason)
		}
		samples[reason] = append(samples[reason], fmt.Sprintf("#%d", m.SampleIndex))
	}
	for i, reason := range reasons {
		list := samples[reason]
		if n := len(list) - fewSamples; n > 0 {
			list = append(list[:fewSamples:fewSamples], fmt.Sprintf("and %d more", n))
		}
		reasons[i] = strings.Join(list, " ") + " " + reason
	}
	return reasons
}

// printLines is a line for each group, then why samples failed.
func (r *results) printLines(w io.Writer) error {
	columns := width(w)
	widest := 0
	for _, g := range r.Groups {
		widest = max(widest, utf8.RuneCountInString(g.UID))
	}
	widest = min(widest, max(columns/3, 12))
	// Status, mean and std take some 30 columns, a sample about 14.
	shown := min(max((columns-widest-30)/14, 1), fewSamples)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "GROUP\tSTATUS\tMEAN\tSTD\tREWARD (ADVANTAGE)")
	var all []memberResult
	for _, g := range r.Groups {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", shorten(g.UID, widest), g.Status, number(g.Mean, "%.3f"), number(g.Std, "%.3f"), g.members(shown))
		all = append(all, g.Members...)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	reasons := map[string]int{}
	for _, m := range all {
		if m.Status != schemas.StatusScored && m.Error != "" {
			reasons[m.Status+": "+firstLine(m.Error)]++
		}
	}
	for _, reason := range sortedKeys(reasons) {
		fmt.Fprintf(w, "%s %s\n", count(reasons[reason], "sample"), reason)
	}
	return nil
}

// members is the short form of a table row, of that many samples at most.
func (g *groupResult) members(most int) string {
	if g.Status == "refused" {
		return firstLine(g.Error)
	}
	var cells []string
	for _, m := range g.Members[:min(most, len(g.Members))] {
		if m.Status != "scored" {
			cells = append(cells, m.Status)
			continue
		}
		cells = append(cells, fmt.Sprintf("%s (%s)", number(m.Reward, "%.2f"), number(m.Advantage, "%+.2f")))
	}
	if n := len(g.Members) - most; n > 0 {
		cells = append(cells, fmt.Sprintf("+%d", n))
	}
	return strings.Join(cells, "  ")
}

// scoreNames are the reward functions of a group, in their order.
func scoreNames(members []memberResult) []string {
	for _, m := range members {
		if len(m.Scores) > 0 {
			names := make([]string, len(m.Scores))
			for i, s := range m.Scores {
				names[i] = s.Name
			}
			return names
		}
	}
	return nil
}

// score is a single score in a table.
func (m *memberResult) score(name string) string {
	for _, s := range m.Scores {
		if s.Name == name {
			if s.Value == nil {
				return s.Status
			}
			return number(s.Value, "%.3f")
		}
	}
	return "-"
}

// maxDetailShown is how much of what was read fits a column or a caption.
const maxDetailShown = 14

// detail is what a reward function read in the picture, in quotes; empty: none said.
func (m *memberResult) detail() string {
	for _, s := range m.Scores {
		if s.Detail != "" {
			text := s.Detail
			if utf8.RuneCountInString(text) > maxDetailShown {
				text = string([]rune(text)[:maxDetailShown-1]) + "…"
			}
			return fmt.Sprintf("%q", text)
		}
	}
	return ""
}
