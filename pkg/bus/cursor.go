package bus

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Cursor is a place in a stream: of a message that was read, or, empty, before them all.
// It is text to be stored and given back, the sequence and the time at which the stream
// was made: one that was made anew counts from 1 again.
type Cursor string

// Cursor is the place of a message of Read; empty for any other. A read that starts after
// it begins with the next one.
func (m *Message) Cursor() Cursor {
	if m.made == 0 {
		return ""
	}
	return Cursor(strconv.FormatUint(m.Seq, 10) + "@" + strconv.FormatInt(m.made, 10))
}

// next is the sequence behind a cursor, in the stream that it must be of; 1 for an empty one.
func (c Cursor) next(s *jetstream.StreamInfo) (uint64, error) {
	if c == "" {
		return 1, nil
	}
	at, made, _ := strings.Cut(string(c), "@")
	seq, errSeq := strconv.ParseUint(at, 10, 64)
	created, errMade := strconv.ParseInt(made, 10, 64)
	switch {
	case errSeq != nil || errMade != nil || seq == 0:
		return 0, fmt.Errorf("%w: %.64q; must be the Cursor of a message that was read", ErrCursor, string(c))
	case created != s.Created.UnixNano() || seq > s.State.LastSeq:
		return 0, fmt.Errorf("%w: %q is of another stream than this one, which was made at %v; start with an empty cursor", ErrCursor, string(c), s.Created.UTC())
	case seq+1 < s.State.FirstSeq:
		return 0, fmt.Errorf("%w: %d to %d are gone; what is left begins with an empty cursor", ErrEvicted, seq+1, s.State.FirstSeq-1)
	}
	return seq + 1, nil
}
