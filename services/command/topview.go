package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

const topGroups = 20

type topView struct {
	where    string
	now      time.Time
	overview *view.Overview // nil: nothing has been read yet
	// away says that there is no connection to the server; fault why the last look failed.
	away  bool
	fault string
	// chosen is the place of the chosen run, -1 where none can be chosen; choice is its name, which keeps it chosen
	// when others come.
	chosen int
	choice schemas.Run
	// opened is the run whose groups are shown; groups is nil until they are read.
	opened schemas.Run
	groups *view.Groups
}

// update shows what a look has found. After a failure, what was found before stays.
func (v *topView) update(l topLook) {
	v.fault = ""
	if errors.Is(l.err, context.DeadlineExceeded) {
		v.fault = "the server does not answer in time; it is asked again"
	} else if l.err != nil && !errors.Is(l.err, context.Canceled) { // one that was ended because the server is away
		v.fault = l.err.Error()
	}
	if l.overview != nil {
		v.overview = l.overview
		runs := v.overview.Runs
		at := slices.IndexFunc(runs, func(r *view.Run) bool { return r.Run == v.choice })
		if at < 0 || v.choice == "" {
			at = max(0, min(v.chosen, len(runs)-1))
		}
		v.choose(at)
	}
	if l.err == nil && l.run == v.opened && l.run != "" {
		v.groups = l.groups
	}
}

func (v *topView) choose(at int) {
	v.chosen, v.choice = at, ""
	if at < len(v.overview.Runs) {
		v.choice = v.overview.Runs[at].Run
	}
}

// press does what a key asks for. It reports whether something else must be read.
func (v *topView) press(k key) bool {
	switch {
	case k == keyBack:
		v.opened, v.groups = "", nil
	case v.overview == nil || v.opened != "":
	case k == keyEnter:
		v.opened = v.choice
		return v.opened != ""
	case k == keyUp:
		v.choose(max(0, v.chosen-1))
	case k == keyDown:
		v.choose(max(0, min(v.chosen+1, len(v.overview.Runs)-1)))
	}
	return false
}

// topLine is a line of the screen. Its text has no colour of its own.
type topLine struct {
	colour present.Colour
	text   string
}

// topLines are lines of the screen, all of at most so many columns. Whatever adds one has it made safe.
type topLines struct {
	columns int
	lines   []topLine
}

func (t *topLines) add(c present.Colour, text string) {
	t.lines = append(t.lines, topLine{c, fit(strings.TrimRight(showable(text), " "), t.columns)})
}

// wrap adds a text in as many lines as it needs: nothing of it is cut. The first begins with lead, all others with as
// many blanks.
func (t *topLines) wrap(c present.Colour, lead, text string) {
	indent := present.Columns(lead)
	var words []string
	for _, word := range strings.Fields(showable(text)) {
		part := ""
		for _, r := range word {
			if present.Columns(part+string(r)) >= t.columns-indent { // Wrap leaves a column free
				words, part = append(words, part), ""
			}
			part += string(r)
		}
		words = append(words, part)
	}
	wrapped := present.Wrap(strings.Join(words, " "), t.columns-indent, 0)
	for line := range strings.SplitSeq(wrapped, "\n") {
		t.add(c, lead+line)
		lead = strings.Repeat(" ", indent)
	}
}

func (t *topLines) title(text string) {
	t.add("", "")
	t.add(present.Bold, text)
}

// showable is boot.Safe in one line.
func showable(text string) string {
	return strings.ReplaceAll(boot.Safe(text), "\n", `\n`)
}

// layOut returns what the screen shows, in lines of at most so many columns. rows is its height; 0 is that of a
// snapshot, which has as many lines as it needs and knows no keys.
func (v *topView) layOut(columns, rows int) []topLine {
	t := &topLines{columns: columns}
	v.addHead(t, rows > 0)
	switch {
	case v.overview == nil:
		t.add("", "")
		t.add("", "reading ...")
	case v.opened != "":
		v.addGroups(t)
	default:
		waits, services := &topLines{columns: columns}, &topLines{columns: columns}
		v.addWaits(waits)
		v.addServices(services)
		room := 0
		if rows > 0 { // a title is above the runs, the keys are below all; services are what may be left out
			room = rows - len(t.lines) - len(waits.lines) - 2
			room = max(4, room-len(services.lines), 2*room/3)
		}
		v.addRuns(t, room)
		t.lines = append(append(t.lines, waits.lines...), services.lines...)
	}
	if rows == 0 {
		return t.lines
	}
	foot := &topLines{columns: columns}
	keys := "q ends   up, down choose a run   enter shows its groups"
	if v.opened != "" {
		keys = "q ends   esc goes back"
	}
	if more := len(t.lines) - (rows - 1); more > 0 {
		t.lines = t.lines[:max(0, rows-2)]
		foot.add(present.Yellow, fmt.Sprintf("%d more lines; a higher terminal shows them", more+1))
	}
	for len(t.lines)+len(foot.lines) < rows-1 {
		t.add("", "")
	}
	foot.add("", keys)
	lines := append(t.lines, foot.lines...)
	return lines[max(0, len(lines)-rows):]
}

// addHead adds the server, the time and, while the server does not answer, what is tried.
func (v *topView) addHead(t *topLines, live bool) {
	clock := v.now.Format("15:04:05")
	if !live {
		clock = v.now.Format("2006-01-02 15:04:05")
	}
	left := fit("meander top  "+showable(v.where), t.columns-present.Columns(clock)-2)
	gap := max(1, t.columns-present.Columns(left)-present.Columns(clock))
	t.add(present.Bold, left+strings.Repeat(" ", gap)+clock)
	switch {
	case v.away:
		t.wrap(present.Red, "reconnecting: ", "the server is away; this is what there was before")
	case v.fault != "":
		t.wrap(present.Red, "trying again: ", v.fault)
	}
}

var runColumns = []string{"STATE", "GROUPS", "SAMPLES", "STEPS/MIN", "MEAN"}

// runCells returns the columns of a run, its name aside. Without progress, they are of what is stored.
func runCells(r *view.Run) []string {
	groups, samples := done(int64(r.Groups-r.Open), 0, int64(r.Groups)), strconv.Itoa(r.Samples)
	rate, mean := "-", r.Mean
	if r.State == schemas.StatusComplete && r.Failed == 0 {
		samples = done(int64(r.Samples), 0, int64(r.Samples))
	}
	if p := r.Progress; p != nil {
		made, closed := p.Stages[1], p.Stages[3]
		groups, samples = done(closed.Done, closed.Lost, closed.Of), done(made.Done, made.Lost, made.Of)
		rate, mean = fmt.Sprintf("%.0f", p.StepsPer), p.Mean
	}
	return []string{stateOf(r), groups, samples, rate, results.Number(mean, "%.4f")}
}

// done says how much of something there is, and how much there will not be.
func done(n, lost, of int64) string {
	return fmt.Sprintf("%d/%d", n, of) + present.When(lost > 0, " -%d", lost)
}

// stateOf returns the state of a run, or what holds it up.
func stateOf(r *view.Run) string {
	state, held := r.State, r.Held
	if r.Progress != nil && r.Progress.State != "" {
		state, held = r.Progress.State, r.Progress.Held
	}
	return cmp.Or(held, state)
}

// runTable lays out lines of runs, with the titles first.
func runTable(runs []*view.Run, columns int) []string {
	t := present.New(append([]string{"RUN"}, runColumns...)...)
	t.Numbers = []bool{false, false, true, true, true, true}
	for _, r := range runs {
		row := []any{showable(string(r.Run))}
		for _, cell := range runCells(r) {
			row = append(row, showable(cell))
		}
		t.Row(row...)
	}
	return t.Rows(columns - 2) // the mark of the chosen run is before it
}

// fill returns a text of exactly that many columns: cut, or with blanks after it.
func fill(text string, columns int) string {
	return present.Pad(fit(showable(text), columns), columns, false)
}

// fit returns a text, cut where it is wider.
func fit(text string, columns int) string {
	if present.Columns(text) > columns {
		return present.Cut(text, columns)
	}
	return text
}

// addRuns adds the runs in at most so many lines, around the chosen one; 0: in as many as they need.
func (v *topView) addRuns(t *topLines, room int) {
	runs := v.overview.Runs
	if len(runs) == 0 {
		t.title("RUNS")
		t.wrap("", "", "no run is stored yet. Publish prompts to make one:")
		t.wrap("", "  ", `meander publish --run demo 'a red sign that says "OPEN"'`)
		return
	}
	table := runTable(runs, t.columns)
	blocks := make([][]topLine, len(runs))
	for i, r := range runs {
		b := &topLines{columns: t.columns}
		mark, colour := "  ", present.Colour("")
		if i == v.chosen {
			mark, colour = "> ", present.Green
		}
		b.add(colour, mark+table[i+1])
		if i == v.chosen || !outcomes.HasEnded(r.State) {
			addBars(b, r.Progress)
		}
		blocks[i] = b.lines
	}
	from, to := 0, len(blocks)
	if room > 0 {
		from, to = window(blocks, max(0, v.chosen), room-2)
	}
	title := "RUNS"
	if from > 0 || to < v.overview.Total {
		title = fmt.Sprintf("RUNS %d to %d of %d", from+1, to, v.overview.Total)
	}
	t.title(title)
	t.add("", "  "+table[0])
	for _, b := range blocks[from:to] {
		t.lines = append(t.lines, b...)
	}
}

// window returns the range of blocks around one that has so many lines; that one is always in it.
func window(blocks [][]topLine, around, room int) (from, to int) {
	from, to = around, around+1
	room -= len(blocks[around])
	for {
		switch {
		case to < len(blocks) && len(blocks[to]) <= room:
			room -= len(blocks[to])
			to++
		case from > 0 && len(blocks[from-1]) <= room:
			from--
			room -= len(blocks[from])
		default:
			return from, to
		}
	}
}

// addBars adds a bar for each stage of a run: four in a line where that fits, else two.
func addBars(t *topLines, p *view.Progress) {
	if p == nil {
		return
	}
	each := 2
	if t.columns >= 120 {
		each = 4
	}
	const indent, gap, name = 4, 2, 9
	cell := (t.columns - indent - gap*(each-1)) / each
	tails, widest := make([]string, len(p.Stages)), 0
	for i, s := range p.Stages {
		tails[i] = done(s.Done, s.Lost, s.Of)
		if cell >= 40 {
			tails[i] += fmt.Sprintf("  %.0f/min", s.PerMinute)
		}
		widest = max(widest, present.Columns(tails[i]))
	}
	length := max(3, cell-name-widest-2)
	for i := 0; i < len(p.Stages); i += each {
		var cells []string
		for j := i; j < min(i+each, len(p.Stages)); j++ {
			s := p.Stages[j]
			full := 0
			if s.Of > 0 {
				full = int(min(s.Done, s.Of) * int64(length) / s.Of)
			}
			bar := strings.Repeat("█", full) + strings.Repeat("░", length-full)
			cells = append(cells, fill(s.Name, name)+" "+bar+" "+fill(tails[j], widest))
		}
		t.add("", strings.Repeat(" ", indent)+strings.Join(cells, strings.Repeat(" ", gap)))
	}
}

// addWaits adds what waits, and what to do about it: first what holds up the whole pipeline, then what runs wait for.
func (v *topView) addWaits(t *topLines) {
	t.title("WHAT WAITS")
	n := len(t.lines)
	for _, w := range v.overview.Waits {
		addWait(t, "", w)
	}
	for _, r := range v.overview.Runs {
		if r.Progress == nil {
			continue
		}
		for _, w := range r.Progress.Waits {
			if !slices.Contains(v.overview.Waits, w) {
				addWait(t, string(r.Run)+": ", w)
			}
		}
		if r.Progress.Fault != "" {
			t.wrap(present.Red, "! ", string(r.Run)+": "+r.Progress.Fault)
		}
	}
	if len(t.lines) == n {
		t.add("", "nothing")
	}
}

// addWait adds one thing that work waits for, with its fix.
func addWait(t *topLines, of string, w outcomes.Wait) {
	lead, colour := "- ", present.Colour("")
	if w.Grave {
		lead, colour = "! ", present.Red
	}
	t.wrap(colour, lead, of+w.Says)
	if w.Fix != "" {
		t.wrap(present.Yellow, "  do: ", w.Fix)
	}
}

// addServices adds lanes, what serves them, streams and dead letters.
func (v *topView) addServices(t *topLines) {
	x := v.overview.System
	t.title("STREAMS AND SERVICES")
	addStreams(t, x)
	n := len(t.lines)
	when := present.When
	for _, l := range x.Lanes {
		weights := "no weights"
		if l.Current != nil {
			weights = fmt.Sprintf("version %d", l.Current.Version) +
				when(l.Served != l.Current.Version && l.Samplers > 0, ", %d is served", l.Served)
		}
		t.add("", fmt.Sprintf("lane %s: %s, %s", l.Lane.Of(l.Tenant), weights, present.Count(l.Samplers, "sampler"))+
			when(!x.Mirror, ", %s to do", present.Count(l.Backlog, "sample")))
	}
	for _, p := range x.Present {
		line := p.Service + " " + p.Instance + when(p.Lane != "", ": lane %s", p.Lane) + when(p.Backend != "", " on %s",
			p.Backend)
		if p.Loading != nil {
			line += fmt.Sprintf(", loads version %d", *p.Loading)
		}
		line += when(p.Draining, ", ends")
		if p.Room != nil && p.Room.Waiting > 0 {
			line += ", " + present.Count(p.Room.Waiting, "sample") + " without room"
		}
		t.wrap("", "", line+when(len(p.Reward) > 0, ": %s", strings.Join(p.Reward, " ")))
	}
	if len(t.lines) == n {
		t.add("", "no sampler and no reward service")
	}
}

// addStreams adds the streams that are nearly full, and how many dead letters there are.
func addStreams(t *topLines, x *view.System) {
	n := len(t.lines)
	for _, s := range x.Streams {
		if s.State != bus.StateNearlyFull && s.State != bus.StateFull {
			continue
		}
		of := present.Count(s.MaxMessages, "message")
		if s.MaxBytes > 0 {
			of = present.Size(s.MaxBytes)
		}
		t.wrap(present.Yellow, "", fmt.Sprintf("%s is %s: %s, %s; its limit is %s", s.Name, s.State,
			present.Count(s.Messages, "message"), present.Size(s.Bytes), of))
	}
	if len(t.lines) == n {
		t.add("", "no stream is nearly full")
	}
	if x.Dead > 0 {
		t.wrap(present.Yellow, "", present.Count(x.Dead, "dead letter")+"; 'meander dead ls' lists them")
	} else {
		t.add("", "no dead letters")
	}
}

// addGroups adds the run that was opened, with its newest groups.
func (v *topView) addGroups(t *topLines) {
	for _, r := range v.overview.Runs {
		if r.Run != v.opened {
			continue
		}
		t.add("", "")
		for i, line := range runTable([]*view.Run{r}, t.columns) {
			t.add([]present.Colour{present.Bold, ""}[i], line)
		}
		addBars(t, r.Progress)
		if r.Progress != nil {
			for _, w := range r.Progress.Waits {
				addWait(t, "", w)
			}
		}
	}
	if v.groups == nil {
		t.add("", "")
		t.add("", "reading the groups of "+string(v.opened)+" ...")
		return
	}
	t.title(fmt.Sprintf("GROUPS, the newest %d of %d", len(v.groups.Rows), v.groups.Total))
	table := present.New("UID", "STATUS", "MEAN", "PROMPT")
	table.Numbers, table.Fit = []bool{false, false, true}, present.Cut
	for _, g := range v.groups.Rows {
		table.Row(present.Cut(showable(string(g.UID)), t.columns/3), showable(g.Status), results.Number(g.Mean, "%.4f"),
			showable(strings.Join(strings.Fields(g.Prompt), " ")))
	}
	for i, line := range table.Rows(t.columns) {
		c := present.Colour("")
		if i > 0 && v.groups.Rows[i-1].Error != "" {
			c = present.Yellow
		}
		t.add(c, line)
	}
}
