package command

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

const mostStrip = 32

// printTexts shows the samples of a group of texts, the best first, one per line: the answer, how sure the model was
// of each token, the reward with its single scores, and the advantage. It returns false, and prints nothing, for
// another group.
func printTexts(w io.Writer, g *results.Group) bool {
	if !slices.ContainsFunc(g.Members, func(m view.Member) bool { return m.Text != nil }) {
		return false
	}
	members, gap, more := bestAndWorst(g, fewSamples)
	names := scoreNames(members)
	if len(names) < 2 {
		names = nil // the reward says the same
	}
	table := textTable(w, members, gap, names)
	if table.Columns() > present.Width(w) {
		table = textTable(w, members, gap, nil)
	}
	table.Print(w)
	printNotes(w, more, append(detailLines(members), failureLines(g.Members)...))
	return true
}

// textTable returns a table with a row for each sample, and the scores of the named reward functions. If gap is not
// 0, samples are left out before that index.
func textTable(w io.Writer, members []view.Member, gap int, names []string) *present.Table {
	strip := "confidence"
	if slices.Contains(names, strip) {
		strip = "by token"
	}
	bars := len(strip)
	for i := range members {
		if t := members[i].Text; t != nil {
			bars = max(bars, min(mostStrip, len(t.Confidences())))
		}
	}
	t := &present.Table{Indent: present.Indent, Right: true, Fit: cutConversation}
	row := func(first []any, scores []string, last ...any) {
		for _, s := range scores {
			first = append(first, s)
		}
		t.Row(append(first, last...)...)
	}
	row([]any{"sample", "tokens", fmt.Sprintf("%-*s", bars, strip)}, names, "reward", "advantage", "answer")
	for i := range members {
		if gap > 0 && i == gap {
			t.Row("…")
		}
		m := &members[i]
		tokens, confidences, answer := "", strings.Repeat(" ", bars), ""
		if m.Text != nil {
			tokens, answer = fmt.Sprint(m.Text.Tokens), conversationLine(m.Text.Turns)
			confidences = confidenceStrip(w, m.Text.Confidences(), bars)
		}
		scores := make([]string, len(names))
		for k, name := range names {
			scores[k] = scoreCell(m, name)
		}
		reward := m.Status
		if m.Status == schemas.StatusScored {
			reward = results.Number(m.Reward, "%.3f")
		}
		row([]any{fmt.Sprintf("#%d", m.SampleIndex), tokens, confidences}, scores, reward,
			results.Number(m.Advantage, "%+.3f"), answer)
	}
	return t
}

// printable returns a text in one line. It is quoted if it is empty, has blanks at an end, or has characters that a
// terminal would not print as letters.
func printable(s string) string {
	if s == "" || strings.TrimSpace(s) != s || strings.ContainsFunc(s, func(r rune) bool {
		return !unicode.IsPrint(r) || r == utf8.RuneError
	}) {
		return fmt.Sprintf("%q", s)
	}
	return s
}

// between separates an answer from what the interaction replies.
const between = " › "

// conversationLine returns a text in one line: its answer; of a conversation all answers, with the replies in
// between.
func conversationLine(turns []schemas.Turn) string {
	line, reply := "", ""
	for _, t := range turns {
		if !t.Generated {
			continue
		}
		if reply != "" {
			line += between + printable(reply) + between
		}
		line, reply = line+printable(t.Text), t.Reply
	}
	return line
}

// cutConversation cuts a line to that many columns. Of a conversation it cuts the beginning, because the last answer
// counts.
func cutConversation(line string, columns int) string {
	if strings.Contains(line, between) {
		return present.CutFront(line, columns)
	}
	return present.Cut(line, columns)
}

var bars = []rune("▁▂▃▄▅▆▇█")

// confidenceStrip returns a bar for each token, from red to green where there are colours. If there are more tokens
// than columns, each bar is the least of several. Blanks fill the columns.
func confidenceStrip(w io.Writer, list []float64, columns int) string {
	n := min(len(list), min(columns, mostStrip))
	var s strings.Builder
	for i := range n {
		least := 1.0
		for _, c := range list[i*len(list)/n : (i+1)*len(list)/n] {
			least = min(least, c)
		}
		colour := present.Red
		switch {
		case least >= 0.9:
			colour = present.Green
		case least >= 0.5:
			colour = present.Yellow
		}
		s.WriteString(present.Paint(w, colour, string(bars[min(len(bars)-1, int(least*float64(len(bars))))])))
	}
	return s.String() + strings.Repeat(" ", columns-n)
}

// logProbText formats a log-prob; "none" where the server that drew the token gave none.
func logProbText(x float32, format string) string {
	if math.IsNaN(float64(x)) {
		return "none"
	}
	return fmt.Sprintf(format, x)
}

// tokensLine describes an event of tokens in one line, for 'meander watch'.
func tokensLine(e *schemas.Tokens) string {
	what := fmt.Sprintf("%s #%v turn %d at %d  ", e.UID, e.Place(), e.Turn, e.Position)
	if !e.Generated {
		return what + present.Count(len(e.IDs), "token") + " given"
	}
	logProbs := e.LogProbs
	if len(logProbs) == 0 {
		logProbs = e.ProcessedLogProbs
	}
	for i, id := range e.IDs {
		what += fmt.Sprintf("%d (%s) ", id, logProbText(logProbs[i], "%.3f"))
	}
	if l := e.Logits; l != nil {
		what += fmt.Sprintf(" logits %s %s %v", l.Form, l.Values.DType, l.Values.Shape)
	}
	return strings.TrimSpace(what + "  " + e.FinishReason)
}

// describeText says in a few lines with which settings a group of texts was requested.
func describeText(t *schemas.Trajectory) []string {
	s := t.Text.Settings
	lines := []string{fmt.Sprintf("at most %d tokens, temperature %g, top_k %d, top_p %g, min_p %g, vocabulary %d, "+
		"logits %s", s.MaxNewTokens, s.Temperature, s.TopK, s.TopP, s.MinP, s.Vocabulary, logitsLine(&s))}
	if d := t.Drawn; d != nil {
		lines = append(lines,
			fmt.Sprintf("drawn by %s with its own random generator, so verify cannot draw them again; it gives %s",
				&d.Engine, engineGives[d.Engine.Values]))
	}
	if with := s.Interaction; with != nil {
		lines = append(lines, fmt.Sprintf("interaction %s, at most %d answers, %v for each of its replies", with.Name,
			s.Answers(), with.Timeout()))
	}
	if len(s.Messages) > 1 {
		for _, m := range s.Messages {
			lines = append(lines, fmt.Sprintf("%s: %s", m.Role, printable(m.Content)))
		}
	}
	return lines
}

var engineGives = map[string]string{
	schemas.EngineRaw:       "log-probs before temperature and filters",
	schemas.EngineTempered:  "log-probs after temperature, before filters",
	schemas.EngineProcessed: "log-probs after temperature and filters",
	schemas.EngineLogits:    "all logits",
}

// logitsLine says which logits a text request stores.
func logitsLine(s *schemas.TextRequest) string {
	if s.Logits == nil {
		return "none"
	}
	answers := s.Logits.Answers
	return fmt.Sprintf("%s, %d of a token, %s %s", s.Logits.Form, s.PerToken(), s.LogitsKind(), s.Logits.DType) +
		present.When(len(answers) > 0, ", of the answers %v", answers)
}

// printTokens shows the answers of the samples, and the tokens with their log-probs by position.
func printTokens(out io.Writer, trajectories []*schemas.Trajectory) {
	fmt.Fprintln(out, "\nanswers")
	longest := 0
	texts := make([]*view.Text, len(trajectories))
	for i, t := range trajectories {
		if texts[i] = view.TextOf(t); texts[i].Tokens == 0 && t.StopReason != schemas.StopCompleted {
			fmt.Fprintf(out, "  #%d  %s\n", t.SampleIndex, t.StopReason)
			continue
		}
		longest = max(longest, int(texts[i].Tokens))
		fmt.Fprintf(out, "  #%d  %s  %s, %s\n", t.SampleIndex, printable(texts[i].Answer),
			present.Count(texts[i].Tokens, "token"), texts[i].FinishReason)
		printConversation(out, t.Text)
	}
	if longest == 0 {
		return
	}
	processed := texts[0].Drawn != nil && texts[0].LogProbs == nil
	title := "log-probs by token: before temperature and filters, id in front"
	if processed {
		title = fmt.Sprintf("log-probs by token: after temperature and filters, as %s gives them, id in front",
			&texts[0].Drawn.Engine)
	}
	present.Linef(out, "\n%s", title)
	table := present.Samples()
	table.Row(sampleHeads("token", trajectories)...)
	for at := range min(longest, mostTokens) {
		cells := []any{at}
		for _, x := range texts {
			cell, logProbs := "", x.LogProbs
			if processed {
				logProbs = x.ProcessedLogProbs
			}
			if k := nthGenerated(x, at); k >= 0 {
				cell = fmt.Sprintf("%d %s", x.IDs[k], logProbText(logProbs[k], "%.4f"))
			}
			cells = append(cells, cell)
		}
		table.Row(cells...)
	}
	table.Print(out)
	fmt.Fprint(out, present.When(longest > mostTokens, "  and %s\n", present.Count(longest-mostTokens, "more token")))
}

// printConversation shows what a model and its interaction said to each other, with the score of each answer.
func printConversation(out io.Writer, x *schemas.TextResult) {
	with := x.Settings.Interaction
	if with == nil {
		return
	}
	columns := max(12, present.Width(out)-30)
	for i, t := range x.Turns {
		if !t.Generated {
			continue
		}
		score := "no score"
		if t.Score != nil {
			score = fmt.Sprintf("score %.4g", *t.Score)
		}
		fmt.Fprintf(out, "      answer %d  %s  %s\n", i/2, present.Cut(printable(t.Text), columns), score)
		fmt.Fprint(out, present.When(t.Reply != "", "      %s says  %s%s\n", with.Name,
			present.Cut(printable(t.Reply), columns), present.When(i == len(x.Turns)-1, "  (after the last answer)")))
	}
	fmt.Fprintf(out, "      ended: %s\n", x.Conversation)
}

const mostTokens = 64

// nthGenerated returns the position of the n-th generated token in a text; -1 if there is none.
func nthGenerated(x *view.Text, n int) int {
	for i, one := range x.Mask {
		if one == 1 {
			if n == 0 {
				return i
			}
			n--
		}
	}
	return -1
}
