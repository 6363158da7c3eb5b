package remotelm

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"time"

	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/remotehttp"
)

const (
	// Upper bounds of sizes in JSON: entryBytes of one number of a token, tokenBytes of the rest of a token, eventBytes
	// of the rest of an event.
	entryBytes = 128
	tokenBytes = 1024
	eventBytes = 256 << 10
	// maxEvent bounds an event of a stream for every request, in bytes.
	maxEvent = 1 << 30
)

// generate sends one request for tokens and calls each with every event, until it returns false. It returns nil in
// that case and when the answer is complete. If the stream ends early, it releases the request on the server.
func (s *Server) generate(ctx context.Context, r Request, top int, each func(event) bool) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(s.config.Patience, func() { cancel(fmt.Errorf("%w for %v", ErrSilent, s.config.Patience)) })
	defer watch.Stop()
	ended := false
	defer func() {
		if !ended && s.dialect.release != nil {
			s.dialect.release(s, r.ID)
		}
	}()
	defer func() {
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, ErrSilent) {
			err = cause
		}
	}()
	asked := s.facts
	asked.Model = cmp.Or(r.Adapter, asked.Model)
	body := s.dialect.requestBody(asked, s.config.Vocabulary, &r, top)
	resp, err := s.http.Do(ctx, http.MethodPost, asked.Route, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	limit := s.eventLimit(r.MaxTokens, top)
	var done []int32
	for {
		data, err := nextEvent(lines, limit)
		if errors.Is(err, io.EOF) {
			err = errCut
		}
		if err != nil {
			return err
		}
		watch.Stop() // while the caller uses the event, the server may be blocked from sending
		var e event
		if err = strictjson.Check(data); err != nil {
			err = fmt.Errorf("%w: %w", ErrGarbage, err)
		} else {
			e, err = s.dialect.parseEvent(s.facts, data, done)
		}
		if err == nil {
			err = s.checkEvent(&e, top)
		}
		if err == nil && len(done)+len(e.tokens) > r.MaxTokens {
			err = fmt.Errorf("%w: more than the %d tokens that were asked for", ErrGarbage, r.MaxTokens)
		}
		if err != nil {
			return err
		}
		for _, t := range e.tokens {
			done = append(done, t.id)
		}
		ended = e.finish != ""
		if !each(e) {
			return nil
		}
		switch e.finish {
		case "":
		case Stop, Length:
			return nil
		case aborted:
			return fmt.Errorf("%w after %d tokens", ErrAborted, len(done))
		default:
			return fmt.Errorf("%w: finish_reason: %.40q", ErrGarbage, e.finish)
		}
		watch.Reset(s.config.Patience)
	}
}

// eventLimit returns the largest size of an event in bytes. An event may hold all tokens: some servers repeat them,
// and a slow reader gets several at once.
func (s *Server) eventLimit(tokens, top int) int {
	if top < 0 {
		top = s.config.Vocabulary
	}
	return min(maxEvent, eventBytes+tokens*(tokenBytes+(top+1)*entryBytes))
}

// nextEvent returns the data of the next server-sent event. It takes one line of data for a whole event, as the
// supported servers send it. Errors: io.EOF at the end of the stream; errCut at "[DONE]", as generate reads no further
// than the event with the finish reason; ErrGarbage for an event of more than limit bytes, and for a JSON object
// instead of events, with the reason that it gives; else what r returns. A last line without a line break is dropped,
// unless it is such an object.
func nextEvent(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if line = append(line, part...); len(line) > limit {
			return nil, fmt.Errorf("%w: an event of more than %d bytes", ErrGarbage, limit)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		data, found := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:"))
		data = bytes.TrimSpace(data)
		switch {
		case bytes.HasPrefix(line, []byte("{")) && (err == nil || errors.Is(err, io.EOF)): // an error, not a stream
			return nil, fmt.Errorf("%w: %s", ErrGarbage, remotehttp.Reason(line))
		case err != nil:
			return nil, err
		case found && string(data) == "[DONE]":
			return nil, errCut
		case found:
			return data, nil
		}
		line = line[:0]
	}
}

// checkEvent refuses an event with impossible numbers or ids, or with missing numbers.
func (s *Server) checkEvent(e *event, top int) error {
	for i := range e.tokens {
		t := &e.tokens[i]
		if t.id < 0 || int(t.id) >= s.config.Vocabulary {
			return fmt.Errorf("%w: token %d; must be below the vocabulary, %d", ErrGarbage, t.id, s.config.Vocabulary)
		}
		for _, v := range append(t.of, t.value) {
			if math.IsInf(v, -1) { // it has none, or filters left the token out
				continue
			}
			if math.IsNaN(v) || math.Abs(v) > math.MaxFloat32 {
				return fmt.Errorf("%w: token %d: %g", ErrGarbage, t.id, v)
			}
			if v > 0 && s.facts.Values != Logits && s.facts.Values != "" {
				return fmt.Errorf("%w: token %d: a log-prob of %g", ErrGarbage, t.id, v)
			}
		}
		for _, id := range t.ids {
			if id < 0 || int(id) >= s.config.Vocabulary {
				return fmt.Errorf("%w: token %d among the likeliest; must be below the vocabulary, %d", ErrGarbage, id,
					s.config.Vocabulary)
			}
		}
		if top < 0 && distinct(t.ids) != s.config.Vocabulary {
			return fmt.Errorf("%w: the numbers of %d tokens; must be of all of the vocabulary, %d", ErrGarbage,
				distinct(t.ids), s.config.Vocabulary)
		}
	}
	return nil
}

// distinct returns how many different ids there are.
func distinct(ids []int32) int {
	seen := make(map[int32]struct{}, len(ids))
	for _, id := range ids {
		seen[id] = struct{}{}
	}
	return len(seen)
}

// serverError returns the error that an event holds. It wraps ErrRefused if its code says that a retry cannot help.
func serverError(data []byte, raw json.RawMessage) error {
	var in struct {
		Code int `json:"code"`
	}
	err := fmt.Errorf("%w: %s", ErrGarbage, remotehttp.Reason(data))
	if json.Unmarshal(raw, &in) == nil {
		return remotehttp.NewStatusError(in.Code, data, err)
	}
	return err
}
