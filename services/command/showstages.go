package command

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// printStages shows the stages of a group in order: of each sample its advantage, prompt and text or image, then the
// log-probs of the stage. What several samples share has one row, that of the first.
func printStages(out io.Writer, list []*view.StageLine) {
	g := &list[0].Trajectory().Group
	for round := int64(1); round <= g.Rounds; round++ {
		for _, s := range g.Stages {
			token := s.Name.Token(round)
			made := slices.DeleteFunc(slices.Clone(list), func(l *view.StageLine) bool { return l.Stage != token })
			if len(made) > 0 {
				printStage(out, made)
			}
		}
	}
}

// printStage shows one stage of a round, of which the samples that failed have no log-probs.
func printStage(out io.Writer, made []*view.StageLine) {
	fmt.Fprintln(out)
	present.Linef(out, "stage %s: %s", made[0].Stage, describeStage(made[0]))
	rows := present.New("SAMPLE", "ADVANTAGE", "PROMPT", "OUTPUT")
	var completed []*schemas.Trajectory
	for _, l := range made {
		rows.Row(samplesOf(l), advantageOf(l), fmt.Sprintf("%q", l.Prompt), outputOf(l))
		if t := l.Trajectory(); t.StopReason == schemas.StopCompleted {
			completed = append(completed, t)
		}
	}
	rows.Print(out)
	switch {
	case len(completed) == 0 || made[0].Kind == schemas.StageInteraction:
	case made[0].Kind == schemas.StageText:
		printTokens(out, completed)
	default:
		printLogProbs(out, completed)
	}
}

// describeStage says what a stage is, and whether it is trained.
func describeStage(l *view.StageLine) string {
	if l.Kind == schemas.StageInteraction {
		return "interaction " + string(l.Lane)
	}
	return fmt.Sprintf("%s of lane %s, version %d", l.Kind, l.Lane, l.Version) +
		present.When(!l.Trained, ", not trained")
}

// samplesOf says which samples have a stage.
func samplesOf(l *view.StageLine) string {
	if l.Samples > 1 {
		return fmt.Sprintf("%d-%d", l.SampleIndex, l.SampleIndex+l.Samples-1)
	}
	return fmt.Sprint(l.SampleIndex)
}

// advantageOf returns the advantage of a stage of a sample, of each of its tracks that has its own; "-": none.
func advantageOf(l *view.StageLine) string {
	var list []string
	for _, a := range l.Advantages {
		list = append(list, strings.TrimSpace(a.Track+" "+results.Number(&a.Value, "%+.6f")))
	}
	return present.OrDash(strings.Join(list, ", "))
}

// outputOf says what a stage made.
func outputOf(l *view.StageLine) string {
	t := l.Trajectory()
	switch {
	case t.StopReason != schemas.StopCompleted:
		return fmt.Sprintf("%s: %s", t.StopReason, t.Error)
	case t.Text == nil:
		return fmt.Sprintf("image %dx%d, %d steps", t.Width, t.Height, len(t.Transitions))
	}
	said := fmt.Sprintf("%q", t.Text.Answer())
	if l.Judgement != nil {
		said += fmt.Sprintf(", score %.4g", *l.Judgement)
	}
	if l.Ends {
		said += ", and ends the sample"
	}
	return said
}

// printSample shows one sample: its result, and each of its stages, or itself, with the facts of its request.
func printSample(out io.Writer, g *view.Group, l *view.Line) {
	line := func(format string, args ...any) { present.Linef(out, format, args...) }
	line("sample %d of group %s of run %s", l.SampleIndex, g.UID, g.Run)
	line("%s, reward %s, advantage %s", l.Status, results.Number(l.Reward, "%.6f"),
		results.Number(l.Advantage, "%+.6f"))
	for _, s := range l.Scores {
		line("  %s %s%s%s %s", s.Name, results.Number(s.Value, "%.6f"),
			present.When(s.Members > 0, ", among %d samples of its group,", s.Members),
			present.When(s.Detail != "", " read %q", s.Detail), s.Error)
	}
	if l.Error != "" {
		line("%s", l.Error)
	}
	if l.Fix != "" {
		line("-> %s", l.Fix)
	}
	show := func(t *schemas.Trajectory, more ...view.Fact) {
		facts, widest := append(more, view.FactsOf(t)...), 0
		for _, f := range facts {
			widest = max(widest, present.Columns(f.Name))
		}
		for _, f := range facts {
			name := strings.Repeat(" ", present.Indent) + strings.ToLower(f.Name)
			present.Field(out, 2*present.Indent+widest, name, boot.SafeOutput(f.Value, true))
		}
	}
	stages := g.StagesOf(l.SampleIndex)
	if t := g.Trajectory(l.SampleIndex); t != nil && len(stages) == 0 {
		fmt.Fprintln(out)
		show(t, view.Fact{Name: "Prompt", Value: fmt.Sprintf("%q", t.Prompt)})
	}
	for _, s := range stages {
		t := s.Trajectory()
		fmt.Fprintln(out)
		line("stage %s: %s%s", s.Stage, describeStage(s), present.When(s.Place == l.Place, ", stands for the sample"))
		var more []view.Fact
		if t.Text != nil {
			for _, m := range t.Text.Settings.Messages[:max(1, len(t.Text.Settings.Messages))-1] {
				more = append(more, view.Fact{Name: m.Role, Value: fmt.Sprintf("%q", m.Content)})
			}
		}
		more = append(more, view.Fact{Name: "Prompt", Value: fmt.Sprintf("%q", s.Prompt)},
			view.Fact{Name: "Output", Value: outputOf(s)}, view.Fact{Name: "Advantage", Value: advantageOf(s)})
		if s.Samples > 1 {
			more = append(more, view.Fact{Name: "Samples", Value: samplesOf(s)})
		}
		show(t, more...)
	}
}
