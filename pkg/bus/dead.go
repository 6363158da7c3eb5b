package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// HeaderRef is a header in a dead letter whose original was too large to be inside:
// "<bucket>/<digest>/<size>" of the bytes in the object store (DeadData reads it).
const HeaderRef = "Mdr-Ref"

// Dead writes a dead letter: why the message could not be used, with its original
// bytes and headers. It returns when the letter is stored; the message is the
// caller's to terminate, afterwards. Writing the same letter again within
// schemas.DedupWindow stores one.
//
// Run and uid are read from the subject, and the uid of a prompt is that of its group.
// An original too large to be inside goes to the object store (HeaderRef).
func (b *Bus) Dead(ctx context.Context, service, code, reason string, m *Message) error {
	run, uid := runAndUID(m)
	d := &schemas.Dead{
		Service: service, Code: code, Reason: reason, Run: run, UID: uid,
		OriginalSubject: m.Subject, Stream: m.Stream, StreamSeq: m.Seq, Deliveries: m.Delivered,
		Headers: headersOf(m), Data: m.Data, At: time.Now().UnixNano(),
	}
	if d.Data == nil {
		d.Data = []byte{}
	}
	if limit := b.MaxInline(); len(m.Data) > limit-stepOverhead-headerSize(d.Headers) {
		ref, err := b.PutBlob(ctx, m.Data)
		if err != nil {
			return fmt.Errorf("dead letter of %s %d: %w", m.Stream, m.Seq, err)
		}
		d.Data = []byte{}
		d.Headers = append([]schemas.Header{{
			Name:  HeaderRef,
			Value: ref.Bucket + "/" + ref.Digest + "/" + strconv.FormatInt(ref.Size, 10),
		}}, d.Headers...)
	}
	msg, err := encode(ctx, d)
	if err != nil {
		return fmt.Errorf("dead letter of %s %d: %w", m.Stream, m.Seq, err)
	}
	msg.Header[jetstream.MsgIDHeader] = []string{fmt.Sprintf("dead.%s.%s.%d", d.Service, m.Stream, m.Seq)}
	if _, err := b.publish(ctx, msg, publishOptions{}); err != nil {
		return fmt.Errorf("dead letter of %s %d: %w", m.Stream, m.Seq, err)
	}
	return nil
}

// DeadData returns the original bytes of a dead letter, inside it or in the object store. It fails when the reference
// is not valid or the bytes are gone.
func (b *Bus) DeadData(ctx context.Context, d *schemas.Dead) ([]byte, error) {
	if len(d.Headers) == 0 || d.Headers[0].Name != HeaderRef || len(d.Data) > 0 {
		return d.Data, nil
	}
	value := d.Headers[0].Value
	parts := strings.Split(value, "/")
	if len(parts) != 3 {
		return nil, fmt.Errorf("dead letter: header %s: %q is no reference", HeaderRef, value)
	}
	size, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil {
		return nil, fmt.Errorf("dead letter: header %s: %w", HeaderRef, err)
	}
	return b.GetBlob(ctx, schemas.Ref{Bucket: parts[0], Digest: parts[1], Size: size})
}

// headersOf returns the headers of a message sorted by name, so that equal dead letters have equal bytes.
func headersOf(m *Message) []schemas.Header {
	out := []schemas.Header{}
	for _, name := range slices.Sorted(maps.Keys(m.Header)) {
		for _, v := range m.Header[name] {
			out = append(out, schemas.Header{Name: name, Value: v})
		}
	}
	return out
}

func headerSize(headers []schemas.Header) int {
	n := 0
	for _, h := range headers {
		n += len(h.Name) + len(h.Value) + 32
	}
	return n
}

// runAndUID returns the run and the uid of an event for its dead letter, each "" when it cannot be read.
func runAndUID(m *Message) (run schemas.Run, uid schemas.UID) {
	a, _ := schemas.ParseSubject(m.Subject)
	run, uid = a.Run, a.UID
	if a.Kind == schemas.KindPrompt {
		var p schemas.Prompt
		if schemas.Decode(m.Data, &p) == nil {
			uid = p.GroupUID(m.Seq)
		}
	}
	return run, uid
}

type advisory struct {
	Stream     string `json:"stream"`
	Consumer   string `json:"consumer"`
	StreamSeq  uint64 `json:"stream_seq"`
	Deliveries uint64 `json:"deliveries"`
}

// WatchAdvisories turns the server's own max-deliveries advisories into dead letters, until ctx ends. It is the
// safety net for consumers that died before they could write one. It also deletes the message from a work queue,
// where it would stay. Replicas share the work.
func (b *Bus) WatchAdvisories(ctx context.Context) error {
	return b.Consume(ctx, ConsumerConfig{
		Durable: schemas.AdvisoriesDurable(), MaxDeliver: -1,
	}, b.deadLetterAdvisory)
}

// deadLetterAdvisory handles one advisory of the server, that it gave a message up after too many deliveries: it
// writes the message's dead letter. After an error the advisory is delivered again.
func (b *Bus) deadLetterAdvisory(ctx context.Context, m *Message) error {
	var a advisory
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return Terminal(schemas.CodeDecode, fmt.Errorf("read advisory: %w", err))
	}
	spec, ours := schemas.StreamNamed(a.Stream)
	if !ours || a.Stream == schemas.StreamAdvisories {
		return nil // a stream of other users in the same account
	}
	original, err := b.Get(ctx, a.Stream, a.StreamSeq)
	if errors.Is(err, ErrNotFound) {
		return nil // acknowledged, purged or expired meanwhile
	}
	if err != nil {
		return err
	}
	original.Delivered = a.Deliveries
	reason := fmt.Sprintf("consumer %s got it %d times and never acknowledged it", a.Consumer, a.Deliveries)
	if err := b.Dead(ctx, serviceOf(a.Consumer), schemas.CodeExhausted, reason, original); err != nil {
		return err
	}
	if spec.WorkQueue {
		return b.Delete(ctx, a.Stream, a.StreamSeq)
	}
	return nil
}
