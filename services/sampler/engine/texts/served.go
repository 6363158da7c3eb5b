package texts

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
)

const (
	// healthEvery is the pause between two checks of a server, redialEvery that between two tries to reach it, toldEvery
	// that between two log lines while the sampler waits for it.
	healthEvery = 2 * time.Second
	redialEvery = time.Second
	toldEvery   = 10 * time.Second
)

// Dial waits until a server that draws the tokens of a model can be reached, and logs that it waits. Readiness gets
// the condition "engine". An error is the end of ctx, or the server's refusal: it serves something else.
func Dial(
	ctx context.Context, config remotelm.Config, l lm.Language, health func(name string, check func() error), log zerolog.Logger,
) (*Served, error) {
	probe, err := l.Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return nil, fmt.Errorf("encode a message to try it with: %w", err)
	}
	s := &Served{language: l, changed: make(chan struct{})}
	s.why.Store(new(fmt.Errorf("not reached yet: %s", config.Server)))
	if health != nil {
		health("engine", s.away)
	}
	config.Vocabulary, config.Probe = l.Card().Vocabulary, probe
	config.Resumed = func(err error) {
		if s.away() == nil { // else that is said already
			log.Warn().Err(err).Msg("an answer broke off; it is gone on with")
		}
	}
	var told time.Time
	for {
		server, err := remotelm.Dial(ctx, config) // its own each time: away reads it through why
		switch {
		case err == nil:
			s.server, s.config = server, config
			s.why.Store(nil)
			return s, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, remotelm.ErrRefused):
			return nil, err
		}
		s.why.Store(&err)
		if time.Since(told) > toldEvery {
			log.Warn().Err(err).Msg("waiting for the engine")
			told = time.Now()
		}
		select {
		case <-time.After(redialEvery):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// away returns why the server accepts no requests; nil: it does.
func (e *Served) away() error {
	if err := e.why.Load(); err != nil {
		return *err
	}
	return nil
}

// Watch checks the server until ctx ends. A server that comes back is checked as at the start: it must serve the same
// model.
func (e *Served) Watch(ctx context.Context, log zerolog.Logger) {
	for {
		select {
		case <-time.After(healthEvery):
		case <-ctx.Done():
			return
		}
		err := e.server.Health(ctx)
		was := e.away()
		if err == nil && was != nil {
			err = e.checkSame(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			e.why.Store(nil)
		default:
			e.why.Store(&err)
		}
		switch {
		case err != nil && was == nil:
			log.Error().Err(err).Msg("the engine is away; requests wait for it")
		case err == nil && was != nil:
			log.Info().Msg("the engine is back")
		}
	}
}

// checkSame says in what a server that is back differs from the server of before; nil: in nothing.
func (e *Served) checkSame(ctx context.Context) error {
	s, err := remotelm.Dial(ctx, e.config)
	if err != nil {
		return err
	}
	defer s.Close()
	was, is := e.server.Facts(), s.Facts()
	if was.Values != is.Values || was.Model != is.Model || was.Route != is.Route || is.MaxTokens != was.MaxTokens {
		return fmt.Errorf("%s: serves %s with %s by %s, %d tokens, now, and served %s with %s by %s, %d tokens, when the lane was announced; restart the sampler",
			s, is.Model, is.Values, is.Route, is.MaxTokens, was.Model, was.Values, was.Route, was.MaxTokens)
	}
	return nil
}
