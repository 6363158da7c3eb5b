package sampler

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// weights are those of one policy, loaded: an engine for each seat.
type weights struct {
	policy  *schemas.Policy
	engines []Engine
	canary  *schemas.Canary
	own     []Network      // that are closed with it
	files   []func() error // that are unmapped behind them

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
	for _, unmap := range w.files {
		errs = append(errs, unmap())
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
	if base := s.base(); p.BaseDigest != "" && p.BaseDigest != base {
		return nil, refuse("base_digest: %.16s; must be of the checkpoint that this sampler has, %.16s", p.BaseDigest, base)
	}
	made, err := fetch(ctx, s.bus, p)
	w.files = made.files
	if err != nil {
		return nil, err
	}
	for i, place := range s.places.All {
		m, err := made.with(place.Network)
		if err != nil {
			return nil, err
		}
		if m != place.Network {
			w.own = append(w.own, m)
		}
		if digest := m.WeightsDigest(); digest != p.WeightsDigest {
			return nil, refuse("weights_digest: %.16s; the weights that it names are %.16s", p.WeightsDigest, digest)
		}
		if i == 0 {
			if w.canary, err = m.canary(ctx); err != nil {
				return nil, err
			}
			if s.bare == nil {
				if s.bare, err = place.Network.canary(ctx); err != nil {
					return nil, err
				}
			}
			if p.Adapter != nil && w.canary.Digest == s.bare.Digest {
				return nil, refuse("canary: what the weights give at a fixed input is that of the checkpoint; " +
					"must be another: the adapter changes nothing")
			}
		}
		w.engines = append(w.engines, m.engine(s.cfg.Workers, s.cfg.SharePrefixes))
	}
	return w, nil
}

// change is what a policy makes of its checkpoint: adapters are added, or the transformer is replaced by full, where
// there is one, which digest names.
type change struct {
	adapters []lora.Weighted
	full     *lora.Full
	digest   string
	files    []func() error // that unmap what adapters and full read
}

// mappedFrom is the size of a blob from which on load maps it, in bytes.
const mappedFrom = 4 << 20

// load reads a blob of weights. A large one goes through a file that is mapped, and has no name any more, so that the
// system can take its memory back; where there is no place for one, it is in memory.
func load(ctx context.Context, b *bus.Bus, ref schemas.Ref) (data []byte, unmap func() error, err error) {
	if ref.Size < mappedFrom {
		data, err = b.GetBlob(ctx, ref)
		return data, nil, err
	}
	f, err := os.CreateTemp("", "meander-weights-*")
	if err != nil {
		var all bytes.Buffer
		err = b.CopyBlob(ctx, ref, &all)
		return all.Bytes(), nil, err
	}
	err = errors.Join(os.Remove(f.Name()), b.CopyBlob(ctx, ref, f))
	if err == nil {
		data, unmap, err = safetensors.Map(f)
	}
	return data, unmap, errors.Join(err, f.Close())
}

// fetch reads what a policy makes of its checkpoint.
func fetch(ctx context.Context, b *bus.Bus, p *schemas.Policy) (made change, err error) {
	blob := func(field string, ref schemas.Ref) ([]byte, error) {
		file, unmap, err := load(ctx, b, ref)
		if unmap != nil {
			made.files = append(made.files, unmap)
		}
		if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrCorrupt) {
			return nil, refuse("%s: %w", field, err)
		}
		if err != nil {
			return nil, fmt.Errorf("fetch the weights of version %d: %w", p.PolicyVersion, err)
		}
		return file, nil
	}
	if p.Adapter != nil {
		file, err := blob("adapter.file", p.Adapter.File)
		if err != nil {
			return made, err
		}
		a, err := lora.Parse(fmt.Sprintf("of version %d", p.PolicyVersion), file, p.Adapter.Config)
		if err != nil {
			return made, refuse("adapter: %w", err)
		}
		made.adapters = []lora.Weighted{{Adapter: a, Weight: p.Adapter.Scale}}
	}
	if len(p.Weights) == 0 {
		return made, nil
	}
	files, digests := make([][]byte, len(p.Weights)), make([]string, len(p.Weights))
	for i, ref := range p.Weights {
		if files[i], err = blob(fmt.Sprintf("weights[%d]", i), ref); err != nil {
			return made, err
		}
		digests[i] = ref.Digest
	}
	if made.full, err = lora.ParseFull(files...); err != nil {
		return made, refuse("weights: %w", err)
	}
	made.digest = lora.FullDigest(p.BaseDigest, digests...)
	return made, nil
}

// Policy returns m with what a policy adds to its checkpoint; m itself where that is what it has. A model that is not m
// is to be closed; files that are mapped for it stay so. What the policy names and is not there, or does not fit, is an
// error.
func Policy(ctx context.Context, b *bus.Bus, m Network, p *schemas.Policy) (Network, error) {
	made, err := fetch(ctx, b, p)
	if err != nil {
		return Network{}, err
	}
	return made.with(m)
}

// refused is an error of weights, which is one whoever tries them, unless the device is lost.
func refused(err error) error {
	if err != nil && !errors.Is(err, tensor.ErrDeviceLost) {
		return &refusal{err}
	}
	return err
}

func digestOf(x []float32) string {
	sum := sha256.Sum256(tensor.F32.AppendFloats(nil, x))
	return hex.EncodeToString(sum[:])
}

// versions are the weights that a sampler has: those that samples begin with, and those before them for
// as long as samples need them. There are two at most, the one that is loaded included.
type versions struct {
	s *service

	mu      sync.Mutex
	current *weights
	old     []*weights
	wanted  *schemas.Policy // the lane's, newest
	refused *schemas.Policy // that is not tried again; nil: none
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

// move has a sample that is made with some weights go on with the newest, where may says so of them, and
// returns those that it goes on with.
func (v *versions) move(from *weights, may func(to *weights) bool) *weights {
	v.mu.Lock()
	defer v.mu.Unlock()
	to := v.current
	if to == from || !may(to) {
		return from
	}
	from.users--
	to.users++
	v.drop(from)
	return to
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
	same := func(q *schemas.Policy) bool {
		return q != nil && p.PolicyVersion == q.PolicyVersion && p.WeightsDigest == q.WeightsDigest
	}
	if p == nil || p.PolicyVersion < v.current.version() || same(v.current.policy) || same(v.refused) {
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
	for {
		p, room := v.next()
		poke(v.s.reins.obeyed)
		var wait <-chan time.Time
		if p != nil && room {
			err := v.update(ctx, p)
			_, final := errors.AsType[*refusal](err)
			switch {
			case ctx.Err() != nil:
				return nil
			case err == nil:
				v.forget(p, nil)
				continue
			case final:
				v.forget(p, p)
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
			v.s.reclaim()
		case <-wait:
		}
	}
}

// reclaim has devices with memory of their own take back what the weights of before took: it goes with the objects.
func (s *service) reclaim() {
	for _, place := range s.places.All {
		if _, ok := place.Device.Device.(tensor.Metered); ok {
			runtime.GC()
			return
		}
	}
}

// forget settles a policy that was taken over, or refused.
func (v *versions) forget(p, refused *schemas.Policy) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.refused = refused
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

// changes refuses weights that are others by name, and give the same as those before them.
func changes(last, next *weights) error {
	if next.policy.Bare() || next.policy.Rollback != nil {
		return nil // somebody goes back on purpose
	}
	a, b := last.canary, next.canary
	if a == nil || b == nil || last.policy.WeightsDigest == next.policy.WeightsDigest || a.Digest != b.Digest {
		return nil
	}
	return refuse("canary: what the weights give at a fixed input is that of version %d; must be another: the update changes nothing, such as an adapter whose lora_B is zero", last.version())
}

// answer tells that a policy was taken over, or why not.
func (s *service) answer(ctx context.Context, p *schemas.Policy, fault error, took time.Duration) error {
	now := s.versions.newest()
	a := &schemas.Applied{
		Lane: p.Lane, Instance: s.instance(), PolicyVersion: p.PolicyVersion, State: schemas.AppliedApplied,
		Serving: now.version(), WeightsDigest: now.policy.WeightsDigest, Canary: now.canary, Backend: s.network.Backend(),
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
