package integration_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// rank answers for nats:NAME: a member's score is its index, and its detail says what it is.
func (c *crew) rank(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		s, err := c.Conn().QueueSubscribe(schemas.ScoreSubject(name), name, func(m *nats.Msg) {
			r, reply := &schemas.ScoreRequest{}, &schemas.ScoreReply{}
			if err := schemas.DecodeValid(m.Data, r); err != nil || r.Prompt != "12+30=?" {
				t.Errorf("request: prompt %q, %v", r.Prompt, err)
			}
			for _, x := range r.Members {
				what := fmt.Sprintf("text %v, %d missing", x.Text != nil, len(r.Missing))
				reply.Scores = append(reply.Scores,
					schemas.MemberScore{SampleIndex: x.SampleIndex, Score: new(float64(x.SampleIndex)), Detail: what})
			}
			data, err := schemas.Encode(reply)
			if err == nil {
				err = m.Respond(data)
			}
			if err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Unsubscribe() })
	}
}

// rankedStages is thinkAndPaint with functions that rate whole groups: of thoughts, of images, and diversity.
func rankedStages(uid schemas.UID) *schemas.Prompt {
	p := thinkAndPaint(uid, 8)
	p.Reward = []schemas.RewardSpec{
		{Name: "nats:ponder", Stage: "think", GroupMin: 2},
		{Name: "nats:rank", Stage: "paint", GroupMin: 2},
		{Name: "diversity"},
		{Name: "jpeg_compressibility"},
	}
	return p
}

// Functions rate the whole group of the stage that they judge: each thought once, whose score both images of it have.
// What they said is stored with the stage.
func TestStages_GroupFunctions(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.rank(t, "rank", "ponder")
	c.publish(t, "r", rankedStages("g"))
	for _, m := range bustest.Await(t, c.Bus, 8, schemas.StreamRewards, schemas.RewardFilter("r", "g", "g")) {
		r := bustest.Decode[schemas.Reward](t, m)
		if r.Status != schemas.StatusScored {
			t.Fatalf("sample %d is %s: %s", r.SampleIndex, r.Status, r.Error)
		}
		think, paint, varied := r.Scores[0], r.Scores[1], r.Scores[2]
		if *think.Value != float64(r.SampleIndex/2*2) || think.Members != 4 || think.Stage != "think" ||
			think.Detail != "text true, 0 missing" || *paint.Value != float64(r.SampleIndex) || paint.Members != 8 ||
			paint.Stage != "paint" || paint.Detail != "text false, 0 missing" || varied.Members != 8 {
			t.Errorf("sample %d: %+v", r.SampleIndex, r.Scores)
		}
	}
	for i, stage := range []schemas.Stage{"think", "paint"} {
		e := &schemas.Rating{}
		if _, err := c.StoredEvent(t.Context(), schemas.StreamVerdicts, schemas.RatingSubject("r", "g", int64(i)), e,
			nil); err != nil || len(e.Members) != 4*(i+1) {
			t.Fatalf("rating %d: %d members, %v", i, len(e.Members), err)
		}
		for _, x := range e.Members {
			if x.Stage != stage {
				t.Errorf("rating %d: member %d is of stage %q", i, x.SampleIndex, x.Stage)
			}
		}
	}
}

// A group whose samples end in different stages is rated when the last one has ended, with what is there: one whose
// next stage cannot be asked for counts as ended.
func TestStages_GroupEnds(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.rank(t, "rank")
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		content := "fine"
		if r.SampleIndex == 2 { // what is painted of it is longer than a prompt
			content = strings.Repeat("x", schemas.MaxPromptBytes)
		}
		return packed(t, &schemas.InteractReply{Content: content, Terminate: r.SampleIndex == 1})
	})
	p := judged("g", 4)
	p.Rounds, p.Stages[0].Prompt = new(int64(1)), "{prompt}"
	p.Reward = []schemas.RewardSpec{{Name: "nats:rank", GroupMin: 2}}
	p.Stages = append(p.Stages, schemas.StageSpec{
		Name: "sign", Routing: schemas.Routing{Model: "synthetic"}, Prompt: "a sign {judge.text}!",
		ImageSettings: p.Stages[1].ImageSettings,
	})
	p.Stages[1].Credit = nil
	c.publish(t, "r", p)
	for _, m := range bustest.Await(t, c.Bus, 4, schemas.StreamRewards, schemas.RewardFilter("r", "g", "g")) {
		r := bustest.Decode[schemas.Reward](t, m)
		stage := map[int64]schemas.Stage{0: "sign", 1: p.Stages[1].Name, 3: "sign"}[r.SampleIndex]
		if failed := r.SampleIndex == 2; failed != (r.Status == schemas.StatusFailed) ||
			!failed && (r.Scores[0].Stage != stage || r.Scores[0].Members != 3) {
			t.Errorf("sample %d is %s: %s %+v", r.SampleIndex, r.Status, r.Error, r.Scores)
		}
	}
}

// Services that are killed at every trajectory give the same ratings and rewards.
func TestStages_GroupKilled(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.config.intake.AckWait, c.config.reward.AckWait, c.config.advantage.AckWait = time.Second, time.Second, time.Second
	c.config.sampler.AckWait = time.Second
	c.twoLanes(t)
	c.rank(t, "rank", "ponder")
	c.killedAlike(t, []string{"reward", "sampler", "reward", "thinker"}, func() []*schemas.Prompt {
		return []*schemas.Prompt{rankedStages("g")}
	})
}
