package command

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// mostStrip is the most tokens that a strip of confidences shows, leastAnswer the columns that answers have at least.
const (
	mostStrip   = 32
	leastAnswer = 12
)

// printTexts shows the samples of a group of texts, the best first, a line each: the answer, how sure the model was of each
// token, the reward with its single scores, and the advantage. It says whether the group is one.
func printTexts(w io.Writer, g *results.Group) bool {
	if !slices.ContainsFunc(g.Members, func(m results.Member) bool { return m.Text != nil }) {
		return false
	}
	members, gap, more := bestAndWorst(g, fewSamples)
	names := scoreNames(members)
	if len(names) < 2 {
		names = nil // the reward says it
	}
	table := textTable(members, names)
	if table.columns() > width(w) {
		table = textTable(members, nil)
	}
	table.print(w, members, gap)
	if more > 0 {
		fmt.Fprintf(w, "%sand %s\n", gridGap, count(more, "more sample"))
	}
	for _, line := range append(details(members), failures(g.Members)...) {
		printBroken(w, gridGap+line)
	}
	return true
}

// texts are the cells of samples, a row each below their heads. Behind them comes the answer.
type texts struct {
	rows   [][]string
	widths []int
	strip  int // columns of confidences, which are the third cell
}

// textTable has the single scores of some reward functions.
func textTable(members []results.Member, names []string) *texts {
	strip := "confidence"
	if slices.Contains(names, strip) {
		strip = "by token"
	}
	x := &texts{rows: [][]string{slices.Concat([]string{"sample", "tokens", strip}, names, []string{"reward", "advantage"})}, strip: len(strip)}
	for i := range members {
		m := &members[i]
		row := []string{fmt.Sprintf("#%d", m.SampleIndex), "", ""}
		if m.Text != nil {
			row[1] = fmt.Sprint(m.Text.Tokens)
			x.strip = max(x.strip, min(mostStrip, len(m.Text.Confidences())))
		}
		for _, name := range names {
			row = append(row, score(m, name))
		}
		reward := m.Status
		if m.Status == schemas.StatusScored {
			reward = results.Number(m.Reward, "%.3f")
		}
		x.rows = append(x.rows, append(row, reward, results.Number(m.Advantage, "%+.3f")))
	}
	x.widths = make([]int, len(x.rows[0]))
	for _, row := range x.rows {
		for i, cell := range row {
			x.widths[i] = max(x.widths[i], utf8.RuneCountInString(cell))
		}
	}
	x.widths[2] = x.strip
	return x
}

// columns is how wide it is without answers.
func (x *texts) columns() (n int) {
	for _, w := range x.widths {
		n += w + len(gridGap)
	}
	return n
}

// print writes the rows with the answers, which have a line of their own where the terminal is narrow. Before
// the sample at gap, where it is not 0, there are others that are left out.
func (x *texts) print(w io.Writer, members []results.Member, gap int) {
	room, between := width(w)-x.columns()-len(gridGap), gridGap
	if narrow := 3 * len(gridGap); room < leastAnswer {
		room, between = max(leastAnswer, width(w)-narrow), "\n"+strings.Repeat(" ", narrow)
	}
	for i, row := range x.rows {
		if gap > 0 && i == 1+gap {
			fmt.Fprintf(w, "%s%s\n", gridGap, pad("…", x.widths[0]))
		}
		answer, strip := "answer", row[2]+strings.Repeat(" ", x.strip-len(row[2])) // strips begin at the left
		if i > 0 {
			answer = ""
			if t := members[i-1].Text; t != nil {
				strip, answer = confidenceStrip(w, t.Confidences(), x.strip), cutTalk(spoken(t.Turns), room)
			}
		}
		for k, cell := range row {
			if k == 2 { // which may have colours
				fmt.Fprint(w, gridGap, strip)
			} else {
				fmt.Fprint(w, gridGap, pad(cell, x.widths[k]))
			}
		}
		fmt.Fprint(w, between, cutText(answer, room), "\n")
	}
}

// printable is a text in one line, in quotes where it could be taken for none, or would be more to a terminal than its letters.
func printable(s string) string {
	if s == "" || strings.TrimSpace(s) != s || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return fmt.Sprintf("%q", s)
	}
	return s
}

// between stands between an answer and what the interaction says to it.
const between = " › "

// spoken is what a text says in one line: its answer, and of a conversation all of them, with the replies in between.
func spoken(turns []schemas.Turn) string {
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

// cutTalk is a line of at most so many columns, without what comes first where it is a conversation: the last answer counts.
func cutTalk(line string, columns int) string {
	all := []rune(line)
	if len(all) <= columns || !strings.Contains(line, between) {
		return cutText(line, columns)
	}
	return "…" + string(all[len(all)-max(0, columns-1):])
}

// cutText is a text of at most so many columns.
func cutText(s string, columns int) string {
	if utf8.RuneCountInString(s) <= columns {
		return s
	}
	return string([]rune(s)[:max(0, columns-1)]) + "…"
}

// bars stand for confidences from 0 to 1.
var bars = []rune("▁▂▃▄▅▆▇█")

// confidenceStrip has a bar for each token, red to green where there are colours; of more tokens than columns each bar is the least of
// several. It fills the columns.
func confidenceStrip(w io.Writer, list []float64, columns int) string {
	n := min(len(list), min(columns, mostStrip))
	var s strings.Builder
	for i := range n {
		least := 1.0
		for _, c := range list[i*len(list)/n : (i+1)*len(list)/n] {
			least = min(least, c)
		}
		sgr := sgrRed
		switch {
		case least >= 0.9:
			sgr = sgrGreen
		case least >= 0.5:
			sgr = sgrYellow
		}
		s.WriteString(paint(w, sgr, string(bars[min(len(bars)-1, int(least*float64(len(bars))))])))
	}
	return s.String() + strings.Repeat(" ", columns-n)
}

// tokensLine is an event of tokens in one line.
func tokensLine(e *schemas.Tokens) string {
	what := fmt.Sprintf("%s #%d turn %d at %d  ", e.UID, e.SampleIndex, e.Turn, e.Position)
	if !e.Generated {
		return what + count(len(e.IDs), "token") + " given"
	}
	logProbs := e.LogProbs
	if len(logProbs) == 0 {
		logProbs = e.ProcessedLogProbs
	}
	for i, id := range e.IDs {
		what += fmt.Sprintf("%d (%.3f) ", id, logProbs[i])
	}
	if l := e.Logits; l != nil {
		what += fmt.Sprintf(" logits %s %s %v", l.Form, l.Values.DType, l.Values.Shape)
	}
	if e.FinishReason != "" {
		what += "  " + e.FinishReason
	}
	return strings.TrimSpace(what)
}

// describeText says how a group of texts was asked for.
func describeText(t *schemas.Trajectory) []string {
	s := t.Text.Settings
	lines := []string{fmt.Sprintf("at most %d tokens, temperature %g, top_k %d, top_p %g, min_p %g, vocabulary %d, logits %s", s.MaxNewTokens, s.Temperature, s.TopK, s.TopP, s.MinP, s.Vocabulary, logitsLine(&s))}
	if d := t.Text.Drawn; d != nil {
		lines = append(lines, fmt.Sprintf("drawn by %s from its own generator, which cannot be replayed; it gives %s", &d.Engine, engineGives[d.Engine.Values]))
	}
	if with := s.Interaction; with != nil {
		lines = append(lines, fmt.Sprintf("interaction %s, at most %d answers, %v for each of its replies", with.Name, s.Answers(), with.Timeout()))
	}
	if len(s.Messages) > 1 {
		for _, m := range s.Messages {
			lines = append(lines, fmt.Sprintf("%s: %s", m.Role, printable(m.Content)))
		}
	}
	return lines
}

// engineGives says what the values of an engine are.
var engineGives = map[string]string{
	schemas.EngineRaw:       "log-probs before temperature and filters",
	schemas.EngineTempered:  "log-probs after temperature, before filters",
	schemas.EngineProcessed: "log-probs after temperature and filters",
	schemas.EngineLogits:    "all logits",
}

func logitsLine(s *schemas.TextRequest) string {
	if s.Logits == nil {
		return "none"
	}
	line := fmt.Sprintf("%s, %d of a token, %s %s", s.Logits.Form, s.PerToken(), s.LogitsKind(), s.Logits.DType)
	if answers := s.Logits.Answers; len(answers) > 0 {
		line += fmt.Sprintf(", of the answers %v", answers)
	}
	return line
}

// printTokens shows the tokens of each sample with their log-probs, by their place in the answers.
func printTokens(out io.Writer, trajectories []*schemas.Trajectory) {
	fmt.Fprintln(out, "\nanswers")
	longest := 0
	texts := make([]*results.Text, len(trajectories))
	for i, t := range trajectories {
		if texts[i] = results.TextOf(t); texts[i].Tokens == 0 && t.StopReason != schemas.StopCompleted {
			fmt.Fprintf(out, "  #%d  %s\n", t.SampleIndex, t.StopReason)
			continue
		}
		longest = max(longest, int(texts[i].Tokens))
		fmt.Fprintf(out, "  #%d  %s  %s, %s\n", t.SampleIndex, printable(texts[i].Answer), count(int(texts[i].Tokens), "token"), texts[i].FinishReason)
		printConversation(out, t.Text)
	}
	if longest == 0 {
		return
	}
	processed := texts[0].Drawn != nil && texts[0].LogProbs == nil
	title := "log-probs by token: before temperature and filters, id in front"
	if processed {
		title = fmt.Sprintf("log-probs by token: after temperature and filters, as %s gives them, id in front", &texts[0].Drawn.Engine)
	}
	fmt.Fprintf(out, "\n%s\n", breakLines(title, lineWidth(out)-len(columnIndent), "\n"+columnIndent))
	table, heads := &grid{}, make([]string, len(trajectories))
	for i, t := range trajectories {
		heads[i] = fmt.Sprintf("#%d", t.SampleIndex)
	}
	table.row("token", heads)
	for at := range min(longest, mostTokens) {
		cells := make([]string, len(trajectories))
		for i, x := range texts {
			if k := nthGenerated(x, at); k >= 0 {
				logProbs := x.LogProbs
				if processed {
					logProbs = x.ProcessedLogProbs
				}
				cells[i] = fmt.Sprintf("%d %.4f", x.IDs[k], logProbs[k])
			}
		}
		table.row(fmt.Sprint(at), cells)
	}
	table.print(out, width(out))
	if longest > mostTokens {
		fmt.Fprintf(out, "%sand %s\n", gridGap, count(longest-mostTokens, "more token"))
	}
}

// printConversation shows what a model and its interaction said to each other, with the score of each answer.
func printConversation(out io.Writer, x *schemas.TextResult) {
	with := x.Settings.Interaction
	if with == nil {
		return
	}
	room := max(leastAnswer, width(out)-30)
	for i, t := range x.Turns {
		if !t.Generated {
			continue
		}
		score := "no score"
		if t.Score != nil {
			score = fmt.Sprintf("score %.4g", *t.Score)
		}
		fmt.Fprintf(out, "      answer %d  %s  %s\n", i/2, cutText(printable(t.Text), room), score)
		if t.Reply != "" {
			said := ""
			if i == len(x.Turns)-1 {
				said = "  (not said any more)"
			}
			fmt.Fprintf(out, "      %s says  %s%s\n", with.Name, cutText(printable(t.Reply), room), said)
		}
	}
	fmt.Fprintf(out, "      ended: %s\n", x.Conversation)
}

// mostTokens is how many tokens of an answer show lists.
const mostTokens = 64

// nthGenerated is the place of the n-th token that was generated, -1 where there is none.
func nthGenerated(x *results.Text, n int) int {
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
