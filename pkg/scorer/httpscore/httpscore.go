// Package httpscore asks a server over HTTP for scores: the reward function http:NAME.
//
// A request is one POST with several samples, a map in JSON or msgpack:
//
//	{"v": 1, "name": "clip", "samples": [{
//	  "prompt": "a red fox", "ground_truth": "", "params": {}, "metadata": {},
//	  "image": <a PNG or JPEG file: base64 in JSON, bytes in msgpack>, "image_format": "png"}]}
//
// metadata is the record that the prompt came with, as a data set has it. Of a video the image is the frame in the
// middle; where the settings ask for more of them, frames is a list of files in the same form, in order. The
// reply is status 200 and a map in the same format, with one score per sample, in order:
//
//	{"scores": [0.27, null], "errors": [null, "no face"], "details": ["a fox", null]}
//
// errors and details are optional, so the replies of Flow-GRPO's reward servers, {"scores": [...]}, are accepted;
// further fields are ignored. A null, a text, NaN or an infinity instead of a score fails that sample. {"error":
// "..."}, another v than 1, another number of scores, or anything else fails the request.
//
// A request for a whole group, schemas.ScoreRequest, has members in place of samples, and one reply for all of them:
//
//	{"v": 1, "name": "rank", "prompt": "a red fox", ..., "group_size": 3,
//	  "members": [{"sample_index": 0, "image": ..., "image_format": "png"}, {"sample_index": 2, ...}],
//	  "missing": [{"sample_index": 1, "why": "trajectory failed: no memory"}]}
//	{"scores": [{"sample_index": 2, "score": 0.5, "detail": "second"}, {"sample_index": 0, "error": "all black"}]}
//	{"preferences": [{"a": 0, "b": 2, "p": 0.75}]}
//
// A request is repeated if there is no connection, no whole reply in time, or a status of 408, 429 or 5xx. If the last
// retry fails, the error wraps scorer.ErrUnavailable; every other failure is final. Redirects are not followed: they
// would send the headers to another server.
package httpscore

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/time/rate"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
	"github.com/meander-rl/meander/schemas"
)

// maxReply bounds a reply in bytes, after decompression.
const maxReply = 1 << 20

// Scorer is a scorer.BatchScorer and a scorer.GroupScorer. It may be used concurrently.
type Scorer struct {
	name   string // of the instance
	cfg    Config
	header http.Header
	hide   *strings.Replacer
	client *http.Client
	slots  chan struct{}
	limit  *rate.Limiter
}

// New returns the scorer http:NAME. It does not connect. If an environment variable of a
// header is not set, the error names it.
func New(name string, cfg Config) (*Scorer, error) {
	if err := wire.CheckName(name); err != nil {
		return nil, fmt.Errorf("http scorer: %w", err)
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("http:%s: %w", name, err)
	}
	header, secrets, err := cfg.expandHeaders()
	if err != nil {
		return nil, fmt.Errorf("http:%s: %w", name, err)
	}
	kind := "application/" + cfg.Format
	header.Set("Content-Type", kind)
	header.Set("Accept", kind)
	limit := rate.Inf
	if cfg.Rate > 0 {
		limit = rate.Limit(cfg.Rate)
	}
	return &Scorer{
		name: name, cfg: cfg, header: header, hide: redactor(secrets),
		client: &http.Client{
			Transport: &http.Transport{
				Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true,
				MaxIdleConnsPerHost: cfg.Concurrency, IdleConnTimeout: 90 * time.Second,
				TLSHandshakeTimeout: 10 * time.Second, MaxResponseHeaderBytes: 64 << 10,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		slots: make(chan struct{}, cfg.Concurrency),
		limit: rate.NewLimiter(limit, 1),
	}, nil
}

// Name returns http:NAME.
func (s *Scorer) Name() string { return scorer.HTTP + ":" + s.name }

// String returns the name and the settings without secrets.
func (s *Scorer) String() string { return s.Name() + " " + s.cfg.String() }

// GoString is String, for %#v.
func (s *Scorer) GoString() string { return s.String() }

// Version returns the version of the protocol, followed by Config.Version if that is set.
func (s *Scorer) Version() string {
	version := "http-" + strconv.Itoa(wire.Version)
	if s.cfg.Version != "" {
		version += "+" + s.cfg.Version
	}
	return version
}

// SeesConditions says that servers see the conditions of samples.
func (s *Scorer) SeesConditions() {}

// Frames returns Config.Frames.
func (s *Scorer) Frames() int { return s.cfg.Frames }

// MaxBatch returns the most samples of one request.
func (s *Scorer) MaxBatch() int { return s.cfg.MaxBatch }

// Concurrency returns how many requests run at once; further calls wait.
func (s *Scorer) Concurrency() int { return s.cfg.Concurrency }

// Close ends idle connections.
func (s *Scorer) Close() error {
	s.client.CloseIdleConnections()
	return nil
}

// Score scores one sample by one request.
func (s *Scorer) Score(ctx context.Context, in scorer.Input) (float64, error) {
	r := s.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail is Score with the detail that the server gives.
func (s *Scorer) ScoreDetail(ctx context.Context, in scorer.Input) scorer.Result {
	return s.ScoreBatch(ctx, []scorer.Input{in})[0]
}

// ScoreBatch scores all samples in requests of at most MaxBatch, one after the other. If a request fails, all its
// samples fail.
func (s *Scorer) ScoreBatch(ctx context.Context, in []scorer.Input) []scorer.Result {
	results := make([]scorer.Result, len(in))
	for from := 0; from < len(in); from += s.cfg.MaxBatch {
		to := min(from+s.cfg.MaxBatch, len(in))
		s.request(ctx, in[from:to], results[from:to])
	}
	for i := range results {
		if err := results[i].Err; err != nil {
			results[i] = scorer.Result{Err: fmt.Errorf("%s: %w", s.Name(), err)}
		}
	}
	return results
}

// request scores samples by one request, with its retries, and sets results. A sample that cannot be encoded gets
// its own error and is not sent.
func (s *Scorer) request(ctx context.Context, in []scorer.Input, results []scorer.Result) {
	body := struct {
		V       int           `json:"v" msgpack:"v"`
		Name    string        `json:"name" msgpack:"name"`
		Samples []wire.Sample `json:"samples" msgpack:"samples"`
	}{V: wire.Version, Name: s.name}
	var sent []int
	for i := range in {
		sample, err := wire.NewSample(in[i], s.cfg.Image)
		if err == nil {
			err = s.checkMetadata(sample.Metadata)
		}
		if err != nil {
			results[i].Err = err
			continue
		}
		body.Samples, sent = append(body.Samples, sample), append(sent, i)
	}
	if len(sent) == 0 {
		return
	}
	data, err := s.encode(body)
	if err == nil {
		data, err = s.postWithRetries(ctx, data, traceOf(in))
	}
	var scores []scorer.Result
	if err == nil {
		scores, err = s.readReply(data, len(sent))
	}
	for k, i := range sent {
		if err != nil {
			results[i].Err = err
		} else {
			results[i] = scores[k]
		}
	}
}

// ScoreGroup scores the members of a group by one request, with its retries.
func (s *Scorer) ScoreGroup(ctx context.Context, g scorer.Group) []scorer.Result {
	ask := func(e *schemas.ScoreRequest, trace map[string][]string) (map[string]any, error) {
		data, err := s.encode(e)
		if err := cmp.Or(s.checkMetadata(e.Metadata), err); err != nil {
			return nil, err
		}
		if data, err = s.postWithRetries(ctx, data, trace); err != nil {
			return nil, err
		}
		return s.readMap(data)
	}
	results := wire.Rate(ctx, g, s.name, s.cfg.Image, ask)
	for i, r := range results {
		if r.Err != nil {
			results[i].Err = fmt.Errorf("%s: %w", s.Name(), r.Err)
		}
	}
	return results
}

// encode returns a request in the format of the server.
func (s *Scorer) encode(request any) ([]byte, error) {
	if s.cfg.Format == wire.FormatMsgpack {
		return msgpack.Marshal(request)
	}
	return json.Marshal(request)
}

// checkMetadata refuses metadata that JSON has no form for: that is a fault of its sample alone.
func (s *Scorer) checkMetadata(m schemas.Metadata) error {
	if s.cfg.Format != wire.FormatJSON {
		return nil
	}
	record, err := m.Map()
	if err == nil {
		_, err = json.Marshal(record)
	}
	if err != nil {
		return fmt.Errorf("metadata: %w; set format: msgpack", err)
	}
	return nil
}

// postWithRetries posts until there is a reply or a final error. After the last retry, or if ctx or the caller's
// patience would end before the next one, the error wraps ErrUnavailable.
func (s *Scorer) postWithRetries(ctx context.Context, body []byte, trace http.Header) ([]byte, error) {
	for tries := 1; ; tries++ {
		reply, err := s.post(ctx, body, trace)
		if err == nil {
			return reply, nil
		}
		failure, ok := errors.AsType[*temporaryError](err)
		if !ok {
			return nil, err
		}
		wait := max(backoff(s.cfg.RetryWait, tries), min(failure.after, maxWait))
		deadline, bounded := ctx.Deadline()
		if until, ok := scorer.RetryDeadline(ctx); ok && (!bounded || until.Before(deadline)) {
			deadline, bounded = until, true
		}
		switch {
		case errors.Is(ctx.Err(), context.Canceled):
			return nil, ctx.Err()
		case ctx.Err() != nil, tries > s.cfg.Retries, bounded && time.Until(deadline) <= wait:
			if tries > 1 {
				err = fmt.Errorf("%w (try %d)", err, tries)
			}
			return nil, fmt.Errorf("%w: %w", scorer.ErrUnavailable, err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// traceOf returns the headers of the trace context that samples have in common; nil: they have different ones.
func traceOf(in []scorer.Input) http.Header {
	for i := range in {
		if !maps.EqualFunc(in[i].Trace, in[0].Trace, slices.Equal[[]string]) {
			return nil
		}
	}
	return in[0].Trace
}

// backoff returns the wait before the next retry: it doubles with every try up to maxWait, and half of it is
// random, so that clients do not retry at the same time.
func backoff(first time.Duration, tries int) time.Duration {
	wait := min(first<<min(tries-1, 16), maxWait)
	return wait/2 + rand.N(wait/2+1)
}

// temporaryError is a failure against which a retry may help.
type temporaryError struct {
	err   error
	after time.Duration // the wait that the server asked for; 0: none
}

func (p *temporaryError) Error() string { return p.err.Error() }
func (p *temporaryError) Unwrap() error { return p.err }

// post makes one attempt and returns the reply of status 200. A *temporaryError may be retried, other errors are final.
func (s *Scorer) post(ctx context.Context, body []byte, trace http.Header) ([]byte, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, &temporaryError{err: fmt.Errorf("wait for one of %d requests to end: %w", cap(s.slots), ctx.Err())}
	}
	if err := s.limit.Wait(ctx); err != nil {
		return nil, &temporaryError{err: fmt.Errorf("wait for the rate of %v/s: %w", s.cfg.Rate, err)}
	}
	patience := wire.Patience(ctx, s.cfg.Timeout)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.cfg.URL, bytes.NewReader(body))
	if err != nil {
		return nil, errors.New("url: no request can be made of it") // the error would show it
	}
	req.Header = s.header.Clone()
	maps.Copy(req.Header, trace)
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, s.connectionError(err, patience)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 == 3 {
		return nil, fmt.Errorf("post %s: status %d, a redirect: put the final address into url", redactURL(s.cfg.URL),
			resp.StatusCode)
	}
	reply, err := io.ReadAll(io.LimitReader(resp.Body, maxReply+1))
	if resp.StatusCode != http.StatusOK {
		return nil, s.statusError(resp, reply)
	}
	if err != nil {
		return nil, s.connectionError(fmt.Errorf("read reply: %w", err), patience)
	}
	if len(reply) > maxReply {
		return nil, fmt.Errorf("post %s: reply is larger than %d bytes", redactURL(s.cfg.URL), maxReply)
	}
	return reply, nil
}

// connectionError returns an error of the connection without the address, which may hold secrets. It is temporary,
// except for a bad certificate.
func (s *Scorer) connectionError(err error, patience time.Duration) error {
	if outer, ok := errors.AsType[*url.Error](err); ok {
		err = outer.Err
	}
	shown := fmt.Errorf("post %s: %w", redactURL(s.cfg.URL), err)
	if errors.Is(err, context.DeadlineExceeded) {
		shown = fmt.Errorf("post %s: no reply within %v: %w", redactURL(s.cfg.URL), patience, context.DeadlineExceeded)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return shown // waiting does not make a certificate good
	}
	return &temporaryError{err: shown}
}

// statusError returns the error for a status other than 200, with the start of the reply. 408, 429 and 5xx are
// temporary.
func (s *Scorer) statusError(resp *http.Response, body []byte) error {
	code := resp.StatusCode
	err := fmt.Errorf("post %s: status %d: %s", redactURL(s.cfg.URL), code, s.quote(body))
	switch {
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code >= 500:
		return &temporaryError{err: err, after: retryAfter(resp.Header.Get("Retry-After"))}
	}
	return err
}

// retryAfter returns the wait of the header Retry-After, in seconds or as a date; 0 if there is none.
func retryAfter(value string) time.Duration {
	if seconds, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
		return time.Duration(max(0, min(seconds, int(maxWait/time.Second)))) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}

// readReply returns the results of a reply, one per sample. A reply that is malformed as a whole is an error; a bad
// score fails its sample.
func (s *Scorer) readReply(body []byte, samples int) ([]scorer.Result, error) {
	m, err := s.readMap(body)
	if err != nil {
		return nil, err
	}
	var lists [3][]any
	for i, key := range []string{"scores", "errors", "details"} {
		if lists[i], err = wire.List(m, key, samples); err != nil {
			return nil, fmt.Errorf("reply: %w", err)
		}
	}
	scores, failures, details := lists[0], lists[1], lists[2]
	if scores == nil {
		return nil, fmt.Errorf("reply: no scores for %d samples: %s", samples, s.quote(body))
	}
	results := make([]scorer.Result, samples)
	for i := range results {
		r := &results[i]
		if failures != nil && failures[i] != nil && failures[i] != "" {
			r.Err = fmt.Errorf("server: %s", wire.Show(failures[i]))
		} else if r.Value, err = wire.Number(scores[i]); err != nil {
			r.Err = fmt.Errorf("score %w", err)
		} else if details != nil {
			text, _ := details[i].(string)
			r.Detail = wire.Detail(text)
		}
	}
	return results, nil
}

// readMap returns the map of a reply without secrets. One that says an error is an error.
func (s *Scorer) readMap(body []byte) (map[string]any, error) {
	m, err := wire.Decode(s.cfg.Format, body)
	if err != nil {
		return nil, fmt.Errorf("reply is no %s map: %w: %s", s.cfg.Format, err, s.quote(body))
	}
	s.hideSecrets(m)
	if v := m["v"]; v != nil { // servers of others name none
		if of, err := wire.Number(v); err != nil || of != wire.Version {
			return nil, fmt.Errorf("reply: v: %s; must be %d, or left out", wire.Show(v), wire.Version)
		}
	}
	if failure := m["error"]; failure != nil && failure != "" {
		return nil, fmt.Errorf("server: %s", wire.Show(failure))
	}
	return m, nil
}

// quote returns the start of a reply for an error, without secrets.
func (s *Scorer) quote(body []byte) string { return wire.Quote(s.hide.Replace(string(body))) }

// hideSecrets replaces secrets in every text of a reply, in place: a server may send back what it received.
func (s *Scorer) hideSecrets(v any) any {
	switch v := v.(type) {
	case string:
		return s.hide.Replace(v)
	case []any:
		for i := range v {
			v[i] = s.hideSecrets(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = s.hideSecrets(v[key])
		}
	}
	return v
}
