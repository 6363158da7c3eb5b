package client_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// streams is a server that listens, with the streams of a pipeline.
type streams struct {
	*bus.Bus
	url  string
	stop func() error
}

// startStreams lets in clients with the token; empty: all clients.
func startStreams(token string) (*streams, error) {
	dir, err := os.MkdirTemp("", "client")
	if err != nil {
		return nil, err
	}
	server, err := natsd.Start(context.Background(), natsd.Options{
		StoreDir: dir, Listen: "127.0.0.1:0", Token: token, Log: zerolog.Nop(),
	})
	if err != nil {
		return nil, err
	}
	b, err := bus.Connect(context.Background(), bus.Config{InProcess: server.InProcess(), Name: "test"}, zerolog.Nop())
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	s := &streams{Bus: b, url: server.ClientURL(), stop: func() error {
		return errors.Join(b.Close(), server.Close(), os.RemoveAll(dir))
	}}
	if err := b.Setup(context.Background()); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// startPipeline is startStreams with the services of the closed-form model.
func startPipeline(token string) (*streams, error) {
	s, err := startStreams(token)
	if err != nil {
		return nil, err
	}
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- pipeline.Run(ctx, s.Bus, config, zerolog.Nop()) }()
	return &streams{Bus: s.Bus, url: s.url, stop: func() error {
		cancel()
		return errors.Join(<-served, s.stop())
	}}, nil
}

func newStreams(t *testing.T) *streams { return stopAtEnd(t)(startStreams("")) }

func newPipeline(t *testing.T, token string) *streams { return stopAtEnd(t)(startPipeline(token)) }

func stopAtEnd(t *testing.T) func(*streams, error) *streams {
	t.Helper()
	return func(s *streams, err error) *streams {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.stop(); err != nil {
				t.Errorf("stop the pipeline: %v", err)
			}
		})
		return s
	}
}
