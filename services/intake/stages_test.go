package intake

import (
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// textLane is the policy of a lane of texts.
func textLane() *schemas.Policy {
	return &schemas.Policy{
		Tenant: schemas.TenantMain, Lane: "sums", Model: "sums", WeightsDigest: "w",
		Text: &schemas.TextPolicy{Vocabulary: 100, MaxTokens: 64, MaxNewTokens: 8, Temperature: 1, TopP: 1},
	}
}

// staged has a thinker, a painter and a judge.
func staged() *schemas.Prompt {
	return &schemas.Prompt{
		UID: "g", Prompt: "12+30=?", GroupSize: new(int64(4)), Seed: new(int64(3)),
		Reward: []schemas.RewardSpec{{Name: "glyph", GroundTruth: "42"}, {Name: "confidence"}},
		Stages: []schemas.StageSpec{
			{Name: "think"},
			{Name: "paint", Prompt: `says "{think.text}"`, Children: new(int64(2)), Credit: []schemas.CreditShare{{Reward: "glyph", Weight: 1}}},
			{
				Name: "judge", Interaction: &schemas.Interaction{Name: "critic"},
				ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
			},
		},
	}
}

func resolveStaged(p *schemas.Prompt) (*asked, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	policies := []*schemas.Policy{textLane(), qwen(), nil}
	if p.Stages[2].Interaction == nil {
		policies[2] = qwen()
	}
	return ResolveStages("r", p, policies, Origin{
		Seq: 7, Created: time.Unix(100, 0), Reward: []string{"jpeg_compressibility"},
	})
}

// A reward function judges the stage that it names, or all whose output it takes; requests of the first stage are there
// for every second sample.
func TestResolveStages(t *testing.T) {
	a, err := resolveStaged(staged())
	if err != nil {
		t.Fatal(err)
	}
	g := &a.Record.Group
	if s := g.Stages; g.Reward[0].Stage != "" || g.Rounds != 1 || len(s) != 3 ||
		!slices.Equal(s[0].JudgedBy, []string{"confidence"}) || !slices.Equal(s[1].JudgedBy, []string{"glyph"}) {
		t.Errorf("rewards %+v of stages %+v", g.Reward, g.Stages)
	}
	if s := g.Stages; s[0].Kind != schemas.StageText || s[0].Every != 2 || s[1].Kind != schemas.KindImage ||
		s[1].Every != 1 || s[2].Lane != "critic" {
		t.Errorf("stages %+v", s)
	}
	if len(a.requests) != 2 || a.requests[1].SampleIndex != 2 || a.requests[1].Stage != "think" ||
		a.requests[1].Text.Messages[0].Content != "12+30=?" {
		t.Errorf("requests %+v", a.requests)
	}
	if n := len(a.sizes()); n != 2+4+4 || a.stepBytes() <= 0 {
		t.Errorf("%d samples of all stages take %d bytes", n, a.stepBytes())
	}
	if r := a.receipt(nil); r.Samples != 4 || r.AllSteps() <= 4 {
		t.Errorf("receipt %+v", r)
	}
	again, err := resolveStaged(staged())
	if err != nil || again.Record.PromptDigest != a.Record.PromptDigest {
		t.Errorf("the same prompt has another digest: %v", err)
	}
	other := staged()
	other.Stages[1].Prompt += "!"
	if again, err = resolveStaged(other); err != nil || again.Record.PromptDigest == a.Record.PromptDigest {
		t.Errorf("another template has the same digest: %v", err)
	}
}

// Without a name a function judges all stages that make what it takes; with one that stage alone, and intake says when
// a judge may end the sample before.
func TestResolveStages_Judged(t *testing.T) {
	p := staged()
	p.GroupSize, p.Stages[1].Children, p.Stages[1].Credit = new(int64(2)), nil, nil
	p.Stages = append(p.Stages, schemas.StageSpec{Name: "rewrite"}, schemas.StageSpec{Name: "repaint", Prompt: `says "{rewrite.text}"`})
	p.Reward = []schemas.RewardSpec{
		{Name: "glyph", GroundTruth: "42"},
		{Name: "external:human"},
		{Name: "jpeg_compressibility", Stage: "repaint"},
		{Name: "confidence", Stage: "think"},
	}
	policies := []*schemas.Policy{textLane(), qwen(), nil, textLane(), qwen()}
	a, err := ResolveStages("r", p, policies, Origin{Seq: 7, Created: time.Unix(100, 0)})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]string{
		{"confidence"}, {"glyph", "external:human"}, nil, nil, {"glyph", "external:human", "jpeg_compressibility"},
	} {
		if got := a.Record.Group.Stages[i].JudgedBy; !slices.Equal(got, want) {
			t.Errorf("stage %d is judged by %v, want %v", i, got, want)
		}
	}
	want := []string{"reward: jpeg_compressibility will fail where judge ends the sample before repaint; without " +
		"stage it judges the newest output"}
	if got := Unscored(a.requests[0]); !slices.Equal(got, want) {
		t.Errorf("warnings %q, want %q", got, want)
	}
	p.Reward = nil
	o := Origin{Seq: 7, Created: time.Unix(100, 0), Reward: []string{"jpeg_compressibility"}}
	if a, err = ResolveStages("r", p, policies, o); err != nil {
		t.Fatal(err)
	}
	if s := a.Record.Group.Stages; len(s[1].JudgedBy) != 1 || len(s[4].JudgedBy) != 1 || len(s[0].JudgedBy) != 0 {
		t.Errorf("default functions judge %+v", s)
	}
}

func TestResolveStages_Refused(t *testing.T) {
	for _, x := range []struct {
		name   string
		change func(*schemas.Prompt)
		want   string
	}{
		{"text of a painter", func(p *schemas.Prompt) { p.Stages[2].Prompt = "{paint.text}" }, "stages[2].prompt: {paint.text}: paint makes images, and no text"},
		{"condition of a lane that takes none", func(p *schemas.Prompt) {
			p.Stages = append(p.Stages[:2], schemas.StageSpec{
				Name:          "again",
				ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
			})
		}, `stages[2]: conditions: image; must be absent, the network of model "q" takes none`},
		{"reward of another stage", func(p *schemas.Prompt) { p.Reward[0].Stage = "think" }, ""},
		{"group function", func(p *schemas.Prompt) { p.Reward[1].GroupMin = 2 }, "stages[0]: reward[0]: group_min: 2; must be absent: it is for functions of one's own, http:NAME and nats:NAME, and not for confidence"},
		{"optional credit", func(p *schemas.Prompt) { p.Reward[0].Required = new(false) }, "stages[1].credit: rewards that are all optional; must have one that is required: else a sample could have none"},
		{"track of an image", func(p *schemas.Prompt) { p.Stages[1].Credit[0].Track = "sound" }, `stages[1].credit[0].track: "sound"; must be one of the states' tracks, which are one`},
		{"gdpo of nothing", func(p *schemas.Prompt) {
			p.Advantage, p.Batch = schemas.AdvantageSpec{Estimator: "gdpo"}, &schemas.BatchSpec{ID: "b", Groups: 2}
			p.Stages[1].Credit[0].Weight = -1
		}, "stages[1].credit: weights of -1 in all; must be above 0 with gdpo"},
		{"setting of the other kind", func(p *schemas.Prompt) { p.Stages[0].Height = new(int64(64)) }, "stages[0]: height: given; must be absent beside text: it is for images"},
		{"text for a painter", func(p *schemas.Prompt) { p.Stages[1].Text = &schemas.Text{} }, `stages[1]: text: given, or messages; must be absent: model "q" makes images`},
		{"judge without a sum", func(p *schemas.Prompt) { p.Prompt, p.Stages[2].Interaction.Name, p.Reward = "hello", "sums", nil }, "stages[1].credit[0].reward: \"glyph\"; must be one of the prompt's reward"},
	} {
		t.Run(x.name, func(t *testing.T) {
			p := staged()
			x.change(p)
			_, err := resolveStaged(p)
			if err == nil || x.want != "" && err.Error() != x.want {
				t.Errorf("error %v, want %s", err, x.want)
			}
		})
	}
}
