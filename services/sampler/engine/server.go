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

// Server is what computes or draws the samples in place of the sampler: workers, or the servers of its Engine.
type Server struct {
	// Of a server that draws, --model is what it serves: of a language model the tokenizer is read.
	Engine            string        `key:"engine" help:"what computes --model: torch (diffusers, in a process that is started) or torch=ADDRESS (one that runs, at unix:/PATH, HOST:PORT or tls:HOST:PORT); or the servers that draw its samples, as KIND=URL[,URL]: vllm=http://127.0.0.1:8000; default the sampler itself"`
	EnginePatience    time.Duration `key:"engine_patience" range:"1s.." help:"how long a server of --engine may say nothing of a sample before that is asked for again"`
	EngineConcurrency int           `key:"engine_concurrency" range:"1..1024" help:"most texts that each server of --engine draws at once; fewer if overloaded"`
	EngineMix         bool          `key:"engine_mix" help:"also make samples of groups that another engine has begun (another kind of server, or the sampler itself); default such groups wait for it"`
	EngineAdapters    string        `key:"engine_adapters" help:"folder in which the servers of --engine find the weights of pushed policies, by the same path; default none: their weights never change"`
	EngineKey         string        `key:"engine_key" secret:"true" help:"API key of the server of --engine, where it wants one; of torch=HOST:PORT its token"`
	// Waiting is told what a worker or a server is waited for, and "" when the wait is over; nil: it is logged.
	Waiting func(text string) `key:"-"`
	// Ready adds a condition of readiness; nil: there is none.
	Ready func(name string, check func() error) `key:"-"`
}

// Servers are the pool of the servers that draw the samples of a network, as pool.Pool is one.
type Servers interface {
	Reach(ctx context.Context) error
	Watch(ctx context.Context) (stop func())
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
	if strings.Contains(s.Engine, ",") { // of a single server Waiting says it
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

// Reach waits until a server can be used; readiness says so. An error is the end of ctx, or a *Refusal.
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
