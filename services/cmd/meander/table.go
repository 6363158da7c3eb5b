package main

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// Runs of at most fewGroups groups are shown sample by sample, larger ones a line each;
// of a group at most fewSamples.
const (
	fewGroups  = 8
	fewSamples = 8
)

// print is the table for people.
func (r *results) print(w io.Writer) error {
	var err error
	if len(r.Groups) <= fewGroups {
		err = r.printGroups(w)
	} else {
		err = r.printLines(w)
	}
	if err != nil {
		return err
	}
	s := r.Summary
	fmt.Fprintf(w, "\nrun %s: %d of %d groups complete, %d samples, %d steps stored, %.1f s\n", s.Run, s.Complete, s.Groups, s.Samples, s.StepsStored, s.Seconds)
	for _, line := range s.measures() {
		fmt.Fprintln(w, line)
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
// there are several, what was read, and the advantage.
func (r *results) printGroups(w io.Writer) error {
	for i, g := range r.Groups {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s  %s", g.Prompt, g.Status)
		if g.Mean != nil {
			fmt.Fprintf(w, ", mean reward %s, std %s", number(g.Mean, "%.3f"), number(g.Std, "%.3f"))
		}
		if g.Group != "" {
			fmt.Fprintf(w, ", stood in for by %s", g.Group)
		}
		if g.Error != "" {
			fmt.Fprintf(w, ": %s", firstLine(g.Error))
		}
		fmt.Fprintln(w)
		members := slices.Clone(g.Members)
		slices.SortStableFunc(members, func(a, b memberResult) int {
			return cmp.Or(compareDown(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
		})
		more := max(0, len(members)-fewSamples)
		members = members[:len(members)-more]
		if len(members) == 0 {
			continue
		}
		t := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
		row := func(name string, cell func(m *memberResult) string) {
			cells := make([]string, len(members))
			filled := false
			for k := range members {
				cells[k] = cell(&members[k])
				filled = filled || cells[k] != ""
			}
			if !filled {
				return
			}
			fmt.Fprintf(t, "  %s\t%s\t", name, strings.Join(cells, "\t"))
			if name == "sample" && more > 0 {
				fmt.Fprintf(t, "and %d more\t", more)
			}
			fmt.Fprintln(t)
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
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// printLines is a line for each group.
func (r *results) printLines(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "GROUP\tSTATUS\tMEAN\tSTD\tREWARD (ADVANTAGE) BY SAMPLE")
	for _, g := range r.Groups {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", g.UID, g.Status, number(g.Mean, "%.3f"), number(g.Std, "%.3f"), g.members())
	}
	return t.Flush()
}

// members is the short form of a table row, at most eight samples.
func (g *groupResult) members() string {
	if g.Status == "refused" {
		return firstLine(g.Error)
	}
	var cells []string
	for _, m := range g.Members[:min(fewSamples, len(g.Members))] {
		if m.Status != "scored" {
			cells = append(cells, m.Status)
			continue
		}
		cells = append(cells, fmt.Sprintf("%s (%s)", number(m.Reward, "%.2f"), number(m.Advantage, "%+.2f")))
	}
	if n := len(g.Members) - fewSamples; n > 0 {
		cells = append(cells, fmt.Sprintf("and %d more", n))
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
