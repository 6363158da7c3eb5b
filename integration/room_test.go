package integration_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler"
)

// Samples of more steps than MDR_STEPS has room for at once, over two samplers with places for
// all of them: each begins when its own steps fit, so that those which have begun end, whose
// steps a reader then frees.
func TestRoom_MoreInHandThanFits(t *testing.T) {
	t.Parallel()
	const groups, samples = 16, 48
	w := newWorld(t)
	limit := bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 1 << 20}
	if err := w.SetLimits(t.Context(), limit); err != nil {
		t.Fatal(err)
	}
	c := defaults()
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	w.Serve(t, c.run("sampler"))
	for range groups {
		p := &schemas.Prompt{
			Prompt: "a red fox", GroupSize: new(int64(samples / groups)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(40))},
		}
		if _, err := w.client.Publish(t.Context(), "r1", p); err != nil {
			t.Fatal(err)
		}
	}
	ctx, moved := bustest.WhileItMoves(t)
	n := 0
	for m, err := range w.Read(ctx, schemas.StreamTrajectories, nil, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatalf("after %d of %d samples: %v", n, samples, err)
		}
		moved()
		a, _ := schemas.ParseSubject(m.Subject)
		if _, err := w.PurgeSubject(ctx, schemas.StreamSteps,
			schemas.StepsFilter(a.Run, a.UID, a.Sample, a.Stage)); err != nil {
			t.Fatal(err)
		}
		if n++; n == samples {
			return
		}
	}
	t.Fatalf("%d of %d samples, then nothing moved", n, samples)
}

// sumOf asks for a sum, of whose answer it wants so many tokens.
func sumOf(tokens int64, change func(*schemas.Text)) schemas.Prompt {
	x := &schemas.Text{MaxNewTokens: &tokens, Temperature: new(0.0)}
	change(x)
	return schemas.Prompt{
		Routing: schemas.Routing{Model: "sums"}, Prompt: "347+58=?", Text: x,
		Reward: []schemas.RewardSpec{{Name: "entropy_mean"}},
	}
}

// What a request is said to store bounds what its steps take, closely enough.
func TestRoom_BytesOfSteps(t *testing.T) {
	t.Parallel()
	p := newWorld(t, bustest.TCP)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		c := intake.DefaultConfig()
		c.Models = []schemas.Lane{"synthetic", "sums"} // prompts wait for either sampler, whichever starts first
		return intake.Run(ctx, c, b, zerolog.Nop())
	})
	for i, model := range []string{"synthetic", sumsFolder(t)} {
		p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
			c := sampler.DefaultConfig()
			c.Model, c.Instance = model, strings.Repeat("i", 59)+strconv.Itoa(i)
			return sampler.Run(ctx, c, b, zerolog.Nop())
		})
	}
	long := strings.Repeat("n", schemas.MaxToken)
	for i, test := range []struct {
		prompt schemas.Prompt
		run    schemas.Run
		loose  float64 // most that the bound is above
	}{
		{schemas.Prompt{ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(40))}}, "r0", 1.2},
		{schemas.Prompt{ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(40))}, UID: schemas.UID(long)}, schemas.Run(long), 1.2},
		{schemas.Prompt{ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{LatentsDType: "BF16", ReturnStepIndices: []int64{2, 10}}}}, "r2", 1.3},
		{schemas.Prompt{ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{Debug: []string{"std", "noise"}}}}, "r3", 1.2},
		{schemas.Prompt{ImageSettings: schemas.ImageSettings{Height: new(int64(1024)), Width: new(int64(1024)), NumInferenceSteps: new(int64(2)), Rollout: schemas.Rollout{Debug: []string{"noise"}}}}, "r4", 1.05},
		{sumOf(3, func(*schemas.Text) {}), "r5", 3.2}, // most of it is the prompt, of whose tokens only the bytes are known
		{sumOf(3, func(x *schemas.Text) { x.Logits = &schemas.Logits{Form: schemas.LogitsFull} }), "r6", 2.2},
		{sumOf(3, func(x *schemas.Text) {
			x.Logits, x.TokensPerEvent = &schemas.Logits{Form: schemas.LogitsTopK}, new(int64(2))
		}), "r7", 3.4},
		// No one knows how long replies are; a context of 512 tokens bounds them.
		{sumOf(1, func(x *schemas.Text) { // too short to be right
			x.Interaction = &schemas.Interaction{Name: "sums", MaxTurns: new(int64(30))}
		}), "r8", 1.8},
	} {
		e := test.prompt
		e.GroupSize = new(int64(1))
		if e.Prompt == "" {
			e.Prompt, e.Model = "a red fox", "synthetic"
		}
		data, err := schemas.Encode(&e)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.PublishPrompt(t.Context(), test.run, data, nil); err != nil {
			t.Fatal(err)
		}
		bustest.Until(t, fmt.Sprintf("the trajectory of prompt %d", i), func() error {
			_, err := p.Last(t.Context(), schemas.StreamTrajectories, schemas.TrajectoryFilter(test.run, "*"))
			return err
		})
		policies, err := p.Policies(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		e.UID = "-"
		policy := policies[slices.IndexFunc(policies, func(p *schemas.Policy) bool { return p.Lane == e.Model })]
		requests, err := intake.Resolve(test.run, &e, policy,
			intake.Origin{Created: time.Now(), Reward: []string{"synthetic"}})
		if err != nil {
			t.Fatal(err)
		}
		requests[0].UID = cmp.Or(test.prompt.UID, schemas.UID(strings.Repeat("u", 8)))
		bound := requests[0].StepBytes(policy)
		info, err := p.StreamInfo(t.Context(), schemas.StreamSteps)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d: %d of %d", i, info.State.Bytes, bound)
		if took := int64(info.State.Bytes); took > bound || float64(bound) > test.loose*float64(took) {
			t.Errorf("prompt %d: its steps take %d bytes, said to be %d at most", i, took, bound)
		}
		if _, err := p.PurgeSubject(t.Context(), schemas.StreamSteps, ">"); err != nil {
			t.Fatal(err)
		}
	}
}

// Two batches, each of which takes 60 % of the space, whose groups come in turns and to two intakes side by side: the
// samples of one are made, and those of the other when its steps are freed. Begun side by side, neither could end.
func TestRoom_TwoBatchesOfSixtyPercent(t *testing.T) {
	t.Parallel()
	const groups, samples = 4, 2
	w := newWorld(t, bustest.TCP)
	c := defaults()
	c.sampler.Batch, c.sampler.Workers = 1, 8
	// A sample of 256 x 256 and 10 steps takes 0.7 MiB: a batch 5.7 MiB of 9.5.
	if err := w.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 19 << 19}); err != nil {
		t.Fatal(err)
	}
	for _, name := range append([]string{"intake"}, stages...) {
		w.Serve(t, c.run(name))
	}
	runs := []schemas.Run{"first", "second"}
	for i := range groups {
		for _, run := range runs {
			p := &schemas.Prompt{
				Prompt: "a red fox", UID: schemas.UID(fmt.Sprintf("u%d", i)), GroupSize: new(int64(samples)),
				Batch: &schemas.BatchSpec{ID: "b", Groups: groups}, ImageSettings: schemas.ImageSettings{
					NumInferenceSteps: new(int64(10)), Height: new(int64(256)), Width: new(int64(256)),
				},
			}
			if _, err := w.client.Publish(t.Context(), run, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, moved := bustest.WhileItMoves(t)
	closed := 0
	for m, err := range w.Read(ctx, schemas.StreamAdvantages, []string{schemas.BatchSubject("*", "*")},
		bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		moved()
		a, _ := schemas.ParseSubject(m.Subject)
		if _, err := w.PurgeSubject(ctx, schemas.StreamSteps, schemas.StepsFilter(a.Run, "*", "*", "*")); err != nil {
			t.Fatal(err)
		}
		if closed++; closed == len(runs) {
			return
		}
	}
	t.Fatalf("%d of 2 batches, then nothing moved", closed)
}
