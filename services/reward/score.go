package reward

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/png"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// scored is the outcome of one function on one sample.
type scored struct {
	scorer.Result
	version string
	took    time.Duration
}

// sample is a trajectory to be scored, with what came for it from elsewhere: scores of
// its group as a whole, and verdicts.
type sample struct {
	*schemas.Trajectory
	seq   uint64
	given map[string]scored // by the name of the function
}

// finish scores a sample and publishes its reward. A positive wait says that a function
// is busy or away: nothing has been published, and the sample is to come again.
func (s *service) finish(ctx context.Context, x sample) (wait time.Duration, err error) {
	r := rewardOf(x.Trajectory, x.seq)
	if x.StopReason != schemas.StopCompleted {
		r.Status, r.Error = schemas.StatusFailed, fmt.Sprintf("trajectory %s: %s", x.StopReason, x.Error)
		return 0, s.publish(ctx, r)
	}
	results, wait, err := s.results(ctx, x)
	if err != nil || wait > 0 {
		return wait, err
	}
	parts := make([]scorer.Part, len(x.Group.Reward))
	for i, spec := range x.Group.Reward {
		parts[i] = scorer.Part{Name: spec.Name, Weight: *spec.Weight, Required: *spec.Required, Value: results[i].Value, Err: results[i].Err}
	}
	sum, err := scorer.Combine(parts)
	for i, part := range parts { // after Combine, which fails values that are no numbers
		score := schemas.Score{
			Name: part.Name, Weight: part.Weight, Version: results[i].version, DurationNS: results[i].took.Nanoseconds(), Detail: results[i].Detail,
		}
		if part.Err != nil {
			score.Status, score.Error = schemas.StatusFailed, part.Err.Error()
		} else {
			score.Status, score.Value = schemas.StatusScored, new(part.Value)
		}
		s.metrics.scores.WithLabelValues(part.Name, score.Status).Inc()
		r.Scores = append(r.Scores, score)
	}
	if err != nil {
		r.Status, r.Error = schemas.StatusFailed, err.Error()
	} else {
		r.Status, r.Reward = schemas.StatusScored, &sum
	}
	if err := s.publish(ctx, r); err != nil {
		return 0, err
	}
	s.tries.forget(x.seq)
	return 0, nil
}

// results are those of all functions of a sample, in order. Functions run side by side.
func (s *service) results(ctx context.Context, x sample) (out []scored, wait time.Duration, err error) {
	try := s.tries.of(x.seq)
	lanes := make([]*lane, len(x.Group.Reward))
	out = make([]scored, len(lanes))
	var entered []*lane
	defer func() {
		for _, l := range entered {
			l.leave()
		}
	}()
	todo := false
	for i, spec := range x.Group.Reward {
		if have, ok := x.given[spec.Name]; ok {
			out[i] = have
			continue
		}
		if have, ok := try.done(spec.Name); ok {
			out[i] = have
			continue
		}
		l, err := s.catalog.lane(spec.Name)
		if err != nil {
			out[i].Err = err
			continue
		}
		if !l.enter() {
			s.metrics.putBack.WithLabelValues(spec.Name, "busy").Inc()
			return nil, busyDelay/2 + rand.N(busyDelay), nil
		}
		entered, lanes[i], todo = append(entered, l), l, true
	}
	if !todo {
		return out, 0, nil
	}
	picture, err := s.picture(ctx, x.Image)
	if errors.Is(err, bus.ErrNotFound) {
		for i, l := range lanes {
			if l != nil {
				out[i] = scored{Result: scorer.Result{Err: fmt.Errorf("picture is no longer stored: %w", err)}, version: l.scorer.Version()}
			}
		}
		return out, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("load picture: %w", err)
	}
	var calls sync.WaitGroup
	for i, l := range lanes {
		if l == nil {
			continue
		}
		spec := &x.Group.Reward[i]
		calls.Go(func() {
			began := time.Now()
			out[i].Result = l.score(ctx, scorer.Input{Image: picture, Prompt: x.Prompt, GroundTruth: spec.GroundTruth, Params: spec.Params})
			out[i].version, out[i].took = l.scorer.Version(), time.Since(began)
		})
	}
	calls.Wait()
	if ctx.Err() != nil {
		return nil, 0, ctx.Err()
	}
	away := ""
	for i, l := range lanes {
		switch {
		case l == nil:
		case errors.Is(out[i].Err, scorer.ErrUnavailable):
			away = l.scorer.Name()
		default:
			try.keep(l.scorer.Name(), out[i])
		}
	}
	if away == "" {
		return out, 0, nil
	}
	if wait, again := try.again(s.cfg.ScorePatience); again {
		s.metrics.putBack.WithLabelValues(away, "away").Inc()
		zerolog.Ctx(ctx).Debug().Str("scorer", away).Dur("delay", wait).Msg("not available, will be tried again")
		return nil, wait, nil
	}
	return out, 0, nil // patience is over: the scores have failed
}

// busyDelay is about how long a sample stays away from a function whose line is full.
const busyDelay = 200 * time.Millisecond

// tries remembers the samples that have to come again, until they are done. It is a
// convenience: when it forgets, a function runs once more and patience begins anew.
type tries struct {
	mu    sync.Mutex
	bySeq map[uint64]*try
}

// maxTriesKept bounds the samples that are remembered.
const maxTriesKept = 10_000

func newTries() *tries { return &tries{bySeq: map[uint64]*try{}} }

// try is what is known of one sample.
type try struct {
	mu     sync.Mutex
	first  time.Time // failure
	count  int
	scores map[string]scored
}

func (t *tries) of(seq uint64) *try {
	t.mu.Lock()
	defer t.mu.Unlock()
	x, ok := t.bySeq[seq]
	if !ok {
		if len(t.bySeq) >= maxTriesKept {
			clear(t.bySeq)
		}
		x = &try{scores: map[string]scored{}}
		t.bySeq[seq] = x
	}
	return x
}

func (t *tries) forget(seq uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.bySeq, seq)
}

func (x *try) done(name string) (scored, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r, ok := x.scores[name]
	return r, ok
}

func (x *try) keep(name string, r scored) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.scores[name] = r
}

// again says how long to wait before the next try, while patience lasts.
func (x *try) again(patience time.Duration) (time.Duration, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	if x.count++; x.count == 1 {
		x.first = now
	}
	left := patience - now.Sub(x.first)
	if left <= 0 {
		return 0, false
	}
	wait := min(500*time.Millisecond<<min(x.count-1, 5), 15*time.Second)
	return min(wait/2+rand.N(wait), left+time.Millisecond), true
}

// picture fetches and decodes a sample's picture.
func (s *service) picture(ctx context.Context, im *schemas.Image) (*image.NRGBA, error) {
	data := im.Data
	if im.Ref != nil {
		var err error
		if data, err = s.bus.GetBlob(ctx, *im.Ref); err != nil {
			return nil, err
		}
	}
	conf, err := png.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if int64(conf.Width) != im.Width || int64(conf.Height) != im.Height {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %dx%d; the trajectory says %dx%d", conf.Width, conf.Height, im.Width, im.Height))
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if n, ok := decoded.(*image.NRGBA); ok {
		return n, nil
	}
	n := image.NewNRGBA(decoded.Bounds())
	draw.Draw(n, n.Bounds(), decoded, decoded.Bounds().Min, draw.Src)
	return n, nil
}
