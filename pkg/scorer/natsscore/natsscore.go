// Package natsscore asks workers on a NATS queue group for scores: the reward function
// nats:NAME. A worker is any program, in any language, that subscribes to
//
//	mdr.v1.score.NAME    queue group NAME
//
// and answers each request, the msgpack map schemas.ScoreRequest, with the msgpack map
// schemas.ScoreReply: {v: 1, score: 0.27}, or {v: 1, error: "out of memory", retry: true}. A request for a whole group
// has members, and its reply their scores, or preferences among them.
//
// This is core NATS: the server passes a request to one worker of the group and does not store it, so workers may start
// and stop at any time. If there is no worker, no answer in time, or a worker says retry, the error wraps
// scorer.ErrUnavailable; every other failure, such as NaN or a malformed reply, is final.
package natsscore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
	"github.com/meander-rl/meander/schemas"
)

// Config is the settings of one reward function.
type Config struct {
	// Image is the format of images in requests: png, or jpeg of quality 95, which is smaller.
	Image string `key:"image" enum:"ScoreImageFormats"`
	// Frames is the most frames of a video that are sent beside the one in the middle, evenly spaced; 0 or 1: none,
	// 1024: all of any video.
	Frames int `key:"frames" range:"0..MaxFrames"`
	// Timeout bounds one request.
	Timeout time.Duration `key:"timeout" range:"(0s..1h]"`
	// Concurrency is how many requests run at once.
	Concurrency int `key:"concurrency" range:"1..1024"`
	// Version names what the workers run; it is a part of Scorer.Version.
	Version string `key:"version" size:"0..128"`
}

// DefaultConfig returns the settings of an instance that is in no file.
func DefaultConfig() Config {
	return Config{Image: wire.PNG, Timeout: 30 * time.Second, Concurrency: 8}
}

// Validate joins all faults; each names its field.
func (c Config) Validate() error { return schemas.CheckFields(&c) }

// Scorer is a scorer.Detailer and a scorer.GroupScorer. It may be used concurrently.
type Scorer struct {
	nc    *nats.Conn
	name  string // of the instance
	cfg   Config
	slots chan struct{}
}

// New returns the scorer nats:NAME. Workers need not run yet. The caller closes nc. With a nil nc only the settings
// are checked, and every score is unavailable.
func New(nc *nats.Conn, name string, cfg Config) (*Scorer, error) {
	if err := wire.CheckName(name); err != nil {
		return nil, fmt.Errorf("nats scorer: %w", err)
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("nats:%s: %w", name, err)
	}
	return &Scorer{nc: nc, name: name, cfg: cfg, slots: make(chan struct{}, cfg.Concurrency)}, nil
}

// Name returns nats:NAME.
func (s *Scorer) Name() string { return scorer.NATS + ":" + s.name }

// Version returns the version of the protocol, followed by Config.Version if that is set.
func (s *Scorer) Version() string {
	version := "nats-" + strconv.Itoa(wire.Version)
	if s.cfg.Version != "" {
		version += "+" + s.cfg.Version
	}
	return version
}

// SeesConditions says that workers see the conditions of samples.
func (s *Scorer) SeesConditions() {}

// Frames returns Config.Frames.
func (s *Scorer) Frames() int { return s.cfg.Frames }

// Concurrency returns how many requests run at once; further calls wait.
func (s *Scorer) Concurrency() int { return s.cfg.Concurrency }

// Score scores one sample by one request to a worker.
func (s *Scorer) Score(ctx context.Context, in scorer.Input) (float64, error) {
	r := s.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail is Score with the detail that the worker gives.
func (s *Scorer) ScoreDetail(ctx context.Context, in scorer.Input) scorer.Result {
	reply, err := s.request(ctx, in)
	if err == nil {
		var r scorer.Result
		if r, err = readScore(reply); err == nil {
			return r
		}
	}
	return scorer.Result{Err: fmt.Errorf("%s: %w", s.Name(), err)}
}

// ScoreGroup scores the members of a group by one request to a worker. Where it is larger than the server allows, its
// members go into the store, and the request names them.
func (s *Scorer) ScoreGroup(ctx context.Context, g scorer.Group) []scorer.Result {
	ask := func(e *schemas.ScoreRequest, trace map[string][]string) (map[string]any, error) {
		files := e.Members[0].Text == nil
		data, err := schemas.Encode(e)
		large := errors.Is(err, schemas.ErrTooLarge) || s.nc != nil && int64(len(data)) > s.nc.MaxPayload()
		if large && g.Store != nil {
			if err := storeMembers(ctx, g, e.Members); err != nil {
				return nil, s.unavailable(ctx, err)
			}
			data, err = schemas.Encode(e)
		}
		if err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
		reply, err := s.send(ctx, data, trace, fmt.Sprintf("%d samples", len(e.Members)), files)
		if err != nil {
			return nil, err
		}
		return readReply(reply, schemas.MaxGroupReply)
	}
	results := wire.Rate(ctx, g, s.name, s.cfg.Image, ask)
	for i, r := range results {
		if r.Err != nil {
			results[i].Err = fmt.Errorf("%s: %w", s.Name(), r.Err)
		}
	}
	return results
}

// storeMembers puts the members of a request into the store, and their names in their place.
func storeMembers(ctx context.Context, g scorer.Group, members []schemas.ScoreMember) error {
	for i, m := range members {
		data, err := msgpack.Marshal(m)
		digest := ""
		if err == nil {
			digest, err = g.Store(ctx, data)
		}
		if err != nil {
			return fmt.Errorf("store sample %d of %d bytes: %w", m.SampleIndex, len(data), err)
		}
		members[i] = schemas.ScoreMember{
			SampleIndex: m.SampleIndex,
			Ref:         &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digest, Size: int64(len(data))},
		}
	}
	return nil
}

// request sends a sample to a worker and returns its reply.
func (s *Scorer) request(ctx context.Context, in scorer.Input) ([]byte, error) {
	sample, err := wire.NewSample(in, s.cfg.Image)
	if err != nil {
		return nil, err
	}
	data, err := schemas.Encode(sample.Request(s.name))
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	what := "a conversation"
	if in.Text == nil {
		what = fmt.Sprintf("an image of %d, %d frames and %d conditions", len(sample.Image), len(sample.Frames),
			len(sample.Conditions))
	}
	return s.send(ctx, data, in.Trace, what, in.Text == nil)
}

// send sends a request with what, files or a text, to a worker and returns its reply. A request that is larger than the
// server allows is a final error, a missing answer a temporary one.
func (s *Scorer) send(ctx context.Context, data []byte, trace map[string][]string, what string, files bool,
) ([]byte, error) {
	if s.nc == nil {
		return nil, s.unavailable(ctx, errors.New("no connection to a NATS server"))
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, s.unavailable(ctx, fmt.Errorf("wait for one of %d requests to end: %w", cap(s.slots), ctx.Err()))
	}
	if limit := s.nc.MaxPayload(); limit > 0 && int64(len(data)) > limit {
		smaller := ""
		if files {
			what, smaller = what+", as "+s.cfg.Image, ", set image: jpeg or fewer frames"
		}
		return nil, fmt.Errorf("request of %d bytes with %s: the NATS server takes %d; raise its max_payload%s, or "+
			"use an http scorer", len(data), what, limit, smaller)
	}
	patience := wire.Patience(ctx, s.cfg.Timeout)
	asked, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	msg, err := s.nc.RequestMsgWithContext(asked, &nats.Msg{
		Subject: schemas.ScoreSubject(s.name), Header: trace, Data: data,
	})
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return nil, s.unavailable(ctx, fmt.Errorf("no worker listens on %s", schemas.ScoreSubject(s.name)))
	case errors.Is(err, context.DeadlineExceeded):
		return nil, s.unavailable(ctx, fmt.Errorf("no worker answered within %v: %w", patience, err))
	case err != nil:
		return nil, s.unavailable(ctx, fmt.Errorf("request: %w", err))
	}
	return msg.Data, nil
}

// unavailable makes err temporary (ErrUnavailable), unless the caller cancelled ctx.
func (s *Scorer) unavailable(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	return fmt.Errorf("%w: %w", scorer.ErrUnavailable, err)
}

// readReply returns a reply of at most some bytes. A malformed reply is a final error; an error that a worker reports
// is temporary if it says retry.
func readReply(data []byte, most int) (map[string]any, error) {
	if len(data) > most {
		return nil, fmt.Errorf("reply of %d bytes; must be at most %d", len(data), most)
	}
	format := wire.FormatMsgpack
	if schemas.IsJSON(data) {
		format = wire.FormatJSON
	}
	m, err := wire.Decode(format, data)
	if err != nil {
		return nil, fmt.Errorf("reply is no %s map: %w: %s", format, err, wire.Quote(string(data)))
	}
	if v, err := wire.Number(m["v"]); err != nil || v != wire.Version {
		return nil, fmt.Errorf("reply: v: %s; must be %d", wire.Show(m["v"]), wire.Version)
	}
	failure, err := wire.Text(m, "error")
	if err != nil {
		return nil, fmt.Errorf("reply: %w", err)
	}
	if failure != "" {
		retry, ok := m["retry"].(bool)
		switch {
		case m["retry"] != nil && !ok:
			return nil, fmt.Errorf("reply: retry: %s; must be true or false", wire.Show(m["retry"]))
		case retry:
			return nil, fmt.Errorf("%w: worker: %s", scorer.ErrUnavailable, wire.Quote(failure))
		}
		return nil, fmt.Errorf("worker: %s", wire.Quote(failure))
	}
	return m, nil
}

// readScore returns the score in a reply to one sample.
func readScore(data []byte) (scorer.Result, error) {
	m, err := readReply(data, schemas.MaxScoreReply)
	if err != nil {
		return scorer.Result{}, err
	}
	score, there := m["score"]
	if !there {
		return scorer.Result{}, errors.New("reply: neither score nor error")
	}
	value, err := wire.Number(score)
	if err != nil {
		return scorer.Result{}, fmt.Errorf("score %w", err)
	}
	detail, err := wire.Text(m, "detail")
	if err != nil {
		return scorer.Result{}, fmt.Errorf("reply: %w", err)
	}
	return scorer.Result{Value: value, Detail: wire.Detail(detail)}, nil
}
