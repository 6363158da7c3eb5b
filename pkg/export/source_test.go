package export_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// put stores an event as it is, valid or not.
func put(t *testing.T, b *bus.Bus, e schemas.Keyed) uint64 {
	t.Helper()
	ack, err := b.PublishRaw(t.Context(), e.Subject(), bustest.Encode(t, e), nil, "")
	if err != nil {
		t.Fatal(err)
	}
	return ack.Seq
}

// archived is the archive of a run.
func archived(t *testing.T, b *bus.Bus, run schemas.Run) []byte {
	t.Helper()
	var file bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), b, run, &file); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

// importRun stores an export.
func importRun(t *testing.T, b *bus.Bus, file []byte, o export.ImportOptions) (*export.Imported, error) {
	t.Helper()
	return export.Import(t.Context(), b, bytes.NewReader(file), o)
}

// group is the record of group u of a run, which a prompt of the sequence asked for.
func group(run, source schemas.Run, prompt uint64) *schemas.GroupRecord {
	g := &schemas.GroupRecord{Run: run, UID: "u", GroupSize: 1, Prompt: "a red fox"}
	g.Group.Batch, g.Group.PromptSeq, g.Group.SourceRun = "u", prompt, source
	if source == "" {
		g.Error = "refused"
	}
	return g
}

// madeAt is the one sample of group u of a run, which ended at a time.
func madeAt(run schemas.Run, finished int64, prompt uint64) *schemas.Trajectory {
	made := &schemas.Trajectory{Identity: schemas.Identity{Stage: schemas.StageMain}}
	made.Run, made.UID, made.GroupSize, made.Lane, made.Attempt = run, "u", 1, "lane", "a"
	made.StopReason, made.Error, made.Timings.Finished = schemas.StopFailed, "no", finished
	made.Group.Batch, made.Group.PromptSeq = "u", prompt
	return made
}

// scored are the reward and the result of that sample, in a run of its own where source is given.
func scored(run, source schemas.Run, finished int64, prompt, seq uint64) (*schemas.Reward, *schemas.Advantage) {
	r := &schemas.Reward{
		Run: run, UID: "u", GroupSize: 1, Status: schemas.StatusFailed, Error: "no", Scores: []schemas.Score{},
		TrajectorySeq: seq, SampleFinished: finished,
	}
	r.Group.Batch, r.Group.PromptSeq, r.Group.SourceRun = "u", prompt, source
	a := &schemas.Advantage{
		Run: run, UID: "u", Batch: "u", Status: schemas.StatusFailed, GroupSize: 1, SourceRun: source,
		Members: []schemas.Member{{Status: schemas.StatusFailed, TrajectorySeq: seq}},
		Scale:   "group", StdBasis: "sample", Estimator: "flow_grpo", Epsilon: 1e-4,
	}
	return r, a
}

// pass is a store with the run "made", its pass "pass", and their archives. Sequences begin with others.
func pass(t *testing.T) (p *bustest.Plane, made, again []byte) {
	t.Helper()
	p = bustest.New(t)
	publish(t, p.Bus, madeAt("other", 1, 1))
	publish(t, p.Bus, group("made", "", 7))
	seq := publish(t, p.Bus, madeAt("made", 5, 7))
	publish(t, p.Bus, group("pass", "made", 7))
	r, a := scored("pass", "made", 5, 7, seq)
	publish(t, p.Bus, r)
	publish(t, p.Bus, a)
	return p, archived(t, p.Bus, "made"), archived(t, p.Bus, "pass")
}

// The events of a pass name the samples of the run that it scored, by their sequences in the store.
func TestImport_Pass(t *testing.T) {
	t.Parallel()
	first, made, again := pass(t)
	p := bustest.New(t)
	if _, err := importRun(t, p.Bus, made, export.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, stored := range []int{3, 0} {
		done, err := importRun(t, p.Bus, again, export.ImportOptions{})
		if err != nil || done.Stored != stored || done.SourceRun != "made" || done.MissingTrajectories != 0 {
			t.Fatalf("%+v, %v; want %d events stored", done, err, stored)
		}
	}
	m, err := p.Last(t.Context(), schemas.StreamTrajectories,
		schemas.TrajectorySubject("made", "u", 0, schemas.StageMain))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		stream, subject string
		seq             func(m *bus.Message) uint64
	}{
		{schemas.StreamRewards, schemas.RewardFilter("pass", "u", "u"), func(m *bus.Message) uint64 {
			var e schemas.Reward
			decode(t, m, &e)
			return e.TrajectorySeq
		}},
		{schemas.StreamAdvantages, schemas.AdvantageSubject("pass", "u"), func(m *bus.Message) uint64 {
			var e schemas.Advantage
			decode(t, m, &e)
			return e.Members[0].TrajectorySeq
		}},
	} {
		got, err := p.Last(t.Context(), x.stream, x.subject)
		if err != nil {
			t.Fatal(err)
		}
		if seq := x.seq(got); seq != m.Seq {
			t.Errorf("%s names sequence %d, want %d", x.subject, seq, m.Seq)
		}
	}
	// Where it is from, a pass that was removed comes back.
	if _, err := first.Purge(t.Context(), "pass"); err != nil {
		t.Fatal(err)
	}
	if _, err := importRun(t, first.Bus, again, export.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(archived(t, first.Bus, "made"), made) {
		t.Error("the run that it scored has changed")
	}
}

// A pass without its run, or beside another run of that name, is refused before anything is written.
func TestImport_PassAlone(t *testing.T) {
	t.Parallel()
	_, made, again := pass(t)
	nothing := func(b *bustest.Plane) {
		t.Helper()
		if _, err := b.Last(t.Context(), schemas.StreamGroups, schemas.GroupSubject("pass", "u")); !errors.Is(err,
			bus.ErrNotFound) {
			t.Errorf("a refused import has left a group: %v", err)
		}
	}
	p := bustest.New(t)
	_, err := importRun(t, p.Bus, again, export.ImportOptions{})
	if !errors.Is(err, export.ErrNoSource) || !strings.Contains(err.Error(), "import an export of run made first") {
		t.Errorf("without its run: %v", err)
	}
	nothing(p)
	publish(t, p.Bus, madeAt("made", 6, 7))
	if _, err := importRun(t, p.Bus, again, export.ImportOptions{}); !errors.Is(err, export.ErrOther) {
		t.Errorf("beside another run: %v", err)
	}
	nothing(p)
	p = bustest.New(t)
	done, err := importRun(t, p.Bus, again, export.ImportOptions{WithoutSource: true})
	if err != nil || done.Stored != 3 || done.MissingTrajectories != 1 {
		t.Errorf("as it was told: %+v, %v", done, err)
	}
	// All that it lacks has one number in its export, which is not that of any sample where its run is.
	alone := archived(t, p.Bus, "pass")
	p = bustest.New(t)
	if _, err := importRun(t, p.Bus, made, export.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	done, err = importRun(t, p.Bus, alone, export.ImportOptions{})
	if err != nil || done.Stored != 3 || done.MissingTrajectories != 1 {
		t.Errorf("the export of what lacks its run: %+v, %v", done, err)
	}
	m, err := p.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("pass", "u"))
	if err != nil {
		t.Fatal(err)
	}
	if seq := bustest.Decode[schemas.Advantage](t, m).Members[0].TrajectorySeq; seq != 1<<53-1 {
		t.Errorf("the result names sequence %d, which may be of another sample", seq)
	}
}

// Streams drop trajectories before rewards: what is left of a run is imported, and names no other event instead.
func TestImport_Aged(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	publish(t, p.Bus, group("r", "", 1))
	r, a := scored("r", "", 5, 1, publish(t, p.Bus, madeAt("r", 5, 1)))
	publish(t, p.Bus, r)
	publish(t, p.Bus, a)
	if _, err := p.PurgeSubject(t.Context(), schemas.StreamTrajectories,
		schemas.TrajectoryFilter("r", "*")); err != nil {
		t.Fatal(err)
	}
	file := archived(t, p.Bus, "r")
	p = bustest.New(t)
	for range 2 { // sequences that the archive has, too
		publish(t, p.Bus, madeAt("r"+schemas.Run(rune('0'+p.Info(t, schemas.StreamTrajectories).State.Msgs)), 1, 1))
	}
	done, err := importRun(t, p.Bus, file, export.ImportOptions{})
	if err != nil || done.Stored != 3 || done.MissingTrajectories != 1 {
		t.Fatalf("%+v, %v", done, err)
	}
	m, err := p.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", "u"))
	if err != nil {
		t.Fatal(err)
	}
	var stored schemas.Advantage
	decode(t, m, &stored)
	if seq := stored.Members[0].TrajectorySeq; seq <= 2 {
		t.Errorf("the result names sequence %d, which is of another sample", seq)
	}
	if g, err := p.Last(t.Context(), schemas.StreamGroups, schemas.GroupSubject("r", "u")); err != nil {
		t.Fatal(err)
	} else if decode(t, g, group("", "", 0)); bustest.Decode[schemas.GroupRecord](t, g).Group.PromptSeq == 1 {
		t.Error("the group names the first prompt of the store")
	}
}
