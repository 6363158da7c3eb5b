package models

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// Server is the settings of the servers that draw the samples of a model.
type Server engine.Server

// serverKind dials a server of a kind, which draws texts or images: one of the two is set.
type serverKind struct {
	text  func(ctx context.Context, s engine.Server, l lm.Language, log zerolog.Logger) (engine.Network, error)
	image func(ctx context.Context, s engine.Server, of images.ServedModel, log zerolog.Logger) (engine.Network, error)
}

// serverKinds are the kinds of servers by the name in their addresses.
var serverKinds = map[string]serverKind{
	schemas.EngineVLLM:            {text: texts.Dial},
	schemas.EngineSGLang:          {text: texts.Dial},
	schemas.EngineSGLangDiffusion: {image: images.Dial},
}

// kind returns the name of the kind of servers in the address, which it checks.
func (s Server) kind() (string, error) {
	name, _, err := remotehttp.SplitAll(s.Engine)
	if _, ok := serverKinds[name]; !ok {
		names := strings.Join(slices.Sorted(maps.Keys(serverKinds)), ", ")
		return "", fmt.Errorf("%q; must be torch, torch=ADDRESS, or NAME=URL[,URL ...], NAME one of %s", s.Engine,
			names)
	}
	return name, err
}

// DrawsTexts reports whether the address is that of a server of texts.
func (s Server) DrawsTexts() bool {
	name, _ := s.kind()
	return serverKinds[name].text != nil
}

// Check returns what is wrong with the address.
func (s Server) Check() error {
	_, err := s.kind()
	return err
}

// Dial waits until the server that draws the samples can be reached, and returns it as the one device of the model.
// name is the folder or the name of the model that the server serves: of a language model its tokenizer is read, of an
// image model its configuration. An error is of the settings, of the model, a refusal of the server, or the end of ctx.
func (s Server) Dial(ctx context.Context, r Registry, name string, log zerolog.Logger) (*Devices, error) {
	kind, err := s.kind()
	if err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	n, err := serverKinds[kind].dial(ctx, engine.Server(s), r, name, log)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("engine: %w", err)
	}
	return &Devices{All: []Device{{Device: devices.Device{ID: kind}, Network: n}}}, nil
}

// PolicyOf is Registry.PolicyOf for a model whose samples a server draws: a server of texts is asked once, within ctx,
// what it gives.
func (s Server) PolicyOf(ctx context.Context, r Registry, name string) (*schemas.Policy, []string, error) {
	kind, err := s.kind()
	if err != nil {
		return nil, nil, fmt.Errorf("engine: %w", err)
	}
	if serverKinds[kind].text != nil {
		l, err := r.language(name)
		if err != nil {
			return nil, nil, fmt.Errorf("engine: %w", err)
		}
		p, err := texts.ServedPolicyOf(ctx, engine.Server(s), l)
		if err != nil {
			return nil, nil, fmt.Errorf("engine: %w", err)
		}
		return p, nil, nil
	}
	p, problems, err := r.PolicyOf(name)
	switch {
	case err != nil:
		return nil, nil, err
	case p.Text != nil:
		return nil, nil, fmt.Errorf("engine: %s makes images; --model %s makes texts", kind, name)
	}
	p.Engine = &schemas.Engine{Name: kind}
	return p, problems, nil
}

// language opens what is read here of a language model that a server serves.
func (r Registry) language(name string) (lm.Language, error) {
	l, err := r.Text.Language(name)
	if err != nil {
		err = fmt.Errorf("%q; --model must be the folder of the language model that it serves: %w", name, err)
	}
	return l, err
}

// dial opens what is needed of the model, and waits until the server can be reached.
func (k serverKind) dial(ctx context.Context, s engine.Server, r Registry, name string, log zerolog.Logger,
) (engine.Network, error) {
	if k.image == nil {
		l, err := r.language(name)
		if err != nil {
			return nil, err
		}
		return k.text(ctx, s, l, log)
	}
	of, err := servedModel(r, name)
	if err != nil {
		return nil, fmt.Errorf("%q; --model must be the folder of the image model that it serves: %w", name, err)
	}
	return k.image(ctx, s, of, log)
}

// servedModel returns the image model called name as servers have it. Only the folder's configuration is needed: the
// weights are the server's.
func servedModel(r Registry, name string) (of images.ServedModel, err error) {
	dir, family, err := r.Images.Find(name)
	if err != nil {
		return of, err
	}
	info, err := r.Images.Inspect(name)
	if err == nil {
		err = info.Card.Validate()
	}
	if err == nil && family.Class == "" {
		err = fmt.Errorf("the family %s has no pipeline of diffusers", family.Name)
	}
	if err != nil {
		return of, err
	}
	return images.ServedModel{Card: info.Card, Class: family.Class, Folder: dir}, nil
}
