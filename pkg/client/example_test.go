package client_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// serve is a pipeline at a URL, for clients with the token; empty: for all clients.
func serve(token string) (url string, stop func()) {
	s, err := startPipeline(token)
	if err != nil {
		panic(err)
	}
	return s.url, func() {
		if err := s.stop(); err != nil {
			panic(err)
		}
	}
}

// Publish a prompt, wait for its group, and take the latents of each trained step.
func Example() {
	url, stop := serve("") // what meander up --model synthetic serves
	defer stop()
	ctx := context.Background()

	c, err := client.Connect(ctx, url)
	if err != nil {
		panic(err)
	}
	defer c.Close()
	receipt, err := c.Ask(ctx, "demo", client.Prompt{
		Prompt: "a red fox", UID: "fox", GroupSize: 2, Seed: 7, NumInferenceSteps: 4,
		Rollout: client.Rollout{SDEStepIndices: []int64{1}},
		Reward:  []client.RewardSpec{{Name: "synthetic"}},
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(receipt.UID, receipt.Samples, "samples")
	for group, err := range c.Groups(ctx, "demo", "") {
		if err != nil {
			panic(err)
		}
		for _, member := range group.Members {
			t, err := c.Trajectory(ctx, group.Run, group.UID, member.SampleIndex)
			if err != nil {
				panic(err)
			}
			latents, err := c.Latents(ctx, t)
			if err != nil {
				panic(err)
			}
			fmt.Printf("#%d advantage %+.3f, states %v of shape %v\n", member.SampleIndex, *member.Advantage,
				slices.Sorted(maps.Keys(latents)), t.LatentsShape)
		}
		break
	}
	// Output:
	// fox 2 samples
	// #0 advantage -0.705, states [1 2] of shape [16 64]
	// #1 advantage +0.705, states [1 2] of shape [16 64]
}

// A reader that keeps the cursor together with what it made of a group takes each group
// once, however often it is started.
func ExampleClient_Groups() {
	url, stop := serve("")
	defer stop()
	ctx := context.Background()

	c, err := client.Connect(ctx, url)
	if err != nil {
		panic(err)
	}
	defer c.Close()
	for _, uid := range []schemas.UID{"fox", "hen", "owl"} {
		p := client.Prompt{
			Prompt: "a red " + string(uid), UID: uid, GroupSize: 1, NumInferenceSteps: 2,
			Reward: []client.RewardSpec{{Name: "synthetic"}},
		}
		if _, err := c.Ask(ctx, "demo", p); err != nil {
			panic(err)
		}
	}
	var kept struct { // one row of a database, say
		cursor client.Cursor
		groups []schemas.UID
	}
	for len(kept.groups) < 3 { // each turn is a start of the reader
		for group, err := range c.Groups(ctx, "demo", kept.cursor) {
			if err != nil {
				panic(err)
			}
			kept.groups, kept.cursor = append(kept.groups, group.UID), group.Cursor
			break
		}
	}
	slices.Sort(kept.groups) // they come as they close
	fmt.Println(kept.groups)
	// Output: [fox hen owl]
}

func ExampleConnect() {
	url, stop := serve("s3cret")
	defer stop()
	ctx := context.Background()

	_, err := client.Connect(ctx, url)
	fmt.Println("without a token, not let in:", errors.Is(err, client.ErrUnauthorized))
	c, err := client.Connect(ctx, url, client.WithToken("s3cret"))
	fmt.Println("with it:", err)
	fmt.Println(c.Close())
	// Output:
	// without a token, not let in: true
	// with it: <nil>
	// <nil>
}

func ExampleRefusedError() {
	url, stop := serve("")
	defer stop()
	ctx := context.Background()

	c, err := client.Connect(ctx, url)
	if err != nil {
		panic(err)
	}
	defer c.Close()
	_, err = c.Ask(ctx, "demo", client.Prompt{Prompt: "a red fox", NumInferenceSteps: -1})
	if refused, ok := errors.AsType[*client.RefusedError](err); ok {
		fmt.Println(refused.Code)
		fmt.Println(refused.Reason)
	}
	// Output:
	// invalid
	// num_inference_steps: -1; must be between 1 and 1000
}
