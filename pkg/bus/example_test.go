package bus_test

import (
	"context"
	"fmt"
	"os"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// A stage of the pipeline: it takes requests, publishes what comes of them, and a
// request is acked when that is stored.
func Example() {
	dir, err := os.MkdirTemp("", "meander-example-")
	must(err)
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(context.Background())
	server, err := natsd.Start(ctx, natsd.Options{StoreDir: dir})
	must(err)
	defer server.Close()
	b, err := bus.Connect(ctx, bus.Config{Name: "example", InProcess: server.InProcess()}, zerolog.Nop())
	must(err)
	defer b.Close()
	must(b.Setup(ctx))

	group := schemas.Group{
		Batch: "fox", Reward: []schemas.RewardSpec{{Name: "ocr"}},
		Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo"},
	}
	request := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "demo", Lane: "tiny", UID: "fox", SampleIndex: 0, GroupSize: 1},
		Sampling: schemas.Sampling{
			Prompt: "a fox", Height: 256, Width: 256,
			Sigmas: []float32{1, 0}, Transitions: []string{"ode"}, LogProbKind: "density", Solver: "euler", LatentsDType: "F32",
		},
		Group: group,
	}
	request.ScheduleDigest = request.ComputeScheduleDigest()
	for range 2 { // the second is refused as a duplicate, which is success
		ack, err := b.Publish(ctx, request)
		must(err)
		fmt.Println(ack.Stream, ack.Seq, ack.Duplicate)
	}

	err = b.Consume(ctx, bus.ConsumerConfig{Durable: schemas.RequestsDurable("tiny")},
		func(ctx context.Context, m *bus.Message) error {
			defer cancel() // one is enough for an example
			var r schemas.Request
			if err := bus.Fits(m, &r); err != nil {
				return bus.Garbage(schemas.CodeDecode, err)
			}
			ack, err := b.Publish(ctx, &schemas.Trajectory{
				Identity:   r.Identity,
				Provenance: schemas.Provenance{Attempt: "a1"},
				Outcome:    schemas.Outcome{StopReason: schemas.StopFailed, Error: "this example cannot paint"},
				Group:      r.Group,
			})
			if err != nil {
				return err
			}
			fmt.Println(ack.Stream, ack.Seq, ack.Duplicate)
			return nil
		})
	must(err)
	// Output:
	// MDR_REQUESTS 1 false
	// MDR_REQUESTS 1 true
	// MDR_TRAJECTORIES 1 false
}

// must keeps the example short; a program returns its errors.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
