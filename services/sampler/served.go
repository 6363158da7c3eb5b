package sampler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
)

const (
	// healthEvery is between two looks at a server, redialEvery between two tries to reach one, toldEvery between two
	// lines in the log that it is waited for.
	healthEvery = 2 * time.Second
	redialEvery = time.Second
	toldEvery   = 10 * time.Second
)

// errAway says that a sample waits for the server that draws its tokens.
var errAway = errors.New("the engine takes no requests")

// served joins what is wrong with the settings of a server that draws tokens.
func (c Config) served() error {
	if c.Engine == "" {
		if c.EngineKey != "" {
			return errors.New("engine_key: set; must be absent without engine")
		}
		return nil
	}
	var errs []error
	if _, _, err := remotelm.Parse(c.Engine); err != nil {
		errs = append(errs, fmt.Errorf("engine: %w", err))
	}
	if c.EnginePatience < time.Second {
		errs = append(errs, fmt.Errorf("engine_patience: %v; must be at least 1s", c.EnginePatience))
	}
	for name, given := range map[string]bool{
		"adapter": c.Adapter != "", "device": c.Device != devices.Auto && c.Device != devices.CPU, "dtype": c.DType != devices.Auto, "deterministic": c.Deterministic,
	} {
		if given {
			errs = append(errs, fmt.Errorf("%s: set; must be absent beside engine: the server computes", name))
		}
	}
	return errors.Join(errs...)
}

// open opens the model where its samples are computed, or reads its folder where a server draws its tokens.
func (c Config) open(ctx context.Context, log zerolog.Logger) (*Places, error) {
	models := Registry{c.Models, c.Languages}
	if c.Engine == "" {
		return c.compute().Open(models, c.Model, model.Options{Progress: loading(c.Loading, log)}, false)
	}
	l, err := models.Text.Language(c.Model)
	if err != nil {
		return nil, fmt.Errorf("engine: %q; --model must be the folder of the language model that it serves: %w", c.Engine, err)
	}
	s, err := dial(ctx, c, l, log)
	if err != nil {
		return nil, err
	}
	name := s.server.Facts().Name
	return &Places{All: []Place{{Device: devices.Device{ID: name}, Network: Network{Served: s}}}}, nil
}

// dial waits for a server, and says for what.
func dial(ctx context.Context, c Config, l lm.Language, log zerolog.Logger) (*Served, error) {
	probe, err := l.Prompt([]lm.Message{{Role: schemas.RoleUser, Content: "Hello, who are you?"}})
	if err != nil {
		return nil, fmt.Errorf("engine: encode a message to try it with: %w", err)
	}
	s := &Served{language: l, changed: make(chan struct{})}
	s.why.Store(new(fmt.Errorf("not reached yet: %s", c.Engine)))
	if c.Health != nil {
		c.Health("engine", s.away)
	}
	config := remotelm.Config{
		Server: c.Engine, Vocabulary: l.Card().Vocabulary, Probe: probe, Patience: c.EnginePatience, Key: c.EngineKey,
	}
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
			return nil, fmt.Errorf("engine: %w", err)
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

// away says why the server takes no requests; nil: it does.
func (e *Served) away() error {
	if err := e.why.Load(); err != nil {
		return *err
	}
	return nil
}

// watch looks at the server until ctx ends. One that was away is looked at as closely as the first time: it must give what
// the lane says.
func (e *Served) watch(ctx context.Context, log zerolog.Logger) {
	for {
		select {
		case <-time.After(healthEvery):
		case <-ctx.Done():
			return
		}
		err := e.server.Health(ctx)
		was := e.away()
		if err == nil && was != nil {
			err = e.again(ctx)
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

// again says in what a server that is back differs from what it was.
func (e *Served) again(ctx context.Context) error {
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
