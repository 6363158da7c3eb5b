package command

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// Runs of at most fewGroups groups are shown sample by sample, with at most fewSamples of a group; larger runs with a
// line for each group.
const (
	fewGroups  = 8
	fewSamples = 8
)

// savedText says what samples that ended in the middle did not take.
func savedText(evaluations int64) string {
	return present.Count(evaluations, "model evaluation") + " saved"
}

// printRun prints the results of a run for people: every sample of a few groups, or a line for each of many, and a
// summary.
func printRun(w io.Writer, r *results.Run) {
	if len(r.Groups) <= fewGroups {
		printGroups(w, r)
	} else {
		printLines(w, r)
	}
	s := r.Summary
	lines := append([]string{
		fmt.Sprintf("run %s: %s, %d of %d groups complete, %s, %s stored, %.1f s", s.Run,
			paintStatus(w, s.State), s.Complete, s.Groups, present.Count(s.Samples, "sample"),
			present.Count(s.StepsStored, "step"), s.Seconds),
	}, summaryLines(&s)...)
	if s.Evaluations < s.FlatEvaluations {
		lines = append(lines, evaluations(s.Evaluations, s.FlatEvaluations))
	}
	if s.Pruned > 0 {
		lines = append(lines, present.Count(s.Pruned, "sample")+" ended in the middle: "+savedText(s.SavedEvaluations))
	}
	if len(s.Engines) > 0 {
		var by []string
		for _, name := range slices.Sorted(maps.Keys(s.Engines)) {
			by = append(by, fmt.Sprintf("%s %d", name, s.Engines[name]))
		}
		lines = append(lines, "samples by engine: "+strings.Join(by, ", "))
	}
	fmt.Fprintln(w)
	for _, line := range lines {
		present.Lines(w, line)
	}
	when := present.When
	fmt.Fprint(w, when(s.Trajectories > 0, "digest %s\n", s.Digest), when(s.NoMP4 != "", "no mp4  %s\n", s.NoMP4),
		when(s.Out != "", "results %s\n", filepath.Join(s.Out, "results.jsonl")),
		when(s.Sheet != "", "contact sheet %s\n", s.Sheet))
}

// printGroups shows every sample of the groups of a small run, the best first: its reward, the single scores if there
// are several, what was read, and the advantage. Then it says why samples failed.
func printGroups(w io.Writer, r *results.Run) {
	for i, g := range r.Groups {
		if i > 0 {
			fmt.Fprintln(w)
		}
		when, mean := present.When, g.Mean != nil && (len(g.Members) == 0 || g.Members[0].Roll == nil)
		head := paintStatus(w, g.Status) + when(mean, ", mean reward %s, std %s", results.Number(g.Mean, "%.3f"),
			results.Number(g.Std, "%.3f")) + when(mean && g.Std != nil, " (%s)", g.StdLabel()) +
			when(g.Group != "", ", replaced by %s", g.Group) + when(g.Error != "", ": %s", present.FirstLine(g.Error))
		prompt := present.Cut(printable(g.Prompt), present.LineWidth(w)) // results.jsonl has the whole text
		if line := prompt + "  " + head; present.Columns(line) <= present.LineWidth(w) {
			fmt.Fprintln(w, line)
		} else {
			fmt.Fprintln(w, prompt)
			present.Linef(w, "  %s", head)
		}
		if printRolls(w, g) || printTexts(w, g) {
			continue
		}
		members, gap, more := bestAndWorst(g, fewSamples)
		table := present.Samples()
		row := func(name string, cell func(m *view.Member) string) {
			cells, filled := []any{name}, false
			for k := range members {
				if gap > 0 && k == gap { // between the best and the worst
					cells = append(cells, "…")
				}
				text := cell(&members[k])
				cells, filled = append(cells, text), filled || text != ""
			}
			if filled {
				table.Row(cells...)
			}
		}
		row("sample", func(m *view.Member) string { return fmt.Sprintf("#%d", m.SampleIndex) })
		names := scoreNames(members)
		for _, name := range names {
			if !scorer.Reads(name) {
				continue
			}
			label := "read"
			if len(names) > 1 { // say which function read it
				label = name + " read"
			}
			row(label, func(m *view.Member) string { return m.ReadBy(name) })
		}
		if len(names) > 1 {
			for _, name := range names {
				row(name, func(m *view.Member) string { return scoreCell(m, name) })
			}
		}
		row("reward", func(m *view.Member) string {
			if m.Status != schemas.StatusScored {
				return m.Status
			}
			return results.Number(m.Reward, "%.3f")
		})
		row("advantage", func(m *view.Member) string { return results.Number(m.Advantage, "%+.3f") })
		table.Print(w)
		printNotes(w, more, append(detailLines(members), failureLines(g.Members)...))
	}
}

func paintStatus(out io.Writer, status string) string {
	colours := map[string]present.Colour{
		outcomes.Good: present.Green, outcomes.Info: present.Green, outcomes.Bad: present.Red,
	}
	return present.Paint(out, cmp.Or(colours[outcomes.Tone(status)], present.Yellow), status)
}

// printNotes writes what is below the samples of a group: how many are not shown, and lines about them.
func printNotes(w io.Writer, more int, lines []string) {
	fmt.Fprint(w, present.When(more > 0, "  and %s\n", present.Count(more, "more sample")))
	for _, line := range lines {
		present.Linef(w, "  %s", line)
	}
}

// bestAndWorst returns at most that many members of a group, the best first. Of a larger group it returns the best
// and the worst that have a reward. gap is the index of the first of the worst, 0 if none are left out before it;
// more is how many are left out.
func bestAndWorst(g *results.Group, most int) (members []view.Member, gap, more int) {
	members = g.Best()
	all := len(members)
	if all <= most {
		return members, 0, 0
	}
	members = slices.DeleteFunc(members, func(m view.Member) bool { return m.Reward == nil })
	if n := len(members); n > most {
		gap = (most + 1) / 2
		members = slices.Delete(members, gap, gap+n-most)
	}
	return members, gap, all - len(members)
}

// detailLines returns what reward functions said about samples, except texts that they read.
func detailLines(members []view.Member) []string {
	var lines []string
	for i := range members {
		for _, s := range members[i].Scores {
			if s.Detail != "" && !scorer.Reads(s.Name) && !scorer.OfText(s.Name) {
				lines = append(lines, fmt.Sprintf("#%d %s says %s", members[i].SampleIndex, s.Name,
					printable(s.Detail)))
			}
		}
	}
	return lines
}

// failures returns why a sample has no reward, and why scores failed that its error does not name: those of optional
// functions.
func failures(m *view.Member) (reasons []string) {
	var said string
	if m.Status != schemas.StatusScored {
		said = present.FirstLine(m.Error)
		reasons = append(reasons, m.Status+present.When(said != "", ": %s", said))
	}
	for _, s := range m.Scores {
		if why := present.FirstLine(s.Error); s.Status == schemas.StatusFailed && !strings.Contains(said, why) {
			reasons = append(reasons, fmt.Sprintf("%s failed: %s", s.Name, strings.TrimPrefix(why, s.Name+": ")))
		}
	}
	return reasons
}

// failureLines says why samples have no reward and why scores failed, each reason once with its samples.
func failureLines(members []view.Member) []string {
	var reasons []string
	samples := map[string][]string{}
	for i := range members {
		for _, reason := range failures(&members[i]) {
			if samples[reason] == nil {
				reasons = append(reasons, reason)
			}
			samples[reason] = append(samples[reason], fmt.Sprintf("#%d", members[i].SampleIndex))
		}
	}
	for i, reason := range reasons {
		list := samples[reason]
		if n := len(list) - fewSamples; n > 0 {
			list = append(list[:fewSamples:fewSamples], fmt.Sprintf("and %d more", n))
		}
		reasons[i] = strings.Join(list, " ") + " " + reason
	}
	return append(reasons, fixLines(members)...)
}

// fixLines says what to do about samples that failed, each thing once.
func fixLines(members []view.Member) (lines []string) {
	for i := range members {
		if fix := members[i].Fix(); fix != "" && !slices.Contains(lines, "-> "+fix) {
			lines = append(lines, "-> "+fix)
		}
	}
	return lines
}

// printLines prints a line for each group of a large run, then why samples failed.
func printLines(w io.Writer, r *results.Run) {
	columns := present.Width(w)
	widest, replaced := 0, 0 // a column names the groups that replaced others, if there are any
	for _, g := range r.Groups {
		widest = max(widest, len(g.UID))
		replaced = max(replaced, len(g.Group))
	}
	widest, replaced = min(widest, max(columns/3, 12)), min(replaced, max(columns/3, 12))
	kinds := map[string]bool{} // of standard deviations
	for _, g := range r.Groups {
		if g.Std != nil {
			kinds[g.StdLabel()] = true
		}
	}
	std := "STD" + present.When(len(kinds) == 1, " (%s)", strings.Join(sortedKeys(kinds), ""))
	// Status, mean and std take some 27 columns and the heading, a sample about 14.
	shown := min(max((columns-widest-replaced-27-len(std))/14, 1), fewSamples)
	t := &present.Table{}
	row := func(uid, by string, cells ...any) {
		if replaced > 0 {
			cells = slices.Insert(cells, 0, any(by))
		}
		t.Row(slices.Insert(cells, 0, any(uid))...)
	}
	row("GROUP", "REPLACED BY", "STATUS", "MEAN", std, "REWARD (ADVANTAGE)")
	var all []view.Member
	for _, g := range r.Groups {
		std := results.Number(g.Std, "%.3f") + present.When(len(kinds) > 1 && g.Std != nil, " (%s)", g.StdLabel())
		row(present.Cut(string(g.UID), widest), present.Cut(present.OrDash(g.Group), replaced), g.Status,
			results.Number(g.Mean, "%.3f"), std, membersCell(g, shown))
		all = append(all, g.Members...)
	}
	t.Print(w)
	reasons := map[string]int{}
	for i := range all {
		for _, reason := range failures(&all[i]) {
			if reason != all[i].Status { // the table says that
				reasons[reason]++
			}
		}
	}
	for _, reason := range sortedKeys(reasons) {
		present.Linef(w, "%s %s", present.Count(reasons[reason], "sample"), reason)
	}
	for _, line := range fixLines(all) {
		present.Linef(w, "%s", line)
	}
}

// notComplete returns an error with exit status 1 if groups, by their status, are not all complete; nil if they are.
func notComplete[G any](groups []G, status func(G) string) error {
	counts, left := map[string]int{}, 0
	for _, g := range groups {
		if s := status(g); s != schemas.StatusComplete {
			counts[s]++
			left++
		}
	}
	if left == 0 {
		return nil
	}
	var parts []string
	for _, s := range sortedKeys(counts) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[s], cmp.Or(outcomes.Lacks(s), s)))
	}
	err := fmt.Errorf("%d of %s not complete: %s", left, present.Count(len(groups), "group"),
		strings.Join(parts, "; "))
	return &exitError{status: exitFailed, err: err}
}

// membersCell returns the samples of a group for one cell of a table, at most that many.
func membersCell(g *results.Group, most int) string {
	if g.Status == schemas.StatusRefused {
		return present.FirstLine(g.Error)
	}
	var cells []string
	shown, gap, more := bestAndWorst(g, most)
	for i, m := range shown {
		if gap > 0 && i == gap {
			cells = append(cells, "…")
		}
		if m.Status != schemas.StatusScored {
			cells = append(cells, m.Status)
			continue
		}
		cells = append(cells, fmt.Sprintf("%s (%s)", results.Number(m.Reward, "%.2f"),
			results.Number(m.Advantage, "%+.2f")))
	}
	if more > 0 {
		cells = append(cells, fmt.Sprintf("+%d", more))
	}
	return strings.Join(cells, "  ")
}

// scoreNames returns the reward functions of a group's samples, in their order.
func scoreNames(members []view.Member) []string {
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

// scoreCell returns a sample's score of one reward function for a table; "-" if there is none.
func scoreCell(m *view.Member, name string) string {
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

// summaryLines returns the lines of a run's summary about rewards and evaluations, from its metrics.
func summaryLines(s *results.Summary) []string {
	var lines []string
	m := s.Metrics
	if _, ok := m["scheduled_sampling/rolled_fraction"]; ok {
		lines = append(lines, rollSummary(m)...)
	} else if _, ok := m["critic/rewards/mean"]; ok {
		number := func(name string) string { return results.Number(new(m["critic/rewards/"+name]), "%.3f") }
		line := fmt.Sprintf("reward %s (%s to %s), std in a group %s (population), %.0f %% of groups without variance",
			number("mean"), number("min"), number("max"), number("std_mean"), 100*m["critic/rewards/zero_std_ratio"])
		lines = append(lines, line+present.When(s.Refills > 0, ", %s refilled", present.Count(s.Refills, "group")))
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
