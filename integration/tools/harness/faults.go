package harness

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// What can be the matter with an event.
const (
	Lost    = "lost"    // it should be stored, and is not
	Doubled = "doubled" // it is stored more than once
	Wrong   = "wrong"   // it is stored, and is not what it should be
)

// Fault is what is the matter with one event.
type Fault struct {
	Kind string // Lost, Doubled or Wrong
	UID  string // of its group; the id of a batch
	What string
}

func (f Fault) String() string { return fmt.Sprintf("%s: %s: %s", f.UID, f.Kind, f.What) }

// audit gathers faults.
type audit []Fault

func (a *audit) note(kind, uid, format string, args ...any) {
	*a = append(*a, Fault{kind, uid, fmt.Sprintf(format, args...)})
}

// ordered are the faults by uid.
func (a audit) ordered() []Fault {
	slices.SortStableFunc(a, func(x, y Fault) int {
		return cmp.Or(strings.Compare(x.UID, y.UID), strings.Compare(x.What, y.What))
	})
	return a
}

// of is the uid or batch of a key of the books.
func of(key string) string {
	_, id, _ := strings.Cut(key, " ")
	id, _, _ = strings.Cut(id, "/")
	return id
}

// StageOf is one stage of a prompt's samples, in one round, as it was asked for.
type StageOf struct {
	Stage schemas.Stage
	Every int64 // how many leaves each of its samples has
	Steps int64 // of each trajectory; AnySteps: one at least
}

// AnySteps is for a stage of text, which has as many steps as the model says.
const AnySteps = -1

// stagesOf are the stages of a prompt; one that has none is its own, of that many steps.
func (k *Books) stagesOf(uid schemas.UID, steps int64) []StageOf {
	if stages := k.Staged[uid]; stages != nil {
		return stages
	}
	return []StageOf{{schemas.StageMain, 1, steps}}
}

// keyOf is the key of a trajectory in the books.
func keyOf(uid schemas.UID, sample int64, stage schemas.Stage) string {
	key := fmt.Sprintf("%s/%d", uid, sample)
	if stage != schemas.StageMain {
		key += "/" + string(stage)
	}
	return key
}

// Faults holds the books against what was asked for, samples by uid: every group complete, each
// sample with one reward and a trajectory of that many steps, or with one of each of its stages, each
// step of a trajectory its own.
func (k *Books) Faults(asked map[schemas.UID]int64, steps int64) []Fault {
	var found audit
	for _, key := range slices.Sorted(maps.Keys(k.Twice)) {
		found.note(Doubled, of(key), "%s: stored %d times", key, k.Twice[key]+1)
	}
	for uid, size := range asked {
		k.group(&found, uid, size, k.stagesOf(uid, steps))
	}
	for uid := range k.Advantages {
		if asked[uid] == 0 {
			found.note(Wrong, string(uid), "an advantage that nobody asked for")
		}
	}
	named := map[uint64]string{}
	for _, key := range slices.Sorted(maps.Keys(k.Trajectories)) {
		tr := k.Trajectories[key]
		stages := k.stagesOf(tr.UID, steps)
		at := slices.IndexFunc(stages, func(s StageOf) bool {
			return s.Stage == tr.Stage && tr.SampleIndex%s.Every == 0
		})
		if asked[tr.UID] <= tr.SampleIndex || at < 0 {
			found.note(Wrong, string(tr.UID), "trajectory %s: nobody asked for it", key)
		} else if want, n := stages[at].Steps, int64(len(tr.Steps)); n != want && (want != AnySteps || n == 0) {
			found.note(Wrong, string(tr.UID), "trajectory %s names %d steps, want %d", key, n, want)
		}
		for i, s := range tr.Steps {
			here := fmt.Sprintf("%s step %d", key, i)
			if other, ok := named[s.Seq]; ok {
				found.note(Wrong, string(tr.UID), "sequence %d is %s and %s", s.Seq, other, here)
			}
			named[s.Seq] = here
		}
	}
	if k.Steps < len(named) {
		found.note(Lost, "", "%d steps are stored, trajectories name %d", k.Steps, len(named))
	}
	return found.ordered()
}

// group is what is the matter with one group.
func (k *Books) group(found *audit, uid schemas.UID, size int64, stages []StageOf) {
	a := k.Advantages[uid]
	switch {
	case a == nil:
		found.note(Lost, string(uid), "no advantage")
	case a.Status != schemas.StatusComplete || int64(len(a.Members)) != size:
		found.note(Wrong, string(uid), "advantage: %s with %d members, %q; want complete with %d", a.Status,
			len(a.Members), a.Error, size)
	}
	for i := range size {
		ran := k.sample(found, uid, i, stages)
		if key := keyOf(uid, i, schemas.StageMain); k.Digests["reward "+key] == "" {
			found.note(Lost, string(uid), "reward %s: none", key)
		}
		if k.Staged[uid] == nil || a == nil || i >= int64(len(a.Members)) {
			continue
		}
		var named []string
		for _, x := range a.Members[i].Stages {
			named = append(named, keyOf(uid, x.SampleIndex, x.Stage))
		}
		if !slices.Equal(named, ran) {
			found.note(Wrong, string(uid), "advantage: sample %d ran %v, stored are %v", i, named, ran)
		}
	}
}

// sample is what is the matter with the stages of one sample, which another stage may have ended. Those that it must
// have run are returned by key.
func (k *Books) sample(found *audit, uid schemas.UID, i int64, stages []StageOf) (ran []string) {
	for _, s := range stages {
		key := keyOf(uid, i-i%s.Every, s.Stage)
		tr := k.Trajectories[key]
		ran = append(ran, key)
		switch {
		case tr == nil:
			found.note(Lost, string(uid), "trajectory %s: none", key)
			return ran
		case tr.StopReason != schemas.StopCompleted:
			found.note(Wrong, string(uid), "trajectory %s: %s, %q; want %s", key, tr.StopReason, tr.Error,
				schemas.StopCompleted)
		case tr.Text != nil && tr.Text.SaidBy != "" && tr.Text.Conversation == schemas.ConversationTerminated:
			return ran
		}
	}
	return ran
}

// Differs is what is not as in the books of another run of the same prompts.
func (k *Books) Differs(calm *Books) []Fault {
	var found audit
	for key, want := range calm.Digests {
		switch got := k.Digests[key]; got {
		case want:
		case "":
			found.note(Lost, of(key), "%s: none; the calm run has one", key)
		default:
			found.note(Wrong, of(key), "%s: content %.16s, of the calm run %.16s", key, got, want)
		}
	}
	for key := range k.Digests {
		if calm.Digests[key] == "" {
			found.note(Wrong, of(key), "%s: the calm run has none", key)
		}
	}
	return found.ordered()
}

// Check fails the test for each of the Faults.
func (k *Books) Check(t testing.TB, asked map[schemas.UID]int64, steps int64) {
	t.Helper()
	for _, f := range k.Faults(asked, steps) {
		t.Error(f)
	}
}

// Same fails the test for each event that Differs.
func (k *Books) Same(t testing.TB, calm *Books) {
	t.Helper()
	for _, f := range k.Differs(calm) {
		t.Error(f)
	}
}

// Stored is one message of a stream.
type Stored struct {
	Subject string
	Digest  string // payload digest
}

// ReadSteps reads the stored steps of a run whole, of images and of texts, by sequence.
func ReadSteps(t testing.TB, b *bus.Bus, run schemas.Run) map[uint64]Stored {
	t.Helper()
	steps := map[uint64]Stored{}
	filters := []string{
		schemas.Address{Kind: schemas.KindStep, Run: run}.Filter(),
		schemas.Address{Kind: schemas.KindTokens, Run: run}.Filter(),
	}
	for m, err := range b.Read(t.Context(), schemas.StreamSteps, filters, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		digest, _ := schemas.PayloadDigest(m.Data) // none of what is no event
		steps[m.Seq] = Stored{m.Subject, digest}
	}
	return steps
}

// StepFaults holds the stored steps against the trajectories: each step that one names is there, on
// its subject, with its bytes, and nothing is on a subject twice. Superseded are steps that no
// trajectory names.
func (k *Books) StepFaults(stored map[uint64]Stored) (faults []Fault, superseded int) {
	var found audit
	superseded = len(stored)
	for key, tr := range k.Trajectories {
		for i, s := range tr.Steps {
			have, ok := stored[s.Seq]
			if ok {
				superseded--
			}
			switch want := (Stored{tr.StepSubject(i), s.Digest}); {
			case !ok:
				found.note(Lost, string(tr.UID), "step %d of %s: nothing at sequence %d", i, key, s.Seq)
			case have != want:
				found.note(Wrong, string(tr.UID), "step %d of %s: sequence %d has %+v, the trajectory names %+v", i,
					key, s.Seq, have, want)
			}
		}
	}
	times := map[string]int{}
	for _, s := range stored {
		times[s.Subject]++
	}
	for subject, n := range times {
		if n > 1 {
			a, _ := schemas.ParseSubject(subject)
			found.note(Doubled, string(a.UID), "step %s: stored %d times", subject, n)
		}
	}
	return found.ordered(), superseded
}
