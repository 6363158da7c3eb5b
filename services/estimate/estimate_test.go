package estimate_test

import (
	"context"
	"encoding/json"
	"fmt"
	"image"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/pipeline"
)

// What a data set would take of the pipeline that this process would be.
func Example() {
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	facts, err := estimate.FromConfig(context.Background(), config)
	if err != nil {
		fmt.Println(err)
		return
	}
	p := estimate.New(facts)
	for _, solver := range []string{"euler", "heun", "guess"} {
		prompt, err := schemas.Encode(&schemas.Prompt{
			Prompt: "a red fox", GroupSize: new(int64(4)),
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{
				Solver: solver, SDEStepIndices: []int64{1, 2},
			}},
		})
		if err != nil {
			fmt.Println(err)
			return
		}
		p.Add(prompt)
	}
	fmt.Printf("%d groups, %d refused; %d samples of %s: %d steps, %d evaluations of the model\n", p.Groups, p.Refused,
		p.Samples, p.ImageSize, p.Steps, p.Evaluations)
	for _, s := range p.Streams {
		fmt.Println(s.Name, s.Bytes > 0, s.Fits())
	}
	// Output:
	// 2 groups, 1 refused; 8 samples of 64 x 64 pixels: 80 steps, 112 evaluations of the model
	// MDR_PROMPTS true true
	// MDR_STEPS true true
	// MDR_TRAJECTORIES true true
	// OBJ_mdr-blobs true true
}

func encode(t *testing.T, p *schemas.Prompt) []byte {
	t.Helper()
	return bustest.Encode(t, p)
}

// policy is that of the closed-form model under another name: 64 x 64 pixels, [16, 64] latents,
// 10 steps.
func policy(t *testing.T, lane schemas.Lane) *schemas.Policy {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	facts, err := estimate.FromConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	p := facts.Policies[0]
	p.Lane, p.Model, p.Reward = lane, string(lane), []string{"glyph", "jpeg_compressibility"}
	return p
}

// What groups do not have in common is left out of the sum; what there is of each is in it.
func TestEstimate_Sum(t *testing.T) {
	p := estimate.New(&estimate.Facts{Policies: []*schemas.Policy{policy(t, "m")}})
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(2))}))
	if p.NumInferenceSteps != 10 || p.ImageSize != "64 x 64 pixels" || p.LatentsKept != 11 ||
		fmt.Sprint(p.LatentsShape) != "[16 64]" {
		t.Errorf("one group: %+v", *p.Cost)
	}
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(3)), ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4)), Height: new(int64(32)), TrueCFGScale: new(2.0)}}))
	if p.NumInferenceSteps != 0 || p.ImageSize != "" || p.LatentsShape != nil || p.Settings.TrueCFGScale != 0 {
		t.Errorf("groups that differ: %+v", *p.Cost)
	}
	if p.Samples != 5 || p.Steps != 2*10+3*4 || p.Evaluations != 2*10+3*4*2 || p.ImageBytes != 3*(2*64*64+3*32*64) {
		t.Errorf("the sum: %+v", *p)
	}
	if fmt.Sprint(p.GroupSizes, p.Reward) != "[2 3] [glyph + jpeg_compressibility (default)]" {
		t.Errorf("group sizes and rewards: %v %v", p.GroupSizes, p.Reward)
	}
}

// Steps without guidance count once, whatever the solver, and the guidance input of a network is shown.
func TestEstimate_Guidance(t *testing.T) {
	lane := policy(t, "m")
	lane.Guidance, lane.BoundaryRatio = 3.5, 0.75
	for _, c := range []struct {
		settings    schemas.ImageSettings
		guided      int64
		evaluations int64
	}{
		{schemas.ImageSettings{TrueCFGScale: new(2.0)}, 10, 2 * 20},
		{schemas.ImageSettings{TrueCFGScale: new(2.0), CFGUntil: new(0.3)}, 3, 2 * 13},
		{schemas.ImageSettings{
			TrueCFGScale: new(2.0), CFGUntil: new(0.3), Rollout: schemas.Rollout{SDEType: "ode", Solver: "heun"},
		}, 3, 2 * 2 * 13},
		{schemas.ImageSettings{
			TrueCFGScale: new(2.0), CFGUntil: new(0.3), Stop: &schemas.Stop{StepIndex: new(int64(2))},
		}, 3, 2 * 4},
		{schemas.ImageSettings{TrueCFGScale: new(2.0), TrueCFGScale2: new(1.0)}, 4, 2 * 14},
		{schemas.ImageSettings{TrueCFGScale: new(2.0), TrueCFGScale2: new(3.0)}, 10, 2 * 20},
		{schemas.ImageSettings{TrueCFGScale: new(1.0), Guidance: new(7.0)}, 0, 2 * 10},
	} {
		p := estimate.New(&estimate.Facts{Policies: []*schemas.Policy{lane}})
		p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(2)), ImageSettings: c.settings}))
		want := 3.5
		if c.settings.Guidance != nil {
			want = *c.settings.Guidance
		}
		if p.Cost == nil || p.GuidedSteps != c.guided || p.Evaluations != c.evaluations || p.Settings.Guidance != want {
			t.Errorf("%+v: %s %+v; want %d guided steps, %d evaluations, guidance %v", c.settings, p.Reason, p.Cost,
				c.guided, c.evaluations, want)
		}
	}
}

// Files of conditions are stored once for all samples of a prompt; one that is missing is refused.
func TestEstimate_Conditions(t *testing.T) {
	lane := policy(t, "m")
	var err error
	lane.Pipeline, err = json.Marshal(&model.Pipeline{
		Class: "EditPipeline", Conditions: []model.Input{{Name: "image", Type: model.InputImage, Required: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	file, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 8, 8)))
	if err != nil {
		t.Fatal(err)
	}
	p := estimate.New(&estimate.Facts{Policies: []*schemas.Policy{lane}})
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(4)), ImageSettings: schemas.ImageSettings{
		Conditions: []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: file}}},
	}}))
	if want := 4 * (3*2*64*64/2 + (int64(len(file))+3)/4); p.Cost == nil || p.ImageBytes != want {
		t.Fatalf("%s: %+v; want %d bytes of images", p.Reason, p.Cost, want)
	}
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(4))}))
	if p.Refused != 1 || !strings.Contains(p.Refusals[0].Reason, "conditions: image: absent") {
		t.Errorf("a missing condition: %+v", p.Refusals)
	}
}

// Encoded texts are counted once for all samples of a prompt.
func TestEstimate_Conditioning(t *testing.T) {
	p := estimate.New(&estimate.Facts{Policies: []*schemas.Policy{policy(t, "m")}})
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(4))}))
	if p.ConditioningBytes != 0 || p.Streams[3].Bytes != p.ImageBytes {
		t.Errorf("no model was asked: %+v", *p.Cost)
	}
	p = estimate.New(&estimate.Facts{Policies: []*schemas.Policy{policy(t, "m")}})
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`, GroupSize: new(int64(4)), ImageSettings: schemas.ImageSettings{TrueCFGScale: new(2.0), Rollout: schemas.Rollout{ReturnConditioning: true}}}))
	one := p.ConditioningBytes / 2 // the negative prompt has as many tokens: one
	if one == 0 || p.ConditioningOfSample != (2*one+3)/4 ||
		p.Streams[3].Bytes != p.ImageBytes+4*p.ConditioningOfSample {
		t.Errorf("both texts: %+v", *p.Cost)
	}
}

func TestEstimate_Refused(t *testing.T) {
	p := estimate.New(&estimate.Facts{Policies: []*schemas.Policy{policy(t, "m")}})
	p.Add([]byte("no prompt"))
	for reason, prompt := range map[string]*schemas.Prompt{
		"reward":   {Prompt: "a fox", Reward: []schemas.RewardSpec{{Name: "nobody"}}},
		"size":     {Prompt: "a fox", ImageSettings: schemas.ImageSettings{Height: new(int64(17))}},
		"steps":    {Prompt: "a fox", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{12}}}},
		"estimate": {Prompt: "a fox", Advantage: schemas.AdvantageSpec{Estimator: "guess"}},
	} {
		before := p.Refused
		if p.Add(encode(t, prompt)); p.Refused != before+1 {
			t.Errorf("%s: not refused", reason)
		}
	}
	if p.Groups != 0 || p.Samples != 0 || p.Cost != nil || p.Reason == "" {
		t.Errorf("after refused prompts alone: %+v", *p)
	}
}

// Samples are sure to overfill the stream of steps; images, whose size is a bound, are not.
func TestEstimate_Overfull(t *testing.T) {
	facts := &estimate.Facts{Policies: []*schemas.Policy{policy(t, "m")}, Capacity: map[string]estimate.StreamCapacity{
		schemas.StreamPrompts: {Limit: 1 << 20}, schemas.StreamSteps: {Used: 1000, Limit: 20_000},
		"OBJ_mdr-blobs": {Limit: 1},
	}}
	p := estimate.New(facts)
	p.Add(encode(t, &schemas.Prompt{Prompt: `a "b"`}))
	over := p.Overfull()
	if len(over) != 1 || over[0].Name != schemas.StreamSteps || over[0].Used != 1000 || over[0].Fits() {
		t.Errorf("overfull %+v, want the steps", over)
	}
}

// Prompts go where intake sends them.
func TestFacts_Policy(t *testing.T) {
	a, b := policy(t, "a"), policy(t, "b")
	for _, c := range []struct {
		name  string
		facts estimate.Facts
		model schemas.Lane
		want  *schemas.Policy
	}{
		{"the one there is", estimate.Facts{Policies: []*schemas.Policy{a}}, "", a},
		{"the one that lives", estimate.Facts{Policies: []*schemas.Policy{a, b}, Live: []schemas.Lane{"b"}}, "", b},
		{"none of two", estimate.Facts{Policies: []*schemas.Policy{a, b}}, "", nil},
		{"by name", estimate.Facts{Policies: []*schemas.Policy{a, b}, Live: []schemas.Lane{"b"}}, "a", a},
		{"unknown", estimate.Facts{Policies: []*schemas.Policy{a}}, "c", nil},
	} {
		if got := c.facts.Policy(c.model); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// A pipeline is asked for its models and for the room it has.
func TestAsk(t *testing.T) {
	b := bustest.New(t).Bus
	if err := b.SetPolicy(t.Context(), policy(t, "a"), nil); err != nil {
		t.Fatal(err)
	}
	facts, err := estimate.FromServer(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if p := facts.Policy(""); p == nil || p.Lane != "a" || len(facts.Live) != 0 ||
		facts.Capacity[schemas.StreamSteps].Limit == 0 {
		t.Errorf("facts %+v", facts)
	}
}

// Full logits of a large vocabulary make a run large from a GiB on; the twenty likeliest do not.
func TestEstimate_Large(t *testing.T) {
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "../../deploy/models/sums"
	facts, err := estimate.FromConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	facts.Policies[0].Text.Vocabulary = 151936
	of := func(groups int, l *schemas.Logits) *estimate.Estimate {
		p := estimate.New(facts)
		for range groups {
			p.Add(encode(t, &schemas.Prompt{
				Prompt: "347+58=?", GroupSize: new(int64(8)), Text: &schemas.Text{Logits: l},
			}))
		}
		if p.Refused > 0 || p.Groups != groups {
			t.Fatalf("%d of %d groups refused: %s", p.Refused, groups, p.Reason)
		}
		return p
	}
	full := &schemas.Logits{Form: "full", DType: "F16"}
	least := 1
	for ; !of(least, full).Large(); least++ {
		if least == 1000 {
			t.Fatal("a thousand groups with full logits are not large")
		}
	}
	if at, before := of(least, full), of(least-1, full); at.StepBytes < 1<<30 || before.StepBytes >= 1<<30 {
		t.Errorf("large from %d bytes on, and not at %d; must be from 1 GiB", at.StepBytes, before.StepBytes)
	}
	if p := of(least, &schemas.Logits{Form: "topk", K: new(int64(20)), DType: "F16"}); p.Large() {
		t.Errorf("the twenty likeliest: %d bytes are large", p.StepBytes)
	}
}
