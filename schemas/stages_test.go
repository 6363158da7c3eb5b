package schemas_test

import (
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// stagesPrompt has a thinker, a painter with two children and a judge.
func stagesPrompt() *schemas.Prompt {
	return &schemas.Prompt{
		Prompt: "12+30=?", GroupSize: new(int64(8)), Reward: []schemas.RewardSpec{
			{Name: "glyph", GroundTruth: "42", Stage: "paint"}, {Name: "length", Stage: "think"},
		},
		Stages: []schemas.StageSpec{
			{
				Name: "think", Routing: schemas.Routing{Model: "sums"}, Text: &schemas.Text{MaxNewTokens: new(int64(8))},
				Credit: []schemas.CreditShare{{Reward: "glyph", Weight: 1}, {Reward: "length", Weight: 0.5}},
			},
			{
				Name: "paint", Routing: schemas.Routing{Model: "signs"}, Prompt: `a blue sign that says "{think.text}"`,
				Children: new(int64(2)), Frozen: true,
				ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4)), Rollout: schemas.Rollout{SDEType: "sde"}},
			},
			{
				Name: "judge", Interaction: &schemas.Interaction{Name: "glyph_judge"}, Prompt: "{think.text}",
				ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
			},
		},
	}
}

func stagesGroup(t testing.TB) schemas.Group {
	g := fullGroup(t)
	g.Stages = []schemas.GroupStage{
		{Name: "think", Kind: "text", Lane: "sums", Every: 2, Credit: []schemas.CreditShare{{Reward: "ocr", Weight: 1}}},
		{Name: "paint", Kind: "image", Lane: "signs", Every: 1, Frozen: true},
	}
	g.Rounds = 2
	return g
}

func stagesSamples(t testing.TB) []sample {
	t.Helper()
	request, said := fullRequest(t), textTrajectory(t)
	request.V, request.Stage, request.SampleIndex, request.Group, request.Lane = schemas.Version, "paint-2", 3,
		stagesGroup(t), "signs"
	request.Conditions = []schemas.Condition{{
		Name: "image", Type: "image", Stage: "think", DataImage: conditions()[0].DataImage,
	}}
	request.ScheduleDigest = request.ComputeScheduleDigest()
	said.Stage, said.SampleIndex, said.Lane, said.Group = "judge", 3, "glyph_judge", stagesGroup(t)
	said.Group.Stages[1] = schemas.GroupStage{Name: "judge", Kind: "interaction", Lane: "glyph_judge", Every: 1}
	said.Steps, said.Conditions = nil, conditions()
	said.Text = &schemas.TextResult{
		Settings: said.Text.Settings, SaidBy: "glyph_judge", Conversation: "terminated",
		Turns: []schemas.Turn{{Generated: true, FinishReason: "stop", Text: "it says 41", Score: new(0.5)}},
	}
	reward := stagesReward(t)
	advantage := completeAdvantage(t)
	advantage.GroupSize, advantage.Members = 4, append(advantage.Members,
		schemas.Member{SampleIndex: 3, Status: "missing"})
	advantage.Members[1].Stages = []schemas.StageResult{
		{Stage: "think", SampleIndex: 0, TrajectorySeq: 40},
		{Stage: "paint", SampleIndex: 1, TrajectorySeq: 41},
	}
	advantage.Credits = []schemas.Credit{{Stage: "think", Every: 2, Values: []*float64{new(0.5), nil}}}
	record := &schemas.GroupRecord{
		Run: "run-1", UID: "p17", GroupSize: 8, PromptDigest: digestOf("prompt"), Prompt: "12+30=?", Lane: "sums",
		ScheduleDigest: digestOf("schedule"), Group: stagesGroup(t),
	}
	record.Stages, record.Seed = []schemas.Request{*request}, new(int64(7))
	return []sample{
		{"prompt-stages", stagesPrompt()},
		{"request-stages", request},
		{"trajectory-said", said},
		{"reward-stages", reward},
		{"advantage-stages", advantage},
		{"group-stages", record},
	}
}

// stagesReward is that of a sample of two stages.
func stagesReward(t testing.TB) *schemas.Reward {
	x := schemas.Trained{
		TrainedSteps: 2, ScheduleDigest: digestOf("schedule"), PolicyVersionMin: 5, PolicyVersionMax: 6,
	}
	return &schemas.Reward{
		Run: "run-1", UID: "p17", SampleIndex: 3, GroupSize: 8, Status: "scored", Reward: new(1.75), Scores: []schemas.Score{},
		TrajectorySeq: 41, Trained: x, Group: stagesGroup(t),
		Stages: []schemas.StageScored{
			{
				StageResult: schemas.StageResult{Stage: "think", SampleIndex: 2, TrajectorySeq: 40}, Lane: "sums",
				ContentDigest: digestOf("content"), Trained: schemas.Trained{Tokens: new(int64(7)), ScheduleDigest: digestOf("text")},
			},
			{StageResult: schemas.StageResult{Stage: "paint", SampleIndex: 3, TrajectorySeq: 41}, Lane: "signs", ContentDigest: digestOf("image"), Trained: x},
		},
	}
}

func TestPrompt_ValidateStages(t *testing.T) {
	type P = schemas.Prompt
	faults(t, stagesPrompt, []fault[P]{
		{"rounds alone", func(p *P) {
			*p = P{Rounds: new(int64(2)), Reward: []schemas.RewardSpec{{Name: "ocr", Stage: "x"}}}
		}, "rounds: 2; must be absent without stages\nreward[0].stage: \"x\"; must be absent without stages"},
		{"no stages", func(p *P) { *p = P{Stages: []schemas.StageSpec{}} }, "stages: 0 items; must be at least 1"},
		{"many stages", func(p *P) { p.Stages = make([]schemas.StageSpec, 9) }, "stages: 9 items; must be at most 8"},
		{"many rounds", func(p *P) { p.Stages[1].Children, p.Rounds = nil, new(int64(9)) }, "rounds: 9; must be between 1 and 8"},
		{"settings at the top", func(p *P) {
			p.NumInferenceSteps, p.Model, p.Text, p.MinPolicyVersion = new(int64(4)), "signs", &schemas.Text{},
				new(int64(1))
		}, "num_inference_steps: given; must be absent beside text: it is for images\n" +
			"text: given; must be absent beside stages: give it to the stage that it is for\n" +
			"num_inference_steps: given; must be absent beside stages: give it to the stage that it is for\n" +
			"model: given; must be absent beside stages: give it to the stage that it is for\n" +
			"min_policy_version: given; must be absent beside stages: give it to the stage that it is for"},
		{"messages at the top", func(p *P) {
			p.Prompt, p.Messages = "", []schemas.Message{{Role: "user", Content: "x"}}
		}, "messages: given; must be absent beside stages: give it to the stage that it is for"},
		{"no token", func(p *P) { p.Stages[0].Name = "a.b"; p.Reward[1].Stage = "" }, `stages[0].name: "a.b"; must be 1 to 32 characters of A-Z a-z 0-9 _ -`},
		{"name twice", func(p *P) { p.Stages[2].Name = "paint" }, `stages[2].name: "paint"; must come at most once`},
		{"name of a round", func(p *P) { p.Stages[2].Name = "paint-2" }, `stages[2].name: "paint-2"; must not end in a number: so does round 2 of stage paint`},
		{"reserved name", func(p *P) { p.Stages[2].Name = "main" }, `stages[2].name: "main"; must be another: this one has its meaning already`},
		{"long name", func(p *P) { p.Stages[2].Name = "a23456789012345678901234567890123" }, `stages[2].name: "a23456789012345678901234567890123"; must be 1 to 32 characters of A-Z a-z 0-9 _ -`},
		{"group of odd size", func(p *P) { p.GroupSize = new(int64(7)) }, "group_size: 7; must be a multiple of 2, the children of all stages: it is the number of samples of the last one"},
		{"default group size", func(p *P) { p.GroupSize, p.Stages[1].Children = nil, new(int64(3)) }, "group_size: absent; must be a multiple of 3, the children of all stages"},
		{"large group", func(p *P) { p.GroupSize, p.Stages[1].Children, p.Rounds = new(int64(1024)), nil, new(int64(2)) }, "group_size: 1024; must be at most 682 with 3 stages in 2 rounds"},
		{"children of the first", func(p *P) { p.Stages[0].Children = new(int64(2)) }, "stages[0].children: 2; must be absent of the first stage: group_size says how many there are"},
		{"children beside rounds", func(p *P) { p.Rounds = new(int64(2)) }, "stages[1].children: 2; must be absent beside rounds, each of which would have as many again: name the stages of each round instead"},
		{"more children than a group has", func(p *P) { p.Stages[1].Children = new(int64(1025)) }, "stages[1].children: 1025; must be between 1 and 1024\ngroup_size: 8; must be a multiple of 1025, the children of all stages: it is the number of samples of the last one"},
		{"judged stage", func(p *P) { p.Reward[0].Stage = "draw" }, `reward[0].stage: "draw"; must be one of think, paint`},
		{"condition of a stage", func(p *P) { p.Stages[2].Conditions[0].Stage = "judge" }, `stages[2].conditions[0].stage: "judge"; must be one of think, paint`},
		{"condition given twice", func(p *P) {
			p.Stages[1].Conditions = []schemas.Condition{{
				Name: "image", Stage: "think", DataImage: schemas.DataImage{Data: []byte("x")},
			}}
		}, `stages[1].conditions[0].stage: "think"; must be the only one of stage, data and ref`},
		{"condition of a judge given twice", func(p *P) {
			p.Stages[2].Conditions[0].Data = []byte("x")
		}, `stages[2].conditions[0].stage: "paint"; must be the only one of stage, data and ref`},
		{"condition of a judge given", func(p *P) {
			p.Stages[2].Conditions[0] = schemas.Condition{
				Name: "image", DataImage: schemas.DataImage{Data: []byte("x")},
			}
		}, `stages[2].conditions[0].stage: ""; must name the stage that made the file`},
		{"two conditions of one name", func(p *P) {
			p.Stages[2].Conditions = append(p.Stages[2].Conditions, p.Stages[2].Conditions[0])
		}, `stages[2].conditions[1].name: "image"; must come at most once`},
		{"credit of no reward", func(p *P) { p.Stages[0].Credit[0].Reward = "ocr" }, `stages[0].credit[0].reward: "ocr"; must be one of the prompt's reward`},
		{"credit of no weight", func(p *P) { p.Stages[0].Credit[0].Weight = 0 }, "stages[0].credit[0].weight: 0, or absent; must be another number: leave out a reward that does not count"},
		{"credit of none", func(p *P) { p.Stages[0].Credit = []schemas.CreditShare{} }, "stages[0].credit: 0 items; must be at least 1"},
		{"credit of a frozen stage", func(p *P) { p.Stages[0].Frozen = true }, "stages[0].credit: given; must be absent beside frozen: the stage is not trained"},
		{"credit twice", func(p *P) { p.Stages[0].Credit[1].Reward = "glyph" }, `stages[0].credit[1].reward: "glyph"; must come at most once for a track`},
		{"image setting of a text", func(p *P) { p.Stages[0].Height = new(int64(64)) }, "stages[0].height: given; must be absent beside text: it is for images"},
		{"noise level", func(p *P) {
			p.Stages[1].Rollout = schemas.Rollout{SDEType: "cps", NoiseLevel: new(1.5), SDEStepIndices: []int64{0}}
		}, "stages[1].rollout.noise_level: 1.5; must be between 0 and 1"},
		{"lane of an interaction", func(p *P) { p.Stages[2].Model, p.Stages[2].Frozen = "x", true }, "stages[2].model: given; must be absent beside interaction, which no lane makes\nstages[2].frozen: given; must be absent beside interaction, which no lane makes"},
		{"turns of an interaction", func(p *P) { p.Stages[2].Interaction.MaxTurns = new(int64(2)) }, "stages[2].interaction.max_turns: 2; must be absent in a stage: rounds says how often it runs"},
		{"credit of a track and of all", func(p *P) {
			p.Stages[0].Credit[0] = schemas.CreditShare{Reward: "glyph", Track: "sound", Weight: 1}
			p.Stages[0].Credit[1].Reward = "glyph"
		}, `stages[0].credit[1].reward: "glyph"; must come at most once for a track`},
		{"credit beside stages", func(p *P) { p.Credit = []schemas.CreditShare{{Reward: "glyph", Track: "sound", Weight: 1}} }, "credit: given; must be absent beside stages: give it to the stage that it is for"},
		{"credit without stages", func(p *P) {
			p.Credit, p.Stages, p.Rounds = []schemas.CreditShare{{Reward: "ocr", Weight: 1}}, nil, nil
			p.Reward = []schemas.RewardSpec{{Name: "glyph"}}
		}, "credit[0].reward: \"ocr\"; must be one of the prompt's reward\ncredit: no track; must name one without stages: what whole samples are trained for is reward"},
		{"judge first", func(p *P) { p.Stages, p.Reward = p.Stages[2:], nil; p.Stages[0].Conditions = nil }, "stages[0].interaction: given; must be absent of the first stage: there is nothing to say something to"},
	})
}

func TestPrompt_ValidateStageSegments(t *testing.T) {
	type P = schemas.Prompt
	faults(t, stagesPrompt, []fault[P]{
		{"tree and children", func(p *P) { p.Stages[1].Tree = twos(1) }, "stages[1].children: 2; must be absent beside tree, whose leaves they are"},
		{"tree beside rounds", func(p *P) { p.Stages[1].Tree, p.Stages[1].Children, p.Rounds = twos(1), nil, new(int64(2)) }, "stages[1].tree: 2; must be absent beside rounds, each of which would have as many again: name the stages of each round instead"},
		{"tree of more than the group", func(p *P) { p.Stages[1].Tree, p.Stages[1].Children = twos(0, 1, 2, 3), nil }, "group_size: 8; must be a multiple of 16, the children of all stages: it is the number of samples of the last one"},
		{"tree beyond the steps", func(p *P) { p.Stages[1].Tree, p.Stages[1].Children = twos(4), nil }, "stages[1].tree.branches[0].step_index: 4; must be between 0 and 3"},
		{"a leaf alone", func(p *P) {
			p.Stages[1].Tree, p.Stages[1].Children = twos(1), nil
			p.Stages[1].Tree.Leaf = new(int64(1))
		}, "stages[1].tree.leaf: given; must be absent in a stage, whose samples are all leaves"},
		{"scheduled sampling", func(p *P) {
			p.Stages[1].ImageSettings = schemas.ImageSettings{
				ScheduledSampling: &schemas.ScheduledSampling{},
				Start:             &schemas.Start{Data: &schemas.Data{Latents: states(true)}},
			}
		}, "stages[1].scheduled_sampling: given; must be absent in a stage, which makes an output, and not latents alone"},
		{"start with images of each", func(p *P) {
			p.Stages[1].Start = &schemas.Start{StepIndex: new(int64(1)), Data: &schemas.Data{
				Images: []schemas.DataImage{{Data: []byte("a")}, {Data: []byte("b")}},
			}}
		}, "stages[1].start.data.images: 2 items; must be one in a stage, for all of its samples"},
		{"start", func(p *P) { p.Stages[1].Start = &schemas.Start{Branch: &schemas.Branch{UID: "p"}} }, ""},
		{"stop", func(p *P) { p.Stages[1].Stop = &schemas.Stop{StepIndex: new(int64(2))} }, "stages[1].stop.decode: false; must be true in a stage: what judges it, or comes after, sees it"},
		{"branch scope without a tree", func(p *P) { p.Advantage.BranchScope = schemas.BranchDepth }, `advantage.branch_scope: "depth"; must be absent without a tree`},
	})
}

func TestGroup_ValidateStages(t *testing.T) {
	type R = schemas.Request
	faults(t, func() *R {
		r := fullRequest(t)
		r.Stage, r.SampleIndex, r.Group, r.Lane = "paint-2", 3, stagesGroup(t), "signs"
		return r
	}, []fault[R]{
		{"stage", func(r *R) { r.Stage = "main" }, `stage: "main"; must be one of the group's stages`},
		{"round", func(r *R) { r.Stage = "paint-3" }, `stage: "paint-3"; must be one of the group's stages`},
		{"index", func(r *R) { r.Stage = "think" }, `sample_index: 3; must be a multiple of 2 in stage think`},
		{"tree", func(r *R) { r.Group.Stages[0].Every = 3 }, "group.stages[0].every: 3; must divide that of the stage before, and be 1 of the last"},
		{"leaves", func(r *R) { r.Group.Stages[0].Tree = twos(1, 2, 3) }, "group.stages[0].tree: 2 x 2 x 2 leaves; must be the samples that one of the stage before has"},
		{"no rounds", func(r *R) { r.Stage, r.Group.Rounds = "paint", 0 }, "stage: \"paint\"; must be one of the group's stages\ngroup.rounds: 0; must be between 1 and 8"},
	})
}

func TestStage_Token(t *testing.T) {
	for _, x := range []struct {
		token, name schemas.Stage
		round       int64
	}{
		{"think", "think", 1},
		{"think-2", "think", 2},
		{"think-12", "think", 12},
		{"a-b", "a-b", 1},
		{"a-1", "a-1", 1},
		{"a-02", "a-02", 1},
		{"-2", "-2", 1},
	} {
		if name, round := x.token.Split(); name != x.name || round != x.round || name.Token(round) != x.token {
			t.Errorf("%q: stage %q, round %d; want %q, %d", x.token, name, round, x.name, x.round)
		}
	}
}
