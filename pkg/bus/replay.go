package bus

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// Replay publishes the original of a dead letter again, from the letter or from the object store, and removes the
// letter once the original is stored. seq is the letter's sequence in MDR_DEAD. It returns the original's position
// and subject.
//
// A refused event of a guarded stream is still on its subject, and its consumer has finished it. Replay deletes it
// first, so that the new one is delivered. When the subject holds another event by now, Replay returns an error and
// leaves the event and the letter alone.
func (b *Bus) Replay(ctx context.Context, seq uint64) (Ack, string, error) {
	letter, err := b.Get(ctx, schemas.StreamDead, seq)
	if err != nil {
		return Ack{}, "", fmt.Errorf("replay: %w", err)
	}
	d := &schemas.Dead{}
	if err := schemas.Decode(letter.Data, d); err != nil {
		return Ack{}, "", fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	subject := schemas.PublishedSubject(d.OriginalSubject)
	spec, ok := schemas.StreamOf(subject)
	if !ok || spec.Name == schemas.StreamAdvisories {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: subject: %q; no stream takes events on it", seq, subject)
	}
	data, err := b.DeadData(ctx, d)
	if err != nil {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	ack, err := b.storeOriginal(ctx, spec, subject, d, data, fmt.Sprintf("replay.%d.%d", seq, d.At))
	if err != nil {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	if err := b.Delete(ctx, schemas.StreamDead, seq); err != nil {
		return ack, subject, fmt.Errorf("replay: letter %d is stored again as %s %d, but stays: %w", seq, ack.Stream,
			ack.Seq, err)
	}
	return ack, subject, nil
}

// storeOriginal publishes the original of a dead letter on its subject, for Replay. When the subject keeps one event,
// it deletes the refused one first. It fails when the subject holds another event by now.
func (b *Bus) storeOriginal(
	ctx context.Context, spec schemas.StreamSpec, subject string, d *schemas.Dead, data []byte, id string,
) (Ack, error) {
	unique := spec.Guarded || spec.WorkQueue
	if unique {
		there, err := b.sameOn(ctx, subject, data)
		switch {
		case err != nil:
			return Ack{}, err
		case there == nil:
		case there.Seq != d.StreamSeq: // a replay that was cut off before it removed the letter
			return Ack{Stream: spec.Name, Seq: there.Seq, Duplicate: true}, nil
		default:
			if err := b.Delete(ctx, spec.Name, there.Seq); err != nil {
				return Ack{}, err
			}
		}
	}
	header := nats.Header{}
	for _, h := range d.Headers {
		if !strings.HasPrefix(h.Name, "Nats-") && h.Name != schemas.HeaderReply && h.Name != HeaderRef {
			header.Add(h.Name, h.Value)
		}
	}
	ack, err := b.PublishRaw(ctx, subject, data, header, id)
	if err == nil && ack.Duplicate && unique {
		// It was stored by an earlier replay, or by another client just now.
		there, err := b.sameOn(ctx, subject, data)
		if err != nil {
			return Ack{}, err
		}
		if there == nil {
			return Ack{}, fmt.Errorf("stored and removed again within %v; try later", schemas.DedupWindow)
		}
	}
	return ack, err
}

// sameOn returns the message on a subject that keeps one; nil when there is none, and an error when its bytes are not
// data.
func (b *Bus) sameOn(ctx context.Context, subject string, data []byte) (*Message, error) {
	m, err := b.storedOn(ctx, subject)
	if m != nil && !bytes.Equal(m.Data, data) {
		return nil, fmt.Errorf("%q holds another event by now, sequence %d of %s; only one can be there", subject,
			m.Seq, m.Stream)
	}
	return m, err
}
