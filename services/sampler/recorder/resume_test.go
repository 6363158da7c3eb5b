package recorder

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// meeting is where steps are stored: each request that looks for its own waits until another one looks, too.
type meeting struct{ looks chan struct{} }

func (m meeting) Last(context.Context, string, string) (*bus.Message, error) {
	return &bus.Message{}, nil
}

func (m meeting) Subjects(ctx context.Context, _, _ string) (map[string]uint64, error) {
	select {
	case m.looks <- struct{}{}:
	case <-m.looks:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return nil, nil
}

func (m meeting) LoadStep(context.Context, *bus.Message) (*schemas.Step, error) { return nil, nil }

// Requests of one process look for what earlier attempts stored side by side.
func TestResume_SideBySide(t *testing.T) {
	t.Parallel()
	m, err := families.All().Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	count := prometheus.NewCounter(prometheus.CounterOpts{Name: "c"})
	s := &Store{
		Steps: meeting{make(chan struct{})}, Sealer: NewSealer([]byte("key")), Can: (&images.Network{Model: m}).Abilities(),
		Metrics: Metrics{count, count, count, count},
	}
	req := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u", GroupSize: 1},
		Sampling: schemas.Sampling{
			Height: 64, Width: 64, Sigmas: []float32{1, 0.5, 0}, Transitions: []string{"sde", "ode"}, Solver: "euler",
			LogProbKind: "density", LatentsDType: "F32",
		},
		Outputs: schemas.Outputs{CheckpointStepIndices: []int64{1}},
	}
	done := make(chan error)
	for range 2 {
		go func() {
			_, err := s.New(req, "a", "cpu", &schemas.Policy{}).Resume(t.Context())
			done <- err
		}()
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
