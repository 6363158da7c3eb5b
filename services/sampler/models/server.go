package models

import (
	"context"
	"fmt"
	"maps"
	"slices"
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

// serverKind waits until a server of a kind can be reached.
type serverKind func(ctx context.Context, s Server, r Registry, model string, log zerolog.Logger) (engine.Network, error)

// serverKinds are the kinds of servers by the name in their addresses.
var serverKinds = map[string]serverKind{
	schemas.EngineVLLM:   dialText,
	schemas.EngineSGLang: dialText,
}

// parse splits the address into the name of a kind and the base URL, and checks both.
func (s Server) parse() (name, base string, err error) {
	name, base, err = remotelm.Split(s.Address)
	if serverKinds[name] == nil {
		return "", "", fmt.Errorf("%q; must be NAME=URL, NAME one of %s", s.Address, strings.Join(slices.Sorted(maps.Keys(serverKinds)), ", "))
	}
	return name, base, err
}

// Check returns what is wrong with the address.
func (s Server) Check() error {
	_, _, err := s.parse()
	return err
}

// Dial waits until the server can be reached, and returns it as the one device of the model. model is the folder of
// the model that the server serves.
func (s Server) Dial(ctx context.Context, r Registry, model string, log zerolog.Logger) (*Devices, error) {
	name, _, err := s.parse()
	if err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	n, err := serverKinds[name](ctx, s, r, model, log)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("engine: %w", err)
	}
	return &Devices{All: []Device{{Device: devices.Device{ID: name}, Network: n}}}, nil
}

// dialText waits until a server that draws tokens can be reached. model is the folder of its language model.
func dialText(ctx context.Context, s Server, r Registry, model string, log zerolog.Logger) (engine.Network, error) {
	l, err := r.Text.Language(model)
	if err != nil {
		return nil, fmt.Errorf("%q; --model must be the folder of the language model that it serves: %w", model, err)
	}
	c := remotelm.Config{Server: s.Address, Patience: s.Patience, Key: s.Key}
	return texts.Dial(ctx, c, l, s.Health, log)
}
