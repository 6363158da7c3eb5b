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

	for range 2 { // the second is refused as a duplicate, which is success
		ack, err := b.Publish(ctx, &schemas.Request{Run: "demo", Lane: "tiny", UID: "fox", SampleIndex: 0})
		must(err)
		fmt.Println(ack.Stream, ack.Seq, ack.Duplicate)
	}

	err = b.Consume(ctx, bus.ConsumerConfig{Stream: schemas.StreamRequests, Durable: "sampler-tiny"},
		func(ctx context.Context, m *bus.Message) error {
			defer cancel() // one is enough for an example
			var r schemas.Request
			if err := schemas.Decode(m.Data, &r); err != nil {
				return bus.Terminal(schemas.CodeDecode, err)
			}
			ack, err := b.Publish(ctx, &schemas.Trajectory{Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, StopReason: schemas.StopCompleted})
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
