package reward

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// forge stores bytes where a true event belongs, message id and all.
func (p *plane) forge(t testing.TB, subject string, data []byte) {
	t.Helper()
	ack, err := p.PublishRaw(t.Context(), subject, data, nil, schemas.MessageID(subject))
	if err != nil || ack.Duplicate {
		t.Fatalf("%s: got %+v, %v; want stored", subject, ack, err)
	}
}

func encoded(t testing.TB, e schemas.Event) []byte {
	t.Helper()
	data, err := schemas.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// gone waits until a subject is free.
func (p *plane) gone(t testing.TB, stream, subject string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := p.Last(t.Context(), stream, subject)
		if errors.Is(err, bus.ErrNotFound) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is not free: %v", subject, err)
		}
	}
}

// letters are the original subjects of the dead letters, with their number.
func (p *plane) letters(t testing.TB) map[string]int {
	t.Helper()
	out := map[string]int{}
	for m, err := range p.Read(t.Context(), schemas.StreamDead, nil, bus.ReadOptions{}) {
		var d schemas.Dead
		if err := errors.Join(err, schemas.DecodeValid(m.Data, &d)); err != nil {
			t.Fatal(err)
		}
		out[d.OriginalSubject]++
	}
	return out
}

// What is no trajectory of its subject, or names steps that nobody has stored, gets no
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
		1: encoded(t, absent),
		2: encoded(t, elsewhere),
		3: encoded(t, sample(0)),
	}
	for i, data := range forged {
		p.forge(t, schemas.TrajectorySubject("r", "u", i), data)
	}
	for i := range forged {
		p.gone(t, schemas.StreamTrajectories, schemas.TrajectorySubject("r", "u", i))
	}
	for i := range forged {
		p.put(t, sample(i))
	}
	for name, r := range p.rewards(t, "r", 4, 20*time.Second) {
		m, err := p.Last(t.Context(), schemas.StreamTrajectories, schemas.TrajectorySubject("r", "u", r.SampleIndex))
		if err != nil || r.TrajectorySeq != m.Seq || r.Status != schemas.StatusScored {
			t.Errorf("%s: %+v, %v; want the reward of the true trajectory", name, r, err)
		}
	}
	letters := p.letters(t)
	for i := range forged {
		if letters[schemas.TrajectorySubject("r", "u", i)] != 1 {
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
		return encoded(t, r)
	}
	for i, data := range [][]byte{
		reward(0, func(r *schemas.Reward) { r.Reward = new(math.NaN()) }),
		reward(1, func(r *schemas.Reward) { r.GroupSize = 2 }),
		reward(2, func(r *schemas.Reward) { r.TrajectorySeq = 4711 }),
		{0xc1},
	} {
		p.forge(t, schemas.RewardSubject("r", "u", "u", int64(i)), data)
		p.put(t, sample(int64(i)))
	}
	p.serve(t, testConfig())
	got := map[string]*schemas.Reward{}
	for deadline := time.Now().Add(20 * time.Second); len(got) < 4; time.Sleep(10 * time.Millisecond) {
		stored, err := p.LastMany(t.Context(), schemas.StreamRewards, []string{bus.RewardFilter("r", "u", "u")})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range stored {
			var r schemas.Reward
			if bus.Fits(m, &r) == nil && r.Status == schemas.StatusScored && *r.Reward != 100 {
				got[m.Subject] = &r
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d true rewards, want 4", len(got))
		}
	}
	for name, r := range got {
		if r.GroupSize != 4 || len(r.Scores) != 2 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	letters := p.letters(t)
	for i := range 4 {
		subject := bus.StoredSubject(schemas.RewardSubject("r", "u", "u", int64(i)))
		if letters[subject] != 1 {
			t.Errorf("sample %d: dead letters %v", i, letters)
		}
	}
}
