package engine

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
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

// LogChanged returns a function that logs which server cannot be used, or can be again. It is nil for a single server:
// Health says that.
func (s Server) LogChanged(log zerolog.Logger) func(server string, err error) {
	if !strings.Contains(s.Address, ",") {
		return nil
	}
	return func(server string, err error) {
		if err != nil {
			log.Warn().Err(err).Str("server", server).Msg("a server of the engine is not used")
			return
		}
		log.Info().Str("server", server).Msg("a server of the engine is used again")
	}
}

const (
	// pingEvery is the pause between two checks of a server, redialEvery that between two tries to reach it, toldEvery
	// that between two log lines while the sampler waits for it.
	pingEvery   = 2 * time.Second
	redialEvery = time.Second
	toldEvery   = 10 * time.Second
)

// Health is whether the servers that draw the samples of a network can be used, one of them at least. A network that
// embeds it is Watched. Its episodes return Away while all servers are away.
type Health struct {
	check func(ctx context.Context) error
	why   atomic.Pointer[error] // why no server accepts requests; nil: one does
	// waiting is that of Server.
	waiting func(text string)
}

// tell says why the server is waited for; empty: the wait is over.
func (h *Health) tell(text string) {
	if h.waiting != nil {
		h.waiting(text)
	}
}

// Reach waits until check succeeds, and logs that it waits. check says why no server can be used; a *Refusal, that
// waiting does not help. Readiness gets the condition "engine". An error is the end of ctx, or a *Refusal.
func (h *Health) Reach(ctx context.Context, s Server, check func(context.Context) error, log zerolog.Logger) error {
	h.check = check
	h.why.Store(new(fmt.Errorf("not reached yet: %s", s.Address)))
	h.waiting = s.Waiting
	if s.Ready != nil {
		s.Ready("engine", h.fault)
	}
	var told time.Time
	for {
		err := h.check(ctx)
		switch {
		case err == nil:
			h.why.Store(nil)
			h.tell("")
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case Refused(err):
			return err
		}
		h.why.Store(&err)
		if time.Since(told) > toldEvery {
			if h.waiting == nil {
				log.Warn().Err(err).Msg("waiting for the engine")
			}
			h.tell(fmt.Sprintf("waiting for the engine: %v", err))
			told = time.Now()
		}
		select {
		case <-time.After(redialEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fault returns why no server accepts requests; nil: one does.
func (h *Health) fault() error {
	if err := h.why.Load(); err != nil {
		return *err
	}
	return nil
}

// Away returns an ErrAway that says why no server accepts requests; nil: one does.
func (h *Health) Away() error {
	if err := h.fault(); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return nil
}

// Watch checks the servers that draw the samples until ctx ends, so that readiness and Away say whether one can be
// used.
func (h *Health) Watch(ctx context.Context, log zerolog.Logger) {
	for {
		select {
		case <-time.After(pingEvery):
		case <-ctx.Done():
			return
		}
		err, was := h.check(ctx), h.fault()
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil && was != nil:
			h.why.Store(nil)
			h.tell("")
			log.Info().Msg("the engine is back")
		case err != nil:
			h.why.Store(&err)
			if was == nil {
				h.tell(fmt.Sprintf("the engine is away; requests wait for it: %v", err))
				log.Error().Err(err).Msg("the engine is away; requests wait for it")
			}
		}
	}
}
