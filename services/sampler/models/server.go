package models

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// Server is the settings of a server that draws the samples of a model.
type Server struct {
	// Address is NAME=URL; the names are those of serverKinds.
	Address string
	// Patience is how long the server may send nothing of a sample before it is asked again.
	Patience time.Duration
	// Key is sent as a bearer token.
	Key string
	// Health adds a condition of readiness; nil: there is none.
	Health func(name string, check func() error)
}

// serverKind has the functions of one kind of server: check checks its address, dial waits until it can be reached.
type serverKind struct {
	check func(address string) error
	dial  func(ctx context.Context, s Server, r Registry, model string, log zerolog.Logger) (engine.Network, error)
}

// serverKinds are the kinds of servers by the name in their addresses.
var serverKinds = map[string]serverKind{
	schemas.EngineVLLM:   textServer,
	schemas.EngineSGLang: textServer,
}

// kind returns the kind of the server. An unknown name gives textServer, whose check lists the known ones.
func (s Server) kind() serverKind {
	name, _, _ := strings.Cut(s.Address, "=")
	if k, ok := serverKinds[name]; ok {
		return k
	}
	return textServer
}

// Check returns what is wrong with the address.
func (s Server) Check() error { return s.kind().check(s.Address) }

// Dial waits until the server can be reached, and returns it as the one device of the model. model is the folder of
// the language model that the server serves.
func (s Server) Dial(ctx context.Context, r Registry, model string, log zerolog.Logger) (*Devices, error) {
	n, err := s.kind().dial(ctx, s, r, model, log)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("engine: %w", err)
	}
	name, _, _ := strings.Cut(s.Address, "=")
	return &Devices{All: []Device{{Device: devices.Device{ID: name}, Network: n}}}, nil
}

var textServer = serverKind{
	check: func(address string) error {
		_, _, err := remotelm.Parse(address)
		return err
	},
	dial: func(ctx context.Context, s Server, r Registry, model string, log zerolog.Logger) (engine.Network, error) {
		l, err := r.Text.Language(model)
		if err != nil {
			return nil, fmt.Errorf("%q; --model must be the folder of the language model that it serves: %w", model, err)
		}
		c := remotelm.Config{Server: s.Address, Patience: s.Patience, Key: s.Key}
		return texts.Dial(ctx, c, l, s.Health, log)
	},
}
