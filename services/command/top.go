package command

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

const (
	// topEvery is the least time between two looks at the pipeline, topSize between two looks at the terminal's size.
	topEvery, topSize = time.Second, 250 * time.Millisecond
	// topTimeout bounds one look, topFirst how long a look waits for runs that have not been read yet.
	topTimeout, topFirst = 30 * time.Second, 2 * time.Second
	// leastColumns and mostColumns are the widths that --columns takes.
	leastColumns, mostColumns = 40, 1000
)

// topCommand makes the command 'meander top'.
func topCommand(a *app) *cobra.Command {
	var once bool
	var columns int
	c := &cobra.Command{
		Use:   "top",
		Short: "show runs, what they wait for and what serves them, live in the terminal",
		Long: `top shows in a terminal what the page of 'meander ui' shows in a browser: runs with the progress of each
stage, what waits and what to do about it, lanes, samplers, streams that are nearly full and dead
letters. It follows the pipeline by itself, also after its server was away. It reads, and changes nothing.

Up and down choose a run, enter shows its newest groups, esc goes back, q or Ctrl-C ends it. Through a
pipe, and with --once, --columns or --json, it prints what it would show, once.`,
		Example: `  meander top
  meander top --once
  meander top --columns 200 > now.txt
  meander top --nats tls://nats.example.org:4222 --nats-creds auth/viewer.creds --nats-tls-ca auth/tls/ca.pem`,
		RunE: func(c *cobra.Command, given []string) error {
			if columns != 0 && (columns < leastColumns || columns > mostColumns) {
				return usage(fmt.Errorf("--columns: %d; must be from %d to %d, or 0", columns, leastColumns,
					mostColumns))
			}
			out := c.OutOrStdout()
			if keys, ok := c.InOrStdin().(*os.File); ok && term.IsTerminal(int(keys.Fd())) && boot.IsTerminal(out) &&
				!once && columns == 0 && !a.json {
				log := &heldLog{Writer: a.stderr}
				a.stderr = log
				return a.withView(func(c *cobra.Command, conn *connection, _ []string) error {
					return showLive(c.Context(), conn, keys, asIs(out), log)
				})(c, given)
			}
			return a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
				return a.printTop(c.Context(), conn, out, cmp.Or(columns, present.Width(out)))
			})(c, given)
		},
	}
	c.Flags().BoolVar(&once, "once", false, "print what there is now, and end")
	c.Flags().IntVar(&columns, "columns", 0,
		"print what there is now, that wide, and end; 0: live, or as wide as the terminal")
	return c
}

// newReader returns a reader of the models that commands show, of a command that shows them once or goes on.
func newReader(ctx context.Context, b *bus.Bus, once bool) *view.Reader {
	return view.NewReader(ctx, b, view.Options{Advise: boot.Advise, Scarce: boot.Scarce, Again: again, Once: once})
}

// printTop prints what there is now.
func (a *app) printTop(ctx context.Context, conn *connection, out io.Writer, columns int) error {
	ctx, done := context.WithTimeout(ctx, topTimeout)
	defer done()
	reader := newReader(ctx, conn.Bus, true)
	defer reader.Close()
	reader.Brief = !a.json
	overview, err := reader.Overview(ctx, ctx)
	if err != nil {
		return fmt.Errorf("look at %s: %w", conn.where, err)
	}
	if a.json {
		return encode(out, overview)
	}
	v := topView{where: conn.where, now: time.Now(), overview: overview, chosen: -1}
	var b strings.Builder
	for _, l := range v.layOut(columns, 0) {
		fmt.Fprintln(&b, present.Paint(out, l.colour, l.text))
	}
	_, err = io.WriteString(out, b.String())
	return err
}

// heldLog passes a log on, or holds its newest lines while the screen shows something else.
type heldLog struct {
	io.Writer
	mu    sync.Mutex
	holds bool
	lines [][]byte
}

// Under returns the writer below, which may be a terminal.
func (h *heldLog) Under() io.Writer { return h.Writer }

// Write passes a line on, or keeps it while the log is held: of those only the newest ten. A failure is of the writer
// below.
func (h *heldLog) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.holds {
		return h.Writer.Write(p)
	}
	h.lines = append(h.lines, bytes.Clone(p))
	h.lines = h.lines[max(0, len(h.lines)-10):]
	return len(p), nil
}

// hold holds lines from now on, or writes those that were held.
func (h *heldLog) hold(holds bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holds = holds; holds {
		return
	}
	for _, line := range h.lines {
		_, _ = h.Writer.Write(line) // it is stderr: there is no better place to say that it fails
	}
	h.lines = nil
}

// What is written to a terminal: another screen without cursor and line breaks of its own, and back; the begin of the
// screen, what each line begins with, and what clears the rest.
const (
	screenOpen, screenClose = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
	screenHome, lineBegin   = "\x1b[H", "\x1b[K"
	screenRest              = "\x1b[J"
)

// showLive shows the pipeline on a terminal until a key or ctx ends it. It leaves the terminal as it was.
func showLive(ctx context.Context, conn *connection, keys *os.File, out io.Writer, log *heldLog) (err error) {
	before, err := term.MakeRaw(int(keys.Fd()))
	if err != nil {
		return fmt.Errorf("read the keys of the terminal: %w", err)
	}
	log.hold(true)
	defer func() {
		_, closed := io.WriteString(out, screenClose)
		err = errors.Join(err, closed, term.Restore(int(keys.Fd()), before))
		log.hold(false)
	}()
	if _, err := io.WriteString(out, screenOpen); err != nil {
		return err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	reader := newReader(ctx, conn.Bus, false)
	defer reader.Close()
	s := &liveScreen{conn: conn, reader: reader, out: out, looks: make(chan topLook, 1)}
	s.view.where = conn.where
	return s.show(ctx, readKeys(keys))
}

type liveScreen struct {
	conn   *connection
	reader *view.Reader
	out    io.Writer
	view   topView
	looks  chan topLook
	drawn  string
}

type topLook struct {
	overview *view.Overview
	run      schemas.Run
	groups   *view.Groups
	err      error
}

// show draws the screen whenever something has changed, until a key or ctx ends it. An error is of the terminal, or
// of a connection that does not come back.
func (s *liveScreen) show(ctx context.Context, keys <-chan key) error {
	tick := time.NewTicker(topSize)
	defer tick.Stop()
	var endLook context.CancelFunc // of the look that runs; nil: none runs
	next := time.Now()
	var looks sync.WaitGroup
	defer looks.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	for {
		if now := time.Now(); endLook == nil && !now.Before(next) {
			var look context.Context
			look, endLook = context.WithTimeout(ctx, topTimeout)
			next = now.Add(topEvery)
			run := s.view.opened
			looks.Go(func() { s.looks <- s.look(look, run) })
		}
		if s.view.away = !s.conn.Conn().IsConnected(); s.view.away && endLook != nil {
			endLook() // no answer comes
		}
		if err := s.draw(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case k, ok := <-keys:
			if !ok { // the terminal has gone; a signal says so too
				keys = nil
				continue
			}
			if k == keyQuit {
				return nil
			}
			if s.view.press(k) {
				next = time.Now()
			}
		case l := <-s.looks:
			endLook()
			endLook = nil
			s.view.update(l)
		case <-tick.C:
			if s.conn.Conn().IsClosed() && ctx.Err() == nil {
				return s.conn.lostForGood()
			}
		}
	}
}

// lostForGood is the error for a connection that was closed from elsewhere.
func (c *connection) lostForGood() error {
	if c.member != nil {
		if err := c.member.Err(); err != nil {
			return fmt.Errorf("the store has failed: %w", err)
		}
	}
	if err := c.Conn().LastError(); err != nil {
		return fmt.Errorf("the connection to %s is closed: %w", c.where, err)
	}
	return fmt.Errorf("the connection to %s is closed", c.where)
}

// look reads what the screen shows. While it is away, the server is asked again and again.
func (s *liveScreen) look(ctx context.Context, run schemas.Run) topLook {
	within, soon := context.WithTimeout(ctx, topFirst)
	defer soon()
	l := topLook{run: run}
	if l.overview, l.err = s.reader.Overview(ctx, within); l.err == nil && run != "" {
		l.groups, l.err = s.reader.Groups(ctx, run, view.List{Order: "newest", Limit: topGroups})
	}
	return l
}

// draw draws the screen, if it is not as it was.
func (s *liveScreen) draw() error {
	columns, rows := present.Width(s.out), 24
	if f, ok := boot.File(s.out); ok {
		if _, h, err := term.GetSize(int(f.Fd())); err == nil && h > 0 {
			rows = h
		}
	}
	s.view.now = time.Now()
	lines := s.view.layOut(columns, rows)
	var b strings.Builder
	b.WriteString(screenHome)
	for i, l := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(lineBegin + present.Paint(s.out, l.colour, l.text))
	}
	if len(lines) < rows {
		b.WriteString("\r\n" + screenRest)
	}
	drawn := fmt.Sprintf("%dx%d %s", columns, rows, b.String())
	if drawn == s.drawn {
		return nil
	}
	s.drawn = drawn
	_, err := io.WriteString(s.out, b.String())
	return err
}

type key int

const (
	keyQuit key = iota
	keyUp
	keyDown
	keyEnter
	keyBack
)

// readKeys reads keys until the terminal has gone. It is never stopped: nothing ends a read of a terminal.
func readKeys(terminal io.Reader) <-chan key {
	keys := make(chan key)
	go func() {
		defer close(keys)
		buffer := make([]byte, 256)
		for {
			n, err := terminal.Read(buffer)
			for _, k := range keysOf(buffer[:n]) {
				keys <- k
			}
			if err != nil {
				return
			}
		}
	}()
	return keys
}

// keysOf returns the keys of what a terminal has sent. Others have no meaning.
func keysOf(sent []byte) (keys []key) {
	for len(sent) > 0 {
		c := sent[0]
		sent = sent[1:]
		switch c {
		case 'q', 'Q', '\x03':
			keys = append(keys, keyQuit)
		case 'k':
			keys = append(keys, keyUp)
		case 'j':
			keys = append(keys, keyDown)
		case '\r', '\n':
			keys = append(keys, keyEnter)
		case '\x1b':
			if len(sent) == 0 || sent[0] != '[' && sent[0] != 'O' {
				keys = append(keys, keyBack)
				continue
			}
			end := 1 // of the sequence: parameters are below '@'
			for end < len(sent) && sent[end] < '@' {
				end++
			}
			if end < len(sent) && sent[end] == 'A' {
				keys = append(keys, keyUp)
			} else if end < len(sent) && sent[end] == 'B' {
				keys = append(keys, keyDown)
			}
			sent = sent[min(end+1, len(sent)):]
		}
	}
	return keys
}
