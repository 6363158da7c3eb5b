package texts

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Dial waits until a server that draws the tokens of a model can be reached, see engine.Health. An error is the end of
// ctx, or the refusal of all servers: they serve something else.
func Dial(ctx context.Context, at engine.Server, l lm.Language, log zerolog.Logger) (engine.Network, error) {
	config, err := configOf(at, l)
	if err != nil {
		return nil, err
	}
	s := &Served{
		Health: &engine.Health{}, language: l, config: config, adapters: newAdapters(at.Adapters, l),
		changed: make(chan struct{}),
	}
	if s.adapters != nil && len(s.adapters.modules) == 0 {
		return nil, engine.Refuse("engine_adapters: set; the model %s takes no adapters", s.Name())
	}
	s.config.Changed = at.LogChanged(log)
	s.config.Overloaded = func(server string, n int, err error) {
		log.Warn().Err(err).Str("server", server).Int("concurrency", n).
			Msg("the engine is overloaded; it is asked for fewer answers at once")
	}
	s.config.Resumed = func(err error) {
		if s.Away() == nil { // else that is said already
			log.Warn().Err(err).Msg("an answer broke off; it is gone on with")
		}
	}
	if s.pool, err = remotelm.NewPool(s.config); err != nil {
		return nil, err
	}
	if err = s.Reach(ctx, at, s.check, log); err != nil {
		s.pool.Close()
	}
	return s, err
}

// configOf returns how remotelm connects to the servers that draw the tokens of a model.
func configOf(at engine.Server, l lm.Language) (remotelm.Config, error) {
	day := map[string]string{schemas.StrftimeNow: time.DateOnly} // any: it is a probe
	probe, err := l.With(day).Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return remotelm.Config{}, fmt.Errorf("encode a message to try it with: %w", err)
	}
	return remotelm.Config{
		Server: at.Address, Patience: at.Patience, Key: at.Key, Concurrency: at.Concurrency,
		Vocabulary: l.Card().Vocabulary, ProbeIDs: probe,
	}, nil
}

// ServedPolicyOf returns the policy that a sampler of the servers would announce, for estimates. If none can be reached
// now, the engine has a name only. An error says that none can ever be used.
func ServedPolicyOf(ctx context.Context, at engine.Server, l lm.Language) (*schemas.Policy, error) {
	config, err := configOf(at, l)
	if err != nil {
		return nil, err
	}
	pool, err := remotelm.Dial(ctx, config)
	if errors.Is(err, remotelm.ErrRefused) {
		return nil, err
	}
	defer pool.Close()
	if err != nil {
		p := PolicyOf(l.Card())
		p.Text.Engine = &schemas.Engine{Name: pool.Facts().Name}
		return p, nil
	}
	return (&Served{language: l, pool: pool}).Policy(), nil
}

// Servers implements engine.Served.
func (e *Served) Servers() (used, all int) { return e.pool.Used(), e.pool.Size() }

// check asks all servers whether they are well, and has them load what samples of the checkpoint are drawn with.
// engine.Refusal: all serve something else.
func (e *Served) check(ctx context.Context) error {
	err := e.pool.Check(ctx)
	if err == nil && e.adapters != nil && e.adapter == "" {
		if e.adapter, err = e.adapters.loadZero(ctx, e.pool); err != nil {
			err = fmt.Errorf("engine_adapters: %w", err)
		}
	}
	if errors.Is(err, remotelm.ErrRefused) {
		return engine.Refuse("%w", err)
	}
	return err
}
