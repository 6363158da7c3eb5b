package texts

import (
	"context"
	"errors"
	"fmt"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Dial waits until a server that draws the tokens of a model can be reached, see engine.Health. An error is the end of
// ctx, or the server's refusal: it serves something else.
func Dial(ctx context.Context, at engine.Server, l lm.Language, log zerolog.Logger) (engine.Network, error) {
	config, err := configOf(at, l)
	if err != nil {
		return nil, err
	}
	s := &Served{
		Health: &engine.Health{}, language: l, config: config, load: newLoad(max(1, at.Concurrency)),
		adapters: newAdapters(at.Adapters, l), changed: make(chan struct{}),
	}
	s.config.Resumed = func(err error) {
		if n := s.load.failed(err); n > 0 {
			log.Warn().Err(err).Int("concurrency", n).Msg("the engine is overloaded; it is asked for fewer answers " +
				"at once")
			return
		}
		if s.Away() == nil { // else that is said already
			log.Warn().Err(err).Msg("an answer broke off; it is gone on with")
		}
	}
	if s.adapters != nil && len(s.adapters.modules) == 0 {
		return nil, engine.Refuse("engine_adapters: set; the model %s takes no adapters", s.Name())
	}
	s.Health.Dial, s.Ping = s.dial, func(ctx context.Context) error { return s.server.Health(ctx) }
	if err := s.Reach(ctx, at, log); err != nil {
		return nil, err
	}
	return s, nil
}

// configOf returns how remotelm connects to a server that draws the tokens of a model.
func configOf(at engine.Server, l lm.Language) (remotelm.Config, error) {
	probe, err := l.Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return remotelm.Config{}, fmt.Errorf("encode a message to try it with: %w", err)
	}
	return remotelm.Config{
		Server: at.Address, Patience: at.Patience, Key: at.Key, Vocabulary: l.Card().Vocabulary, ProbeIDs: probe,
	}, nil
}

// ServedPolicyOf returns the policy that a sampler of the server would announce, for estimates. A server that cannot be
// reached now has a name only. An error says that it can never be used.
func ServedPolicyOf(ctx context.Context, at engine.Server, l lm.Language) (*schemas.Policy, error) {
	config, err := configOf(at, l)
	if err != nil {
		return nil, err
	}
	server, err := remotelm.Dial(ctx, config)
	switch {
	case errors.Is(err, remotelm.ErrRefused):
		return nil, err
	case err != nil:
		name, _, _ := remotelm.Parse(at.Address)
		p := PolicyOf(l.Card())
		p.Text.Engine = &schemas.Engine{Name: name}
		return p, nil
	}
	defer server.Close()
	return (&Served{language: l, server: server}).Policy(), nil
}

// dial connects to the server that draws the tokens; Reach and Watch call it. A server that is back must be as it was
// when the lane was announced: otherwise the error says in what it differs. engine.Refusal: it serves something else.
func (e *Served) dial(ctx context.Context) error {
	s, err := remotelm.Dial(ctx, e.config)
	switch {
	case errors.Is(err, remotelm.ErrRefused):
		return engine.Refuse("%w", err)
	case err != nil:
		return err
	case e.server == nil:
		e.server, e.adapter, err = e.adapters.loadZero(ctx, s)
		if errors.Is(err, remotelm.ErrRefused) {
			return engine.Refuse("engine_adapters: %w", err)
		}
		if err != nil {
			e.server = nil
		}
		return err
	}
	defer s.Close()
	was, is := e.server.Facts(), s.Facts()
	if was.Values != is.Values || was.Model != is.Model || was.Route != is.Route || is.MaxTokens != was.MaxTokens {
		return fmt.Errorf("%s: serves %s with %s by %s, %d tokens, now, and served %s with %s by %s, %d tokens, when the lane was announced; restart the sampler",
			s, is.Model, is.Values, is.Route, is.MaxTokens, was.Model, was.Values, was.Route, was.MaxTokens)
	}
	return e.adapters.loadAgain(ctx, s)
}
