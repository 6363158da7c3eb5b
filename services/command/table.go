package command

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Runs of at most fewGroups groups are shown sample by sample, larger ones a line each;
// of a group at most fewSamples.
const (
	fewGroups  = 8
	fewSamples = 8
)

// printRun is the table for people.
func printRun(w io.Writer, r *results.Run) error {
	if len(r.Groups) <= fewGroups {
		printGroups(w, r)
	} else if err := printLines(w, r); err != nil {
		return err
	}
	s := r.Summary
	lines := append([]string{
		fmt.Sprintf("run %s: %d of %d groups complete, %d samples, %d steps stored, %.1f s", s.Run, s.Complete, s.Groups, s.Samples, s.StepsStored, s.Seconds),
	}, measures(&s)...)
	if s.Evaluations < s.FlatEvaluations {
		lines = append(lines, evaluations(s.Evaluations, s.FlatEvaluations))
	}
	fmt.Fprintln(w)
	for _, line := range lines {
		fmt.Fprintln(w, breakLines(line, lineWidth(w)-len(columnIndent), "\n"+columnIndent))
	}
	if s.Trajectories > 0 {
		fmt.Fprintf(w, "digest %s\n", s.Digest)
	}
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
func printGroups(w io.Writer, r *results.Run) {
	for i, g := range r.Groups {
		if i > 0 {
			fmt.Fprintln(w)
		}
		head := paintStatus(w, g.Status)
		if rolled := len(g.Members) > 0 && g.Members[0].Roll != nil; g.Mean != nil && !rolled {
			head += fmt.Sprintf(", mean reward %s, std %s", results.Number(g.Mean, "%.3f"), results.Number(g.Std, "%.3f"))
			if g.Std != nil {
				head += fmt.Sprintf(" (%s)", g.StdLabel())
			}
		}
		if g.Group != "" {
			head += ", stood in for by " + string(g.Group)
		}
		if g.Error != "" {
			head += ": " + firstLine(g.Error)
		}
		between := "  "
		prompt := cutText(printable(g.Prompt), lineWidth(w)) // results have the whole
		if utf8.RuneCountInString(prompt)+utf8.RuneCountInString(head) > lineWidth(w) {
			between = "\n  "
		}
		fmt.Fprintf(w, "%s%s%s\n", prompt, between, breakLines(head, lineWidth(w)-len(columnIndent), "\n"+columnIndent))
		if printRolls(w, g) || printTexts(w, g) {
			continue
		}
		members, gap, more := bestAndWorst(g, fewSamples)
		table := &grid{}
		row := func(name string, cell func(m *results.Member) string) {
			cells := make([]string, len(members), len(members)+1)
			filled := false
			for k := range members {
				cells[k] = cell(&members[k])
				filled = filled || cells[k] != ""
			}
			if gap > 0 { // between the best and the worst
				cells = slices.Insert(cells, gap, "…")
			}
			if filled {
				table.row(name, cells)
			}
		}
		row("sample", func(m *results.Member) string { return fmt.Sprintf("#%d", m.SampleIndex) })
		names := scoreNames(members)
		for _, name := range names {
			if !scorer.Reads(name) {
				continue
			}
			label := "read"
			if len(names) > 1 { // which of them it was that read
				label = name + " read"
			}
			row(label, func(m *results.Member) string { return m.ReadBy(name) })
		}
		if len(names) > 1 {
			for _, name := range names {
				row(name, func(m *results.Member) string { return score(m, name) })
			}
		}
		row("reward", func(m *results.Member) string {
			if m.Status != "scored" {
				return m.Status
			}
			return results.Number(m.Reward, "%.3f")
		})
		row("advantage", func(m *results.Member) string { return results.Number(m.Advantage, "%+.3f") })
		table.print(w, width(w))
		if more > 0 {
			fmt.Fprintf(w, "%sand %s\n", gridGap, count(more, "more sample"))
		}
		for _, line := range append(details(members), failures(g.Members)...) {
			printBroken(w, gridGap+line)
		}
	}
}

// bestAndWorst are so many members of a group at most, the best first: of more the best and the worst that
// have a reward.
// gap is the place of the first of the worst, 0 where nothing is left out before them; more is how many are left out.
func bestAndWorst(g *results.Group, most int) (members []results.Member, gap, more int) {
	members = g.Best()
	all := len(members)
	if all <= most {
		return members, 0, 0
	}
	members = slices.DeleteFunc(members, func(m results.Member) bool { return m.Reward == nil })
	if n := len(members); n > most {
		gap = (most + 1) / 2
		members = slices.Delete(members, gap, gap+n-most)
	}
	return members, gap, all - len(members)
}

// details are what reward functions said of samples, where that is not the text that they read, each once.
func details(members []results.Member) []string {
	var lines []string
	for i := range members {
		for _, s := range members[i].Scores {
			if s.Detail != "" && !scorer.Reads(s.Name) && !scorer.OfText(s.Name) {
				lines = append(lines, fmt.Sprintf("#%d %s says %s", members[i].SampleIndex, s.Name, printable(s.Detail)))
			}
		}
	}
	return lines
}

// failures says of samples without a reward why, each reason once.
func failures(members []results.Member) []string {
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
func printLines(w io.Writer, r *results.Run) error {
	columns := width(w)
	widest, stood := 0, 0 // groups that stood in have a column, where there are any
	for _, g := range r.Groups {
		widest = max(widest, utf8.RuneCountInString(string(g.UID)))
		stood = max(stood, utf8.RuneCountInString(string(g.Group)))
	}
	widest, stood = min(widest, max(columns/3, 12)), min(stood, max(columns/3, 12))
	kinds := map[string]bool{} // of standard deviations
	for _, g := range r.Groups {
		if g.Std != nil {
			kinds[g.StdLabel()] = true
		}
	}
	std := "STD"
	if len(kinds) == 1 {
		std += fmt.Sprintf(" (%s)", slices.Collect(maps.Keys(kinds))[0])
	}
	// Status, mean and std take some 27 columns and the heading, a sample about 14.
	shown := min(max((columns-widest-stood-27-len(std))/14, 1), fewSamples)
	t := newColumns(w)
	by := func(text string) string {
		if stood == 0 {
			return ""
		}
		return text + "\t"
	}
	fmt.Fprintf(t, "GROUP\t%sSTATUS\tMEAN\t%s\tREWARD (ADVANTAGE)\n", by("STOOD IN FOR BY"), std)
	var all []results.Member
	for _, g := range r.Groups {
		std := results.Number(g.Std, "%.3f")
		if len(kinds) > 1 && g.Std != nil {
			std += fmt.Sprintf(" (%s)", g.StdLabel())
		}
		fmt.Fprintf(t, "%s\t%s%s\t%s\t%s\t%s\n", shorten(string(g.UID), widest), by(shorten(orDash(g.Group), stood)), g.Status,
			results.Number(g.Mean, "%.3f"), std, members(g, shown))
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
		printBroken(w, fmt.Sprintf("%s %s", count(reasons[reason], "sample"), reason))
	}
	return nil
}

// lacks says of each status what groups that have it lack.
var lacks = map[string]string{
	schemas.StatusPartial:   "without a reward of each sample",
	schemas.StatusFailed:    "failed",
	schemas.StatusShort:     "with too few samples that have a reward",
	schemas.StatusMixed:     "of weights too far apart, or of several schedules",
	schemas.StatusStale:     "of weights too old",
	schemas.StatusRefused:   "refused",
	schemas.StatusCancelled: "cancelled",
	results.StatusOpen:      "without a result",
	schemas.StatusFiltered: "left out, as the rewards of their samples are equal (--zero-std), " +
		"and no fresh group took their place",
}

// notComplete is the error of groups of which some are not complete, by their statuses; nil where all are.
func notComplete(statuses []string) error {
	counts, left := map[string]int{}, 0
	for _, s := range statuses {
		if s != schemas.StatusComplete {
			counts[s]++
			left++
		}
	}
	if left == 0 {
		return nil
	}
	var parts []string
	for _, s := range sortedKeys(counts) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[s], cmp.Or(lacks[s], s)))
	}
	err := fmt.Errorf("%d of %s not complete: %s", left, count(len(statuses), "group"), strings.Join(parts, "; "))
	return &exitError{status: exitFailed, err: err}
}

// members is the short form of a table row, of that many samples at most.
func members(g *results.Group, most int) string {
	if g.Status == "refused" {
		return firstLine(g.Error)
	}
	var cells []string
	shown, gap, more := bestAndWorst(g, most)
	for i, m := range shown {
		if gap > 0 && i == gap {
			cells = append(cells, "…")
		}
		if m.Status != "scored" {
			cells = append(cells, m.Status)
			continue
		}
		cells = append(cells, fmt.Sprintf("%s (%s)", results.Number(m.Reward, "%.2f"), results.Number(m.Advantage, "%+.2f")))
	}
	if more > 0 {
		cells = append(cells, fmt.Sprintf("+%d", more))
	}
	return strings.Join(cells, "  ")
}

// scoreNames are the reward functions of a group, in their order.
func scoreNames(members []results.Member) []string {
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
func score(m *results.Member, name string) string {
	for _, s := range m.Scores {
		if s.Name == name {
			if s.Value == nil {
				return s.Status
			}
			return results.Number(s.Value, "%.3f")
		}
	}
	return "-"
}

// measures are the lines of the summary that say how the rewards are.
func measures(s *results.Summary) []string {
	var lines []string
	m := s.Metrics
	if _, ok := m["scheduled_sampling/rolled_fraction"]; ok {
		lines = append(lines, rollMeasures(m)...)
	} else if _, ok := m["critic/rewards/mean"]; ok {
		line := fmt.Sprintf("reward %.3f (%.3f to %.3f), std in a group %.3f (population), %.0f %% of groups without variance",
			m["critic/rewards/mean"], m["critic/rewards/min"], m["critic/rewards/max"], m["critic/rewards/std_mean"], 100*m["critic/rewards/zero_std_ratio"])
		if s.Refills > 0 {
			line += fmt.Sprintf(", %s refilled", count(s.Refills, "group"))
		}
		lines = append(lines, line)
	}
	evaluations := map[string][]string{} // by source and score
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if reader, ok := strings.CutSuffix(name, "/exact/mean"); ok {
			reader = strings.TrimPrefix(reader, "critic/")
			format := "%s found %.1f %% exact"
			if scorer.OfText(reader) {
				format = "%s took %.1f %% of the answers for right"
			} else if scorer.Reads(reader) {
				format = "%s read %.1f %% exactly"
			}
			lines = append(lines, fmt.Sprintf(format, reader, 100*m[name]))
		}
		rest, core := strings.CutPrefix(name, "val-core/")
		if aside, ok := strings.CutPrefix(name, "val-aux/"); ok && strings.Contains(aside, "/exact/mean@") {
			rest, core = aside, true
		}
		rest = strings.TrimSuffix(rest, "/mean")
		if at := strings.LastIndexByte(rest, '/'); core && !strings.HasSuffix(rest, "/std") {
			evaluations[rest[:at]] = append(evaluations[rest[:at]], fmt.Sprintf("%s %.3f", rest[at+1:], m[name]))
		}
	}
	for _, of := range slices.Sorted(maps.Keys(evaluations)) {
		lines = append(lines, "evaluation "+of+": "+strings.Join(evaluations[of], ", "))
	}
	return lines
}

func firstLine(s string) string {
	first, _, more := strings.Cut(s, "\n")
	if more {
		return first + " ..."
	}
	return s
}
