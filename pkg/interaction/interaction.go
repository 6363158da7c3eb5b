// Package interaction asks an interaction for its reply to a language model's answer, so that the model can try again
// in its next turn. An interaction is either built in (Sums) or a group of workers on NATS. A worker is any program, in
// any language, that subscribes to
//
//	mdr.v1.interact.NAME    queue group NAME
//
// and answers each request, the msgpack map schemas.InteractRequest, with the msgpack map schemas.InteractReply, such
// as
//
//	{v: 1, content: "too low", score: 0}
//	{v: 1, terminate: true, score: 1}
//	{v: 1, error: "out of memory", retry: true}
//
// This is core NATS: the server gives a request to one worker of the group and does not store it. Each request has the
// whole conversation, so workers can start and stop at any time. If no worker answers within the time that the prompt
// allows, the result is a Fault, which names what went wrong.
package interaction

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Fault is the final error of an interaction: to ask again would not help.
type Fault struct {
	// State is the kind of fault, one of schemas.ConversationStates: timeout, absent, error or garbage.
	State string
	Err   error
}

func (f *Fault) Error() string {
	if f.Err == nil {
		return f.State
	}
	return f.State + ": " + f.Err.Error()
}

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// The pauses before Ask tries again if no worker is there or a worker's reply says retry. They double from first to
// most.
const (
	firstPause = 50 * time.Millisecond
	mostPause  = 2 * time.Second
)

// Ask returns the reply of a request's interaction to the last message. A built-in one replies at once, a worker within
// the timeout. The error is a Fault if the interaction gives no reply. Other errors are temporary: the connection was
// lost, or ctx has ended.
func Ask(
	ctx context.Context, nc *nats.Conn, r *schemas.InteractRequest, timeout time.Duration,
) (*schemas.InteractReply, error) {
	if Builtin(r.Name) {
		return sumsReply(r)
	}
	subject := schemas.InteractSubject(r.Name)
	data, err := encodeRequest(nc, r)
	if err != nil {
		return nil, &Fault{schemas.ConversationError, err}
	}
	asked, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	reconnects := nc.Stats().Reconnects
	var fault *Fault // of the try before
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		began := time.Now()
		m, err := nc.RequestMsgWithContext(asked, &nats.Msg{Subject: subject, Header: tracing.Header(ctx), Data: data})
		switch {
		case err == nil:
			reply, why := decodeReply(m.Data)
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
			return nil, fault // the last try had too little time; the one before tells more
		case errors.Is(err, context.DeadlineExceeded):
			return nil, &Fault{
				schemas.ConversationTimeout,
				fmt.Errorf("no answer on %s within %v (interaction.timeout_ms)", subject, timeout),
			}
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

// encodeRequest encodes a request to workers. If it is too large for a message of the server, it
// leaves out the logits, which events have too. A request that is too large even so is an error
// with the setting to raise.
func encodeRequest(nc *nats.Conn, r *schemas.InteractRequest) ([]byte, error) {
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

// printable replaces control characters in a worker's text, which a terminal might interpret.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return utf8.RuneError
	}, s)
}

// decodeReply decodes a worker's reply. The Fault says that the reply is not valid (garbage) or that the worker reports
// an error; then the caller looks at reply.Retry.
func decodeReply(data []byte) (*schemas.InteractReply, *Fault) {
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
		return reply, &Fault{schemas.ConversationError, fmt.Errorf("the worker says: %s", printable(reply.Error))}
	}
	return reply, nil
}

// Sums is the name of the built-in interaction that checks the answer to a sum. The sum is in the newest message of the
// user that asks one, such as 347+58=?, or the ground truth is the right number. A right answer scores 1 and ends the
// conversation. A wrong one scores 0, and the reply is "too low" or "too high". An answer that is cut off, or not a
// whole number in its usual form, gets the reply NotANumber. The model sums was trained with these replies.
const Sums = "sums"

// NotANumber is the reply of Sums to an answer that is not a whole number.
const NotANumber = "not a number"

// Builtin reports whether the interaction of a name is built in.
func Builtin(name string) bool { return name == Sums }

// Check returns an error if the interaction is built in and could not check the answers to a
// prompt: it has params, or the messages ask no sum and there is no ground truth. Intake refuses
// such a prompt with it. Workers check themselves.
func Check(name string, params map[string]string, messages []schemas.Message, groundTruth string) error {
	if !Builtin(name) {
		return nil
	}
	if len(params) > 0 {
		return fmt.Errorf("params: %d; must be none: %s has no options", len(params), name)
	}
	_, err := expectedSum(messages, groundTruth)
	return err
}

// sumsReply returns the reply of Sums to the last message of a request. A request without a sum is a Fault.
func sumsReply(r *schemas.InteractRequest) (*schemas.InteractReply, error) {
	if len(r.Messages) == 0 {
		return nil, &Fault{schemas.ConversationError, errors.New("messages: none; must end with the answer")}
	}
	last := len(r.Messages) - 1
	want, err := expectedSum(r.Messages[:last], r.GroundTruth.Text())
	if err != nil {
		return nil, &Fault{schemas.ConversationError, err}
	}
	return compareSum(r.Messages[last].Content, r.FinishReason, want), nil
}

func expectedSum(messages []schemas.Message, groundTruth string) (float64, error) {
	list := make([]scorer.Message, len(messages))
	for i, m := range messages {
		list[i] = scorer.Message(m)
	}
	return scorer.NumericTarget(scorer.UserTexts(list), groundTruth)
}

var canonical = regexp.MustCompile(`^(0|-?[1-9][0-9]*)$`)

// compareSum returns the reply of Sums to an answer: text is the answer, finish how it ended
// (schemas.FinishStop, ...), want the right number. A right answer ends the conversation with score
// 1; else the reply says too low, too high or that it is no number, with score 0.
func compareSum(text, finish string, want float64) *schemas.InteractReply {
	got, err := strconv.ParseFloat(text, 64)
	reply := &schemas.InteractReply{Score: new(0.0)}
	switch {
	case finish != schemas.FinishStop || !canonical.MatchString(text) || err != nil:
		reply.Content = NotANumber
	case got < want:
		reply.Content = "too low"
	case got > want:
		reply.Content = "too high"
	default:
		reply.Terminate, reply.Score = true, new(1.0)
	}
	return reply
}
