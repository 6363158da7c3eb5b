package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// showCommand makes the command 'meander show'.
func showCommand(a *app) *cobra.Command {
	var run schemas.Run
	c := &cobra.Command{
		Use:   "show [UID [SAMPLE]]",
		Short: "show a group: samples, steps and log-probs; one sample; without UID, the groups of a run",
		Example: `  meander show
  meander show 0000-a-red-sign-that-says-open
  meander show 0000-a-red-sign-that-says-open 3    # one sample, with all its stages
  meander show --run demo --json 0000-a-red-sign-that-says-open`,
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, given []string) error {
			if len(given) == 0 {
				return a.showRun(c.Context(), conn.Bus, run, c.OutOrStdout())
			}
			if err := schemas.CheckToken("uid", given[0]); err != nil {
				return usage(err)
			}
			return a.showGroup(c.Context(), conn.Bus, run, schemas.UID(given[0]), given[1:], c.OutOrStdout())
		}),
	}
	nameFlag(c.Flags(), &run, "run", "", "run; default the latest")
	return c
}

// showRun prints the state of a run, and a line for each of its groups, the open ones last. A run without any is an
// error.
func (a *app) showRun(ctx context.Context, b *bus.Bus, run schemas.Run, out io.Writer) error {
	t := present.New("UID", "STATUS", "MEMBERS", "MEAN", "STD")
	found := 0
	for m, err := range b.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")},
		bus.ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("read advantages: %w", err)
		}
		var e schemas.Advantage
		if bus.Fits(m, &e) != nil {
			continue // not a result; the true one will replace it
		}
		found++
		if a.json {
			if err := encode(out, schemas.JSON(&e)); err != nil {
				return err
			}
			continue
		}
		t.Row(e.UID, outcomes.Group(&e), len(e.Members), results.Number(e.Mean, "%.4f"),
			results.Number(e.Std, "%.4f"))
	}
	c, err := counters.Of(ctx, b, run)
	switch unknown := errors.Is(err, bus.ErrNotFound); {
	case unknown && found == 0:
		return fmt.Errorf("run %q has no group; 'meander watch --run %s' shows what it has", run, run)
	case err != nil && !unknown:
		return err
	case a.json:
	default:
		if !unknown {
			for _, uid := range slices.Sorted(maps.Keys(c.Open)) {
				t.Row(uid, outcomes.Open, "-", "-", "-")
			}
			fmt.Fprintf(out, "run %s: %s\n", run, stateText(out, c.Status))
		}
		t.Print(out)
	}
	return a.printUpdates(ctx, b, run, out)
}

// mostUpdates is how many updates of the weights 'meander show' lists, the newest.
const mostUpdates = 8

// printUpdates lists what trainers made of the run: the newest updates of the weights, as 'meander watch' shows them,
// or all of them as JSON.
func (a *app) printUpdates(ctx context.Context, b *bus.Bus, run schemas.Run, out io.Writer) error {
	var lines []string
	for m, err := range b.Read(ctx, schemas.StreamUpdates, schemas.RunFilters(run)[schemas.StreamUpdates],
		bus.ReadOptions{}) {
		if errors.Is(err, bus.ErrPermission) {
			return nil // of a role that sees the groups alone
		}
		if err != nil {
			return fmt.Errorf("read updates: %w", err)
		}
		if bus.Fits(m, &schemas.Update{}) != nil {
			continue // not an update
		}
		if a.json {
			if err := a.printEvent(out, schemas.KindUpdate, m, ""); err != nil {
				return err
			}
			continue
		}
		if line, _, err := eventLine(schemas.KindUpdate, m); err == nil {
			lines = append(lines, line)
		}
	}
	if more := len(lines) - mostUpdates; more > 0 {
		before := fmt.Sprintf("%s before: meander watch --kinds update --run %s", present.Count(more, "update"), run)
		lines = append([]string{before}, lines[more:]...)
	}
	for i, line := range lines {
		if i == 0 {
			fmt.Fprintln(out)
		}
		present.Linef(out, "%s", line)
	}
	return nil
}

// runState says in a line how a run is doing, in the words of 'meander status'; "" for a run that there is not.
func runState(ctx context.Context, b *bus.Bus, run schemas.Run, out io.Writer) (string, error) {
	s, err := counters.Status(ctx, b, run)
	if errors.Is(err, bus.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("run %s: %s", run, stateText(out, s)), nil
}

// showGroup prints a group: its result and its trajectories. Either may be missing. of may name one sample: then it
// prints that.
func (a *app) showGroup(
	ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID, of []string, out io.Writer,
) error {
	reader := newReader(ctx, b, true)
	defer reader.Close()
	g, err := reader.Group(ctx, run, uid, 0, schemas.MaxGroupSize)
	if errors.Is(err, bus.ErrNotFound) {
		return fmt.Errorf("run %q has no group %q; 'meander show --run %s' lists the groups", run, uid, run)
	}
	if err != nil {
		return err
	}
	if len(of) > 0 {
		return a.showSample(g, of[0], out)
	}
	adv := g.Result()
	var trajectories []*schemas.Trajectory
	var failed []view.Member
	for _, m := range g.Members() {
		if t := m.Trajectory(); t != nil && len(g.Stages) == 0 {
			trajectories = append(trajectories, t)
		}
		if adv != nil || m.Error != "" {
			failed = append(failed, m)
		}
	}
	for _, s := range g.Stages {
		trajectories = append(trajectories, s.Trajectory())
	}
	gone, err := whyStepsGone(ctx, b, trajectories)
	if err != nil {
		return err
	}
	if a.json {
		v := map[string]any{"run": run, "uid": uid, "advantage": nil}
		if gone != "" {
			v["steps_gone"] = gone
		}
		if adv != nil {
			v["advantage"] = schemas.JSON(adv)
		}
		v["trajectories"] = eventsJSON(trajectories)
		return encode(out, v)
	}
	why := failureLines(failed)
	if gone != "" {
		why = append(why, "its steps were "+gone)
	}
	if g.Fix != "" && g.Status != schemas.StatusFailed { // what its samples lack stands with them
		why = append(why, "-> "+g.Fix)
	}
	printGroup(out, g, trajectories, why)
	if adv != nil {
		return nil
	}
	state, err := runState(ctx, b, run, out)
	if state != "" {
		fmt.Fprintf(out, "\n%s\n", state)
	}
	return err
}

func eventsJSON(trajectories []*schemas.Trajectory) []any {
	list := make([]any, len(trajectories))
	for i, t := range trajectories {
		list[i] = schemas.JSON(t)
	}
	return list
}

// showSample prints one sample of a group.
func (a *app) showSample(g *view.Group, of string, out io.Writer) error {
	i := slices.IndexFunc(g.Samples, func(l *view.Line) bool { return fmt.Sprint(l.SampleIndex) == of })
	if i < 0 {
		return fmt.Errorf("group %s has no sample %q; must be a number from 0 to %d", g.UID, of, g.Size-1)
	}
	l := g.Samples[i]
	if !a.json {
		printSample(out, g, l)
		return nil
	}
	stages, trajectories := g.StagesOf(l.SampleIndex), []*schemas.Trajectory(nil)
	for _, s := range stages {
		trajectories = append(trajectories, s.Trajectory())
	}
	if t := g.Trajectory(l.SampleIndex); t != nil && len(stages) == 0 {
		trajectories = append(trajectories, t)
	}
	return encode(out, map[string]any{
		"run": g.Run, "uid": g.UID, "sample": l, "stages": stages, "trajectories": eventsJSON(trajectories),
	})
}

// whyStepsGone says why no step of a group is stored, if it is one whose steps are freed when they were read; "" while
// there are some, or if we may not look.
func whyStepsGone(ctx context.Context, b *bus.Bus, trajectories []*schemas.Trajectory) (string, error) {
	if len(trajectories) == 0 || !trajectories[0].Group.FreeReadSteps {
		return "", nil
	}
	t := trajectories[0]
	stored, err := b.Subjects(ctx, schemas.StreamSteps, schemas.StepsFilter(t.Run, t.UID, "*", "*"))
	if errors.Is(err, bus.ErrPermission) || err == nil && len(stored) > 0 {
		return "", nil
	}
	return t.Group.WhyStepsGone(), err
}

// segmentLine says which part of the schedule a sample ran; "" if it ran all.
func segmentLine(t *schemas.Trajectory) string {
	if t.Start == nil && t.Stop == nil {
		return ""
	}
	begin, end := t.Segment()
	s := fmt.Sprintf("ran from %d to %d", begin, end)
	if t.Start != nil && t.Start.Branch != nil {
		b := t.Start.Branch
		s += fmt.Sprintf(", from the state that %s/%s/%d@%d stored", b.Run, b.UID, b.SampleIndex, b.StepIndex)
	} else if t.Start != nil {
		s += ", beginning with given states"
	}
	return s + present.When(!t.Decoded(), "; no image, for the latents have noise in them")
}

// attemptsLine says which attempts made the steps of a sample, if it was continued; "" if one attempt made all.
func attemptsLine(t *schemas.Trajectory) string {
	attempts := t.Attempts()
	if len(attempts) < 2 {
		return ""
	}
	at, _ := t.Segment()
	var parts []string
	for _, attempt := range attempts {
		first := at
		for i := range t.Steps {
			if t.StepAttempt(i) == attempt {
				at++
			}
		}
		parts = append(parts, fmt.Sprintf("%d to %d by attempt %s", first, at-1, attempt))
	}
	return fmt.Sprintf("sample %d was continued: steps %s", t.SampleIndex, strings.Join(parts, ", "))
}

// printGroup prints a group for people; why are the reasons of failed samples.
func printGroup(out io.Writer, g *view.Group, trajectories []*schemas.Trajectory, why []string) {
	adv := g.Result()
	line := func(format string, args ...any) { present.Linef(out, format, args...) }
	line("group %s of run %s", g.UID, g.Run)
	if adv != nil && adv.SourceRun != "" {
		line("a pass over run %s, which made the samples", adv.SourceRun)
	}
	if g.Prompt != "" {
		line("prompt %q", g.Prompt)
	}
	if len(trajectories) > 0 && len(g.Stages) == 0 {
		t := trajectories[0]
		if t.Text != nil {
			for _, s := range describeText(t) {
				line("%s", s)
			}
		} else {
			line("%dx%d pixels, %d steps, %s log-probs, noise level %g, latents %v %s, cfg %g",
				t.Width, t.Height, len(t.Transitions), t.LogProbKind, t.NoiseLevel, t.LatentsShape, t.LatentsDType,
				t.TrueCFGScale)
		}
		for _, x := range (*schemas.Settings)(&t.Sampling).Extras() {
			line("%s %s", x[0], x[1])
		}
		if ran := segmentLine(t); ran != "" && t.Sibling() == nil {
			line("%s", ran)
		}
		line("schedule %.16s weights %.16s", t.ScheduleDigest, t.WeightsDigest)
		for _, t := range trajectories {
			if went := attemptsLine(t); went != "" {
				line("%s", went)
			}
		}
	}
	if adv == nil {
		line("the group is still open")
	} else {
		line("%s: %s, std %s (%s, %d trained steps), mean %s, std %s %s", outcomes.Group(adv), adv.Estimator, adv.Scale,
			adv.StdBasis, adv.TrainedSteps, results.Number(adv.Mean, "%.6f"), results.Number(adv.Std, "%.6f"),
			adv.Error)
		t := present.New("SAMPLE", "STATUS", "REWARD", "ADVANTAGE", "TRAJECTORY", "")
		for _, m := range adv.Members {
			t.Row(m.SampleIndex, m.Status, results.Number(m.Reward, "%.6f"), results.Number(m.Advantage, "%+.6f"),
				m.TrajectorySeq, siblingText(trajectories, m.SampleIndex))
		}
		fmt.Fprintln(out)
		t.Print(out)
	}
	for _, reason := range why {
		line("%s", reason)
	}
	if len(trajectories) == 0 {
		return
	}
	if len(g.Stages) > 0 {
		printStages(out, g.Stages)
		return
	}
	if tree := trajectories[0].Group.Tree; tree != nil {
		what := "advantages of segments when the group has closed"
		if adv != nil && adv.BranchScope != "" {
			what = fmt.Sprintf("each segment with its advantage (%s), each leaf with its reward and advantage",
				adv.BranchScope)
		}
		fmt.Fprintln(out)
		line("tree: %s", what)
		for _, l := range drawTree(tree, adv, present.LineWidth(out)) {
			fmt.Fprintln(out, l)
		}
	}
	if trajectories[0].Text != nil {
		printTokens(out, trajectories)
		return
	}
	printLogProbs(out, trajectories)
}

// siblingText says from which other of its group a sample went on, as the rewards at a step had it; "": it did not.
func siblingText(trajectories []*schemas.Trajectory, sample int64) string {
	for _, t := range trajectories {
		if at := t.Sibling(); at != nil && t.SampleIndex == sample && t.Group.Tree == nil {
			return fmt.Sprintf("from #%d at step %d", at.SampleIndex, at.StepIndex)
		}
	}
	return ""
}

// printLogProbs shows the log-probs of all samples, with a row for each step.
func printLogProbs(out io.Writer, trajectories []*schemas.Trajectory) {
	fmt.Fprintln(out, "\nlog-probs by step")
	steps := present.Samples()
	steps.Row(sampleHeads("step   sigma  runs", trajectories)...)
	begin, end := trajectories[0].Segment()
	for _, t := range trajectories {
		from, _ := t.Segment()
		begin = min(begin, from)
	}
	for i := begin; i < min(end, int64(len(trajectories[0].Sigmas))); i++ { // a failed sample may have none
		cells := []any{fmt.Sprintf("%d  %.4f  %4s", i, trajectories[0].Sigmas[i], trajectories[0].Transitions[i])}
		for _, tr := range trajectories {
			cell := ""
			if i < int64(len(tr.LogProbs)) {
				cell = results.Number(tr.LogProbs[i], "%.6f")
			}
			cells = append(cells, cell)
		}
		steps.Row(cells...)
	}
	steps.Print(out)
}

func sampleHeads(name string, trajectories []*schemas.Trajectory) []any {
	cells := []any{name}
	for _, t := range trajectories {
		cells = append(cells, fmt.Sprintf("#%d", t.SampleIndex))
	}
	return cells
}

// wideEdge and narrowEdge are the columns of an edge of a tree, with its advantage and without.
const wideEdge, narrowEdge = 10, 3

// drawTree draws the tree of a group in that many columns with one line per leaf: where the paths part, the advantage
// of each segment after the branch point, and the leaf with its reward and advantage. adv is nil while the group is
// open.
func drawTree(tree *schemas.Tree, adv *schemas.Advantage, columns int) []string {
	if adv == nil {
		adv = &schemas.Advantage{}
	}
	segments := map[schemas.TreeSegment]*float64{}
	for _, b := range adv.Branches {
		for _, c := range b.Children {
			segments[schemas.TreeSegment{SampleIndex: c.SampleIndex, Begin: b.StepIndex}] = c.Advantage
		}
	}
	const start, label = 3, 36
	edge := wideEdge
	if start+edge*len(tree.Branches)+label > columns {
		edge = narrowEdge
	}
	head := strings.Repeat(" ", start)
	for i, b := range tree.Branches {
		text := fmt.Sprint(b.StepIndex)
		if edge == wideEdge && i == 0 {
			text += " step"
		}
		head += fmt.Sprintf("%-*s", edge, text)
	}
	lines := []string{strings.TrimRight(head, " ")}
	for leaf := range tree.Leaves() {
		line := strings.Repeat(" ", start)
		if leaf == 0 {
			line = strings.Repeat("─", start)
		}
		for depth, b := range tree.Branches {
			behind := tree.LeavesBelow(depth + 1)
			child := leaf / behind % b.Width
			begins, last := leaf%behind == 0, child == b.Width-1
			mark, rest := " ", " "
			switch {
			case begins && child == 0:
				mark, rest = "┬", "─"
			case begins && last:
				mark, rest = "└", "─"
			case begins:
				mark, rest = "├", "─"
			case !last:
				mark = "│"
			}
			text := ""
			if a := segments[schemas.TreeSegment{SampleIndex: leaf, Begin: b.StepIndex}]; begins && a != nil &&
				edge == wideEdge {
				text = fmt.Sprintf(" %+.2f ", *a)
			}
			line += mark + text + strings.Repeat(rest, max(0, edge-1-utf8.RuneCountInString(text)))
		}
		line += fmt.Sprintf(" #%d", leaf)
		if leaf < int64(len(adv.Members)) {
			m := &adv.Members[leaf]
			if m.Status == schemas.StatusScored {
				line += fmt.Sprintf("  %s  %s", results.Number(m.Reward, "%.3f"), results.Number(m.Advantage, "%+.3f"))
			} else {
				line += "  " + m.Status
			}
		}
		lines = append(lines, line)
	}
	return lines
}
