package command

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/nats-io/nats.go"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// meter shows how far something is: a bar on a terminal, else a line every few seconds.
type meter struct {
	out   io.Writer
	bars  *mpb.Progress
	bar   *mpb.Bar // nil: there is none
	line  func() string
	ended chan struct{}
}

// start shows a bar with these parts, or line from time to time, until close. machine: there is no bar, even on a
// terminal.
func (m *meter) start(machine bool, total int, line func() string, parts ...mpb.BarOption) {
	out, ended := m.out, make(chan struct{})
	m.line, m.ended = line, ended
	if boot.IsTerminal(out) && !machine {
		if f, ok := boot.File(out); ok { // it moves the cursor
			out = f
		}
		m.bars = mpb.New(mpb.WithOutput(out), mpb.WithWidth(32), mpb.WithRefreshRate(120*time.Millisecond))
		m.bar = m.bars.New(int64(total), mpb.BarStyle().Lbound("[").Filler("=").Tip(">").Padding(" ").Rbound("]"),
			parts...)
		return
	}
	go func() {
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				fmt.Fprintln(out, line())
			}
		}
	}()
}

func (m *meter) add(n int) {
	if m.bar != nil {
		m.bar.IncrBy(n)
	}
}

// note prints a line, above the bar if there is one.
func (m *meter) note(line string) {
	out := m.out
	if m.bar != nil {
		out = m.bars
	}
	fmt.Fprintln(out, boot.Safe(line))
}

// close leaves the bar on the screen, or prints a last line; complete says that the bar should be full.
func (m *meter) close(complete bool) {
	close(m.ended)
	if m.bar == nil {
		fmt.Fprintln(m.out, m.line())
		return
	}
	if complete {
		m.bar.SetTotal(-1, true)
	}
	m.bar.Abort(false) // does nothing to a bar that has ended
	m.bars.Wait()
}

// progress shows how far a run is. It counts steps by their subjects and reads no latents.
type progress struct {
	meter
	runs  []schemas.Run
	total int                 // groups
	uids  map[progressOf]bool // open at the start; never changed after it

	// tail is the end of the line. The bar reads it while it draws; as calls of the bar wait for that, a lock would
	// deadlock.
	tail  atomic.Pointer[string]
	model *loading

	mu      sync.Mutex
	seen    map[string]bool // run.uid.sample.step, of any attempt
	steps   int             // T x samples of the prompts accepted so far
	done    int             // groups closed
	refills int             // fresh groups in place of given-up ones
	scored  int
	cut     bool // the run was cancelled: not all of its steps will come
}

// newProgress shows the progress of a run on out until end. machine: there is no bar, even on a terminal. m is the
// model that this process loads.
func newProgress(
	out io.Writer, machine bool, run schemas.Run, prompts []results.Prompt, o *results.Outcomes, m *loading,
) *progress {
	p := &progress{
		meter: meter{out: out}, model: m, uids: map[progressOf]bool{}, seen: map[string]bool{},
	}
	p.addRun(run, prompts, o)
	m.lines.Store(nil)
	name := string(run) + " "
	if present.Width(out) < 80 {
		name = "" // the numbers matter more
	}
	p.start(machine, 0, p.text, mpb.PrependDecorators(decor.Name(name)), mpb.AppendDecorators(
		decor.CountersNoUnit("%d/%d steps"),
		decor.Any(func(decor.Statistics) string { return "  " + *p.tail.Load() + p.model.String() }),
		decor.Name("  "), decor.Elapsed(decor.ET_STYLE_MMSS),
	))
	return p
}

// progressOf names a group of one of the runs.
type progressOf struct {
	run schemas.Run
	uid schemas.UID
}

// addRun has the progress of a run in the sum.
func (p *progress) addRun(run schemas.Run, prompts []results.Prompt, o *results.Outcomes) {
	p.runs = append(p.runs, run)
	for _, prompt := range prompts {
		p.uids[progressOf{run, prompt.UID}] = o.Open(prompt.UID)
	}
	p.change(func() { p.total, p.done = p.total+len(prompts), p.done+len(prompts)-o.Left() })
}

// countEvents counts stored and new steps and rewards of the run, in the background until ctx ends.
func (p *progress) countEvents(ctx context.Context, b *bus.Bus) {
	steps := &export.Source{Stream: schemas.StreamSteps, From: bus.ReadOptions{HeadersOnly: true}}
	rewards := &export.Source{Stream: schemas.StreamRewards}
	for _, run := range p.runs {
		for _, kind := range []string{schemas.KindStep, schemas.KindTokens} {
			steps.Filters = append(steps.Filters, schemas.Address{Kind: kind, Run: run}.Filter())
		}
		rewards.Filters = append(rewards.Filters, schemas.RewardFilter(run, "*", "*"))
	}
	go func() {
		for m, err := range live(ctx, b, steps, rewards) {
			switch {
			case err != nil:
				return // awaitOutcomes reads too, and reports the error
			case m.Stream == schemas.StreamRewards:
				p.countReward(m)
			default:
				p.countStep(m.Subject)
			}
		}
	}()
}

// explainAfter is how long nothing of a run moves before its progress says what the pipeline waits for.
const explainAfter = 15 * time.Second

// explainWaits says what holds up the pipeline when nothing of an accepted run has moved for a while, each reason once,
// in the background until ctx ends. A user who may not ask gets no reason.
func (p *progress) explainWaits(ctx context.Context, b *bus.Bus, after time.Duration) {
	reader := newReader(ctx, b, false)
	defer reader.Close()
	told, before := map[string]bool{}, ""
	for bus.Pause(ctx, after) == nil {
		p.mu.Lock()
		_, total := p.counts()
		p.mu.Unlock()
		now := p.text()
		if moved := now != before; moved || total == 0 {
			before = now
			continue
		}
		system, err := reader.System(ctx)
		if err != nil {
			continue
		}
		for _, w := range system.Waits {
			reason := strings.Join(strings.FieldsFunc(w.Says, unicode.IsDigit), "") // with another count it is the same
			if !told[reason] {
				told[reason] = true
				p.note(w.Text())
			}
		}
	}
}

// receiptHandler returns a handler of intake's answers to the run's prompts: it adds up the steps to come, and prints
// warnings, but for those that are known, and why prompts wait, each reason once.
func (p *progress) receiptHandler(known []string) nats.MsgHandler {
	told := map[string]bool{}
	return func(m *nats.Msg) {
		var r schemas.Receipt
		if schemas.Decode(m.Data, &r) != nil {
			return
		}
		if why, _, _ := strings.Cut(r.Waiting, "; held until"); why != "" && !told[why] {
			told[why] = true
			p.note("waiting: " + r.Waiting)
		}
		for _, w := range r.Warnings {
			if slices.Contains(known, w) {
				continue
			}
			p.note("warning: " + string(r.UID) + ": " + w)
		}
		if r.Accepted {
			p.expect(int(r.AllSteps()))
		}
	}
}

func (p *progress) expect(steps int) { p.change(func() { p.steps += steps }) }

// countStep counts a step of the run's samples, once for all attempts at a sample.
func (p *progress) countStep(subject string) {
	a, _ := schemas.ParseSubject(subject)
	if p.uids[progressOf{a.Run, a.UID}] {
		p.change(func() { p.seen[string(a.Run)+"."+string(a.UID)+"."+a.Sample+"."+a.Step] = true })
	}
}

// countReward counts a reward of the run. Samples that failed or were pruned have an event without one.
func (p *progress) countReward(m *bus.Message) {
	var r schemas.Reward
	if bus.Fits(m, &r) == nil && r.Reward != nil && p.uids[progressOf{r.Run, r.UID}] {
		p.change(func() { p.scored++ })
	}
}

// cancelled notes that the missing steps will not come.
func (p *progress) cancelled() { p.change(func() { p.cut = true }) }

func (p *progress) groups(done, refills int) { p.change(func() { p.done, p.refills = done, refills }) }

// change changes the counts and shows them.
func (p *progress) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	s := strconv.Itoa(p.scored) + " rewards  " + strconv.Itoa(p.done) + "/" + strconv.Itoa(p.total) + " groups"
	if p.cut {
		s += "  cancelled"
	}
	if p.refills > 0 {
		s += "  " + strconv.Itoa(p.refills) + " refills"
	}
	p.tail.Store(&s)
	if p.bar != nil {
		steps, total := p.counts()
		p.bar.SetTotal(int64(total), false)
		p.bar.SetCurrent(int64(steps))
	}
}

// counts returns the steps made, and the steps to make. p.mu is held. Receipts may be lost, and a group may close
// before its last steps are counted, so the total is at least the steps made.
func (p *progress) counts() (steps, total int) {
	steps, total = len(p.seen), max(p.steps, len(p.seen))
	if p.done == p.total && !p.cut {
		steps = total
	}
	return steps, total
}

// text is the progress as a line.
func (p *progress) text() string {
	p.mu.Lock()
	steps, total := p.counts()
	p.mu.Unlock()
	return fmt.Sprintf("run %s: %d/%d steps  %s", p.runs[0], steps, total, *p.tail.Load()+p.model.String())
}

// end ends the bar, or prints a last line of progress.
func (p *progress) end() {
	p.mu.Lock()
	whole := p.done == p.total && !p.cut
	p.mu.Unlock()
	p.close(whole)
}

// counted shows how many of a known number of things are done.
type counted struct {
	meter
	total int
	done  atomic.Int64
}

// newCounted shows the progress until end, under a name, which may be empty. machine: there is no bar, even on a
// terminal.
func newCounted(out io.Writer, machine bool, name, unit string, total int) *counted {
	p := &counted{meter: meter{out: out}, total: total}
	p.start(machine, total, func() string { return fmt.Sprintf("%s%d/%d %s", name, p.done.Load(), total, unit) },
		mpb.PrependDecorators(decor.Name(name)), mpb.AppendDecorators(decor.CountersNoUnit("%d/%d "+unit),
			decor.Name("  "), decor.Elapsed(decor.ET_STYLE_MMSS)))
	return p
}

func (p *counted) count() {
	p.done.Add(1)
	p.add(1)
}

func (p *counted) end() { p.close(int(p.done.Load()) == p.total) }

// loading says how far this process is with loading its model.
type loading struct {
	now, waits atomic.Pointer[string]
	// lines gets what is waited for, until a progress shows it; nil: nothing does.
	lines atomic.Pointer[io.Writer]
}

// wait is told what the worker of an engine is waited for; empty: for nothing.
func (l *loading) wait(text string) {
	if out := l.lines.Load(); out != nil && text != "" {
		fmt.Fprintln(*out, text)
	}
	if text != "" {
		text = "  " + text
	}
	l.waits.Store(&text)
}

// update is a model.Progress: done of total bytes of a part are loaded.
func (l *loading) update(part string, done, total int) {
	s := ""
	if done < total {
		s = fmt.Sprintf("  loading %s: %s of %s", part, present.Size(done), present.Size(total))
	}
	l.now.Store(&s)
}

// String returns the text behind a bar; "" when nothing is being loaded.
func (l *loading) String() string {
	text := ""
	for _, part := range []*string{l.now.Load(), l.waits.Load()} {
		if part != nil {
			text += *part
		}
	}
	return text
}
