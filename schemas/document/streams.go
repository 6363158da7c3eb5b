package document

import (
	"fmt"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/schemas"
)

// setup returns the configuration of a stream as the document has it.
func setup(s schemas.StreamSpec) streamSetup {
	out := streamSetup{
		Purpose: s.Purpose, Subjects: s.Subjects, Retention: "limits", Discard: "old", MaxMsgs: s.MaxMsgs,
		MaxBytes:        s.MaxBytes,
		DuplicateWindow: fmt.Sprintf("%dm", schemas.DedupWindow/time.Minute), AllowDirect: true,
	}
	if s.WorkQueue {
		out.Retention = "workqueue"
	}
	if s.Guarded || s.DiscardNew {
		out.Discard = "new"
	}
	if s.Guarded || s.WorkQueue {
		out.MaxMsgsPerSubject, out.DiscardNewPerSubject = 1, true
	}
	if s.MaxAge > 0 {
		out.MaxAge = fmt.Sprintf("%dh", s.MaxAge/time.Hour)
	}
	if s.TransformDest != "" {
		out.Transform = &transform{s.TransformSource, s.TransformDest}
	}
	return out
}

// storedBy returns how a stream stores the messages of a channel, and how readers get them.
func storedBy(stream string) *channelStream {
	c := &channelStream{Stream: stream, Guard: "message id within the duplicate window"}
	for _, s := range schemas.Streams() {
		switch {
		case s.Name != stream:
		case s.Guarded:
			c.Guard = "one message per subject, for ever"
		case s.WorkQueue:
			c.Guard = "one message per subject, while it waits"
			c.Delivery = "a work queue: one consumer takes each message, and it is gone; others see it by a core " +
				"subscription, as it is published"
		}
	}
	return c
}

func node(v any) yaml.Node {
	var n yaml.Node
	if err := n.Encode(v); err != nil {
		panic(err) // only structs of this package come here
	}
	return n
}
