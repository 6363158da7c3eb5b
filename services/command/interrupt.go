package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/term"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

const (
	// choiceTime is how long an interrupted run waits for the user's choice to leave or to
	// cancel, cancelTime how long it waits for a cancellation to be in force. Intake of a busy machine needs seconds;
	// another Ctrl-C ends the command at once.
	choiceTime = 10 * time.Second
	cancelTime = time.Minute
	// signalTime is how long after the end of the context its signal may arrive here.
	signalTime = time.Second
)

// errLeft ends the waiting for a run that is left as it is.
var errLeft = errors.New("left")

// interrupt decides what happens to a run when its command is interrupted. On a terminal Ctrl-C asks: leave or
// cancel; a second Ctrl-C cancels, a third ends the process. Without a terminal, and for SIGTERM and SIGHUP, the run
// is left.
type interrupt struct {
	runs    []interrupted
	conn    *connection
	stdin   io.Reader
	stderr  io.Writer
	leave   context.CancelCauseFunc
	signals chan os.Signal // nil without a terminal
	// printLine prints a line on stderr. Once there is a progress bar, it is replaced by a function that keeps the bar
	// whole.
	printLine atomic.Pointer[func(line string)]
}

// interrupted is a run that may be cancelled; cancelled is closed once it is, by whatever command.
type interrupted struct {
	run       schemas.Run
	cancelled chan struct{}
}

// onInterrupt makes ready for an interruption, which ends ctx: the user is then asked, in a goroutine of its own,
// whether to leave the run running or to cancel it. leave is called with the reason why the command no longer waits
// for the run. done ends all that: a later end of ctx asks nothing, and a signal has its usual effect again.
func (r *runner) onInterrupt(ctx context.Context, conn *connection, stderr io.Writer,
	leave context.CancelCauseFunc,
) (i *interrupt, done func()) {
	i = &interrupt{conn: conn, stdin: r.stdin, stderr: stderr, leave: leave}
	for _, r := range r.all() {
		i.runs = append(i.runs, interrupted{r.id, make(chan struct{})})
	}
	printLine := func(line string) { fmt.Fprintln(stderr, line) }
	i.printLine.Store(&printLine)
	if f, ok := r.stdin.(*os.File); ok && term.IsTerminal(int(f.Fd())) && boot.IsTerminal(stderr) {
		i.signals = make(chan os.Signal, 3)
		signal.Notify(i.signals, boot.EndSignals()...)
	}
	stop := context.AfterFunc(ctx, i.askAndAct)
	return i, func() {
		stop()
		if i.signals != nil {
			signal.Stop(i.signals)
		}
	}
}

// askAndAct asks the user, after an interruption, and leaves the run or publishes its cancellation; the groups of a
// cancelled run then end by themselves. It calls leave if it does not cancel the run, or fails to.
func (i *interrupt) askAndAct() {
	if !i.wantsCancel() {
		i.leave(errLeft)
		return
	}
	for _, r := range i.runs {
		(*i.printLine.Load())(fmt.Sprintf("cancelling run %s", r.run))
		i.cancel(r)
	}
}

// cancel publishes the cancellation of a run. It calls leave if that fails.
func (i *interrupt) cancel(r interrupted) {
	ctx, stop := context.WithTimeout(context.Background(), cancelTime)
	defer stop()
	go func() {
		select {
		case <-r.cancelled: // intake's answer, with what it has removed, may be late
			stop()
		case <-ctx.Done():
		}
	}()
	_, err := client.New(i.conn.Bus).Control(ctx,
		&schemas.Control{Run: r.run, Action: schemas.ControlCancel, By: currentUser(), Reason: "Ctrl-C"})
	select {
	case <-r.cancelled:
		return
	default:
	}
	if _, refused := errors.AsType[*client.RefusedError](err); refused {
		i.leave(fmt.Errorf("run %s: left before it began", r.run))
	} else if err != nil {
		i.leave(fmt.Errorf("cancel run %s: %w; try 'meander cancel %s'", r.run, err, r.run))
	}
}

// wantsCancel asks on the terminal, and reports whether to cancel the run. Without a terminal or an answer the run is
// left.
func (i *interrupt) wantsCancel() bool {
	if i.signals == nil {
		return false
	}
	defer signal.Stop(i.signals) // another Ctrl-C ends the process
	select {
	case s := <-i.signals:
		if s != os.Interrupt {
			return false
		}
	case <-time.After(signalTime): // there was no signal, or it came too early
		return false
	}
	printLine := *i.printLine.Load()
	later := fmt.Sprintf("resume it later with 'meander run --run %s' and the same prompts", i.runs[0].run)
	if !i.conn.serves() {
		later = fmt.Sprintf("it continues at %s; come back with 'meander run --run %s' and the same prompts",
			i.conn.where, i.runs[0].run)
	}
	printLine(fmt.Sprintf("Ctrl-C: leave run %s, or cancel it?", i.runs[0].run))
	printLine("  l, or no answer for " + choiceTime.String() + ": leave; " + later)
	printLine("  c, or Ctrl-C again: cancel; groups without a result are cancelled for ever")
	lines := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(i.stdin).ReadString('\n')
		lines <- strings.ToLower(strings.TrimSpace(line))
	}()
	t := time.NewTimer(choiceTime)
	defer t.Stop()
	select {
	case s := <-i.signals:
		return s == os.Interrupt
	case line := <-lines:
		return line == "c" || line == "cancel"
	case <-t.C:
		return false
	}
}

// watchControl prints beside the progress when the run is paused, resumed or cancelled, until ctx ends. It closes
// cancelled when the run is cancelled, which is final.
func watchControl(ctx context.Context, b *bus.Bus, run schemas.Run, p *progress, cancelled chan<- struct{}) {
	told := uint64(0)
	for m, err := range b.Read(ctx, schemas.StreamControlBucket,
		[]string{schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, ""))},
		bus.ReadOptions{Live: true}) {
		if err != nil {
			return // awaitOutcomes reads too, and reports the error
		}
		c := &schemas.Control{}
		if len(m.Data) == 0 || schemas.DecodeValid(m.Data, c) != nil || c.Seq <= told {
			continue
		}
		told = c.Seq
		line := c.Sentence()
		if c.Action == schemas.ControlPause {
			line += "; continue it with: meander resume " + string(run)
		}
		p.note(line)
		if c.Action == schemas.ControlCancel {
			p.cancelled()
			close(cancelled)
			return
		}
	}
}
