package sampler

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// weights are those of one policy, loaded: an engine for each seat.
type weights struct {
	policy  *schemas.Policy
	engines []Engine
	canary  *schemas.Canary
	own     []model.Model // that are closed with it

	// Those that make samples with it, and whether others begin with it. The lock of versions is held.
	users   int
	retired bool
}

func (w *weights) version() int64 { return w.policy.PolicyVersion }

func (w *weights) close() error {
	var errs []error
	for _, m := range w.own {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// refusal is an error that a policy has whoever tries it, and however often.
type refusal struct{ err error }

func (e *refusal) Error() string { return e.err.Error() }
func (e *refusal) Unwrap() error { return e.err }

func refuse(format string, args ...any) error { return &refusal{fmt.Errorf(format, args...)} }

// weigh makes the weights of a policy beside those that are in use. An error is a *refusal, unless
// it may pass.
func (s *service) weigh(ctx context.Context, p *schemas.Policy) (_ *weights, err error) {
	w := &weights{policy: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if base := baseOf(s.places.All[0].Model); p.BaseDigest != "" && p.BaseDigest != base {
		return nil, refuse("base_digest: %.16s; must be of the checkpoint that this sampler has, %.16s", p.BaseDigest, base)
	}
	adapters, err := fetch(ctx, s.bus, p)
	if err != nil {
		return nil, err
	}
	for i, place := range s.places.All {
		m, err := adapted(place.Model, adapters)
		if err != nil {
			return nil, err
		}
		if m != place.Model {
			w.own = append(w.own, m)
		}
		if digest := m.Card().WeightsDigest; digest != p.WeightsDigest {
			return nil, refuse("weights_digest: %.16s; the weights that it names are %.16s", p.WeightsDigest, digest)
		}
		if i == 0 {
			if w.canary, err = canary(ctx, m); err != nil {
				return nil, err
			}
		}
		w.engines = append(w.engines, newFlowEngine(m, s.cfg.Workers))
	}
	return w, nil
}

// baseOf names the checkpoint of a model.
func baseOf(m model.Model) string {
	if a, ok := m.(model.Adaptable); ok {
		return a.BaseDigest()
	}
	return m.Card().WeightsDigest
}

// fetch reads what a policy adds to its checkpoint.
func fetch(ctx context.Context, b *bus.Bus, p *schemas.Policy) ([]lora.Weighted, error) {
	if p.Adapter == nil {
		return nil, nil
	}
	file, err := b.GetBlob(ctx, p.Adapter.File)
	if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrCorrupt) {
		return nil, refuse("adapter.file: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("fetch the adapter of version %d: %w", p.PolicyVersion, err)
	}
	a, err := lora.Parse(fmt.Sprintf("of version %d", p.PolicyVersion), file, p.Adapter.Config)
	if err != nil {
		return nil, refuse("adapter: %w", err)
	}
	return []lora.Weighted{{Adapter: a, Weight: p.Adapter.Scale}}, nil
}

// Policy returns m with what a policy adds to its checkpoint; m itself where that is what it has. A model that is
// not m is to be closed. What the policy names and is not there, or does not fit, is an error.
func Policy(ctx context.Context, b *bus.Bus, m model.Model, p *schemas.Policy) (model.Model, error) {
	adapters, err := fetch(ctx, b, p)
	if err != nil {
		return nil, err
	}
	return adapted(m, adapters)
}

// adapted is a model plus adapters; the model itself where there is nothing to change.
func adapted(m model.Model, adapters []lora.Weighted) (model.Model, error) {
	a, ok := m.(model.Adaptable)
	switch {
	case !ok && len(adapters) > 0:
		return nil, refuse("adapter: the model %s takes none", m.Card().Name)
	case !ok, m.Card().WeightsDigest == lora.WeightsDigest(a.BaseDigest(), adapters...):
		return m, nil
	}
	n, err := a.Adapted(adapters...)
	if err != nil && !errors.Is(err, tensor.ErrDeviceLost) {
		err = &refusal{err}
	}
	return n, err
}

// The fixed input of canaries: the negative prompt, which every model takes, drawn noise, a sigma, and an image of
// a few tokens.
const (
	canarySeed  = 7
	canarySigma = 0.75
	canarySide  = 4 // tokens
)

// canary is what weights make of a fixed input.
func canary(ctx context.Context, m model.Model) (*schemas.Canary, error) {
	card := m.Card()
	side := canarySide * card.PixelsPerToken
	tokens, err := card.Tokens(side, side)
	if err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	conds, err := m.Encode(ctx, []string{card.NegativePrompt})
	if err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	x, v := make([]float32, tokens*card.LatentChannels), make([]float32, tokens*card.LatentChannels)
	flow.InitialNoise(x, canarySeed)
	if err := m.Velocity(ctx, [][]float32{v}, [][]float32{x}, []float32{canarySigma}, conds, side, side); err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	sum := 0.0
	for _, e := range v {
		sum += float64(float64(e) * float64(e))
	}
	if sum-sum != 0 {
		return nil, refuse("canary: the velocity at a fixed input is not finite")
	}
	digest := sha256.Sum256(tensor.F32.AppendFloats(nil, v))
	return &schemas.Canary{Digest: hex.EncodeToString(digest[:]), Norm: math.Sqrt(sum)}, nil
}

// versions are the weights that a sampler has: those that samples begin with, and those before them for
// as long as samples need them. There are two at most, the one that is loaded included.
type versions struct {
	s *service

	mu      sync.Mutex
	current *weights
	old     []*weights
	wanted  *schemas.Policy // the lane's, newest
	loading *int64
	drained chan struct{} // has room for one word: old has fewer
	news    chan struct{} // has room for one word: wanted is another
}

// errYoung says that a request is for weights that this sampler does not have yet.
var errYoung = errors.New("the sampler does not have the version yet")

// pin returns the weights that a sample begins with, and keeps them until release.
func (v *versions) pin(least int64) (*weights, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if have := v.current.version(); have < least {
		return nil, fmt.Errorf("%w: %d; it has %d", errYoung, least, have)
	}
	v.current.users++
	return v.current, nil
}

func (v *versions) release(w *weights) {
	v.mu.Lock()
	defer v.mu.Unlock()
	w.users--
	v.drop(w)
}

// drop closes weights that nobody needs. Lock held.
func (v *versions) drop(w *weights) {
	if !w.retired || w.users > 0 {
		return
	}
	v.old = slices.DeleteFunc(v.old, func(o *weights) bool { return o == w })
	_ = w.close() // of a device that is lost, which its samples say
	v.s.metrics.resident.Dec()
	poke(v.drained)
}

// poke leaves a word on a channel that has room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// newest is what samples begin with.
func (v *versions) newest() *weights {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.current
}

// close closes all weights. No sample is made any more.
func (v *versions) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, w := range append(v.old, v.current) {
		if w != nil {
			_ = w.close()
			v.s.metrics.resident.Dec()
		}
	}
}

// move has a sample that is made with some weights go on with others.
func (v *versions) move(from, to *weights) {
	v.mu.Lock()
	defer v.mu.Unlock()
	from.users--
	to.users++
	v.drop(from)
}

// take makes weights those that samples begin with.
func (v *versions) take(w *weights) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.s.metrics.resident.Inc()
	v.s.metrics.version.Set(float64(w.version()))
	if last := v.current; last != nil {
		last.retired = true
		v.old = append(v.old, last)
		defer v.drop(last)
	}
	v.current = w
}

// want notes the lane's policy.
func (v *versions) want(p *schemas.Policy) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wanted = p
	poke(v.news)
}

// next is the policy to take over, nil for none, once there is room for its weights.
func (v *versions) next() (p *schemas.Policy, room bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, v.loading = v.wanted, nil
	if p == nil || p.PolicyVersion < v.current.version() || p.PolicyVersion == v.current.version() && p.WeightsDigest == v.current.policy.WeightsDigest {
		return nil, true
	}
	v.loading = &p.PolicyVersion
	return p, len(v.old) == 0
}

// serving is what the presence says: the policy in use, and the version that is loaded.
func (v *versions) serving() (p *schemas.Policy, loading *int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.current.policy, v.loading
}

// loadPause is before a version is tried again whose adapter could not be fetched.
const loadPause = time.Second

// follow takes over the policies of the lane as they come, until ctx ends.
func (v *versions) follow(ctx context.Context) error {
	var refused *schemas.Policy
	for {
		p, room := v.next()
		poke(v.s.reins.obeyed)
		var wait <-chan time.Time
		if p != nil && room && p != refused {
			err := v.update(ctx, p)
			_, final := errors.AsType[*refusal](err)
			switch {
			case ctx.Err() != nil:
				return nil
			case err == nil, final:
				if refused = p; err == nil {
					refused = nil
				}
				v.forget(p)
				continue
			}
			zerolog.Ctx(ctx).Warn().Err(err).Int64("policy_version", p.PolicyVersion).Msg("version not taken over, trying again")
			wait = time.After(loadPause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-v.news:
		case <-v.drained:
		case <-wait:
		}
	}
}

// forget settles a policy that was taken over or refused.
func (v *versions) forget(p *schemas.Policy) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.wanted == p {
		v.wanted = nil
	}
}

// update takes over a policy, or says why not; errors that may pass have no event.
func (v *versions) update(ctx context.Context, p *schemas.Policy) error {
	began := time.Now()
	w, err := v.s.weigh(ctx, p)
	if err == nil {
		if err = changes(v.newest(), w); err != nil {
			err = errors.Join(err, w.close())
		}
	}
	if _, final := errors.AsType[*refusal](err); err != nil && !final {
		return err
	}
	if err == nil {
		v.take(w)
	}
	return errors.Join(err, v.s.answer(ctx, p, err, time.Since(began)))
}

// changes refuses weights that are others by name, and give the same velocities as those before them.
func changes(last, next *weights) error {
	a, b := last.canary, next.canary
	if a == nil || b == nil || last.policy.WeightsDigest == next.policy.WeightsDigest || a.Digest != b.Digest {
		return nil
	}
	return refuse("canary: the velocity at a fixed input is that of version %d; must be another: the update changes nothing, such as an adapter whose lora_B is zero", last.version())
}

// answer tells that a policy was taken over, or why not.
func (s *service) answer(ctx context.Context, p *schemas.Policy, fault error, took time.Duration) error {
	now := s.versions.newest()
	a := &schemas.Applied{
		Lane: p.Lane, Instance: s.instance(), PolicyVersion: p.PolicyVersion, State: schemas.AppliedApplied,
		Serving: now.version(), WeightsDigest: now.policy.WeightsDigest, Canary: now.canary, Backend: s.card.Backend,
		LoadNS: took.Nanoseconds(), At: time.Now().UnixNano(),
	}
	log := zerolog.Ctx(ctx)
	if fault != nil {
		a.State, a.Error = schemas.AppliedRefused, fault.Error()
		log.Error().Err(fault).Int64("policy_version", p.PolicyVersion).Int64("serving", a.Serving).Msg("version refused")
	} else {
		log.Info().Int64("policy_version", p.PolicyVersion).Str("weights_digest", a.WeightsDigest).Dur("dur_ms", took).Msg("version taken over")
		s.metrics.load.Observe(took.Seconds())
	}
	s.metrics.updates.WithLabelValues(a.State).Inc()
	poke(s.reins.obeyed)
	_, err := s.bus.Publish(ctx, a)
	return err
}
