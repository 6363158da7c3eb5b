package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

type replayer struct {
	*app
	Speed    string        `key:"speed" help:"how many times as fast as in the run: 1, 10, 0.5, or max: without pauses"`
	MaxPause time.Duration `key:"max_pause" range:"0s.." help:"wait at most this long between two events; 0: as long as it was, by --speed"`
	Subject  string        `key:"subject" help:"publish on subjects with this prefix, replay or replay.NAME; empty: print"`
	To       string        `key:"to" help:"URL of the NATS server to publish on; default the one that stores the run"`
	Bytes    bool          `key:"bytes" help:"with --json: add the bytes of each event, and the parts of large steps"`
	kinds    []string

	pace export.Pace
}

// runsReplayCommand makes the command 'meander runs replay'.
func runsReplayCommand(a *app) *cobra.Command {
	r := &replayer{app: a, Speed: "1"}
	c := &cobra.Command{
		Use: "replay RUN|FILE", Short: "play the events of a run again, to test what reads them",
		Long: `replay gives the events of a stored run, or of the file of an archive ('meander runs export'), to a
consumer once more: in their order, with the pauses that were between them, at any speed. It changes
nothing that is stored, and no service takes what it plays for work.

Without --subject it prints the events: a line each, with --json as JSON, with --bytes also the msgpack
bytes (base64, field data). With --subject replay it publishes them, byte for byte, on core NATS:
mdr.v1.advantage.night.p becomes replay.advantage.night.p; the headers Nats-Stream, Nats-Sequence,
Nats-Subject and Nats-Time-Stamp say where and when it was stored. An empty message on replay.end
is the last; if not all was played it has the header Mdr-Error, which says why. Nothing keeps these
messages: start the consumer first.

On a server with roles only the admin may publish there. As a viewer print the events, or publish them
on a server of your own with --to.`,
		Example: `  meander runs replay night --speed 10
  meander runs replay night --speed max --json --kinds trajectory,reward,advantage | ./consumer
  meander runs replay night.tar --speed max --json       # needs no server
  meander runs replay night --subject replay --max-pause 2s
  meander runs replay night --subject replay.test --to nats://127.0.0.1:4333`,
		PreRunE: func(*cobra.Command, []string) error { return r.check() },
		RunE: func(c *cobra.Command, given []string) error {
			play := func(c *cobra.Command, conn *connection, given []string) error {
				return r.replay(c, conn, given[0])
			}
			if strings.ContainsAny(given[0], "./") && (r.Subject == "" || r.To != "") {
				return play(c, nil, given)
			}
			return a.withBus(play)(c, given)
		},
	}
	c.Flags().StringSliceVar(&r.kinds, "kinds", export.Kinds(), "kinds of events to play")
	flagsOf(c, r)
	return c
}

// check checks the flags.
func (r *replayer) check() error {
	r.pace.MaxPause = r.MaxPause
	speed, err := strconv.ParseFloat(r.Speed, 64)
	switch {
	case r.Speed == "max":
	case err != nil || !(speed > 0) || math.IsInf(speed, 0):
		return usage(fmt.Errorf("--speed: %q; must be max or a number above 0", r.Speed))
	default:
		r.pace.Speed = speed
	}
	for _, k := range r.kinds {
		if all := export.Kinds(); !slices.Contains(all, k) {
			return usage(oneOf("kinds", k, all))
		}
	}
	switch {
	case r.Subject == "" && r.To != "":
		return usage(errors.New("--to: is for --subject; give both"))
	case r.Subject != "" && (r.json || r.Bytes):
		return usage(errors.New("--json, --bytes: are for events that are printed; leave out --subject or these"))
	case r.Bytes && !r.json:
		return usage(errors.New("--bytes: is for --json; give both"))
	}
	if r.Subject != "" {
		if err := export.CheckPrefix(r.Subject); err != nil {
			return usage(fmt.Errorf("--subject: %w", err))
		}
	}
	return nil
}

// replay plays the events of a run, or of an archive, which its name tells apart: no run has a dot or a slash in it.
// conn is nil where no server is needed.
func (r *replayer) replay(c *cobra.Command, conn *connection, of string) (err error) {
	ctx, stderr := c.Context(), c.ErrOrStderr()
	var b *bus.Bus
	if conn != nil {
		b = conn.Bus
	}
	run, sources := schemas.Run(of), []*export.Source(nil)
	if strings.ContainsAny(of, "./") {
		file, err := os.Open(of)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // read-only
		if sources, run, err = export.ArchiveSources(file, r.kinds); err != nil {
			return err
		}
	} else {
		if _, err := storedRun(ctx, b, of); err != nil {
			return err
		}
		sources = export.Sources(run, r.kinds)
	}
	sources, total, err := r.count(ctx, b, run, sources, stderr)
	if err != nil {
		return err
	}
	play, end := r.print(c.OutOrStdout()), func() error { return nil }
	where := "stdout"
	if r.Subject != "" {
		p, connectErr := r.connect(conn, stderr)
		if connectErr != nil {
			return connectErr
		}
		defer p.close()
		defer func() { p.endWith(err) }()
		play, end, where = p.publish, p.end, r.Subject+".> of "+p.where
	}
	pace := r.Speed + "x"
	if r.pace.Speed == 0 {
		pace = "as fast as they are taken"
		if r.Subject != "" {
			pace = "without pauses"
		}
	}
	fmt.Fprintf(stderr, "replaying %s of run %s to %s, %s; Ctrl-C ends\n", present.Count(total, "event"), run, where,
		pace)
	shown := newCounted(stderr, r.Subject == "" && boot.IsTerminal(c.OutOrStdout()), "", "events", int(total))
	begin, played := time.Now(), 0
	var freed freedSteps
	for m, err := range export.Play(ctx, b, sources, r.pace) {
		if err == nil {
			freed.note(m)
			err = play(m)
		}
		if err != nil {
			shown.end()
			return fmt.Errorf("replay of run %s, after %d of %s: %w", run, played, present.Count(total, "event"), err)
		}
		played++
		shown.count()
	}
	shown.end()
	if uint64(played) < total {
		return fmt.Errorf("replay of run %s: %d of %s were played: the others were removed meanwhile", run, played,
			present.Count(total, "event"))
	}
	if err := end(); err != nil {
		return err
	}
	fmt.Fprintf(stderr, "%s in %v\n", present.Count(played, "event"), time.Since(begin).Round(time.Millisecond))
	if n := len(freed.without); n > 0 && slices.Contains(r.kinds, schemas.KindStep) {
		fmt.Fprintf(stderr, "without the steps of %s: %s\n", present.Count(n, "sample"),
			(&schemas.Group{FreeReadSteps: true}).WhyStepsGone())
	}
	return nil
}

// freedSteps counts the samples whose steps were freed because all had read them.
type freedSteps struct {
	with, without map[schemas.Address]bool
}

// note takes the next event of a run; steps come before their trajectory.
func (f *freedSteps) note(m *bus.Message) {
	a, _ := schemas.ParseSubject(m.Subject)
	of := schemas.Address{UID: a.UID, Sample: a.Sample, Stage: a.Stage}
	if f.with == nil {
		f.with, f.without = map[schemas.Address]bool{}, map[schemas.Address]bool{}
	}
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens:
		f.with[of] = true
	case schemas.KindTrajectory:
		var t schemas.Trajectory
		if bus.Fits(m, &t) == nil && t.Group.FreeReadSteps && len(t.Steps) > 0 && !f.with[of] {
			f.without[schemas.Address{UID: a.UID, Sample: a.Sample}] = true
		}
		delete(f.with, of)
	}
}

// count returns the sources that have events, and how many events that are. It says which kinds the user's role may
// not read.
func (r *replayer) count(
	ctx context.Context, b *bus.Bus, run schemas.Run, all []*export.Source, stderr io.Writer,
) (sources []*export.Source, total uint64, err error) {
	for _, s := range all {
		if r.Subject == "" && !r.Bytes { // parts are not printed
			s.Filters = slices.DeleteFunc(s.Filters, schemas.IsPart)
		}
		n, err := s.Count(ctx, b)
		if errors.Is(err, bus.ErrPermission) {
			hidden := uint64(0)
			for _, filter := range s.Filters {
				subjects, err := b.Subjects(ctx, s.Stream, filter)
				if err != nil {
					return nil, 0, err
				}
				for _, k := range subjects {
					hidden += k
				}
			}
			if hidden > 0 {
				fmt.Fprintf(stderr, "left out: %s of %s, which your role may not read\n",
					present.Count(hidden, "event"), s.Stream)
			}
		} else if err != nil {
			return nil, 0, err
		}
		if n > 0 {
			sources, total = append(sources, s), total+n
		}
	}
	if total == 0 {
		return nil, 0, fmt.Errorf("run %s: no events of the kinds %s are stored", run, strings.Join(r.kinds, ", "))
	}
	return sources, total, nil
}

// print returns the function that prints an event.
func (r *replayer) print(out io.Writer) func(m *bus.Message) error {
	return func(m *bus.Message) error {
		a, _ := schemas.ParseSubject(m.Subject)
		if r.Bytes {
			var event any
			if !schemas.IsPart(m.Subject) {
				event = schemas.JSONOfBytes(m.Data)
			}
			return encode(out, map[string]any{
				"kind": a.Kind, "subject": m.Subject, "seq": m.Seq, "time": m.Time.UnixNano(), "event": event,
				"data": m.Data,
			})
		}
		line, _, err := eventLine(a.Kind, m)
		if err != nil {
			line = "unreadable: " + err.Error()
		}
		return r.printEvent(out, a.Kind, m, line)
	}
}

// headerReplayError of the last message says why a replay is not whole.
const headerReplayError = "Mdr-Error"

// publisher publishes events on subjects of their own.
type publisher struct {
	prefix, where string
	nc            *nats.Conn
	replies       *nats.Subscription // what the server answers where nobody listens
	close         func()
	sent, unheard int
	stderr        io.Writer
	reconnects    uint64 // of the connection, at the beginning
}

// connect returns a publisher on the server of --to, or on that of the run.
func (r *replayer) connect(conn *connection, stderr io.Writer) (*publisher, error) {
	p := &publisher{prefix: r.Subject, where: bus.RedactURL(r.To), close: func() {}, stderr: stderr}
	if r.To == "" {
		p.nc, p.where = conn.Conn(), conn.where
	} else {
		nc, err := nats.Connect(r.To, nats.Name("meander runs replay"), nats.NoReconnect())
		if err != nil {
			return nil, fmt.Errorf("--to: %s: %w", p.where, err)
		}
		p.nc, p.close = nc, nc.Close
	}
	p.reconnects = p.nc.Stats().Reconnects
	replies, err := p.nc.SubscribeSync(p.nc.NewInbox())
	if err == nil {
		err = replies.SetPendingLimits(-1, -1)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	p.replies = replies
	return p, nil
}

// publish publishes an event. The first one also tells whether the server lets the user publish.
func (p *publisher) publish(m *bus.Message) error {
	subject, header, err := export.PlayMessage(p.prefix, m)
	if err == nil { // with a reply subject the server says when nobody listens
		err = p.nc.PublishMsg(&nats.Msg{Subject: subject, Header: header, Data: m.Data, Reply: p.replies.Subject})
	}
	if err != nil {
		return err
	}
	if p.sent++; p.sent == 1 {
		if err := p.flush(); err != nil {
			return err
		}
	}
	return p.countUnheard()
}

// flush waits until the server has everything. It fails if the server has refused a message.
func (p *publisher) flush() error {
	if err := p.nc.Flush(); err != nil {
		return err
	}
	if err := p.nc.LastError(); err != nil && strings.Contains(err.Error(), `"`+p.prefix+".") {
		return fmt.Errorf("%w; print the events, publish as admin, or on a server of your own with --to", err)
	}
	return nil
}

// countUnheard counts the messages which the server says that nobody has heard.
func (p *publisher) countUnheard() error {
	for {
		n, _, err := p.replies.Pending()
		if n > 0 && err == nil {
			_, err = p.replies.NextMsg(time.Second)
		}
		switch {
		case errors.Is(err, nats.ErrNoResponders):
			p.unheard++
		case err != nil || n == 0:
			return err
		}
	}
}

// end publishes the last message, and fails if nobody has heard any other.
func (p *publisher) end() error {
	if err := errors.Join(p.flush(), p.countUnheard()); err != nil {
		return err
	}
	if p.unheard == p.sent {
		return fmt.Errorf("nobody listened on %s.> of %s: start the consumer first, on a server that both reach "+
			"('meander up', --nats or --to)", p.prefix, p.where)
	}
	if p.nc.Stats().Reconnects != p.reconnects {
		return fmt.Errorf("the connection to %s was lost meanwhile, and messages with it: play the run again", p.where)
	}
	if p.unheard > 0 {
		fmt.Fprintf(p.stderr, "%d of %s were heard by nobody\n", p.unheard, present.Count(p.sent, "event"))
	}
	return errors.Join(p.nc.Publish(p.prefix+".end", nil), p.nc.Flush())
}

// endWith publishes the last message of a replay that has failed; the consumer must not take it for whole.
func (p *publisher) endWith(failed error) {
	if failed == nil {
		return
	}
	m := nats.NewMsg(p.prefix + ".end")
	m.Header.Set(headerReplayError, strings.ReplaceAll(failed.Error(), "\n", "; "))
	if err := errors.Join(p.nc.PublishMsg(m), p.nc.Flush()); err != nil {
		fmt.Fprintf(p.stderr, "the consumer does not know that this failed: %v\n", err)
	}
}
