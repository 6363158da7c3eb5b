// Package interaction is who answers a language model between its turns, so that it can try again: the interaction sums,
// which is built in, and workers on a NATS queue group. A worker is any program, in any language, that subscribes to
//
//	mdr.v1.interact.NAME    queue group NAME
//
// and answers each request, the msgpack map schemas.InteractRequest, with the msgpack map schemas.InteractReply:
// {v: 1, content: "too low", score: 0}, {v: 1, terminate: true, score: 1}, or {v: 1, error: "out of memory", retry: true}.
//
// This is core NATS: the server hands a request to one worker of the group and forgets it. All that was said is in each
// request, so that workers come and go freely. Whatever keeps a worker from answering ends within the time that the prompt
// gives it, as a Fault with the name of its kind.
package interaction

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// Fault is why an interaction says nothing, for good.
type Fault struct {
	// State is its kind, one of schemas.ConversationStates: timeout, absent, error or garbage.
	State string
	Err   error
}

func (f *Fault) Error() string { return f.State + ": " + f.Err.Error() }

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// The pauses after which a worker that is not there, or says retry, is asked again.
const (
	firstPause = 50 * time.Millisecond
	mostPause  = 2 * time.Second
)

// Ask returns what the interaction of a request says to its answer: a built-in one at once, a worker within the timeout. An
// error that is no Fault may pass: the connection was lost meanwhile, or ctx has ended.
func Ask(ctx context.Context, nc *nats.Conn, r *schemas.InteractRequest, timeout time.Duration) (*schemas.InteractReply, error) {
	if Builtin(r.Name) {
		return answer(r)
	}
	subject := schemas.InteractSubject(r.Name)
	data, err := encode(nc, r)
	if err != nil {
		return nil, &Fault{schemas.ConversationError, err}
	}
	asked, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	reconnects := nc.Stats().Reconnects
	var fault *Fault // of the try before
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		began := time.Now()
		m, err := nc.RequestWithContext(asked, subject, data)
		switch {
		case err == nil:
			reply, why := read(m.Data)
			if why == nil || why.State == schemas.ConversationGarbage || !reply.Retry {
				return reply, faultOf(why)
			}
			fault = why
		case errors.Is(err, nats.ErrNoResponders):
			fault = &Fault{schemas.ConversationAbsent, fmt.Errorf("no worker listens on %s, for %v", subject, timeout)}
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case !nc.IsConnected(), nc.Stats().Reconnects != reconnects:
			return nil, fmt.Errorf("the connection to the server was lost: %w", err)
		case errors.Is(err, context.DeadlineExceeded) && fault != nil && time.Since(began) < pause:
			return nil, fault // a try that had no time says nothing
		case errors.Is(err, context.DeadlineExceeded):
			return nil, &Fault{schemas.ConversationTimeout, fmt.Errorf("no answer on %s within %v (interaction.timeout_ms)", subject, timeout)}
		default:
			return nil, fmt.Errorf("ask on %s: %w", subject, err)
		}
		select {
		case <-time.After(pause):
		case <-asked.Done():
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, fault
		}
	}
}

func faultOf(f *Fault) error {
	if f == nil {
		return nil
	}
	return f
}

// encode leaves logits out where they do not fit in a message: events have them.
func encode(nc *nats.Conn, r *schemas.InteractRequest) ([]byte, error) {
	data, err := schemas.Encode(r)
	if limit := nc.MaxPayload(); err == nil && limit > 0 && int64(len(data)) > limit && r.Logits != nil {
		bare := *r
		bare.Logits = nil
		data, err = schemas.Encode(&bare)
	}
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	if limit := nc.MaxPayload(); limit > 0 && int64(len(data)) > limit {
		return nil, fmt.Errorf("request of %d bytes; the NATS server takes %d: raise its max_payload", len(data), limit)
	}
	return data, nil
}

// legible is a text of strangers without what a terminal would take for more than letters.
func legible(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return utf8.RuneError
	}, s)
}

// read takes a worker's reply; what is none is a Fault.
func read(data []byte) (*schemas.InteractReply, *Fault) {
	reply := &schemas.InteractReply{}
	err := error(nil)
	if len(data) > schemas.MaxInteractReply {
		err = fmt.Errorf("%d bytes; must be at most %d", len(data), schemas.MaxInteractReply)
	} else {
		err = schemas.DecodeValid(data, reply)
	}
	switch {
	case err != nil:
		return reply, &Fault{schemas.ConversationGarbage, fmt.Errorf("the worker's reply: %w", err)}
	case reply.Error != "":
		return reply, &Fault{schemas.ConversationError, fmt.Errorf("the worker says: %s", legible(reply.Error))}
	}
	return reply, nil
}
