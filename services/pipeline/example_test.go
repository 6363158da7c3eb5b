package pipeline_test

import (
	"context"
	"fmt"
	"os"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// A trainer with the whole pipeline and a server in its own process: a prompt, its group, the
// results of the run and the proof of its log-probs.
func Example() {
	if err := train(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// complete: 4 samples
	// 1 of 1 groups, every log-prob right: true
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
	run, err := results.Read(ctx, b, "demo")
	if err != nil {
		return err
	}
	proof, err := verify.Run(ctx, b, "demo", verify.Options{})
	if err != nil {
		return err
	}
	fmt.Printf("%d of %d groups, every log-prob right: %v\n", run.Summary.Complete, run.Summary.Groups, proof.OK(0))
	stop()
	return <-served
}
