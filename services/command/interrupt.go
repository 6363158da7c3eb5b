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
	// choiceTime is how long a run that was interrupted waits to hear whether to leave or to
	// cancel, cancelTime how long for intake's answer to the latter.
	choiceTime = 10 * time.Second
	cancelTime = 10 * time.Second
	// signalTime is how long after the command was told to end the signal may come that told it.
	signalTime = time.Second
)

// errLeft ends the following of a run that is left as it is.
var errLeft = errors.New("left")

// interrupt decides what becomes of a run when its command is interrupted. On a terminal
// Ctrl-C asks: leave or cancel; a second Ctrl-C cancels, a third ends the process. Anywhere
// else, and for SIGTERM and SIGHUP, the run is left.
type interrupt struct {
	run     schemas.Run
	conn    *connection
	stdin   io.Reader
	stderr  io.Writer
	leave   context.CancelCauseFunc
	signals chan os.Signal // nil where nobody can be asked
	// say prints a line; it changes once there is a bar.
	say atomic.Pointer[func(line string)]
}

// onInterrupt watches for the end of ctx, until done.
func (r *runner) onInterrupt(ctx context.Context, conn *connection, stderr io.Writer, leave context.CancelCauseFunc) (i *interrupt, done func()) {
	i = &interrupt{run: r.id, conn: conn, stdin: r.stdin, stderr: stderr, leave: leave}
	print := func(line string) { fmt.Fprintln(stderr, line) }
	i.say.Store(&print)
	if f, ok := r.stdin.(*os.File); ok && term.IsTerminal(int(f.Fd())) && boot.IsTerminal(stderr) {
		i.signals = make(chan os.Signal, 3)
		signal.Notify(i.signals, boot.EndSignals()...)
	}
	stop := context.AfterFunc(ctx, i.decide)
	return i, func() {
		stop()
		if i.signals != nil {
			signal.Stop(i.signals)
		}
	}
}

// decide ends the following, or cancels the run, whose groups then end by themselves.
func (i *interrupt) decide() {
	if !i.cancels() {
		i.leave(errLeft)
		return
	}
	(*i.say.Load())(fmt.Sprintf("cancelling run %s", i.run))
	ctx, stop := context.WithTimeout(context.Background(), cancelTime)
	defer stop()
	_, err := client.New(i.conn.Bus).Control(ctx, &schemas.Control{Run: i.run, Action: schemas.ControlCancel, By: me(), Reason: "Ctrl-C"})
	if _, refused := errors.AsType[*client.RefusedError](err); refused {
		i.leave(fmt.Errorf("run %s: left before it had begun", i.run))
	} else if err != nil {
		i.leave(fmt.Errorf("cancel run %s: %w; try 'meander cancel %s'", i.run, err, i.run))
	}
}

// cancels says whether the run is to be cancelled.
func (i *interrupt) cancels() bool {
	if i.signals == nil {
		return false
	}
	defer signal.Stop(i.signals) // another Ctrl-C ends the process
	select {
	case s := <-i.signals:
		if s != os.Interrupt {
			return false
		}
	case <-time.After(signalTime): // it was no signal, or came before anybody listened
		return false
	}
	say := *i.say.Load()
	later := fmt.Sprintf("it stays as it is; go on with 'meander run --run %s' and the same prompts", i.run)
	if !i.conn.serves() {
		later = fmt.Sprintf("it goes on at %s; come back with 'meander run --run %s' and the same prompts", i.conn.where, i.run)
	}
	say(fmt.Sprintf("Ctrl-C: leave run %s, or cancel it?", i.run))
	say("  l, or nothing for " + choiceTime.String() + ": leave; " + later)
	say("  c, or Ctrl-C again: cancel; its groups without a result end as cancelled, and stay so")
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

// watchControl says when somebody pauses, resumes or cancels the run, until ctx ends.
func watchControl(ctx context.Context, b *bus.Bus, run schemas.Run, p *progress) {
	told := uint64(0)
	for m, err := range b.Read(ctx, "KV_"+schemas.ControlBucket, []string{schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, ""))}, bus.ReadOptions{Live: true}) {
		if err != nil {
			return // the run, which reads as well, says why
		}
		c := &schemas.Control{}
		if len(m.Data) == 0 || schemas.DecodeValid(m.Data, c) != nil || c.Seq <= told {
			continue
		}
		told = c.Seq
		line := c.Says()
		if c.Action == schemas.ControlPause {
			line += "; it goes on with: meander resume " + string(run)
		}
		if c.Action == schemas.ControlCancel {
			p.cancelled()
		}
		p.note(line)
	}
}
