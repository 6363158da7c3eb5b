package reward

import (
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// letters are the original subjects of the dead letters, with their number.
func (p *plane) letters(t testing.TB) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, d := range bustest.Dead(t, p.Bus, 0) {
		out[d.OriginalSubject]++
	}
	return out
}

// What is no trajectory of its subject, or names steps that are not stored, gets no
// reward, and its subject is free for the true one, which gets its own.
func TestService_GarbageTrajectories(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	sample := func(i int64) *schemas.Trajectory { return trajectory(t, "r", "u", i, 4, 7, "jpeg_incompressibility") }
	absent, elsewhere := sample(1), sample(2)
	absent.Steps[0].Seq = 4711
	forged := map[int64][]byte{
		0: []byte("rubbish"),
		1: bustest.Encode(t, absent),
		2: bustest.Encode(t, elsewhere),
		3: bustest.Encode(t, sample(0)),
	}
	for i, data := range forged {
		p.Forge(t, schemas.TrajectorySubject("r", "u", i, schemas.StageMain), data)
	}
	for i := range forged {
		bustest.Free(t, p.Bus, schemas.StreamTrajectories, schemas.TrajectorySubject("r", "u", i, schemas.StageMain))
	}
	for i := range forged {
		p.put(t, sample(i))
	}
	for name, r := range p.rewards(t, "r", 4) {
		m, err := p.Last(t.Context(), schemas.StreamTrajectories, schemas.TrajectorySubject("r", "u", r.SampleIndex,
			schemas.StageMain))
		if err != nil || r.TrajectorySeq != m.Seq || r.Status != schemas.StatusScored {
			t.Errorf("%s: %+v, %v; want the reward of the true trajectory", name, r, err)
		}
	}
	letters := p.letters(t)
	for i := range forged {
		if letters[schemas.TrajectorySubject("r", "u", i, schemas.StageMain)] != 1 {
			t.Errorf("sample %d: dead letters %v", i, letters)
		}
	}
}

// A reward that is none, or not of this trajectory, makes room for the true one.
func TestService_GarbageRewards(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	sample := func(i int64) *schemas.Trajectory {
		return trajectory(t, "r", "u", i, 4, 7, "jpeg_incompressibility", "diversity")
	}
	reward := func(i int64, change func(*schemas.Reward)) []byte {
		r := outline(sample(i), 1)
		r.Status, r.Reward = schemas.StatusScored, new(100.0)
		change(r)
		return bustest.Encode(t, r)
	}
	for i, data := range [][]byte{
		reward(0, func(r *schemas.Reward) { r.Reward = new(math.NaN()) }),
		reward(1, func(r *schemas.Reward) { r.GroupSize = 2 }),
		reward(2, func(r *schemas.Reward) { r.TrajectorySeq = 4711 }),
		{0xc1},
	} {
		p.Forge(t, schemas.RewardSubject("r", "u", "u", int64(i)), data)
		p.put(t, sample(int64(i)))
	}
	p.serve(t, testConfig())
	got := map[string]*schemas.Reward{}
	bustest.Until(t, "the true rewards", func() error {
		stored, err := p.LastMany(t.Context(), schemas.StreamRewards, []string{schemas.RewardFilter("r", "u", "u")})
		if err != nil {
			return err
		}
		for _, m := range stored {
			var r schemas.Reward
			if bus.Fits(m, &r) == nil && r.Status == schemas.StatusScored && *r.Reward != 100 {
				got[m.Subject] = &r
			}
		}
		if len(got) < 4 {
			return fmt.Errorf("%d of 4", len(got))
		}
		return nil
	})
	for name, r := range got {
		if r.GroupSize != 4 || len(r.Scores) != 2 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	letters := p.letters(t)
	for i := range 4 {
		subject := schemas.StoredSubject(schemas.RewardSubject("r", "u", "u", int64(i)))
		if letters[subject] != 1 {
			t.Errorf("sample %d: dead letters %v", i, letters)
		}
	}
}
