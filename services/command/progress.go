package command

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// progress shows how far a run is: a bar on a terminal, a line every few seconds
// elsewhere. It counts steps by their subjects and never reads a latent.
type progress struct {
	out    io.Writer
	run    schemas.Run
	total  int                  // groups
	uids   map[schemas.UID]bool // those that are not done yet; not changed after the start
	bars   *mpb.Progress
	bar    *mpb.Bar
	ended  chan struct{}
	closed sync.Once

	// tail is the end of the line. The bar reads it while it draws, and whoever tells the
	// bar something waits for the drawing: so it is read without the lock.
	tail  atomic.Pointer[string]
	model *loading

	mu     sync.Mutex
	seen   map[string]bool // uid.sample.step, whatever the attempt
	steps  int             // T x samples of the prompts accepted so far
	done   int             // groups closed
	again  int             // groups asked for in place of others
	scored int
	cut    bool // the run was cancelled: not all of its steps will come
}

func newProgress(out io.Writer, machine bool, run schemas.Run, prompts []results.Prompt, o *results.Outcomes, m *loading) *progress {
	p := &progress{out: out, model: m, run: run, total: len(prompts), uids: map[schemas.UID]bool{}, seen: map[string]bool{}, ended: make(chan struct{})}
	for _, prompt := range prompts {
		p.uids[prompt.UID] = o.Open(prompt.UID)
	}
	p.changed()
	if boot.IsTerminal(out) && !machine {
		name := string(run) + " "
		if width(out) < 80 {
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
		go p.lines()
	}
	return p
}

// newBar is one bar on a terminal.
func newBar(out io.Writer, total int64, options ...mpb.BarOption) (*mpb.Progress, *mpb.Bar) {
	bars := mpb.New(mpb.WithOutput(out), mpb.WithWidth(32), mpb.WithRefreshRate(120*time.Millisecond))
	return bars, bars.New(total, mpb.BarStyle().Lbound("[").Filler("=").Tip(">").Padding(" ").Rbound("]"), options...)
}

// endBar leaves the bar as it is on the screen, full when the whole is done.
func endBar(bars *mpb.Progress, bar *mpb.Bar, whole bool) {
	if whole {
		bar.SetTotal(-1, true)
	}
	bar.Abort(false) // of a bar that has ended: nothing
	bars.Wait()
}

// watch counts what the streams already hold and what comes, until ctx ends.
func (p *progress) watch(ctx context.Context, b *bus.Bus) {
	follow := func(stream, filter string, see func(subject string)) {
		for m, err := range b.Read(ctx, stream, []string{filter}, bus.ReadOptions{Live: true, HeadersOnly: true}) {
			if err != nil {
				return // the run, which reads as well, says why
			}
			see(m.Subject)
		}
	}
	go follow(schemas.StreamSteps, schemas.Address{Kind: schemas.KindStep, Run: p.run}.Filter(), p.step)
	go follow(schemas.StreamSteps, schemas.Address{Kind: schemas.KindTokens, Run: p.run}.Filter(), p.step)
	go follow(schemas.StreamRewards, schemas.RewardFilter(p.run, "*", "*"), p.reward)
}

// receipts handles intake's answers: how much there is to do, and what prompts wait for,
// once for all of them.
func (p *progress) receipts() nats.MsgHandler {
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
			p.note("warning: " + string(r.UID) + ": " + w)
		}
		if r.Accepted {
			p.expect(int(r.AllSteps()))
		}
	}
}

// expect adds the steps of one accepted prompt to the total.
func (p *progress) expect(steps int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps += steps
	p.changed()
}

func (p *progress) step(subject string) {
	a, _ := schemas.ParseSubject(subject)
	if !p.uids[a.UID] {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[string(a.UID)+"."+a.Sample+"."+a.Step] = true
	p.changed()
}

func (p *progress) reward(subject string) {
	if a, _ := schemas.ParseSubject(subject); !p.uids[a.UID] {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scored++
	p.changed()
}

// note prints a line for good, above the bar.
func (p *progress) note(line string) {
	out := p.out
	if p.bars != nil {
		out = p.bars
	}
	fmt.Fprintln(out, line)
}

// cancelled says that the steps that are lacking will not come.
func (p *progress) cancelled() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	p.changed()
}

func (p *progress) groups(done, refills int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.again = done, refills
	p.changed()
}

// changed shows what has changed. The lock is held, but by newProgress.
func (p *progress) changed() {
	s := strconv.Itoa(p.scored) + " rewards  " + strconv.Itoa(p.done) + "/" + strconv.Itoa(p.total) + " groups"
	if p.cut {
		s += "  cancelled"
	}
	if p.again > 0 {
		s += "  " + strconv.Itoa(p.again) + " refills"
	}
	p.tail.Store(&s)
	if p.bar != nil {
		steps, total := p.counts()
		p.bar.SetTotal(int64(total), false)
		p.bar.SetCurrent(int64(steps))
	}
}

// counts are the steps made and to make. The lock is held. Receipts may be lost, and
// the steps of the last groups are counted after their end is known.
func (p *progress) counts() (steps, total int) {
	steps, total = len(p.seen), max(p.steps, len(p.seen))
	if p.done == p.total && !p.cut {
		steps = total
	}
	return steps, total
}

// lines reports without a terminal: every few seconds, and at the end.
func (p *progress) lines() {
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
