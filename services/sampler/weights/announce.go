package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Begin loads the lane's current policy, or else the sampler's own, which it announces, once the stream has space.
func (v *Versions) Begin(ctx context.Context) error {
	for warned := false; ; warned = true {
		_, err := RetryLate(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, v.beginOnce(ctx) })
		if !errors.Is(err, bus.ErrStreamFull) {
			return err
		}
		if !warned {
			zerolog.Ctx(ctx).Warn().Err(err).Msg("the model waits to be announced: the server has no room")
		}
		if bus.Pause(ctx, time.Second) != nil {
			return err
		}
	}
}

// startPatience bounds how long a starting sampler waits for a slow server: a thousand samplers may start at once.
const startPatience = time.Minute

// RetryLate asks again each time that ask ends at its own deadline, for startPatience: servers may just have started.
func RetryLate[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	for began := time.Now(); ; {
		answer, err := ask(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || time.Since(began) > startPatience {
			return answer, err
		}
		zerolog.Ctx(ctx).Warn().Err(err).Msg("the server answers late, asked again")
	}
}

// beginOnce is one try of Begin: it announces the sampler's own policy if that is news, and loads the lane's.
func (v *Versions) beginOnce(ctx context.Context) error {
	mine, err := v.ownPolicy(ctx)
	if err != nil {
		return err
	}
	p, err := v.announceNext(ctx, mine)
	if err != nil {
		return err
	}
	all, err := v.options.Bus.Policies(ctx)
	if err != nil {
		return err
	}
	for _, other := range all { // the lane is the same to all tenants; Follow loads their weights
		if other.Lane == v.options.Lane && other.Tenant != schemas.TenantMain {
			if _, err := v.announceNext(ctx, mine.Founding(other.Tenant)); err != nil {
				return err
			}
		}
	}
	return v.loadFirst(ctx, p)
}

// announceNext is announceOwn, again while other samplers announce policies.
func (v *Versions) announceNext(ctx context.Context, mine *schemas.Policy) (p *schemas.Policy, err error) {
	if err := v.options.Bus.RaisePolicy(ctx, mine.Lineage()); err != nil {
		return nil, err
	}
	for err = bus.ErrBehind; errors.Is(err, bus.ErrBehind); {
		p, err = v.announceOwn(ctx, mine)
	}
	return p, err
}

// loadBest loads policy p, the first that the sampler knows of its tenant. If p is refused, for fault, it loads the
// newest older policy of the same checkpoint that is not refused: a version that no sampler can load must not keep
// samplers from starting. It fails if none can be loaded.
func (v *Versions) loadBest(ctx context.Context, p *schemas.Policy) (w *Loaded, fault, err error) {
	load, err := v.loadUnlessRefused(ctx, p.Lineage())
	if err != nil {
		return nil, nil, err
	}
	w, err = load(p)
	if fault = err; !engine.Refused(err) {
		return w, nil, err
	}
	history, listErr := v.options.Bus.PolicyHistory(ctx, p.Lineage())
	if listErr != nil {
		return nil, nil, listErr
	}
	for _, older := range slices.Backward(history) {
		if w == nil && older.BaseDigest == p.BaseDigest && older.PolicyVersion < p.PolicyVersion {
			w, err = load(older)
		}
	}
	return w, fault, err
}

// loadFirst loads policy p with loadBest and makes it current, when the sampler starts.
func (v *Versions) loadFirst(ctx context.Context, p *schemas.Policy) error {
	began := time.Now()
	w, fault, err := v.loadBest(ctx, p)
	if err != nil {
		return fmt.Errorf("load version %d: %w", p.PolicyVersion, err)
	}
	v.setCurrent(w)
	if fault != nil {
		v.noteHandled(p, fault)
	}
	if p.IsCheckpoint() && fault == nil {
		return nil // the checkpoint alone is no update to publish
	}
	_, err = v.options.Bus.Publish(ctx, v.answerTo(ctx, p, fault, time.Since(began)))
	return err
}

// loadOfEpoch refuses a policy that passed the guard by: a trainer has taken the lane since it was made.
func (v *Versions) loadOfEpoch(ctx context.Context, p *schemas.Policy) (*Loaded, error) {
	v.mu.Lock()
	epoch := v.lineage(p.Tenant).epoch
	v.mu.Unlock()
	if p.Epoch < epoch {
		return nil, engine.Refuse("epoch: %d; must be at least %d: a trainer has taken the lane since", p.Epoch, epoch)
	}
	return v.loadPolicy(ctx, p)
}

// loadUnlessRefused returns a function that loads a policy, but refuses those that other samplers have refused and
// none has taken over. An update that changes nothing is one: only a sampler with the version before it can see that.
// An error is of the server.
func (v *Versions) loadUnlessRefused(ctx context.Context, of schemas.Lineage,
) (func(*schemas.Policy) (*Loaded, error), error) {
	refused, err := v.options.Bus.PolicyRefusals(ctx, of)
	return func(p *schemas.Policy) (*Loaded, error) {
		if why := refused[p.PolicyVersion]; why != "" && !p.IsCheckpoint() {
			return nil, engine.Refuse("%s", why)
		}
		return v.loadPolicy(ctx, p)
	}, err
}

// base returns the digest of the sampler's checkpoint.
func (v *Versions) base() string {
	return v.options.Networks[0].Policy().BaseDigest
}

// OtherCheckpointError says that the sampler's model is not the checkpoint that its settings ask for.
type OtherCheckpointError struct{ Model, Has, Want string }

func (e *OtherCheckpointError) Error() string {
	return fmt.Sprintf("model: %q is the checkpoint %.16s; must be %.16s", e.Model, e.Has, e.Want)
}

// ownPolicy returns the policy of the sampler's own settings. It stores the adapter, and the lists of what adapters and
// full weights can change, as blobs that the policy refers to.
func (v *Versions) ownPolicy(ctx context.Context) (*schemas.Policy, error) {
	p := v.options.Networks[0].Policy()
	p.Lane, p.PolicyVersion = v.options.Lane, v.options.Own.PolicyVersion
	p.EngineMix = v.options.EngineMix
	if makes, _ := p.Makes(v.options.Own.BaseDigest); !makes {
		return nil, &OtherCheckpointError{Model: v.options.Own.Model, Has: p.BaseDigest, Want: v.options.Own.BaseDigest}
	}
	can := v.options.Networks[0].Abilities()
	modules, tensors := can.Modules, can.Tensors
	if modules == nil && v.options.Own.Adapter != "" {
		return nil, fmt.Errorf("adapter: %q; the model %s takes none", v.options.Own.Adapter, p.Model)
	}
	if modules == nil && tensors == nil {
		return p, nil
	}
	for _, t := range []struct {
		of   interface{ Encode() ([]byte, error) }
		none bool
		ref  **schemas.Ref
	}{{modules, modules == nil, &p.Modules}, {tensors, tensors == nil, &p.Tensors}} {
		if t.none {
			continue // the model accepts only the other
		}
		table, err := t.of.Encode()
		if err != nil {
			return nil, err
		}
		ref, err := v.options.Bus.PutBlob(ctx, table)
		if err != nil {
			return nil, fmt.Errorf("store what can be changed of the model: %w", err)
		}
		*t.ref = &ref
	}
	if v.options.Own.Adapter == "" {
		return p, nil
	}
	adapter, err := lora.Open(v.options.Own.Adapter)
	if err != nil {
		return nil, err
	}
	with := lora.Weighted{Adapter: adapter, Weight: v.options.Own.AdapterScale}
	if err := modules.Check(with); err != nil {
		return nil, err
	}
	ref, err := v.options.Bus.PutBlob(ctx, adapter.File())
	if err != nil {
		return nil, fmt.Errorf("store the adapter: %w", err)
	}
	p.Adapter = &schemas.PolicyAdapter{
		Source: hub.Source(lora.Folder(v.options.Own.Adapter)), File: ref, Config: adapter.Config(), Scale: with.Weight,
	}
	p.WeightsDigest = lora.WeightsDigest(p.BaseDigest, with)
	return p, nil
}

// announceOwn returns the policy that the lane serves of a tenant from now on: the current one, or else mine with the
// next version, which it announces. bus.ErrBehind: another sampler has announced one meanwhile.
func (v *Versions) announceOwn(ctx context.Context, mine *schemas.Policy) (*schemas.Policy, error) {
	current, err := v.options.Bus.Policy(ctx, mine.Lineage())
	if errors.Is(err, bus.ErrNotFound) {
		current, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	next := *mine
	next.Announced = time.Now().UnixNano()
	if current != nil {
		keep, err := v.keepsWeights(ctx, current, mine)
		if err != nil {
			return nil, err
		}
		version := current.PolicyVersion
		next.Epoch = current.Epoch
		switch {
		case keep && current.SameLane(mine):
			return current, nil
		case keep: // the weights stay, the model's defaults have changed
			p := *current
			next.PolicyVersion, next.WeightsDigest, next.Adapter, next.Weights = version, p.WeightsDigest, p.Adapter,
				p.Weights
			next.Parent, next.Rollback, next.Rule, next.By, next.Note = p.Parent, p.Rollback, p.Rule, p.By, p.Note
		case mine.Continues(current): // other engines, the same weights: no version of its own
			next.PolicyVersion, next.Parent = max(version, mine.PolicyVersion), current.Parent
		default:
			next.PolicyVersion, next.Parent = max(version+1, mine.PolicyVersion), &version
		}
		warnStates(ctx, current, &next)
	}
	if err := v.options.Bus.SetPolicy(ctx, &next, current); err != nil {
		return nil, err
	}
	if current != nil && current.BaseDigest != next.BaseDigest {
		zerolog.Ctx(ctx).Warn().Str("was", current.Model).Str("base_digest_was", current.BaseDigest).
			Str("now", next.Model).Str("base_digest", next.BaseDigest).Msg("the lane changes to another checkpoint: " +
			"samplers of the one before get no new prompts; --lane names another lane")
	}
	return &next, nil
}

// warnStates says that prompts which name no latents_dtype get states of another type from now on, such as where
// samplers of one lane compute in several types: the one that started last decides.
func warnStates(ctx context.Context, was, now *schemas.Policy) {
	if was.LatentsDType != now.LatentsDType {
		zerolog.Ctx(ctx).Warn().Str("was", cmp.Or(was.LatentsDType, "F32")).
			Str("now", cmp.Or(now.LatentsDType, "F32")).Msg("samplers of the lane compute in several types: " +
			"prompts that name no latents_dtype get states of this sampler's; --dtype gives all samplers one, " +
			"--latents-dtype of a prompt says it")
	}
}

// keepsWeights reports whether the lane keeps its current weights when a sampler with the policy mine starts. Weights
// that were pushed stay, unless the sampler's own adapter is one that the lane never had. An error is of the server.
func (v *Versions) keepsWeights(ctx context.Context, current, mine *schemas.Policy) (bool, error) {
	switch {
	case current.BaseDigest != mine.BaseDigest:
		return false, nil
	case current.WeightsDigest == mine.WeightsDigest:
		return mine.PolicyVersion <= current.PolicyVersion, nil
	case current.By == "":
		return false, nil
	}
	known := mine.Adapter == nil
	if !known {
		history, err := v.options.Bus.PolicyHistory(ctx, current.Lineage())
		if err != nil {
			return false, err
		}
		known = slices.ContainsFunc(history,
			func(p *schemas.Policy) bool { return p.WeightsDigest == mine.WeightsDigest })
	}
	if known {
		zerolog.Ctx(ctx).Warn().Int64("policy_version", current.PolicyVersion).Str("by", current.By).
			Msg("starts on the version that was pushed to the lane, not on its own files")
	}
	return known, nil
}
