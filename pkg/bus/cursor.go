package bus

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Cursor is a position in a stream: behind a message that was read, or, empty, before all messages. A client stores
// it as text and gives it back later. It has the sequence, and the time at which the stream was created, because a
// stream that is created again counts from 1.
type Cursor string

// Cursor returns the position of a message that Read yielded; a read with it in ReadOptions.After begins with the
// next message. It returns "" for any other message.
func (m *Message) Cursor() Cursor {
	if m.made == 0 {
		return ""
	}
	return Cursor(strconv.FormatUint(m.Seq, 10) + "@" + strconv.FormatInt(m.made, 10))
}

// nextSequence returns the first sequence after a cursor in its stream, where a reader goes on; 1 for an empty
// cursor. It returns ErrCursor when the cursor is not valid or belongs to another stream, and ErrEvicted when
// messages behind it are gone.
func (c Cursor) nextSequence(s *jetstream.StreamInfo) (uint64, error) {
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
		return 0, fmt.Errorf("%w: %q is of another stream than this one, which was made at %v; start with an empty "+
			"cursor", ErrCursor, string(c), s.Created.UTC())
	case seq+1 < s.State.FirstSeq:
		return 0, fmt.Errorf("%w: %d to %d are gone; what is left begins with an empty cursor", ErrEvicted, seq+1,
			s.State.FirstSeq-1)
	}
	return seq + 1, nil
}
