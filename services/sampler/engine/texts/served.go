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
	probe, err := l.Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return nil, fmt.Errorf("encode a message to try it with: %w", err)
	}
	s := &Served{language: l, changed: make(chan struct{})}
	s.config = remotelm.Config{
		Server: at.Address, Patience: at.Patience, Key: at.Key, Vocabulary: l.Card().Vocabulary, ProbeIDs: probe,
	}
	s.config.Resumed = func(err error) {
		if s.Away() == nil { // else that is said already
			log.Warn().Err(err).Msg("an answer broke off; it is gone on with")
		}
	}
	s.Health.Dial, s.Ping = s.dial, func(ctx context.Context) error { return s.server.Health(ctx) }
	if err := s.Reach(ctx, at, log); err != nil {
		return nil, err
	}
	return s, nil
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
		e.server = s
		return nil
	}
	defer s.Close()
	was, is := e.server.Facts(), s.Facts()
	if was.Values != is.Values || was.Model != is.Model || was.Route != is.Route || is.MaxTokens != was.MaxTokens {
		return fmt.Errorf("%s: serves %s with %s by %s, %d tokens, now, and served %s with %s by %s, %d tokens, when the lane was announced; restart the sampler",
			s, is.Model, is.Values, is.Route, is.MaxTokens, was.Model, was.Values, was.Route, was.MaxTokens)
	}
	return nil
}
