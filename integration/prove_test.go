package integration_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/prove"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/verify"
)

// learned stores a batch of group g of a run, and the update that learned from it and made a version of the weights.
func learned(t *testing.T, b *bus.Bus, a *schemas.Advantage, of *schemas.Policy) {
	t.Helper()
	g := schemas.TrainedGroup{Advantage: a}
	for i, made := 0, trajectoriesOf(t, b, a.Run); i < len(a.Members); i++ {
		g.Trajectories = append(g.Trajectories, made[i])
	}
	digest := schemas.BatchDigests([]string{schemas.BatchDigest([]schemas.TrainedGroup{g})})
	for _, e := range []schemas.Keyed{
		&schemas.Batch{Run: a.Run, Batch: "b", Groups: 1, UIDs: []schemas.UID{a.UID}, StdBasis: schemas.StdBases[0]},
		&schemas.Update{
			Run: a.Run, Lane: of.Lane, Tenant: of.Tenant, Trainer: "main", Step: 1, Batches: []string{"b"},
			BatchDigest: digest, PolicyVersion: of.PolicyVersion, WeightsBefore: of.BaseDigest,
			WeightsDigest: of.WeightsDigest,
		},
	} {
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
}

func archiveOf(t *testing.T, b *bus.Bus, run schemas.Run) []byte {
	t.Helper()
	var out bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), b, run, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// edited is an archive after a change of one of its events, whole in itself; without a change the event is gone.
func edited[E any, P interface {
	*E
	schemas.Event
}](t *testing.T, archive []byte, stream, subject string, change func(e P),
) []byte {
	t.Helper()
	plane := bustest.New(t)
	imported, err := export.Import(t.Context(), plane.Bus, bytes.NewReader(archive),
		export.ImportOptions{Policies: true})
	if err != nil {
		t.Fatal(err)
	}
	m := bustest.Await(t, plane.Bus, 1, stream, subject)[subject]
	e := bustest.Decode[E, P](t, m)
	if err := plane.Delete(t.Context(), stream, m.Seq); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(e)
		plane.Forge(t, schemas.PublishedSubject(subject), bustest.Encode(t, P(e)))
	}
	return archiveOf(t, plane.Bus, imported.Run)
}

// proved returns the links of an archive that do not hold, with what is said, and whether all is proved.
func proved(t *testing.T, archive []byte, change func(o *prove.Options)) (faults []string, whole bool) {
	t.Helper()
	o := prove.Options{
		Version: -1, All: true, Reward: reward.DefaultConfig(), Advantage: advantage.DefaultConfig(),
		Log: zerolog.Nop(), Verify: verify.Options{Model: []string{"synthetic"}},
	}
	if change != nil {
		change(&o)
	}
	r, err := prove.Run(t.Context(), bustest.New(t).Bus, "run.tar", bytes.NewReader(archive), o)
	if err != nil {
		return []string{err.Error()}, false
	}
	for _, l := range r.Links {
		if l.Verdict == prove.Broken || l.Verdict == prove.Unchecked {
			faults = append(faults, l.Link+" "+l.Verdict+": "+l.What)
		}
	}
	return faults, r.Proved
}

// Which samples went on is computed again out of the rewards at their step, these out of the stored predictions, and a
// change of each is found.
func TestProve_Selections(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	w.publish(t, "r", judgedPrompt(keeps(3), schemas.RewardSpec{Name: "synthetic", AtSteps: []int64{judgedStep}}))
	group := w.advantages(t, "r", 1)["g"]
	made := trajectoriesOf(t, w.Bus, "r")[0]
	learned(t, w.Bus, group, &schemas.Policy{
		Lane: made.Lane, Tenant: schemas.TenantMain, BaseDigest: made.WeightsDigest,
		WeightsDigest: made.WeightsDigest,
	})
	archive := archiveOf(t, w.Bus, "r")
	said := schemas.StepRewardSubject("r", "g", 2, judgedStep)
	said3 := func(change func(e *schemas.StepReward)) []byte {
		return edited(t, archive, schemas.StreamVerdicts, said, change)
	}
	chosen := func(change func(e *schemas.Selection)) []byte {
		return edited(t, archive, schemas.StreamVerdicts, schemas.SelectionSubject("r", "g", judgedStep), change)
	}
	for want, of := range map[string][]byte{
		"": archive,
		"selections broken: g #2: its scores at step 4 give": said3(func(e *schemas.StepReward) { *e.Reward += 1e-9 }),
		"selections broken: g, step 4: #2 is chosen by": said3(func(e *schemas.StepReward) {
			*e.Reward += 1e-3
			*e.Scores[0].Value += 1e-3
		}),
		"selections unchecked: g #2: its reward at step 4": said3(nil),
		"selections unchecked: g #0: which samples ended":  chosen(nil),
		"selections broken: g, step 4: 31 saved evaluation": chosen(func(e *schemas.Selection) {
			e.SavedEvaluations++
		}),
		"the rule gives": chosen(func(e *schemas.Selection) { e.Rule.Keep = new(int64(4)) }),
		"prompts broken: g: #0: the rule by which": chosen(func(e *schemas.Selection) {
			e.Rule.KeepBy = schemas.KeepHighest
		}),
	} {
		faults, whole := proved(t, of, nil)
		found := slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, want) })
		if whole != (want == "") || !found && want != "" {
			t.Errorf("%q: proved %t, %q", want, whole, faults)
		}
	}
	other := said3(func(e *schemas.StepReward) { e.Media[0].Digest = strings.Repeat("0", len(e.Media[0].Digest)) })
	if _, whole := proved(t, other, nil); whole {
		t.Error("another prediction is not found")
	}
}

// Who went on from whom is computed again, too, with the beginnings that were given up, and a change of it is found.
func TestProve_BranchOff(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	rule := keeps(2)
	rule.Then = schemas.ThenBranch
	w.publish(t, "r", judgedPrompt(rule, schemas.RewardSpec{Name: "synthetic", AtSteps: []int64{judgedStep}}))
	group := w.advantages(t, "r", 1)["g"]
	made := trajectoriesOf(t, w.Bus, "r")[0]
	learned(t, w.Bus, group, &schemas.Policy{
		Lane: made.Lane, Tenant: schemas.TenantMain, BaseDigest: made.WeightsDigest,
		WeightsDigest: made.WeightsDigest,
	})
	archive, e := archiveOf(t, w.Bus, "r"), w.chosen(t, "r")
	child := slices.IndexFunc(e.Members, func(m schemas.SelectedMember) bool { return m.Parent != nil })
	other := slices.IndexFunc(e.Members, func(m schemas.SelectedMember) bool {
		return m.Parent == nil && m.SampleIndex != *e.Members[child].Parent
	})
	said := schemas.StepRewardSubject("r", "g", int64(child), judgedStep)
	for want, of := range map[string][]byte{
		"": archive,
		fmt.Sprintf("selections broken: g #%d: it goes on from #%d, its trajectory did not", child, other): edited(t,
			archive, schemas.StreamVerdicts, e.Subject(), func(e *schemas.Selection) {
				e.Members[child].Parent = new(int64(other))
			}),
		fmt.Sprintf("trajectories broken: g #%d step %d: prediction", child, judgedStep): edited(t, archive,
			schemas.StreamVerdicts, said, func(e *schemas.StepReward) {
				e.Media[0].Digest = strings.Repeat("0", len(e.Media[0].Digest))
			}),
	} {
		faults, whole := proved(t, of, nil)
		found := slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, want) })
		if whole != (want == "") || !found && want != "" {
			t.Errorf("%q: proved %t, %q", want, whole, faults)
		}
	}
}

// checkProved proves that an update of tenant b learned from samples of b, and that one of another tenant's is found.
func checkProved(t *testing.T, b *bus.Bus, run schemas.Run, of *schemas.Policy) {
	t.Helper()
	subject := schemas.AdvantageSubject(run, "g")
	a := bustest.Await(t, b, 1, schemas.StreamAdvantages, subject)[subject]
	learned(t, b, bustest.Decode[schemas.Advantage](t, a), of)
	archive := archiveOf(t, b, run)
	prover := func(o *prove.Options) { o.Verify.Model = []string{signsFolder} }
	if faults, whole := proved(t, archive, prover); !whole {
		t.Errorf("an update of b: %q", faults)
	}
	record := schemas.GroupSubject(run, "g")
	other := edited(t, archive, schemas.StreamGroups, record, func(e *schemas.GroupRecord) { e.Tenant = "a" })
	want := "batch broken: batch b: group g was made with the weights of signs.a, the update is of signs.b"
	if faults, _ := proved(t, other, prover); !slices.Contains(faults, want) {
		t.Errorf("%q; want %q", faults, want)
	}
	faults, _ := proved(t, archive, func(o *prove.Options) { o.Tenant = "a" })
	if want := `lane "", tenant "a": no update of them is in the archive`; !slices.Contains(faults, want) {
		t.Errorf("%q; want %q", faults, want)
	}
}
