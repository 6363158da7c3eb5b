package advantage

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Rewards that are none of their group free their subject, and those that are close it.
func TestGarbage_Rewards(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	reward := func(i int64) *schemas.Reward { return made("r", "g", i, 4, float64(i), nil) }
	p.open(t, openingOf(reward(0)))
	nan, short := reward(0), reward(1)
	nan.Reward, short.GroupSize = new(math.NaN()), 1
	for i, r := range []*schemas.Reward{nan, short, reward(3)} {
		p.Forge(t, reward(int64(i)).Subject(), bustest.Encode(t, r))
	}
	for i := range int64(3) {
		bustest.Free(t, p.Bus, schemas.StreamRewards, schemas.StoredSubject(reward(i).Subject()))
	}
	p.put(t, reward(0), reward(1), reward(2), reward(3))
	a := advantageOf(t, p.results(t, "r", 1), "r", "g")
	if a.Status != schemas.StatusComplete {
		t.Errorf("%+v", a)
	}
	for i, m := range a.Members {
		if m.Reward == nil || *m.Reward != float64(i) {
			t.Errorf("sample %d: %+v", i, m)
		}
	}
	bustest.Dead(t, p.Bus, 3)
}

// Of two rewards of one sample the one that is stored counts: the other was displaced.
func TestGarbage_RewardDisplaced(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	first, last := made("r", "g", 0, 2, 1, nil), made("r", "g", 1, 2, 5, nil)
	p.put(t, first)
	m, err := p.Last(t.Context(), schemas.StreamRewards, schemas.StoredSubject(first.Subject()))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Displace(t.Context(), m, errors.New("not of this trajectory")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(t.Context(), made("r", "g", 0, 2, 3, nil)); err != nil {
		t.Fatal(err)
	}
	p.put(t, last)
	a := advantageOf(t, p.results(t, "r", 1), "r", "g")
	if a.Status != schemas.StatusComplete || *a.Members[0].Reward != 3 || *a.Members[1].Reward != 5 {
		t.Errorf("%+v", a)
	}
}

// A result that is not the group's, or a batch's that is none, is no result.
func TestGarbage_Results(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	in := func(g *schemas.Group) { g.Batch, g.BatchGroups = "b", 2 }
	other := &schemas.Advantage{
		Run: "r", UID: "alone", Batch: "alone", Status: "failed", Error: "forged", GroupSize: 1,
		Members: []schemas.Member{},
		Scale:   "group", StdBasis: "sample", Estimator: "flow_grpo",
	}
	p.Forge(t, schemas.AdvantageSubject("r", "alone"), bustest.Encode(t, other))
	p.Forge(t, schemas.AdvantageSubject("r", "b0"), bustest.Encode(t, other))
	p.Forge(t, schemas.AdvantageSubject("r", "b1"), bustest.Encode(t, &schemas.Dead{}))
	p.Forge(t, schemas.BatchSubject("r", "b"),
		bustest.Encode(t, &schemas.Batch{Run: "r", Batch: "other", StdBasis: "sample"}))
	p.serve(t, testConfig())
	p.put(t, made("r", "alone", 0, 2, 1, nil), made("r", "alone", 1, 2, 2, nil))
	p.put(t, made("r", "b0", 0, 1, 1, in), made("r", "b1", 0, 1, 1, in))
	bustest.Until(t, "the true results", func() error {
		results := p.results(t, "r", 4)
		var alone, b0, b1 schemas.Advantage
		var b schemas.Batch
		err := errors.Join(
			schemas.DecodeValid(results[schemas.AdvantageSubject("r", "alone")], &alone),
			schemas.DecodeValid(results[schemas.AdvantageSubject("r", "b0")], &b0),
			schemas.DecodeValid(results[schemas.AdvantageSubject("r", "b1")], &b1),
			schemas.DecodeValid(results[schemas.BatchSubject("r", "b")], &b),
		)
		if err == nil && alone.Status == schemas.StatusComplete && b0.UID == "b0" && b1.UID == "b1" &&
			b.Batch == "b" && b.Groups == 2 {
			return nil
		}
		return fmt.Errorf("%w: %+v, %+v, %+v, %+v", err, alone, b0, b1, b)
	})
	bustest.Dead(t, p.Bus, 4)
}

// A group that a false record opened is its own once the true record comes, and so
// is its batch.
func TestGarbage_Opening(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	in := func(g *schemas.Group) { g.Batch, g.BatchGroups = "b", 1 }
	true0, true1 := made("r", "g", 0, 2, 1, in), made("r", "g", 1, 2, 2, in)
	forged := openingOf(true0)
	forged.GroupSize, forged.Group.PromptSeq = 3, 4711
	p.Forge(t, forged.Subject(), bustest.Encode(t, forged))
	p.put(t, true0) // the forged record stays where no one knows better
	bustest.Free(t, p.Bus, schemas.StreamRewards, schemas.StoredSubject(true0.Subject()))
	record := (*schemas.GroupRecord)(openingOf(true0))
	if _, err := p.Publish(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	its := bus.Against(func(*schemas.Opening) (fault, err error) { return errors.New("not the record"), nil })
	if _, err := p.Publish(t.Context(), openingOf(true0), its); err != nil {
		t.Fatal(err)
	}
	p.put(t, true0, true1)
	results := p.results(t, "r", 2)
	if a := advantageOf(t, results, "r", "g"); a.Status != schemas.StatusComplete || a.GroupSize != 2 {
		t.Errorf("%+v", a)
	}
	if b := batchOf(t, results, "r", "b"); b.Groups != 1 || b.Samples != 2 {
		t.Errorf("%+v", b)
	}
}

// Of many groups that are opened at once, each counts by its own record, whichever way its
// record was looked up.
func TestGarbage_OpeningsAtOnce(t *testing.T) {
	t.Parallel()
	const groups, forgedEvery = 200, 7
	p := newPlane(t)
	reward := func(i int) *schemas.Reward {
		return made("r", schemas.UID(fmt.Sprintf("g%d", i)), 0, 1, float64(i), nil)
	}
	var forged []string
	for i := range groups {
		o := openingOf(reward(i))
		if i%forgedEvery != 1 { // others have none
			if _, err := p.Publish(t.Context(), (*schemas.GroupRecord)(openingOf(reward(i)))); err != nil {
				t.Fatal(err)
			}
		}
		if i%forgedEvery == 0 {
			o.GroupSize = 2
			forged = append(forged, o.Subject())
		}
		p.Forge(t, o.Subject(), bustest.Encode(t, o))
	}
	p.serve(t, testConfig())
	for _, subject := range forged {
		bustest.Free(t, p.Bus, schemas.StreamRewards, schemas.StoredSubject(subject))
	}
	for i := range groups {
		p.put(t, reward(i))
	}
	results := p.results(t, "r", groups)
	for i := range groups {
		if a := advantageOf(t, results, "r", reward(i).UID); a.Status != schemas.StatusComplete || a.GroupSize != 1 {
			t.Errorf("group %d: %+v", i, a)
		}
	}
	bustest.Dead(t, p.Bus, len(forged))
}

// A record that is not intake's counts for nothing, whether it came before the rewards of its group, which
// agree with the true one, or after the result, under another batch.
func TestGarbage_OpeningOfAnother(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	rewards := []*schemas.Reward{made("r", "g", 0, 2, 1, nil), made("r", "g", 1, 2, 3, nil)}
	record := openingOf(rewards[0])
	if _, err := p.Publish(t.Context(), (*schemas.GroupRecord)(record)); err != nil {
		t.Fatal(err)
	}
	other := *record
	other.Group.Advantage.Std = schemas.StdNone
	p.Forge(t, other.Subject(), bustest.Encode(t, &other))
	p.serve(t, testConfig())
	for _, r := range rewards {
		if _, err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if a := advantageOf(t, p.results(t, "r", 1), "r", "g"); a.Status != schemas.StatusComplete ||
		a.Scale != schemas.StdGroup {
		t.Errorf("%+v", a)
	}
	bustest.Free(t, p.Bus, schemas.StreamRewards, schemas.StoredSubject(other.Subject()))
	again := *record
	again.GroupSize, again.Group.Batch = 3, "again"
	p.Forge(t, again.Subject(), bustest.Encode(t, &again))
	bustest.Free(t, p.Bus, schemas.StreamRewards, schemas.StoredSubject(again.Subject()))
	bustest.Dead(t, p.Bus, 2)
	if n := len(p.results(t, "r", 1)); n != 1 {
		t.Errorf("%d results", n)
	}
}

// A record of another size, which is not intake's, refuses no reward, whichever of them a worker meets first.
func TestGarbage_OpeningOfAnotherSize(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	put := func(r *schemas.Reward) {
		if _, err := p.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	forge := func(r *schemas.Reward) {
		other := openingOf(r)
		if _, err := p.Publish(t.Context(), (*schemas.GroupRecord)(openingOf(r))); err != nil {
			t.Fatal(err)
		}
		other.GroupSize = 3
		p.Forge(t, other.Subject(), bustest.Encode(t, other))
	}
	before, after := made("r", "before", 0, 2, 1, nil), made("r", "after", 0, 2, 1, nil)
	forge(before)
	put(before)
	put(after)
	forge(after)
	p.serve(t, testConfig())
	put(made("r", "before", 1, 2, 3, nil))
	put(made("r", "after", 1, 2, 3, nil))
	results := p.results(t, "r", 2)
	for _, uid := range []schemas.UID{"before", "after"} {
		if a := advantageOf(t, results, "r", uid); a.Status != schemas.StatusComplete || a.GroupSize != 2 {
			t.Errorf("%+v", a)
		}
	}
	for _, d := range bustest.Dead(t, p.Bus, 2) {
		if !schemas.IsOpening(d.OriginalSubject) {
			t.Errorf("dead letter %s of %s: %s", d.Code, d.OriginalSubject, d.Reason)
		}
	}
}
