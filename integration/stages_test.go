package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// twoLanes adds a sampler of texts to a pipeline of images.
func (c *crew) twoLanes(t *testing.T) {
	t.Helper()
	c.config.intake.Models = []schemas.Lane{"synthetic", "sums"}
	c.up(t, "intake", "sampler", "reward", "advantage")
	c.thinker(t)
}

func (c *crew) thinker(t *testing.T) {
	t.Helper()
	texts := c.config
	texts.sampler.Model = sumsFolder(t)
	c.serving["thinker"] = c.Serve(t, texts.run("sampler"))
}

// thinkAndPaint is a prompt whose thoughts are painted twice each.
func thinkAndPaint(uid schemas.UID, size int64) *schemas.Prompt {
	return &schemas.Prompt{
		UID: uid, Prompt: "12+30=?", GroupSize: &size, Seed: new(int64(5)),
		Reward: []schemas.RewardSpec{
			{Name: "jpeg_compressibility"}, {Name: "confidence", Stage: "think", Weight: new(0.5)},
		},
		Stages: []schemas.StageSpec{
			{Name: "think", Routing: schemas.Routing{Model: "sums"}, Text: &schemas.Text{MaxNewTokens: new(int64(4))}},
			{
				Name: "paint", Routing: schemas.Routing{Model: "synthetic"}, Prompt: `a sign that says "{think.text}"`, Children: new(int64(2)),
				Credit: []schemas.CreditShare{{Reward: "jpeg_compressibility", Weight: 2}},
				ImageSettings: schemas.ImageSettings{
					NumInferenceSteps: new(int64(3)), Height: new(int64(32)), Width: new(int64(32)),
					Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 2}},
				},
			},
		},
	}
}

func (c *crew) stage(t *testing.T, run schemas.Run, uid schemas.UID, sample int64,
	stage schemas.Stage,
) *schemas.Trajectory {
	t.Helper()
	tr := &schemas.Trajectory{}
	if _, err := c.StoredEvent(t.Context(), schemas.StreamTrajectories,
		schemas.TrajectorySubject(run, uid, sample, stage), tr, nil); err != nil {
		t.Fatalf("stage %s of sample %d: %v", stage, sample, err)
	}
	return tr
}

// counted checks what is said of a run: its samples count, not their stages.
func (c *crew) counted(t *testing.T, run schemas.Run, made, scored, failed int64) {
	t.Helper()
	s, err := c.client.Status(t.Context(), run)
	if err != nil {
		t.Fatal(err)
	}
	if s.Trajectories != made || s.Rewards != scored || s.Failed != failed || s.State == schemas.RunRunning {
		t.Errorf("run %s is %s: %d samples made, %d scored, %d failed; want %d, %d, %d", run, s.State, s.Trajectories,
			s.Rewards, s.Failed, made, scored, failed)
	}
	if n, differ, err := counters.Check(t.Context(), c.Bus, 1); n != 1 || len(differ) > 0 || err != nil {
		t.Errorf("%d runs counted in full, %v differ, %v", n, differ, err)
	}
	r := view.NewReader(t.Context(), c.Bus, view.Options{Once: true})
	defer r.Close()
	list, err := r.Groups(t.Context(), run, view.List{Limit: 8})
	if err != nil || len(list.Rows) != 1 {
		t.Fatalf("groups: %+v, %v", list, err)
	}
	if g := list.Rows[0]; int64(g.Made) != made || int64(g.Scored) != scored || int64(g.Lost) != failed {
		t.Errorf("its group has %d samples made, %d scored, %d lost; want %d, %d, %d", g.Made, g.Scored, g.Lost, made,
			scored, failed)
	}
}

// Each sample of a stage leads to its children, and each stage has advantages of its own.
func TestStages_ThinkAndPaint(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.publish(t, "r", thinkAndPaint("g", 8))
	a := c.advantages(t, "r", 1)["g"]
	if a.Status != schemas.StatusComplete || len(a.Members) != 8 {
		t.Fatalf("group: %s, %s, %d members", a.Status, a.Error, len(a.Members))
	}
	seeds := map[uint64]bool{}
	for i := range int64(8) {
		think, paint := c.stage(t, "r", "g", i-i%2, "think"), c.stage(t, "r", "g", i, "paint")
		if want := fmt.Sprintf("a sign that says %q", think.Text.Answer()); paint.Prompt != want {
			t.Errorf("sample %d is painted of %q, want %q", i, paint.Prompt, want)
		}
		seeds[paint.SampleSeed], seeds[think.SampleSeed] = true, true
		m := a.Members[i]
		if len(m.Stages) != 2 || m.Stages[0].Stage != "think" || m.Stages[0].SampleIndex != i-i%2 ||
			m.Stages[1].TrajectorySeq != m.TrajectorySeq {
			t.Errorf("member %d ran %+v", i, m.Stages)
		}
	}
	if len(seeds) != 8+4 {
		t.Errorf("%d different seeds, want one for each sample of each stage, 12", len(seeds))
	}
	if len(a.Credits) != 2 || a.Credits[0].Stage != "think" || len(a.Credits[0].Values) != 4 ||
		a.Credits[0].Every != 2 ||
		a.Credits[1].Stage != "paint" || len(a.Credits[1].Values) != 8 {
		t.Fatalf("credits: %+v", a.Credits)
	}
	c.counted(t, "r", 8, 8, 0)
	harness.AwaitIdle(t, c.Bus)
	if left := c.messages(t, schemas.StreamRequests); left != 0 {
		t.Errorf("%d requests are left", left)
	}
	for _, r := range bustest.Await(t, c.Bus, 8, schemas.StreamRewards, schemas.RewardFilter("r", "g", "g")) {
		r := bustest.Decode[schemas.Reward](t, r)
		think, paint := r.Scores[1], r.Scores[0]
		if r.Status != schemas.StatusScored || think.Value == nil || paint.Value == nil || len(r.Stages) != 2 ||
			r.Stages[0].Tokens == nil || r.Stages[1].TrainedSteps != 2 {
			t.Errorf("reward: %+v", r)
		}
	}
}

// Three rounds of a judge that ends one sample in the second: it is told what was said before, and shown the image.
func TestStages_Judge(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if len(r.Conditions) != 1 || len(r.Conditions[0].File) == 0 || int64(len(r.Messages)) != 2+2*r.Answer ||
			r.MaxTurns != 3 {
			t.Errorf("the judge is told %v, with %d files", r.Messages, len(r.Conditions))
		}
		return packed(t, &schemas.InteractReply{
			Content:   fmt.Sprintf(" round %d of %d", r.Answer, r.SampleIndex),
			Terminate: r.SampleIndex == 1 && r.Answer == 1,
		})
	})
	p := thinkAndPaint("g", 2)
	p.Rounds = new(int64(3))
	p.Stages[0].Prompt, p.Stages[1].Children = "{prompt}{judge.text}", nil
	p.Stages = append(p.Stages, schemas.StageSpec{
		Name: "judge", Interaction: &schemas.Interaction{Name: "critic"}, Prompt: "{think.text}",
		ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
	})
	c.publish(t, "r", p)
	a := c.advantages(t, "r", 1)["g"]
	if a.Status != schemas.StatusComplete {
		t.Fatalf("group: %s, %s", a.Status, a.Error)
	}
	c.counted(t, "r", 2, 2, 0)
	for i, want := range []int{9, 6} {
		m := a.Members[i]
		if len(m.Stages) != want || m.TrajectorySeq != m.Stages[want-2].TrajectorySeq {
			t.Errorf("sample %d ran %d stages, and is %d: %+v", i, len(m.Stages), m.TrajectorySeq, m.Stages)
		}
	}
	if again := c.stage(t, "r", "g", 0, "think-3"); again.Prompt != "12+30=? round 1 of 0" {
		t.Errorf("round 3 answers %q", again.Prompt)
	}
	if said := c.stage(t, "r", "g", 1, "judge-2"); said.Text.SaidBy != "critic" ||
		said.Text.Answer() != " round 1 of 1" || said.Text.Conversation != schemas.ConversationTerminated {
		t.Errorf("the judge said %+v", said.Text)
	}
	if len(a.Credits) != 2 {
		t.Errorf("credits: %+v; want those of the two that are trained", a.Credits)
	}
}

// A judge that ends samples before a stage ran leaves them out of its comparison: those that ran it have the advantages
// that their estimator gives them alone.
func TestStages_EndedEarly(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "usher", func(r *schemas.InteractRequest) []byte {
		return packed(t, &schemas.InteractReply{Content: "go on", Terminate: r.SampleIndex == 2 || r.UID == "none"})
	})
	for _, uid := range []schemas.UID{"some", "none"} {
		p := thinkAndPaint(uid, 8) // the judge ends two thoughts, with two samples each
		p.Stages = []schemas.StageSpec{p.Stages[0], {
			Name: "judge", Interaction: &schemas.Interaction{Name: "usher"}, Prompt: "{think.text}",
		}, p.Stages[1]}
		p.Reward = []schemas.RewardSpec{
			{Name: "confidence", Stage: "think"}, {Name: "jpeg_compressibility", Required: new(false)},
		}
		p.Stages[2].Credit = []schemas.CreditShare{{Reward: "confidence", Weight: 2}}
		c.publish(t, "r", p)
	}
	results := c.advantages(t, "r", 2)
	for uid, ran := range map[schemas.UID][]int{"some": {0, 1, 4, 5, 6, 7}, "none": nil} {
		a := results[uid]
		if a.Status != schemas.StatusComplete || len(a.Credits) != 2 || len(a.Credits[1].Values) != 8 {
			t.Fatalf("group %s: %s, %s, %+v", uid, a.Status, a.Error, a.Credits)
		}
		set, got := estimator.Rewards{}, []float64(nil)
		for i, v := range a.Credits[1].Values {
			if (v != nil) != slices.Contains(ran, i) || a.Members[i].Advantage == nil {
				t.Errorf("sample %d of %s has the advantage %v of the painter, whom %v reached", i, uid, v, ran)
			} else if v != nil {
				set.Values, got = append(set.Values, 0), append(got, *v)
			}
		}
		rewards := schemas.RewardFilter("r", string(uid), uid)
		for _, m := range bustest.Await(t, c.Bus, 8, schemas.StreamRewards, rewards) {
			r := bustest.Decode[schemas.Reward](t, m)
			if i := slices.Index(ran, int(r.SampleIndex)); i >= 0 {
				set.Values[i] = 2 * *r.Scores[0].Value
			} else if len(r.Stages) != 2 || r.Scores[1].Value != nil {
				t.Errorf("sample %d of %s ran %+v, with the scores %+v", r.SampleIndex, uid, r.Stages, r.Scores)
			}
		}
		if len(ran) == 0 {
			continue
		}
		want, err := estimator.Estimate(estimator.DefaultConfig(), []estimator.Rewards{set})
		if err != nil || !slices.Equal(got, want[0].Advantages) {
			t.Errorf("the painter has the advantages %v, want %v: %v", got, want, err)
		}
	}
}

// A stage may prune: those of its samples that are out of bounds end there, and no later stage runs for them.
func TestStages_PruneRule(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	p := thinkAndPaint("g", 8)
	again := p.Stages[1]
	again.Name, again.Children, again.Credit = "repaint", nil, nil
	p.Stages = append(p.Stages, again)
	p.Stages[1].Rollout = schemas.Rollout{}
	c.publish(t, "whole", p)
	c.advantages(t, "whole", 1)
	sums := make([]float64, 8)
	for i := range sums {
		sums[i] = *c.stage(t, "whole", "g", int64(i), "paint").LogProbs[0]
	}
	bound := slices.Sorted(slices.Values(sums))[3]
	p.Stages[1].Prune = &schemas.Prune{StepIndex: 1, LogProbBelow: &bound}
	c.publish(t, "r", p)
	a := c.advantages(t, "r", 1)["g"]
	if a.Status != schemas.StatusPartial {
		t.Fatalf("group: %s, %s", a.Status, a.Error)
	}
	for i, m := range a.Members {
		want, ran := schemas.StatusScored, 3
		if sums[i] < bound {
			want, ran = schemas.StatusPruned, 2
		}
		if m.Status != want || len(m.Stages) != ran || (a.Credits[2].Values[i] == nil) != (ran == 2) {
			t.Errorf("sample %d is %s after %d stages, want %s after %d", i, m.Status, len(m.Stages), want, ran)
		}
	}
	harness.AwaitIdle(t, c.Bus)
	harness.NoDead(t, c.Bus)
}

// A stage that fails for good fails its samples, with all of their children; the others go on.
func TestStages_Failed(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.SampleIndex == 2 {
			return packed(t, &schemas.InteractReply{Error: "no idea"})
		}
		return packed(t, &schemas.InteractReply{Content: "fine"})
	})
	p := thinkAndPaint("g", 6)
	p.Stages = []schemas.StageSpec{p.Stages[0], {
		Name: "judge", Interaction: &schemas.Interaction{Name: "critic"}, Prompt: "{think.text}",
	}, p.Stages[1]}
	c.publish(t, "r", p)
	a := c.advantages(t, "r", 1)["g"]
	c.counted(t, "r", 4, 4, 2)
	for i, m := range a.Members {
		want := schemas.StatusScored
		if i == 2 || i == 3 {
			want = schemas.StatusFailed
		}
		if m.Status != want {
			t.Errorf("sample %d is %s, want %s", i, m.Status, want)
		}
	}
	if a.Status != schemas.StatusPartial || a.Credits[0].Values[1] != nil || a.Credits[0].Values[0] == nil {
		t.Errorf("group: %s, credits %v", a.Status, a.Credits)
	}
	for _, m := range bustest.Await(t, c.Bus, 6, schemas.StreamRewards, schemas.RewardFilter("r", "g", "g")) {
		if r := bustest.Decode[schemas.Reward](t, m); r.Status == schemas.StatusFailed &&
			!strings.HasPrefix(r.Error, "stage judge: trajectory failed: interaction critic: error: the worker says: "+
				"no idea") {
			t.Errorf("sample %d: %s", r.SampleIndex, r.Error)
		}
	}
}

// critic says the same to the same, and ends samples of even sums in the second round.
func critic(t *testing.T, c *crew) {
	t.Helper()
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		return packed(t, &schemas.InteractReply{Content: fmt.Sprintf(" no, not %s",
			r.Messages[len(r.Messages)-1].Content), Terminate: r.Answer == 1 && r.SampleIndex%2 == 0})
	})
}

// judged is a prompt of three rounds of thinking, painting and judging.
func judged(uid schemas.UID, size int64) *schemas.Prompt {
	p := thinkAndPaint(uid, size)
	p.Rounds = new(int64(3))
	p.Stages[0].Prompt, p.Stages[1].Children = "{prompt}{judge.text}", nil
	p.Stages = append(p.Stages, schemas.StageSpec{
		Name: "judge", Interaction: &schemas.Interaction{Name: "critic"}, Prompt: "{think.text}",
		ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
	})
	return p
}

// Services that are killed at every trajectory, one after the other, give the same bits as services that run through.
func TestStages_Killed(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.config.intake.AckWait, c.config.reward.AckWait, c.config.advantage.AckWait = time.Second, time.Second, time.Second
	c.config.sampler.AckWait = time.Second
	c.twoLanes(t)
	critic(t, c)
	names := []string{"reward", "sampler", "thinker", "intake", "reward", "advantage"}
	c.killedAlike(t, names, func() []*schemas.Prompt {
		return []*schemas.Prompt{thinkAndPaint("g", 8), judged("j", 4)}
	})
}

// killedAlike kills services one after the other, at every trajectory of prompts, and compares with a calm run.
func (c *crew) killedAlike(t *testing.T, names []string, prompts func() []*schemas.Prompt) {
	t.Helper()
	ask := func(run schemas.Run) {
		for _, p := range prompts() {
			if _, err := c.client.Publish(limited(t), run, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	ask("calm")
	c.advantages(t, "calm", len(prompts()))
	calm := harness.ReadBooks(t, c.Bus, "calm")
	ask("killed")
	seen := 0
	for _, err := range c.Read(t.Context(), schemas.StreamTrajectories,
		[]string{schemas.TrajectoryFilter("killed", "*")}, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if seen++; seen >= len(calm.Trajectories) {
			break
		}
		name := names[seen%len(names)]
		c.serving[name].Kill()
		if name == "thinker" {
			c.thinker(t)
		} else {
			c.up(t, name)
		}
	}
	c.advantages(t, "killed", len(prompts()))
	harness.NoDead(t, c.Bus)
	killed := harness.ReadBooks(t, c.Bus, "killed")
	if len(killed.Digests) != len(calm.Digests) || len(killed.Twice) > 0 {
		t.Errorf("%d events and %d twice, want %d and none", len(killed.Digests), len(killed.Twice), len(calm.Digests))
	}
	for key, digest := range calm.Digests {
		if killed.Digests[key] != digest {
			t.Errorf("%s: digest %q, want %q", key, killed.Digests[key], digest)
		}
	}
}

// Requests of a later stage that a server loses are asked for again.
func TestStages_LostRequests(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.withoutPainter(t)
	c.publish(t, "r", thinkAndPaint("g", 4))
	requests := schemas.Address{Kind: schemas.KindRequest, Run: "r"}.Filter()
	c.waiting(t, schemas.KindRequest, "r", "paint", 4)
	if _, err := c.PurgeSubject(t.Context(), schemas.StreamRequests, requests); err != nil {
		t.Fatal(err)
	}
	c.up(t, "sampler")
	if a := c.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Errorf("group: %s, %s", a.Status, a.Error)
	}
}

// The commands of the guide's page do what it says, with its judge in Python.
func TestStages_Guide(t *testing.T) {
	t.Parallel()
	pythonWith(t, "nats, msgpack, blake3, numpy, PIL")
	const page = "deploy/guide/stages.md"
	blocks := slices.DeleteFunc(blocksOf(t, page, documents(t)[page]), func(b block) bool {
		return b.kind == "text" || b.skip != "" && b.skip != t.Name()
	})
	if len(blocks) != 2 {
		t.Fatalf("%d blocks; want 2", len(blocks))
	}
	for _, fault := range runBlocks(t, blocks) {
		t.Errorf("%s:%s", page, fault)
	}
}
