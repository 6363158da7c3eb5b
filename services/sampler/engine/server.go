package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Server is the servers that draw the samples of a network, one or more, and how they are asked.
type Server struct {
	// Address is NAME=URL[,URL ...]; NAME is their kind.
	Address string
	// Patience is how long a server may send nothing of a sample before it is asked again.
	Patience time.Duration
	// Concurrency is the most samples of texts that each server is asked for at once.
	Concurrency int
	// Key is sent as a bearer token.
	Key string
	// Adapters is the folder, of this machine and the server's, in which the server finds the adapters of policies;
	// empty: it keeps the weights that it was started with.
	Adapters string
	// Waiting is told why the server is waited for, and "" when the wait is over; nil: it is logged.
	Waiting func(text string)
	// Ready adds a condition of readiness; nil: there is none.
	Ready func(name string, check func() error)
}

// Servers are the pool of the servers that draw the samples of a network, as pool.Pool is one.
type Servers interface {
	Reach(ctx context.Context) error
	Watch(ctx context.Context)
	Away() error
	Used() int
	Size() int
}

// Hooks log what becomes of the servers, and tell Waiting.
func (s Server) Hooks(log zerolog.Logger) (h remotehttp.Hooks) {
	tell, reached, away := s.Waiting, false, false
	if tell == nil {
		tell = func(string) {}
	}
	h.Waiting = func(why error) {
		switch {
		case why == nil && reached:
			log.Info().Msg("the engine is back")
			fallthrough
		case why == nil:
			reached, away = true, false
			tell("")
		case !reached:
			if s.Waiting == nil {
				log.Warn().Err(why).Msg("waiting for the engine")
			}
			tell(fmt.Sprintf("waiting for the engine: %v", why))
		case !away:
			away = true
			tell(fmt.Sprintf("the engine is away; requests wait for it: %v", why))
			log.Error().Err(why).Msg("the engine is away; requests wait for it")
		}
	}
	h.Overloaded = func(server string, n int, err error) {
		log.Warn().Err(err).Str("server", server).Int("concurrency", n).
			Msg("the engine is overloaded; it is asked for fewer samples at once")
	}
	if strings.Contains(s.Address, ",") { // of a single server Waiting says it
		h.Changed = func(server string, err error) {
			if err != nil {
				log.Warn().Err(err).Str("server", server).Msg("a server of the engine is not used")
				return
			}
			log.Info().Str("server", server).Msg("a server of the engine is used again")
		}
	}
	return h
}

// Reach waits until a server of a pool can be used, whose state is the condition "engine" of readiness. An error is the
// end of ctx, or a *Refusal: waiting does not help.
func (s Server) Reach(ctx context.Context, p Servers) error {
	if s.Ready != nil {
		s.Ready("engine", p.Away)
	}
	return Unrefused(p.Reach(ctx))
}

// Unrefused makes an error of a server that refuses for good a *Refusal.
func Unrefused(err error) error {
	if errors.Is(err, pool.ErrRefused) {
		return &Refusal{err}
	}
	return err
}

// Away returns an ErrAway that says why no server of a pool accepts requests; nil: one does.
func Away(p Servers) error {
	if err := p.Away(); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return nil
}
