package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
)

// first loads the weights that the sampler begins with: the lane's current policy, or its own, which
// it announces. It waits for a server without room.
func (s *service) first(ctx context.Context) error {
	for told := false; ; told = true {
		_, err := inTime(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.firstWithRoom(ctx) })
		if !errors.Is(err, bus.ErrStreamFull) {
			return err
		}
		if !told {
			zerolog.Ctx(ctx).Warn().Err(err).Msg("the model waits to be announced: the server has no room")
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Second):
		}
	}
}

// startPatience bounds how long a sampler that starts waits for a server that answers late: a thousand may start at once.
const startPatience = time.Minute

// inTime asks the server, and again while it answers late.
func inTime[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	for began := time.Now(); ; {
		answer, err := ask(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || time.Since(began) > startPatience {
			return answer, err
		}
		zerolog.Ctx(ctx).Warn().Err(err).Msg("the server answers late, asked again")
	}
}

// unlessStopped is what kept a sampler from being up; nil where that was its own stop: nothing is in hand.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (s *service) firstWithRoom(ctx context.Context) error {
	mine, err := s.mine(ctx)
	if err != nil {
		return err
	}
	if err := s.bus.RaisePolicy(ctx, s.cfg.Lane); err != nil {
		return err
	}
	for {
		p, err := s.settle(ctx, mine)
		if errors.Is(err, bus.ErrBehind) {
			continue // another sampler was first
		}
		if err != nil {
			return err
		}
		return s.start(ctx, p)
	}
}

// start loads a policy, or where that is refused, the newest before it that is not: a version that nobody
// can load must not keep samplers from starting.
func (s *service) start(ctx context.Context, p *schemas.Policy) error {
	began := time.Now()
	load, err := s.unlessRefused(ctx)
	if err != nil {
		return err
	}
	w, err := load(p)
	fault := err
	if _, final := errors.AsType[*refusal](err); final {
		history, listErr := s.bus.PolicyHistory(ctx, s.cfg.Lane)
		if listErr != nil {
			return listErr
		}
		for _, older := range slices.Backward(history) {
			if w == nil && older.BaseDigest == p.BaseDigest && older.PolicyVersion < p.PolicyVersion {
				w, err = load(older)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("load version %d: %w", p.PolicyVersion, err)
	}
	s.versions.take(w)
	if fault != nil {
		s.versions.refused = p
	}
	if p.Bare() && fault == nil {
		return nil // what its files have is no update
	}
	return s.answer(ctx, p, fault, time.Since(began))
}

// unlessRefused is weigh, but for policies that samplers before this one have refused and none has taken over: an
// update
// that changes nothing, for one, is known by the version before it, which this sampler has never had.
func (s *service) unlessRefused(ctx context.Context) (func(*schemas.Policy) (*weights, error), error) {
	refused, err := s.bus.PolicyRefusals(ctx, s.cfg.Lane)
	return func(p *schemas.Policy) (*weights, error) {
		if why := refused[p.PolicyVersion]; why != "" && !p.Bare() {
			return nil, refuse("%s", why)
		}
		return s.weigh(ctx, p)
	}, err
}

// base is the checkpoint of the sampler.
func (s *service) base() string {
	base, _, _ := s.places.All[0].Network.base()
	return base
}

// OtherCheckpointError says that a model is not the checkpoint that it must be.
type OtherCheckpointError struct{ Model, Has, Want string }

func (e *OtherCheckpointError) Error() string {
	return fmt.Sprintf("model: %q is the checkpoint %.16s; must be %.16s", e.Model, e.Has, e.Want)
}

// mine is the policy of what the settings name: the model, and its adapter.
func (s *service) mine(ctx context.Context) (*schemas.Policy, error) {
	m := s.places.All[0].Network
	p := m.Policy()
	base, modules, ok := m.base()
	p.Lane, p.PolicyVersion, p.BaseDigest = s.cfg.Lane, s.cfg.PolicyVersion, base
	if want := s.cfg.BaseDigest; want != "" && want != base {
		return nil, &OtherCheckpointError{Model: s.cfg.Model, Has: base, Want: want}
	}
	if !ok && s.cfg.Adapter != "" {
		return nil, fmt.Errorf("adapter: %q; the model %s takes none", s.cfg.Adapter, p.Model)
	}
	if !ok {
		return p, nil
	}
	tables := []struct {
		of  interface{ Encode() ([]byte, error) }
		ref **schemas.Ref
	}{{modules, &p.Modules}}
	if a, ok := m.Images.(model.Adaptable); ok { // of a language model adapters alone are taken
		tables = append(tables, struct {
			of  interface{ Encode() ([]byte, error) }
			ref **schemas.Ref
		}{a.Tensors(), &p.Tensors})
	}
	for _, t := range tables {
		table, err := t.of.Encode()
		if err != nil {
			return nil, err
		}
		ref, err := s.bus.PutBlob(ctx, table)
		if err != nil {
			return nil, fmt.Errorf("store what can be changed of the model: %w", err)
		}
		*t.ref = &ref
	}
	if s.cfg.Adapter == "" {
		return p, nil
	}
	adapter, err := lora.Open(s.cfg.Adapter)
	if err != nil {
		return nil, err
	}
	with := lora.Weighted{Adapter: adapter, Weight: s.cfg.AdapterScale}
	if err := modules.Check(with); err != nil {
		return nil, err
	}
	ref, err := s.bus.PutBlob(ctx, adapter.File())
	if err != nil {
		return nil, fmt.Errorf("store the adapter: %w", err)
	}
	p.Adapter = &schemas.PolicyAdapter{File: ref, Config: adapter.Config(), Scale: with.Weight}
	p.WeightsDigest = lora.WeightsDigest(p.BaseDigest, with)
	return p, nil
}

// settle says what the lane serves from now on, and announces that where it is news; bus.ErrBehind
// when somebody else was first.
func (s *service) settle(ctx context.Context, mine *schemas.Policy) (*schemas.Policy, error) {
	current, err := s.bus.Policy(ctx, s.cfg.Lane)
	if errors.Is(err, bus.ErrNotFound) {
		current, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	next := *mine
	next.Announced = time.Now().UnixNano()
	if current != nil {
		keep, err := s.stays(ctx, current, mine)
		if err != nil {
			return nil, err
		}
		version := current.PolicyVersion
		switch {
		case keep && sameFacts(current, mine):
			return current, nil
		case keep: // the model's defaults are others, its weights are not
			p := *current
			next.PolicyVersion, next.WeightsDigest, next.Adapter, next.Weights = version, p.WeightsDigest, p.Adapter, p.Weights
			next.Parent, next.Rollback, next.Rule, next.By, next.Note = p.Parent, p.Rollback, p.Rule, p.By, p.Note
		default:
			next.PolicyVersion, next.Parent = max(version+1, mine.PolicyVersion), &version
		}
	}
	if err := s.bus.SetPolicy(ctx, &next, current); err != nil {
		return nil, err
	}
	return &next, nil
}

// stays says whether the lane's weights stay as they are. What was pushed does, and a sampler starts with
// it; only other files than any that the lane has had are news.
func (s *service) stays(ctx context.Context, current, mine *schemas.Policy) (bool, error) {
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
		history, err := s.bus.PolicyHistory(ctx, s.cfg.Lane)
		if err != nil {
			return false, err
		}
		known = slices.ContainsFunc(history, func(p *schemas.Policy) bool { return p.WeightsDigest == mine.WeightsDigest })
	}
	if known {
		zerolog.Ctx(ctx).Warn().Int64("policy_version", current.PolicyVersion).Str("by", current.By).
			Msg("starts on the version that was pushed to the lane, not on its own files")
	}
	return known, nil
}

// sameFacts says whether policies are alike but for their weights.
func sameFacts(a, b *schemas.Policy) bool {
	bare := func(p *schemas.Policy) string {
		c := *p
		c.PolicyVersion, c.WeightsDigest, c.Adapter, c.Weights, c.Parent, c.Rollback, c.Rule, c.By, c.Note, c.Announced = 0, "", nil, nil, nil, nil, "", "", "", 0
		data, err := schemas.Encode(&c)
		if err != nil {
			return fmt.Sprint(err)
		}
		return string(data)
	}
	return bare(a) == bare(b)
}
