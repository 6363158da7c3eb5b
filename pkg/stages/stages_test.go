package stages_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// prompt has a thinker, a painter with two children and a judge.
func prompt() *schemas.Prompt {
	return &schemas.Prompt{Prompt: "12+30=?", GroupSize: new(int64(4)), Stages: []schemas.StageSpec{
		{Name: "think", Text: &schemas.Text{}},
		{Name: "paint", Prompt: `a sign that says "{think.text}"`, Children: new(int64(2))},
		{
			Name: "judge", Interaction: &schemas.Interaction{Name: "glyph_judge"}, Prompt: "{think.text}",
			ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
		},
	}}
}

func TestCheck(t *testing.T) {
	metadata, err := schemas.MetadataFrom(map[string]any{"answer": int64(42)})
	if err != nil {
		t.Fatal(err)
	}
	const known = "not known; must be prompt, metadata.KEY or STAGE.text with one of the stages think, paint, judge"
	for _, x := range []struct {
		name   string
		change func(*schemas.Prompt)
		kinds  []string
		want   string
	}{
		{"all is there", func(p *schemas.Prompt) {
			p.Stages[1].Prompt, p.Metadata = "{{{prompt}}} {metadata.answer} {think.text} }}", metadata
		}, []string{"text", "image", "interaction"}, ""},
		{"no such stage", func(p *schemas.Prompt) { p.Stages[1].Prompt = "{thnk.text}" }, nil, "stages[1].prompt: {thnk.text}: " + known},
		{"no such entry", func(p *schemas.Prompt) { p.Stages[1].Prompt = "{metadata.answer}" }, nil, "stages[1].prompt: {metadata.answer}: the prompt's metadata has no such entry"},
		{"substitute without an entry", func(p *schemas.Prompt) {
			p.Stages[1].Prompt, p.Metadata = "{metadata.answer}", metadata
			p.Substitutes = []schemas.Substitute{{Prompt: "1+1=?", Metadata: metadata}, {Prompt: "2+2=?"}}
		}, nil, "substitutes[1]: stages[1].prompt: {metadata.answer}: the prompt's metadata has no such entry"},
		{"file of a thinker", func(p *schemas.Prompt) {
			p.Stages[0].Conditions = []schemas.Condition{{Name: "image"}}
		}, []string{"text", "image", "interaction"}, "stages[0].conditions: given; must be absent: the stage makes a text, and takes no files"},
		{"no place", func(p *schemas.Prompt) { p.Stages[1].Prompt = "{}" }, nil, "stages[1].prompt: {}: " + known},
		{"brace alone", func(p *schemas.Prompt) { p.Stages[1].Prompt = "a } b" }, nil, "stages[1].prompt: a brace alone at byte 2; must be a place, such as {prompt}, or doubled"},
		{"brace left open", func(p *schemas.Prompt) { p.Stages[0].Messages = []schemas.Message{{Content: "{prompt"}} }, nil, "stages[0].messages[0].content: a brace alone at byte 0; must be a place, such as {prompt}, or doubled"},
		{"image in a text", func(p *schemas.Prompt) { p.Stages[2].Prompt = "{paint.image}" }, nil, `stages[2].prompt: {paint.image}: no text; give the image to a condition: {"name": "image", "stage": "paint"}`},
		{"other output", func(p *schemas.Prompt) { p.Stages[2].Prompt = "{paint.latents}" }, nil, `stages[2].prompt: {paint.latents}: paint has no "latents"; must be paint.text`},
		{"text of a painter", func(p *schemas.Prompt) { p.Stages[2].Prompt = "{paint.text}" }, []string{"text", "image", "interaction"}, "stages[2].prompt: {paint.text}: paint makes images, and no text"},
		{"later stage", func(p *schemas.Prompt) { p.Stages[0].Prompt = "{judge.text}" }, nil, "stages[0].prompt: {judge.text}: judge comes later; must be an earlier stage, or rounds above 1, in the first of which its text is empty"},
		{"itself", func(p *schemas.Prompt) { p.Stages[0].NegativePrompt = new("{think.text}") }, nil, "stages[0].negative_prompt: {think.text}: think comes later; must be an earlier stage, or rounds above 1, in the first of which its text is empty"},
		{"later stage of the round before", func(p *schemas.Prompt) { p.Stages[0].Prompt, p.Rounds = "{judge.text}", new(int64(3)) }, nil, ""},
		{"later image", func(p *schemas.Prompt) {
			p.Stages[1].Conditions, p.Rounds = []schemas.Condition{{Name: "image", Stage: "paint"}}, new(int64(3))
		}, nil, `stages[1].conditions[0].stage: "paint"; must be an earlier stage`},
		{"image of a thinker", func(p *schemas.Prompt) { p.Stages[2].Conditions[0].Stage = "think" }, []string{"text", "image", "interaction"}, `stages[2].conditions[0].stage: "think"; must be a stage that makes images, and this one makes text`},
	} {
		t.Run(x.name, func(t *testing.T) {
			p := prompt()
			x.change(p)
			got := ""
			if err := stages.Check(p, x.kinds); err != nil {
				got = err.Error()
			}
			if got != x.want {
				t.Errorf("Check = %q, want %q", got, x.want)
			}
		})
	}
}

// record is of four samples: two thoughts, each painted twice, each painting judged; three rounds where each is painted
// once.
func record(t *testing.T, every, rounds int64) *schemas.GroupRecord {
	g := schemas.Group{Batch: "g", Rounds: rounds, Stages: []schemas.GroupStage{
		{Name: "think", Kind: schemas.StageText, Lane: "sums", Every: every},
		{Name: "paint", Kind: schemas.KindImage, Lane: "signs", Every: 1},
		{Name: "judge", Kind: schemas.StageInteraction, Lane: "glyph_judge", Every: 1},
	}}
	text := schemas.TextRequest{
		TopP: 1, TokensPerEvent: 1, Vocabulary: 10,
		Messages: []schemas.Message{{Role: "user", Content: "{prompt}{judge.text}"}},
	}
	said := text
	said.Messages = []schemas.Message{{Role: "assistant", Content: "{think.text}"}}
	said.Interaction = &schemas.Interaction{Name: "glyph_judge", MaxTurns: new(rounds), TimeoutMS: new(int64(1000))}
	at := func(i int) schemas.Identity {
		return schemas.Identity{Run: "r", UID: "g", Stage: g.Stages[i].Name, GroupSize: 4, Lane: g.Stages[i].Lane}
	}
	return &schemas.GroupRecord{
		Run: "r", UID: "g", GroupSize: 4, Prompt: "12+30=? {", Group: g, Seed: new(int64(7)),
		Stages: []schemas.Request{
			{Identity: at(0), Text: &text},
			{Identity: at(1), Sampling: schemas.Sampling{
				Prompt: `says "{think.text}"`, SampleSeed: 1, NoiseSeed: 2, Sigmas: []float32{1, 0}, Transitions: []string{"ode"},
				Height: 64, Width: 64, Solver: "euler", LogProbKind: "density", LatentsDType: "F32",
			}},
			{
				Identity: at(2), Text: &said,
				Sampling: schemas.Sampling{Conditions: []schemas.Condition{{Name: "image", Type: "image", Stage: "paint"}}},
			},
		},
	}
}

func made(stage schemas.Stage, text string) *schemas.Trajectory {
	return &schemas.Trajectory{
		Identity: schemas.Identity{Stage: stage, SampleIndex: 2}, Outcome: schemas.Outcome{StopReason: schemas.StopCompleted},
		Text: &schemas.TextResult{Turns: []schemas.Turn{{Generated: true, Text: text}}},
	}
}

func painted(stage schemas.Stage) *schemas.Trajectory {
	return &schemas.Trajectory{
		Identity: schemas.Identity{Stage: stage, SampleIndex: 2}, Outcome: schemas.Outcome{StopReason: schemas.StopCompleted},
		Media: []schemas.Medium{{Kind: "image", Data: []byte(stage)}},
	}
}

func put(data []byte) (schemas.Ref, error) {
	return schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("a", 64), Size: int64(len(data))}, nil
}

func TestNext(t *testing.T) {
	g := &record(t, 2, 1).Group
	if got, want := stages.First(g, 4), []stages.Place{
		{Stage: "think", SampleIndex: 0},
		{Stage: "think", SampleIndex: 2},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("First = %v, want %v", got, want)
	}
	if got, want := stages.Next(g, made("think", "42")), []stages.Place{
		{Stage: "paint", SampleIndex: 2},
		{Stage: "paint", SampleIndex: 3},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("Next of a thought = %v, want %v", got, want)
	}
	failed := made("think", "")
	failed.StopReason = schemas.StopFailed
	if got := stages.Next(g, failed); got != nil {
		t.Errorf("Next of a failed thought = %v, want none", got)
	}
	if got := stages.Next(g, made("judge", "good")); got != nil {
		t.Errorf("Next of the last judgement = %v, want none", got)
	}
	g.Rounds = 3
	if got, want := stages.Next(g, made("judge-2", "bad")),
		[]stages.Place{{Stage: "think-3", SampleIndex: 2}}; !reflect.DeepEqual(got, want) {
		t.Errorf("Next of a judgement = %v, want %v", got, want)
	}
	ended := made("judge-2", "good")
	ended.Text.SaidBy, ended.Text.Conversation = "glyph_judge", schemas.ConversationTerminated
	if got := stages.Next(g, ended); got != nil {
		t.Errorf("Next of a judgement that ends the sample = %v, want none", got)
	}
}

func TestPath(t *testing.T) {
	g := &record(t, 2, 1).Group
	if got, want := stages.Path(g, 3, ""), []stages.Place{
		{Stage: "think", SampleIndex: 2},
		{Stage: "paint", SampleIndex: 3},
		{Stage: "judge", SampleIndex: 3},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("Path = %v, want %v", got, want)
	}
	if got, want := stages.Path(g, 3, "paint"), []stages.Place{
		{Stage: "think", SampleIndex: 2},
		{Stage: "paint", SampleIndex: 3},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("Path to paint = %v, want %v", got, want)
	}
	if from, to := stages.Leaves(g, stages.Place{Stage: "think", SampleIndex: 2}); from != 2 || to != 4 {
		t.Errorf("Leaves of thought 2 = %d to %d, want 2 to 4", from, to)
	}
}

func TestRequest_texts(t *testing.T) {
	x := record(t, 1, 3)
	request := func(at schemas.Stage, before ...*schemas.Trajectory) *schemas.Request {
		t.Helper()
		r, err := stages.Request(x, stages.Place{Stage: at, SampleIndex: 2}, before, put)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := request("think")
	if got, want := first.Prompt, "12+30=? {"; got != want || first.Stage != "think" || first.SampleIndex != 2 ||
		first.UID != "g" {
		t.Errorf("first request: prompt %q of %+v, want %q", got, first.Identity, want)
	}
	round := []*schemas.Trajectory{made("think", "41"), painted("paint"), made("judge", "wrong")}
	paint := request("paint", round[:1]...)
	if want := `says "41"`; paint.Prompt != want {
		t.Errorf("prompt of the painter %q, want %q", paint.Prompt, want)
	}
	if other := request("paint-2", round[:1]...); other.SampleSeed == paint.SampleSeed ||
		other.NoiseSeed == paint.NoiseSeed {
		t.Errorf("seeds of two rounds are equal: %d", other.SampleSeed)
	}
	again := request("think-2", round...)
	if want := "12+30=? {wrong"; again.Prompt != want {
		t.Errorf("prompt of the second round %q, want %q", again.Prompt, want)
	}
	judge := request("judge", round[:2]...)
	want := []schemas.Message{{Role: "user", Content: "12+30=? {"}, {Role: "assistant", Content: "41"}}
	if !reflect.DeepEqual(judge.Text.Messages, want) || judge.Conditions[0].Ref == nil {
		t.Errorf("the judge is told %v and shown %v, want %v and the image", judge.Text.Messages, judge.Conditions,
			want)
	}
	round[2].Text.Settings = *judge.Text
	judge = request("judge-2", append(round, made("think-2", "42"), painted("paint-2"))...)
	want = append(want, schemas.Message{Role: "user", Content: "wrong"},
		schemas.Message{Role: "assistant", Content: "42"})
	if !reflect.DeepEqual(judge.Text.Messages, want) || judge.Conditions[0].Ref.Size != int64(len("paint-2")) {
		t.Errorf("in round 2 the judge is told %v and shown %v, want %v and the image of round 2", judge.Text.Messages,
			judge.Conditions, want)
	}
}

func TestRequest_faults(t *testing.T) {
	x := record(t, 1, 1)
	for _, c := range []struct {
		at   schemas.Stage
		made []*schemas.Trajectory
		want string
	}{
		{"paint", []*schemas.Trajectory{made("think", strings.Repeat("1", 1<<15))}, "stage paint: prompt: 32775 bytes; must be at most 16384"},
		{"judge", []*schemas.Trajectory{made("think", "1")}, "stage judge: conditions: image: stage paint made no image"},
		{"draw", nil, "stage draw: not one of the group's stages"},
	} {
		_, err := stages.Request(x, stages.Place{Stage: c.at, SampleIndex: 2}, c.made, put)
		if _, fault := errors.AsType[*stages.Fault](err); !fault || err.Error() != c.want {
			t.Errorf("%s: %v, want %s", c.at, err, c.want)
		}
	}
	full := func([]byte) (schemas.Ref, error) { return schemas.Ref{}, errors.New("no space") }
	_, err := stages.Request(x, stages.Place{Stage: "judge", SampleIndex: 2},
		[]*schemas.Trajectory{made("think", "1"), painted("paint")}, full)
	if _, fault := errors.AsType[*stages.Fault](err); fault || err == nil {
		t.Errorf("a store that is full: %v, want an error that may pass", err)
	}
}

// A function judges the newest output that it may; what a lane made last stands for the sample, or what failed.
func TestJudged(t *testing.T) {
	g := &record(t, 1, 3).Group
	g.Stages = append(g.Stages,
		schemas.GroupStage{Name: "rewrite", Kind: schemas.StageText, Every: 1, JudgedBy: []string{"length"}},
		schemas.GroupStage{Name: "repaint", Kind: schemas.KindImage, Every: 1, JudgedBy: []string{"glyph", "ocr"}})
	g.Stages[0].JudgedBy, g.Stages[1].JudgedBy = []string{"length"}, []string{"glyph"}
	all := func(list ...*schemas.Trajectory) []*schemas.Trajectory {
		for _, m := range list {
			m.Group = *g
		}
		return list
	}
	ended := all(made("think", "42"), painted("paint"), made("judge", "right"))
	whole := append(ended[:3:3], all(made("rewrite", "43"), painted("repaint"))...)
	second := append(whole[:5:5], all(made("think-2", "44"), painted("paint-2"), made("judge-2", "right"))...)
	failed := append(ended[:1:1], all(painted("paint"), made("judge", ""))...)
	failed[2].StopReason = schemas.StopFailed
	for _, c := range []struct {
		name string
		made []*schemas.Trajectory
		want schemas.Stage
	}{
		{"length", ended, "think"},
		{"length", whole, "rewrite"},
		{"length", second, "think-2"},
		{"glyph", ended, "paint"},
		{"glyph", whole, "repaint"},
		{"glyph", second, "paint-2"},
		{"glyph", ended[:1], ""},
		{"ocr", ended, ""},
		{"ocr", second, "repaint"},
		{"other", second, ""},
		{"", ended, "paint"},
		{"", whole, "repaint"},
		{"", second, "paint-2"},
		{"", failed, "judge"},
		{"", nil, ""},
	} {
		got := stages.Judged(g, &schemas.RewardSpec{Name: c.name}, c.made)
		if c.name == "" && stages.Standing(c.made) >= 0 {
			got = c.made[stages.Standing(c.made)]
		}
		if got == nil && c.want != "" || got != nil && got.Stage != c.want {
			t.Errorf("%q of %d trajectories: %+v, want %s", c.name, len(c.made), got, c.want)
		}
	}
}

// A short template that names a long text often is not built: neither before a stage runs nor after it.
func TestCheck_longTexts(t *testing.T) {
	p := &schemas.Prompt{Prompt: strings.Repeat("1", schemas.MaxPromptBytes), Stages: []schemas.StageSpec{
		{Name: "think"}, {Name: "paint", Prompt: strings.Repeat("{prompt}", 2000)},
	}}
	want := "stages[1].prompt: filled, 32768 bytes and more; must be at most 16384"
	if err := stages.Check(p, nil); err == nil || err.Error() != want {
		t.Errorf("Check = %v, want %s", err, want)
	}
	p.Stages[1].Prompt = "{prompt}"
	if err := stages.Check(p, nil); err != nil {
		t.Errorf("a text of just the size is refused: %v", err)
	}
	x := record(t, 1, 1)
	x.Stages[1].Prompt = strings.Repeat("{think.text}", 1000)
	want = "stage paint: prompt: filled, 600000 bytes and more; must be at most 524288"
	if _, err := stages.Request(x, stages.Place{Stage: "paint"},
		[]*schemas.Trajectory{made("think", strings.Repeat("1", 200000))}, put); err == nil ||
		!strings.HasPrefix(err.Error(), want) {
		t.Errorf("Request = %v, want %s", err, want)
	}
}
