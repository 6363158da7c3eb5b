package integration_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

const judgedStep, judgedSize = 4, 8

// judgedPrompt is a group whose samples a function judges in the middle; some of them end there.
func judgedPrompt(rule *schemas.Prune, rewards ...schemas.RewardSpec) *schemas.Prompt {
	return &schemas.Prompt{
		UID: "g", Prompt: "a red fox", Seed: new(int64(1)), GroupSize: new(int64(judgedSize)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(10)), Height: new(int64(32)), Width: new(int64(32)), Prune: rule,
		},
		Reward: rewards,
	}
}

func keeps(n int64) *schemas.Prune { return &schemas.Prune{StepIndex: judgedStep, Keep: &n} }

// looks is the workers' function of the test, which sees latents: the first value of the prediction.
func looks(latent bool) schemas.RewardSpec {
	return schemas.RewardSpec{Name: "nats:look", AtSteps: []int64{judgedStep}, Latent: latent}
}

// chosen returns the only Selection of a run.
func (w *world) chosen(t *testing.T, run schemas.Run) *schemas.Selection {
	t.Helper()
	subject := schemas.SelectionSubject(run, "g", judgedStep)
	return bustest.Decode[schemas.Selection](t, bustest.Await(t, w.Bus, 1, schemas.StreamVerdicts, subject)[subject])
}

// answerLooks answers for nats:look by what it is shown, as long as open says so for the n-th question.
func (w *world) answerLooks(t *testing.T, open func(n int64) bool) (asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	s, err := w.Conn().QueueSubscribe(schemas.ScoreSubject("look"), "look", func(m *nats.Msg) {
		var q schemas.ScoreRequest
		if err := schemas.DecodeValid(m.Data, &q); err != nil {
			t.Errorf("a question: %v", err)
			return
		}
		if !open(asked.Add(1)) {
			return // it has died with the question
		}
		score := float64(len(q.Image)) / 1e5
		if q.Latents != nil {
			score = float64(q.Latents.Data[0]) / 256
		}
		reply, err := schemas.Encode(&schemas.ScoreReply{V: 1, Score: &score})
		if err != nil || q.StepIndex != judgedStep && q.StepIndex != 0 {
			t.Errorf("step %d: %v", q.StepIndex, err)
		}
		_ = m.Respond(reply)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Unsubscribe() })
	return asked
}

// Functions judge predictions in the middle, decoded or as latents; the samples that the rule leaves out end there, and
// the others have the bits that they have without it. All of it is made again.
func TestStepRewards_Rule(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	w.answerLooks(t, func(int64) bool { return true })
	synthetic := schemas.RewardSpec{Name: "synthetic"}
	w.publish(t, "whole", judgedPrompt(nil, synthetic))
	w.advantages(t, "whole", 1)
	whole := trajectoriesOf(t, w.Bus, "whole")
	for run, rewards := range map[schemas.Run][]schemas.RewardSpec{
		"decoded": {synthetic, looks(false)}, "latent": {synthetic, looks(true)},
	} {
		w.publish(t, run, judgedPrompt(keeps(3), rewards...))
		a := w.advantages(t, run, 1)["g"]
		e := w.chosen(t, run)
		if n := statuses(a); a.Status != schemas.StatusPartial || n[schemas.StatusScored] != 3 ||
			n[schemas.StatusPruned] != 5 || len(e.Members) != judgedSize || e.SavedEvaluations != 5*6 {
			t.Errorf("%s: %s %s %v, %+v", run, a.Status, a.Error, n, e)
		}
		for i, made := range trajectoriesOf(t, w.Bus, run) {
			why, n, stop := e.Stopped(int64(i)), len(made.Steps), made.StopReason
			if why == "" && made.ContentDigest != whole[i].ContentDigest ||
				why != "" && (made.Error != why || n != judgedStep || stop != schemas.StopPruned) {
				t.Errorf("%s: sample %d: %s %q, %d steps; %q", run, i, stop, made.Error, n, why)
			}
			subject := schemas.StepRewardSubject(run, "g", int64(i), judgedStep)
			stored := bustest.Await(t, w.Bus, 1, schemas.StreamVerdicts, subject)[subject]
			r, latent := bustest.Decode[schemas.StepReward](t, stored), run == "latent"
			if (r.Latents != nil) != latent || (len(r.Media) > 0) == latent || len(r.Scores) != 1 {
				t.Errorf("%s: sample %d: %+v", run, i, r)
			}
		}
		report, err := verify.Run(t.Context(), w.Bus, run, verify.Options{Model: []string{"synthetic"}})
		if err != nil || !report.OK(0) || report.Predictions != judgedSize {
			t.Errorf("%s: %v, %+v", run, err, report)
		}
	}
}

// Prompts that ask for rewards at steps where there are none are refused by name.
func TestStepRewards_Refusals(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	at := func(k int64) schemas.RewardSpec { return schemas.RewardSpec{Name: "synthetic", AtSteps: []int64{k}} }
	diverse := schemas.RewardSpec{Name: "diversity", AtSteps: []int64{4}}
	for want, p := range map[string]*schemas.Prompt{
		"reward[0].at_steps: 10; must be above 0":                       judgedPrompt(nil, at(10)),
		"prune.step_index: 4; must be in at_steps":                      judgedPrompt(keeps(3), at(5)),
		"prune.evaluations: 37; must be at least 38: 8 samples take 32": judgedPrompt(budget(37), at(4)),
		"at_steps: given; must be absent of diversity":                  judgedPrompt(nil, diverse),
	} {
		if _, err := w.client.Publish(t.Context(), "r", p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; must have %q", err, want)
		}
	}
	w.publish(t, "budget", judgedPrompt(budget(32+2*6+5), at(4)))
	w.advantages(t, "budget", 1)
	if e := w.chosen(t, "budget"); *e.Rule.Keep != 2 || e.SavedEvaluations != 6*6 {
		t.Errorf("%+v", e)
	}
}

func budget(n int64) *schemas.Prune { return &schemas.Prune{StepIndex: judgedStep, Evaluations: &n} }

// Sampler and reward service die while some samples are judged and others wait: the others that come in their place
// end with the same samples, steps and rewards.
func TestStepRewards_Killed(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	var open atomic.Bool
	open.Store(true)
	asked := c.answerLooks(t, func(n int64) bool { return open.Load() || n <= judgedSize+3 })
	c.up(t, stages...)
	prompt := func() *schemas.Prompt {
		return judgedPrompt(keeps(3), schemas.RewardSpec{Name: "synthetic"}, looks(true))
	}
	c.publish(t, "calm", prompt())
	c.advantages(t, "calm", 1)
	open.Store(false)
	c.publish(t, "killed", prompt())
	bustest.Until(t, "some are judged, and others asked about", func() error {
		stored, err := c.Bus.Subjects(t.Context(), schemas.StreamVerdicts, schemas.Address{
			Kind: schemas.KindStepReward, Run: "killed",
		}.Filter())
		if n := asked.Load(); err == nil && (len(stored) != 3 || n < judgedSize+4) {
			err = fmt.Errorf("%d are stored, %d asked about", len(stored), n)
		}
		return err
	})
	c.serving["sampler"].Kill()
	c.serving["reward"].Kill()
	if _, err := c.Bus.Last(t.Context(), schemas.StreamVerdicts,
		schemas.SelectionSubject("killed", "g", judgedStep)); err == nil {
		t.Error("decided before all were judged")
	}
	open.Store(true)
	c.up(t, "sampler", "reward")
	c.advantages(t, "killed", 1)
	calm, killed := c.chosen(t, "calm"), c.chosen(t, "killed")
	if len(calm.Members) != judgedSize || len(killed.Members) != judgedSize {
		t.Fatalf("%+v, %+v", calm, killed)
	}
	made := [2]map[int]*schemas.Trajectory{trajectoriesOf(t, c.Bus, "calm"), trajectoriesOf(t, c.Bus, "killed")}
	for i, m := range calm.Members {
		k, a, b := killed.Members[i], made[0][i], made[1][i]
		if *m.Reward != *k.Reward || m.Stopped != k.Stopped || a.ContentDigest != b.ContentDigest ||
			len(a.Steps) != len(b.Steps) || a.Error != b.Error {
			t.Errorf("sample %d: %+v %s, %+v %s", i, m, a.ContentDigest, k, b.ContentDigest)
		}
	}
}

// Samples that the rule leaves out go on from the chosen ones, with noise of their own; whatever dies, the same do. The
// group has an image of each, and all of it is made again.
func TestStepRewards_BranchOff(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.answerLooks(t, func(int64) bool { return true })
	c.up(t, stages...)
	rewards := []schemas.RewardSpec{{Name: "synthetic"}, looks(true)}
	rule := keeps(3)
	rule.Then = schemas.ThenBranch
	c.publish(t, "whole", judgedPrompt(nil, rewards...))
	c.advantages(t, "whole", 1)
	c.publish(t, "calm", judgedPrompt(rule, rewards...))
	c.advantages(t, "calm", 1)
	c.publish(t, "killed", judgedPrompt(rule, rewards...))
	e := c.chosen(t, "killed")
	c.serving["sampler"].Kill() // the chosen go on, the others wait for them
	c.serving["reward"].Kill()
	c.up(t, "sampler", "reward")
	if a := c.advantages(t, "killed", 1)["g"]; a.Status != schemas.StatusComplete || a.TrainedSteps != 10 {
		t.Errorf("%s %s, %d steps", a.Status, a.Error, a.TrainedSteps)
	}
	whole, calm := trajectoriesOf(t, c.Bus, "whole"), trajectoriesOf(t, c.Bus, "calm")
	media := map[string]bool{}
	for i, made := range trajectoriesOf(t, c.Bus, "killed") {
		media[made.Medium(schemas.KindImage).Digest] = true
		from, of := e.Of(int64(i)).Parent, whole[i]
		if from != nil {
			of = whole[int(*from)]
			if at := made.Sibling(); at == nil || at.SampleIndex != *from || made.Start.StepIndex != judgedStep {
				t.Errorf("sample %d begins with %+v; must with #%d", i, made.Start, *from)
			}
		}
		path, err := c.client.Path(t.Context(), made)
		if err != nil || len(path) != 10 {
			t.Fatalf("sample %d: a path of %d steps, %v", i, len(path), err)
		}
		for k, step := range path {
			same := *step.Step.LogProb == *of.LogProbs[k]
			if same != (k < judgedStep || from == nil) {
				t.Errorf("sample %d: step %d is that of #%d: %t", i, k, of.SampleIndex, same)
			}
		}
		if made.ContentDigest != calm[i].ContentDigest {
			t.Errorf("sample %d is not that of the calm run", i)
		}
	}
	if len(media) != judgedSize || e.SavedEvaluations != 0 {
		t.Errorf("%d images, %+v", len(media), e)
	}
	report, err := verify.Run(t.Context(), c.Bus, "killed", verify.Options{Model: []string{"synthetic"}})
	if err != nil || !report.OK(0) || report.Predictions != judgedSize || report.Steps != 3*10+5*6 {
		t.Errorf("%v, %+v", err, report)
	}
	read, err := results.Read(t.Context(), c.Bus, "killed")
	if s := read.Summary; err != nil || s.Evaluations != 80 || s.FlatEvaluations != 80 || s.SavedEvaluations != 0 {
		t.Errorf("%v, %+v", err, s)
	}
}
