package command

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// printStages shows the stages of a group in order: of each sample its advantage, prompt and text or image, then the
// log-probs of the stage. What several samples share has one row, that of the first. adv is nil while the group is
// open.
func printStages(out io.Writer, adv *schemas.Advantage, trajectories []*schemas.Trajectory) {
	g := &trajectories[0].Group
	for round := int64(1); round <= g.Rounds; round++ {
		for _, s := range g.Stages {
			var made []*schemas.Trajectory
			for _, t := range trajectories {
				if t.Stage == s.Name.Token(round) {
					made = append(made, t)
				}
			}
			if len(made) > 0 {
				printStage(out, &s, adv, made)
			}
		}
	}
}

// printStage shows one stage of a round: made are its trajectories, of which those that failed have no log-probs.
func printStage(out io.Writer, s *schemas.GroupStage, adv *schemas.Advantage, made []*schemas.Trajectory) {
	what := s.Kind + " of lane " + string(s.Lane)
	switch {
	case s.Kind == schemas.StageInteraction:
		what = "interaction " + string(s.Lane)
	case s.Frozen:
		what += ", frozen"
	}
	fmt.Fprintln(out)
	present.Linef(out, "stage %s: %s", made[0].Stage, what)
	rows := present.New("SAMPLE", "ADVANTAGE", "PROMPT", "OUTPUT")
	for _, t := range made {
		rows.Row(t.SampleIndex, stageAdvantage(adv, t), fmt.Sprintf("%q", t.Prompt), outputOf(t))
	}
	rows.Print(out)
	made = slices.DeleteFunc(made, func(t *schemas.Trajectory) bool { return t.StopReason != schemas.StopCompleted })
	switch {
	case len(made) == 0 || s.Kind == schemas.StageInteraction:
	case s.Kind == schemas.StageText:
		printTokens(out, made)
	default:
		printLogProbs(out, made)
	}
}

// stageAdvantage returns the advantage of a stage of a sample, of each of its tracks that has its own; "-": none.
func stageAdvantage(adv *schemas.Advantage, t *schemas.Trajectory) string {
	var list []string
	name, _ := t.Stage.Split()
	for i := 0; adv != nil && i < len(adv.Credits); i++ {
		c := &adv.Credits[i]
		k := t.SampleIndex / max(c.Every, 1)
		if c.Stage != name || k >= int64(len(c.Values)) {
			continue
		}
		list = append(list, strings.TrimSpace(c.Track+" "+results.Number(c.Values[k], "%+.6f")))
	}
	if len(list) == 0 {
		return "-"
	}
	return strings.Join(list, ", ")
}

// outputOf says what a stage made.
func outputOf(t *schemas.Trajectory) string {
	switch {
	case t.StopReason != schemas.StopCompleted:
		return fmt.Sprintf("%s: %s", t.StopReason, t.Error)
	case t.Text != nil && t.Text.SaidBy != "" && t.Text.Conversation == schemas.ConversationTerminated:
		return fmt.Sprintf("%q, and ends the sample", t.Text.Answer())
	case t.Text != nil:
		return fmt.Sprintf("%q", t.Text.Answer())
	}
	return fmt.Sprintf("image %dx%d, %d steps", t.Height, t.Width, len(t.Transitions))
}
