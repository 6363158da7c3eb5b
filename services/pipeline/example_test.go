package pipeline_test

import (
	"context"
	"fmt"
	"os"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// A trainer with the whole pipeline and a server in its own process.
func Example() {
	if err := train(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: complete: 4 samples
}

func train(ctx context.Context) error {
	store, err := os.MkdirTemp("", "meander-example-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(store)
	server, err := natsd.Start(ctx, natsd.Options{StoreDir: store, Log: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer server.Close()
	b, err := bus.Connect(ctx, bus.Config{InProcess: server.InProcess(), Name: "trainer"}, zerolog.Nop())
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Setup(ctx); err != nil {
		return err
	}

	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	serving, stop := context.WithCancel(ctx)
	defer stop()
	served := make(chan error, 1)
	go func() { served <- pipeline.Run(serving, b, config, zerolog.Nop()) }()

	c := client.New(b)
	if _, err := c.Publish(ctx, "demo", &schemas.Prompt{Prompt: "a red fox", GroupSize: new(int64(4))}); err != nil {
		return err
	}
	for group, err := range c.Groups(ctx, "demo", "") {
		if err != nil {
			return err
		}
		fmt.Printf("%s: %d samples\n", group.Status, len(group.Members))
		break
	}
	stop()
	return <-served
}
