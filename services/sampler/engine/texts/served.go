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

// Dial waits until a server that draws the tokens of a model can be reached, or all refuse: they serve something else.
func Dial(ctx context.Context, at engine.Server, l lm.Language, log zerolog.Logger) (_ engine.Network, err error) {
	s := &Served{language: l, changed: make(chan struct{})}
	if s.config, err = configOf(at, l); err != nil {
		return nil, err
	}
	if s.adapters, err = newWeights(at.EngineAdapters, l); err != nil {
		return nil, err
	}
	s.config.Hooks, s.config.Whole = at.Hooks(log), s.adapters != nil
	s.config.Loading = func(server, folder string) {
		log.Info().Str("server", server).Str("folder", folder).
			Msg("a server of the engine loads whole weights, and requests wait for it")
	}
	s.config.Resumed = func(err error) {
		if s.pool.Away() == nil { // else that is said already
			log.Warn().Err(err).Msg("an answer broke off; it is gone on with")
		}
	}
	if s.pool, err = remotelm.NewPool(s.config); err != nil {
		return nil, err
	}
	if s.adapters != nil {
		// Samples of the checkpoint are drawn with an adapter of zeros. vLLM computes requests without an adapter wrong
		// on CPUs when it batches them with requests that have one: it takes the last of its adapters for them.
		if s.own.adapter, err = s.save(s.adapters.Modules.Zero(), "base"); err != nil {
			return nil, err
		}
		s.own.folder = s.own.adapter
		s.pool.AddAdapter(s.own.adapter, s.adapters.Path(s.own.adapter))
	}
	if err = at.Reach(ctx, s.pool); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if s.adapters != nil {
		s.takes(s.pool.Facts())
	}
	return s, nil
}

// takes leaves out of what a policy may change what the servers do not take.
func (e *Served) takes(f remotelm.Facts) {
	if !f.Whole {
		e.adapters.Tensors = nil
	}
	if !f.Adapters {
		e.adapters.Modules, e.own.adapter = nil, ""
	}
}

// configOf returns how remotelm connects to the servers that draw the tokens of a model.
func configOf(at engine.Server, l lm.Language) (remotelm.Config, error) {
	day := map[string]string{schemas.StrftimeNow: time.DateOnly} // any: it is a probe
	probe, err := l.With(day).Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return remotelm.Config{}, fmt.Errorf("encode a message to try it with: %w", err)
	}
	return remotelm.Config{
		Server: at.Engine, Patience: at.EnginePatience, Key: at.EngineKey, Concurrency: at.EngineConcurrency,
		Vocabulary: l.Card().Vocabulary, ProbeIDs: probe,
	}, nil
}

// ServedPolicyOf returns the policy that a sampler of the servers would announce, for estimates. If none can be reached
// now, the engine has a name only; an error says that none can ever be used.
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
