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

// progress shows how far a run is: a bar on a terminal, else a line every few seconds. It counts steps by their
// subjects and reads no latents.
type progress struct {
	out    io.Writer
	run    schemas.Run
	total  int                  // groups
	uids   map[schemas.UID]bool // open at the start; never changed after it
	bars   *mpb.Progress
	bar    *mpb.Bar
	ended  chan struct{}
	closed sync.Once

	// tail is the end of the line. The bar reads it while it draws; as calls of the bar wait for that, a lock would
	// deadlock.
	tail  atomic.Pointer[string]
	model *loading

	mu      sync.Mutex
	seen    map[string]bool // uid.sample.step, of any attempt
	steps   int             // T x samples of the prompts accepted so far
	done    int             // groups closed
	refills int             // fresh groups in place of given-up ones
	scored  int
	cut     bool // the run was cancelled: not all of its steps will come
}

// newProgress shows the progress of a run on out until close: a bar on a terminal, else a line from time to time.
// machine: there is no bar, even on a terminal. m is the model that this process loads.
func newProgress(
	out io.Writer, machine bool, run schemas.Run, prompts []results.Prompt, o *results.Outcomes, m *loading,
) *progress {
	p := &progress{
		out: out, model: m, run: run, total: len(prompts), done: len(prompts) - o.Left(), uids: map[schemas.UID]bool{},
		seen: map[string]bool{}, ended: make(chan struct{}),
	}
	for _, prompt := range prompts {
		p.uids[prompt.UID] = o.Open(prompt.UID)
	}
	m.lines.Store(nil)
	p.update()
	if boot.IsTerminal(out) && !machine {
		name := string(run) + " "
		if present.Width(out) < 80 {
			name = "" // the numbers matter more
		}
		p.bars, p.bar = newBar(out, 0,
			mpb.PrependDecorators(decor.Name(name)),
			mpb.AppendDecorators(
				decor.CountersNoUnit("%d/%d steps"),
				decor.Any(func(decor.Statistics) string { return "  " + *p.tail.Load() + p.model.String() }),
				decor.Name("  "), decor.Elapsed(decor.ET_STYLE_MMSS),
			))
	} else {
		go p.printRegularly()
	}
	return p
}

// newBar returns a bar on a terminal.
func newBar(out io.Writer, total int64, options ...mpb.BarOption) (*mpb.Progress, *mpb.Bar) {
	if f, ok := boot.File(out); ok { // it moves the cursor
		out = f
	}
	bars := mpb.New(mpb.WithOutput(out), mpb.WithWidth(32), mpb.WithRefreshRate(120*time.Millisecond))
	return bars, bars.New(total, mpb.BarStyle().Lbound("[").Filler("=").Tip(">").Padding(" ").Rbound("]"), options...)
}

// endBar leaves the bar on the screen; complete says that it should be full.
func endBar(bars *mpb.Progress, bar *mpb.Bar, complete bool) {
	if complete {
		bar.SetTotal(-1, true)
	}
	bar.Abort(false) // does nothing to a bar that has ended
	bars.Wait()
}

// countEvents counts stored and new steps and rewards of the run, in the background until ctx ends.
func (p *progress) countEvents(ctx context.Context, b *bus.Bus) {
	steps := &export.Source{Stream: schemas.StreamSteps, From: bus.ReadOptions{HeadersOnly: true}}
	for _, kind := range []string{schemas.KindStep, schemas.KindTokens} {
		steps.Filters = append(steps.Filters, schemas.Address{Kind: kind, Run: p.run}.Filter())
	}
	rewards := &export.Source{
		Stream: schemas.StreamRewards, Filters: []string{schemas.RewardFilter(p.run, "*", "*")},
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
	tick := time.NewTicker(after)
	defer tick.Stop()
	told, before := map[string]bool{}, ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.ended:
			return
		case <-tick.C:
		}
		p.mu.Lock()
		steps, total := p.counts()
		p.mu.Unlock()
		now := fmt.Sprint(steps, total, *p.tail.Load(), p.model.String())
		if moved := now != before; moved || total == 0 {
			before = now
			continue
		}
		system, err := reader.System(ctx)
		if err != nil {
			continue
		}
		for _, w := range system.Waits {
			reason := strings.Map(withoutDigit, w.Says) // with another count it is the same
			if !told[reason] {
				told[reason] = true
				p.note(boot.Safe(w.Text()))
			}
		}
	}
}

// withoutDigit is for strings.Map: it drops digits.
func withoutDigit(r rune) rune {
	if '0' <= r && r <= '9' {
		return -1
	}
	return r
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

func (p *progress) expect(steps int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps += steps
	p.update()
}

// countStep counts a step of the run's samples, once for all attempts at a sample.
func (p *progress) countStep(subject string) {
	a, _ := schemas.ParseSubject(subject)
	if !p.uids[a.UID] {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[string(a.UID)+"."+a.Sample+"."+a.Step] = true
	p.update()
}

// countReward counts a reward of the run. Samples that failed or were pruned have an event without one.
func (p *progress) countReward(m *bus.Message) {
	var r schemas.Reward
	if bus.Fits(m, &r) != nil || r.Reward == nil || !p.uids[r.UID] {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scored++
	p.update()
}

func (p *progress) note(line string) {
	out := p.out
	if p.bars != nil {
		out = p.bars
	}
	fmt.Fprintln(out, boot.Safe(line))
}

// cancelled notes that the missing steps will not come.
func (p *progress) cancelled() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	p.update()
}

func (p *progress) groups(done, refills int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.refills = done, refills
	p.update()
}

// update shows the current counts. The caller holds p.mu, except newProgress.
func (p *progress) update() {
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

// printRegularly prints a line of progress every few seconds, until close.
func (p *progress) printRegularly() {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-p.ended:
			return
		case <-tick.C:
			p.print()
		}
	}
}

func (p *progress) print() {
	p.mu.Lock()
	steps, total := p.counts()
	p.mu.Unlock()
	fmt.Fprintf(p.out, "run %s: %d/%d steps  %s\n", p.run, steps, total, *p.tail.Load()+p.model.String())
}

// close ends the bar, or prints a last line of progress.
func (p *progress) close() {
	p.closed.Do(func() {
		close(p.ended)
		if p.bar == nil {
			p.print()
		} else {
			p.mu.Lock()
			whole := p.done == p.total && !p.cut
			p.mu.Unlock()
			endBar(p.bars, p.bar, whole)
		}
	})
}

// counted shows how many of a known number of things are done: a bar on a terminal, else a line from time to time.
type counted struct {
	out   io.Writer
	name  string // begins each line; may be empty
	unit  string
	total int
	bars  *mpb.Progress
	bar   *mpb.Bar

	mu    sync.Mutex
	done  int
	shown time.Time
}

// newCounted shows the progress until close. machine: there is no bar, even on a terminal.
func newCounted(out io.Writer, machine bool, name, unit string, total int) *counted {
	p := &counted{out: out, name: name, unit: unit, total: total, shown: time.Now()}
	if boot.IsTerminal(out) && !machine {
		p.bars, p.bar = newBar(out, int64(total), mpb.PrependDecorators(decor.Name(name)),
			mpb.AppendDecorators(decor.CountersNoUnit("%d/%d "+unit), decor.Name("  "),
				decor.Elapsed(decor.ET_STYLE_MMSS)))
	}
	return p
}

// count counts one more.
func (p *counted) count() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	if p.bar != nil {
		p.bar.Increment()
	} else if time.Since(p.shown) > 5*time.Second {
		p.shown = time.Now()
		p.print()
	}
}

func (p *counted) print() { fmt.Fprintf(p.out, "%s%d/%d %s\n", p.name, p.done, p.total, p.unit) }

func (p *counted) close() {
	if p.bar == nil {
		p.print()
		return
	}
	endBar(p.bars, p.bar, p.done == p.total)
}

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
