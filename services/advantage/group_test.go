package advantage

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/schemas"
)

const schedule = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func rewardOf(i, n int64, value *float64) *schemas.Reward {
	r := &schemas.Reward{
		V: 1, Run: "r", UID: "u", SampleIndex: i, GroupSize: n, Status: schemas.StatusFailed, Error: "no",
		Reward: value,
		Scores: []schemas.Score{}, TrajectorySeq: uint64(100 + i), Trained: schemas.Trained{TrainedSteps: 2, ScheduleDigest: schedule},
		Scored: 1000 + i,
		Group: schemas.Group{
			Batch: "u", PromptSeq: 1, Created: 1,
			Reward: []schemas.RewardSpec{{Name: "synthetic", Weight: new(1.0), Required: new(true)}},
			Advantage: schemas.AdvantageSpec{
				Estimator: "flow_grpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-4),
			},
		},
	}
	if value != nil {
		r.Status, r.Error = schemas.StatusScored, ""
	}
	return r
}

// openingOf is the record of the group of a reward, as intake stores it.
func openingOf(r *schemas.Reward) *schemas.Opening {
	return &schemas.Opening{
		Run: r.Run, UID: r.UID, GroupSize: r.GroupSize, PromptDigest: schedule, Prompt: "a red fox", Lane: "synthetic",
		ScheduleDigest: schedule, Group: r.Group,
	}
}

func closeGroup(t interface{ Fatal(...any) }, rewards []*schemas.Reward) *schemas.Advantage {
	g := newGroup(openingOf(rewards[0]), time.Time{})
	for _, r := range rewards {
		g.addReward(r, nil, time.Hour)
	}
	a := []*schemas.Advantage{g.outline()}
	estimate([]*group{g}, a)
	if err := a[0].Validate(); err != nil {
		t.Fatal(err)
	}
	return a[0]
}

// The bytes of an advantage depend on the rewards alone, not on their order or on
// how often each was delivered.
func TestGroup_OrderAndRedeliveryDoNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 12).Draw(t, "n")
		rewards := make([]*schemas.Reward, n)
		for i := range n {
			var value *float64
			if rapid.IntRange(0, 4).Draw(t, "outcome") > 0 {
				value = new(rapid.Float64Range(-5, 5).Draw(t, "reward"))
			}
			rewards[i] = rewardOf(i, n, value)
		}
		want, err := schemas.Encode(closeGroup(t, rewards))
		if err != nil {
			t.Fatal(err)
		}
		again := append(rapid.Permutation(rewards).Draw(t, "order"),
			rapid.SliceOf(rapid.SampledFrom(rewards)).Draw(t, "redelivered")...)
		got, err := schemas.Encode(closeGroup(t, again))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("another order gives another advantage")
		}
	})
}

func TestGroup_Status(t *testing.T) {
	other := rewardOf(1, 2, new(2.0))
	other.ScheduleDigest = "f" + schedule[1:]
	for _, c := range []struct {
		name    string
		rewards []*schemas.Reward
		want    string
		members []string
	}{
		{
			"all scored",
			[]*schemas.Reward{rewardOf(1, 2, new(3.0)), rewardOf(0, 2, new(1.0))},
			schemas.StatusComplete,
			[]string{"scored", "scored"},
		},
		{
			"one failed",
			[]*schemas.Reward{rewardOf(0, 2, new(1.0)), rewardOf(1, 2, nil)},
			schemas.StatusPartial,
			[]string{"scored", "failed"},
		},
		{
			"one missing",
			[]*schemas.Reward{rewardOf(1, 2, new(1.0))},
			schemas.StatusPartial,
			[]string{"missing", "scored"},
		},
		{
			"none scored",
			[]*schemas.Reward{rewardOf(0, 2, nil), rewardOf(1, 2, nil)},
			schemas.StatusFailed,
			[]string{"failed", "failed"},
		},
		{
			"two schedules",
			[]*schemas.Reward{rewardOf(0, 2, new(1.0)), other},
			schemas.StatusMixed,
			[]string{"scored", "scored"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := closeGroup(t, c.rewards)
			if a.Status != c.want {
				t.Errorf("status %s, want %s", a.Status, c.want)
			}
			for i, m := range a.Members {
				if m.SampleIndex != int64(i) || m.Status != c.members[i] {
					t.Errorf("member %d: sample %d %s, want %s", i, m.SampleIndex, m.Status, c.members[i])
				}
				if (m.Advantage != nil) != (m.Status == "scored" && c.want != schemas.StatusMixed) {
					t.Errorf("member %d (%s): advantage %v", i, m.Status, m.Advantage)
				}
			}
		})
	}
}

// Rewards 1 and 3: mean 2, sample std sqrt(2), advantages -+1/(sqrt(2)+1e-4) (spec example A, group, T=1).
func TestGroup_Numbers(t *testing.T) {
	a := closeGroup(t, []*schemas.Reward{rewardOf(0, 2, new(1.0)), rewardOf(1, 2, new(3.0))})
	const x = 0.707056785
	if d := *a.Members[1].Advantage - x; d > 1e-9 || d < -1e-9 || *a.Members[0].Advantage != -*a.Members[1].Advantage {
		t.Errorf("advantages %v, %v; want -+%v", *a.Members[0].Advantage, *a.Members[1].Advantage, x)
	}
	if *a.Mean != 2 || a.PolicyVersionMin != 0 || a.Opened != 1000 || a.Closed != 1001 {
		t.Errorf("mean %v, opened %d, closed %d", *a.Mean, a.Opened, a.Closed)
	}
}

// A group whose rewards no estimator can take fails alone: the others of its batch have the advantages that they have
// without it.
func TestEstimate_PoisonFailsAlone(t *testing.T) {
	batch := func(lists ...[]float64) (out []*schemas.Advantage) {
		var groups []*group
		for _, values := range lists {
			var g *group
			for i, v := range values {
				r := rewardOf(int64(i), int64(len(values)), &v)
				r.Group.Advantage.Std = "global"
				if g == nil {
					g = newGroup(openingOf(r), time.Time{})
				}
				g.addReward(r, nil, time.Hour)
			}
			groups, out = append(groups, g), append(out, g.outline())
		}
		estimate(groups, out)
		return out
	}
	poison := []float64{1e200, -1e200}
	want := batch([]float64{1, 2}, []float64{4}, []float64{0, 8})
	got := batch([]float64{1, 2}, poison, []float64{4}, poison, []float64{0, 8})
	for _, i := range []int{3, 1} {
		if got[i].Status != schemas.StatusFailed || !strings.Contains(got[i].Error, "too large") {
			t.Errorf("poison: %s, %q; want it failed, its rewards too large", got[i].Status, got[i].Error)
		}
		got = slices.Delete(got, i, i+1)
	}
	for i, a := range got {
		for j, m := range a.Members {
			same := m.Advantage != nil && *m.Advantage == *want[i].Members[j].Advantage && a.BatchSamples == 5
			if a.Status != schemas.StatusComplete || !same {
				t.Errorf("group %d: %s %q, sample %d: %v of %d", i, a.Status, a.Error, j, m.Advantage, a.BatchSamples)
			}
		}
	}
}

// Groups close, and what fails is logged, in the order in which they opened, however their map iterates.
func TestOldestFirst(t *testing.T) {
	groups := map[schemas.UID]*group{}
	for i := range int64(50) {
		uid := schemas.UID(fmt.Sprintf("u%02d", i))
		groups[uid] = &group{run: "r", uid: uid, opened: time.Unix(100-i/2, 0)}
	}
	for i, g := range oldestFirst(groups) {
		if want := schemas.UID(fmt.Sprintf("u%02d", 48-i/2*2+i%2)); g.uid != want {
			t.Fatalf("group %d is %s, want %s", i, g.uid, want)
		}
	}
}
