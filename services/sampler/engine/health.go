package engine

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
)

// Server is a server that draws the samples of a network, and how it is asked.
type Server struct {
	// Address is NAME=URL; NAME is its kind.
	Address string
	// URL is that of the address, without a slash at its end. Only what dials a server needs it.
	URL string
	// Patience is how long the server may send nothing of a sample before it is asked again.
	Patience time.Duration
	// Concurrency is the most samples of texts that the server is asked for at once.
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

const (
	// pingEvery is the pause between two pings of a server, redialEvery that between two tries to reach it, toldEvery
	// that between two log lines while the sampler waits for it.
	pingEvery   = 2 * time.Second
	redialEvery = time.Second
	toldEvery   = 10 * time.Second
)

// Health is whether the server that draws the samples of a network can be reached. A network that embeds it is Watched.
// Its episodes return Away while the server is away.
type Health struct {
	// Dial reaches the server and says why it cannot be used. It is called until it succeeds, and when the server is
	// back: it then says whether the server still serves what it did. A *Refusal says that waiting does not help.
	Dial func(ctx context.Context) error
	// Ping says why a server that was reached does not answer.
	Ping func(ctx context.Context) error

	why atomic.Pointer[error] // why the server accepts no requests; nil: it does
	// waiting is that of Server.
	waiting func(text string)
}

// tell says why the server is waited for; empty: the wait is over.
func (h *Health) tell(text string) {
	if h.waiting != nil {
		h.waiting(text)
	}
}

// Reach waits until the server that draws the samples can be used, and logs that it waits. Readiness gets the
// condition "engine". An error is the end of ctx, or a *Refusal of the server.
func (h *Health) Reach(ctx context.Context, s Server, log zerolog.Logger) error {
	h.why.Store(new(fmt.Errorf("not reached yet: %s", s.Address)))
	h.waiting = s.Waiting
	if s.Ready != nil {
		s.Ready("engine", h.fault)
	}
	var told time.Time
	for {
		err := h.Dial(ctx)
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

// fault returns why the server accepts no requests; nil: it does.
func (h *Health) fault() error {
	if err := h.why.Load(); err != nil {
		return *err
	}
	return nil
}

// Away returns an ErrAway that says why the server accepts no requests; nil: it does.
func (h *Health) Away() error {
	if err := h.fault(); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return nil
}

// Watch pings the server that draws the samples until ctx ends, so that readiness and Away say whether it answers. A
// server that comes back is dialled as at the start.
func (h *Health) Watch(ctx context.Context, log zerolog.Logger) {
	for {
		select {
		case <-time.After(pingEvery):
		case <-ctx.Done():
			return
		}
		err, was := h.Ping(ctx), h.fault()
		if err == nil && was != nil {
			err = h.Dial(ctx)
		}
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
