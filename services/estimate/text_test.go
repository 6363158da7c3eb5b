package estimate_test

import (
	"context"
	"testing"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/pipeline"
)

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
			p.Add(encode(t, &schemas.Prompt{Prompt: "347+58=?", GroupSize: new(int64(8)), Text: &schemas.Text{Logits: l}}))
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
