package intake

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// sized is the first request of a group of n samples with so many trained steps, each
// with an advantage of its own where gamma is below 1.
func sized(t *testing.T, n, steps int64, gamma float64, change func(*schemas.Prompt)) []schemas.Request {
	t.Helper()
	p := &schemas.Prompt{
		UID: "u", Prompt: "a", GroupSize: &n, ImageSettings: schemas.ImageSettings{NumInferenceSteps: &steps},
	}
	p.Batch = &schemas.BatchSpec{ID: "b", Groups: 1}
	p.Advantage.Estimator, p.Advantage.Gamma = "reinforce_plus_plus", &gamma
	if change != nil {
		change(p)
	}
	return []schemas.Request{*resolved(t, p)[0]}
}

func TestFits_Group(t *testing.T) {
	const payload = 1<<20 - 8<<10
	for _, test := range []struct {
		n, steps int64
		gamma    float64
		limit    int
		want     string
	}{
		{1024, 50, 0.9, payload, ""},
		{1024, 60, 0.9, payload, "group_size: 1024; must be at most 8"},
		{1024, 1000, 1, payload, ""},
		{64, 1000, 0.9, payload, ""},
		{66, 1000, 0.9, payload, "group_size: 66; must be at most 6"},
		{64, 50, 0.9, payload, ""},
		{1024, 10, 1, 64 << 10, "group_size: 1024; must be at most "},
	} {
		err := checkResultSize(sized(t, test.n, test.steps, test.gamma, nil), test.limit)
		if test.want == "" && err != nil || test.want != "" &&
			(err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%d x %d, gamma %g: got %v; want %q", test.n, test.steps, test.gamma, err, test.want)
		}
	}
	r := sized(t, 64, 10, 0.9, nil)
	r[0].Text = &schemas.TextRequest{MaxNewTokens: 1000}
	if err := checkResultSize(r, payload); err != nil {
		t.Errorf("1000 tokens: %v", err)
	}
	r[0].Text.Interaction = &schemas.Interaction{MaxTurns: new(int64(3))}
	if err := checkResultSize(r, payload); err == nil ||
		!strings.Contains(err.Error(), "group_size: 64; must be at most 21 where each sample has 3000 advantages") {
		t.Errorf("three answers of 1000 tokens: got %v", err)
	}
	// What is said to fit does, and one more does not.
	limit := int64(0)
	if _, err := fmt.Sscanf(checkResultSize(sized(t, 1024, 60, 0.9, nil), payload).Error(),
		"group_size: 1024; must be at most %d", &limit); err != nil {
		t.Fatal(err)
	}
	if err := checkResultSize(sized(t, limit, 60, 0.9, nil), payload); err != nil {
		t.Errorf("%d are said to fit: %v", limit, err)
	}
	if checkResultSize(sized(t, limit+1, 60, 0.9, nil), payload) == nil {
		t.Errorf("%d fit, and %d are said to be the most", limit+1, limit)
	}
}

func TestFits_Batch(t *testing.T) {
	const payload = 1<<20 - 8<<10
	for _, test := range []struct {
		groups, rounds int64
		want           string
	}{
		{4096, 0, ""},
		{4096, 1, ""},
		{4096, 2, "batch.groups: 4096; must be at most 2730 with 2 refill_rounds"},
		{256, 16, ""},
	} {
		err := checkResultSize(sized(t, 8, 10, 1, func(p *schemas.Prompt) {
			p.Batch = &schemas.BatchSpec{ID: "b", Groups: test.groups}
			p.GroupPolicy = &schemas.GroupPolicy{ZeroStd: schemas.GroupRefill, RefillRounds: &test.rounds}
		}), payload)
		if test.want == "" && err != nil || test.want != "" &&
			(err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%d groups, %d rounds: got %v; want %q", test.groups, test.rounds, err, test.want)
		}
	}
}

// The result of a group with stages names what ran of each, and has advantages of each that is trained.
func TestFits_Stages(t *testing.T) {
	const payload = 1<<20 - 8<<10
	for _, test := range []struct {
		n, rounds, steps int64
		gamma            float64
		want             string
	}{
		{n: 1024, rounds: 1, steps: 10, gamma: 1},
		{n: 1024, rounds: 6, steps: 10, gamma: 1, want: "group_size: 1024; must be at most 6"},
		{n: 1024, rounds: 1, steps: 60, gamma: 0.9, want: "group_size: 1024; must be at most 5"},
		{n: 256, rounds: 1, steps: 60, gamma: 0.9},
		{n: 256, rounds: 4, steps: 60, gamma: 0.9, want: "group_size: 256; must be at most 1"},
	} {
		p := staged()
		p.GroupSize, p.Rounds, p.Advantage.Gamma = &test.n, &test.rounds, &test.gamma
		p.Stages = p.Stages[:2]
		p.Stages[1].Children, p.Stages[1].NumInferenceSteps = nil, &test.steps
		p.Batch, p.Advantage.Estimator = &schemas.BatchSpec{ID: "b", Groups: 1}, "reinforce_plus_plus"
		a, err := ResolveStages("r", p, []*schemas.Policy{textLane(), qwen()},
			Origin{Seq: 7, Created: time.Unix(100, 0)})
		if err != nil {
			t.Fatal(err)
		}
		err = checkResultSize(a.Record.Stages, payload)
		if said := fmt.Sprint(err); test.want == "" && err != nil || test.want != "" &&
			(!strings.Contains(said, test.want) || !strings.Contains(said, "with these stages")) {
			t.Errorf("%d samples, %d rounds of %d steps, gamma %g: got %v; want %q", test.n, test.rounds, test.steps,
				test.gamma, err, test.want)
		}
	}
}
