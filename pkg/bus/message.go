package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Message is one stored message. Acknowledge messages of Consume and Subscription once, by Ack, AckAsync,
// NakWithDelay or Term; those of Get, Last, LastMany and Read cannot be acknowledged.
type Message struct {
	// Subject as stored (for rewards: with the partition).
	Subject string
	Data    []byte
	Header  nats.Header
	// Stream and Seq say where it is stored, Time says when that happened.
	Stream string
	Seq    uint64
	Time   time.Time
	// Delivered counts the deliveries by this consumer, this one included; 0 when it was read.
	Delivered uint64

	nc           *nats.Conn
	reply        string
	pending      uint64 // messages behind this one for its consumer
	made         int64  // when the stream was created, Unix nanoseconds; 0 if the message did not come from Read
	acknowledged atomic.Bool
	heartbeats   *heartbeats
}

// Pending is how many messages were behind this one for its reader when the server sent it.
func (m *Message) Pending() uint64 { return m.pending }

// Acknowledgements, as the server reads them.
const (
	ackAck      = "+ACK"
	ackNak      = "-NAK"
	ackProgress = "+WPI"
	ackTerm     = "+TERM"
)

// Ack acknowledges the message as done and waits until the server has confirmed that. After an error the message may
// come again.
func (m *Message) Ack(ctx context.Context) error {
	if err := m.markAcknowledged(); err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, apiTimeout)
	defer stop()
	if _, err := m.nc.RequestWithContext(ctx, m.reply, []byte(ackAck)); err != nil {
		m.acknowledged.Store(false)
		return fmt.Errorf("ack %s %d: %w", m.Stream, m.Seq, err)
	}
	return nil
}

// AckAsync acknowledges the message as done without waiting. When the ack is lost, the
// message comes again.
func (m *Message) AckAsync() error { return m.sendAck("ack", ackAck) }

// NakWithDelay returns the message; the server delivers it again after d, to the client that asks first. d should not
// be 0: a failing message would spin.
func (m *Message) NakWithDelay(d time.Duration) error {
	return m.sendAck("nak", ackNak+` {"delay":`+strconv.FormatInt(max(0, d).Nanoseconds(), 10)+"}")
}

// Withdrawal returns a function that takes a message back from the server after NakWithDelay: the message counts as
// done and does not come again. The function keeps none of the message's data in memory.
func (m *Message) Withdrawal() (withdraw func() error) {
	nc, reply := m.nc, m.reply
	return func() error { return nc.Publish(reply, []byte(ackAck)) }
}

// Recall returns a function that has the server deliver a message at once that was put back by NakWithDelay. The
// function keeps none of the message's data in memory.
func (m *Message) Recall() (recall func() error) {
	nc, reply := m.nc, m.reply
	return func() error { return nc.Publish(reply, []byte(ackNak)) }
}

// Term acknowledges the message as never to be delivered again. Write the dead letter before (Bus.Dead). The reason
// goes into the server's advisory.
func (m *Message) Term(reason string) error {
	reason = strings.Map(func(r rune) rune {
		if r == '\r' || r == '\n' {
			return ' '
		}
		return r
	}, reason)
	return m.sendAck("terminate", ackTerm+" "+reason[:min(len(reason), 512)])
}

// InProgress tells the server that a handler still works on the message: AckWait starts again. Consume and
// Subscription call it themselves.
func (m *Message) InProgress() error {
	if m.reply == "" {
		return errors.New("message was read, not consumed; it cannot be acknowledged")
	}
	return m.nc.Publish(m.reply, []byte(ackProgress))
}

// Acknowledged reports whether this process has acked, nakked or terminated the message.
func (m *Message) Acknowledged() bool { return m.acknowledged.Load() }

// sendAck publishes an acknowledgement of a consumed message without waiting; verb names it in errors. It fails with
// ErrAcknowledged when there was one before.
func (m *Message) sendAck(verb, payload string) error {
	if err := m.markAcknowledged(); err != nil {
		return err
	}
	if err := m.nc.Publish(m.reply, []byte(payload)); err != nil {
		return fmt.Errorf("%s %s %d: %w", verb, m.Stream, m.Seq, err)
	}
	return nil
}

// markAcknowledged notes that the message is acknowledged, and ends its heartbeats. It returns ErrAcknowledged when
// it was acknowledged before, and another error for a message that was read, not consumed.
func (m *Message) markAcknowledged() error {
	if m.reply == "" {
		return errors.New("message was read, not consumed; it cannot be acknowledged")
	}
	if !m.acknowledged.CompareAndSwap(false, true) {
		return ErrAcknowledged
	}
	if m.heartbeats != nil {
		m.heartbeats.release(m)
	}
	return nil
}

// parseDelivery makes a Message of one that a consumer delivered. Its reply subject has 9 tokens,
//
//	$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
//
// or, from servers that tell domains apart, 11 or more, with the domain and the
// account in front of the stream.
func parseDelivery(nc *nats.Conn, m *nats.Msg) (*Message, error) {
	var tokens [12]string
	n := 0
	for rest := m.Reply; n < len(tokens); n++ {
		token, after, more := strings.Cut(rest, ".")
		tokens[n] = token
		if !more {
			n++
			break
		}
		rest = after
	}
	at := 2
	if n > 9 {
		at = 4
	}
	if n < 9 || n == 10 || tokens[0] != "$JS" || tokens[1] != "ACK" {
		return nil, fmt.Errorf("reply subject %q is not one of a consumer", m.Reply)
	}
	count, err1 := strconv.ParseUint(tokens[at+2], 10, 64)
	seq, err2 := strconv.ParseUint(tokens[at+3], 10, 64)
	ns, err3 := strconv.ParseInt(tokens[at+5], 10, 64)
	pending, err4 := strconv.ParseUint(tokens[at+6], 10, 64)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, fmt.Errorf("reply subject %q: %w", m.Reply, err)
	}
	return &Message{
		Subject: m.Subject, Data: m.Data, Header: m.Header, Stream: tokens[at], Seq: seq,
		Time: time.Unix(0, ns), Delivered: count, nc: nc, reply: m.Reply, pending: pending,
	}, nil
}

// parseDirectGet makes a Message of the server's answer to a direct get. It fails when the answer lacks a header.
func parseDirectGet(m *nats.Msg) (*Message, error) {
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("direct get: header %s: %w", jetstream.SequenceHeader, err)
	}
	at, err := time.Parse(time.RFC3339Nano, m.Header.Get(jetstream.TimeStampHeaer))
	if err != nil {
		return nil, fmt.Errorf("direct get: header %s: %w", jetstream.TimeStampHeaer, err)
	}
	out := &Message{
		Subject: m.Header.Get(jetstream.SubjectHeader), Data: m.Data, Header: nats.Header{},
		Stream: m.Header.Get(jetstream.StreamHeader), Seq: seq, Time: at,
	}
	if out.Subject == "" || out.Stream == "" {
		return nil, errors.New("direct get: the answer does not say what it is")
	}
	for name, v := range m.Header {
		switch name {
		case jetstream.SubjectHeader, jetstream.StreamHeader, jetstream.SequenceHeader, jetstream.TimeStampHeaer,
			headerNumPending, headerLastSequence:
		default:
			out.Header[name] = v
		}
	}
	return out, nil
}

// cloudEventType begins the types of our events as CloudEvents have them, which are to name who defines them.
const cloudEventType = "io.github.meander-rl."

// addCloudEvent gives the message of an event the attributes of CloudEvents 1.0 in binary mode, if the connection is to
// (Config.CloudEvents): the payload stays as it is. A message that is sent again keeps those that it has.
func (b *Bus) addCloudEvent(m *nats.Msg) {
	kind, version, event := strings.Cut(m.Header.Get(schemas.HeaderType), "/")
	if !b.cloudEvents || !event || m.Header["ce-id"] != nil {
		return
	}
	for name, value := range map[string]string{
		"ce-specversion": "1.0", "ce-type": cloudEventType + kind + ".v" + version, "ce-source": b.source(),
		"ce-id": m.Header.Get(jetstream.MsgIDHeader), "ce-subject": schemas.MessageID(m.Subject),
		"ce-time":            time.Now().UTC().Format(time.RFC3339Nano),
		"ce-datacontenttype": m.Header.Get(schemas.HeaderContentType),
	} {
		m.Header[name] = []string{value}
	}
}

// source returns who publishes, as the programs name their connections, without the instance.
func (b *Bus) source() string {
	program, _, _ := strings.Cut(cmp.Or(b.nc.Opts.Name, "meander-client"), " ")
	return "/" + url.PathEscape(program)
}

// Outcome returns the outcome of a trajectory, reward or result of a group, as its event says it, for those who only
// look. A message that was read without its payload is read again where no header says it; its headers then do. "": it
// is no such event.
func (b *Bus) Outcome(ctx context.Context, m *Message) (string, error) {
	a, _ := schemas.ParseSubject(m.Subject)
	_, unsaid := strconv.ParseUint(m.Header.Get(schemas.HeaderSamples), 10, 32)
	if said := m.Header.Get(schemas.HeaderOutcome); outcomes.IsOutcome(said) &&
		(a.Kind != schemas.KindTrajectory || a.Stage == schemas.StageMain || unsaid == nil) {
		return said, nil
	}
	var e schemas.Keyed
	switch a.Kind {
	case schemas.KindTrajectory:
		e = &schemas.Trajectory{}
	case schemas.KindReward:
		e = &schemas.Reward{}
	case schemas.KindAdvantage:
		e = &schemas.Advantage{}
	default:
		return "", nil
	}
	if len(m.Data) == 0 {
		whole, err := b.Get(ctx, m.Stream, m.Seq)
		if errors.Is(err, ErrNotFound) {
			return "", nil // it was removed meanwhile
		}
		if err != nil {
			return "", err
		}
		m.Data = whole.Data
	}
	if Fits(m, e) != nil {
		return "", nil // the true one will replace it
	}
	outcomes.Said(e, func(name, value string) {
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header.Set(name, value)
	})
	return outcomes.Of(e), nil
}

// Ends returns how many samples end with a trajectory whose Outcome is known.
func (m *Message) Ends() int64 {
	if n, err := strconv.ParseUint(m.Header.Get(schemas.HeaderSamples), 10, 32); err == nil {
		return int64(n)
	}
	return 1
}
