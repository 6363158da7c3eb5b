package command

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/meander-rl/meander/services/internal/boot"
)

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
