package remotelm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"time"
)

const (
	// mostAnswer bounds what is read of an answer that is no stream, in bytes.
	mostAnswer = 4 << 20
	// askTimeout bounds a question that costs the server nothing.
	askTimeout = 10 * time.Second
	// entryBytes is more than one number of one token takes in JSON, tokenBytes than a token does besides, and eventBytes
	// than what is around them.
	entryBytes = 128
	tokenBytes = 1024
	eventBytes = 256 << 10
	// mostEvent bounds an event of a stream, whatever was asked for, in bytes.
	mostEvent = 1 << 30
)

// Health says why the server takes no requests; nil: it does.
func (s *Server) Health(ctx context.Context) error {
	err := s.ask(ctx, http.MethodGet, "/health", nil, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	return nil
}

func (s *Server) request(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var data io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		data = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.base+path, data)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.config.Key != "" {
		req.Header.Set("Authorization", "Bearer "+s.config.Key)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, reason(said))
	if permanent(resp.StatusCode) {
		return nil, &refusal{resp.StatusCode, err}
	}
	return nil, err
}

// refusal is an answer that says that the request is wrong.
type refusal struct {
	status int
	err    error
}

func (e *refusal) Error() string        { return e.err.Error() }
func (e *refusal) Is(target error) bool { return target == ErrRefused }

// reason is what a server says of an error, in one line.
func reason(body []byte) string {
	var e struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
	}
	said := string(body)
	if json.Unmarshal(body, &e) == nil {
		var in struct {
			Message string `json:"message"`
		}
		switch {
		case json.Unmarshal(e.Error, &in) == nil && in.Message != "":
			said = in.Message
		case e.Message != "":
			said = e.Message
		case len(e.Detail) > 0:
			said = string(e.Detail)
		}
	}
	if said = strings.Join(strings.Fields(strings.ToValidUTF8(said, "?")), " "); said == "" {
		return "no reason given"
	}
	return fmt.Sprintf("%.400s", said)
}

// ask sends a request whose answer is JSON, decoded into v unless that is nil.
func (s *Server) ask(ctx context.Context, method, path string, body, v any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := s.request(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer))
	if err == nil && v != nil {
		if err = json.Unmarshal(data, v); err != nil {
			err = fmt.Errorf("%w: %w", ErrGarbage, err)
		}
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// generate asks for tokens once, and calls each with what the server says, until that returns false. nil: it did, or all
// is there.
func (s *Server) generate(ctx context.Context, r Request, top int, each func(event) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(s.config.Patience, func() { cancel(fmt.Errorf("%w for %v", ErrSilent, s.config.Patience)) })
	defer watch.Stop()
	ended := false
	defer func() {
		if !ended {
			s.dialect.release(s, r.ID)
		}
	}()
	said := func(err error) error {
		if cause := context.Cause(ctx); errors.Is(cause, ErrSilent) {
			return fmt.Errorf("%s: %w", s, cause)
		}
		return fmt.Errorf("%s: %w", s, err)
	}
	resp, err := s.request(ctx, http.MethodPost, s.facts.Route, s.dialect.body(s.facts, &r, top))
	if err != nil {
		return said(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	limit := s.mostEvent(r.MaxTokens, top)
	var done []int32
	for {
		data, err := nextEvent(lines, limit)
		if errors.Is(err, io.EOF) {
			err = errCut
		}
		if err != nil {
			return said(err)
		}
		watch.Stop() // while the caller looks at it the server may not be able to say anything
		e, err := s.dialect.read(s.facts, data, done)
		if err == nil {
			err = s.check(&e, top)
		}
		if err == nil && len(done)+len(e.tokens) > r.MaxTokens {
			err = fmt.Errorf("%w: more than the %d tokens that were asked for", ErrGarbage, r.MaxTokens)
		}
		if err != nil {
			return said(err)
		}
		for _, t := range e.tokens {
			done = append(done, t.id)
		}
		if !each(e) {
			return nil
		}
		switch e.finish {
		case "":
		case Stop, Length:
			ended = true
			return nil
		case aborted:
			ended = true
			return said(fmt.Errorf("%w after %d tokens", ErrAborted, len(done)))
		default:
			ended = true
			return said(fmt.Errorf("%w: finish_reason: %.40q", ErrGarbage, e.finish))
		}
		watch.Reset(s.config.Patience)
	}
}

// mostEvent bounds an event by what it can have: all tokens, of servers that repeat them, or that wait for us.
func (s *Server) mostEvent(tokens, top int) int {
	if top < 0 {
		top = s.config.Vocabulary
	}
	return min(mostEvent, eventBytes+tokens*(tokenBytes+(top+1)*entryBytes))
}

// nextEvent is the data of the next server-sent event. Servers of models have each in one line.
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
		case err != nil: // what is there of a line is cut off
			return nil, err
		case found && string(data) == "[DONE]":
			return nil, errCut
		case found:
			return data, nil
		case len(bytes.TrimSpace(line)) > 0 && line[0] == '{': // an error in the place of a stream
			return nil, fmt.Errorf("%w: %s", ErrGarbage, reason(line))
		}
		line = line[:0]
	}
}

// check refuses numbers that cannot be.
func (s *Server) check(e *event, top int) error {
	for i := range e.tokens {
		t := &e.tokens[i]
		if t.id < 0 || int(t.id) >= s.config.Vocabulary {
			return fmt.Errorf("%w: token %d; must be below the vocabulary, %d", ErrGarbage, t.id, s.config.Vocabulary)
		}
		for _, v := range append(t.of, t.value) {
			if math.IsNaN(v) || math.IsInf(v, 0) || math.Abs(v) > math.MaxFloat32 {
				return fmt.Errorf("%w: token %d: %g", ErrGarbage, t.id, v)
			}
			if v > 0 && s.facts.Values != Logits && s.facts.Values != "" {
				return fmt.Errorf("%w: token %d: a log-prob of %g", ErrGarbage, t.id, v)
			}
		}
		for _, id := range t.ids {
			if id < 0 || int(id) >= s.config.Vocabulary {
				return fmt.Errorf("%w: token %d among the likeliest; must be below the vocabulary, %d", ErrGarbage, id, s.config.Vocabulary)
			}
		}
		if top < 0 && distinct(t.ids) != s.config.Vocabulary {
			return fmt.Errorf("%w: the numbers of %d tokens; must be of all of the vocabulary, %d", ErrGarbage, distinct(t.ids), s.config.Vocabulary)
		}
	}
	return nil
}

func distinct(ids []int32) int {
	seen := make(map[int32]struct{}, len(ids))
	for _, id := range ids {
		seen[id] = struct{}{}
	}
	return len(seen)
}

// serverError is an error in the place of an event.
func serverError(data []byte, raw json.RawMessage) error {
	var in struct {
		Code int `json:"code"`
	}
	err := fmt.Errorf("%w: %s", ErrGarbage, reason(data))
	if json.Unmarshal(raw, &in) == nil && permanent(in.Code) {
		return &refusal{in.Code, err}
	}
	return err
}

// permanent says that the request is wrong, however often it is tried.
func permanent(status int) bool {
	return status >= 400 && status < 500 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout && status != http.StatusConflict
}
