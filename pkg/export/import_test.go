package export_test

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// exported is a run of a prompt without a uid, the third that is stored, with a sample of two steps and its reward.
func exported(t *testing.T) []byte {
	t.Helper()
	p := bustest.New(t)
	var prompt bus.Ack
	for _, run := range []schemas.Run{"other", "other", "r1"} {
		var err error
		data := bustest.Encode(t, &schemas.Prompt{Prompt: "a red fox"})
		if prompt, err = p.PublishRaw(t.Context(), schemas.PromptSubject(run), data, nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	record := group("r1", "", prompt.Seq)
	record.UID, record.Group.Batch = "p3", "p3"
	publish(t, p.Bus, record)
	publish(t, p.Bus, stepOf("other", "u", 0, 0, make([]byte, 32)))
	var steps []schemas.StepRef
	for i := range int64(2) {
		step := stepOf("r1", "p3", 0, i, make([]byte, 32))
		steps = append(steps, refTo(t, step, publish(t, p.Bus, step)))
	}
	publish(t, p.Bus, madeAt("other", 1, 1))
	sample := completed("r1", "p3", 0, steps...)
	sample.Group.PromptSeq = prompt.Seq
	reward, _ := scored("r1", "", 0, prompt.Seq, publish(t, p.Bus, sample))
	reward.UID, reward.Group.Batch = "p3", "p3"
	publish(t, p.Bus, reward)
	var file bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), p.Bus, "r1", &file); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

func decode(t *testing.T, m *bus.Message, e schemas.Event) {
	t.Helper()
	if err := schemas.Decode(m.Data, e); err != nil {
		t.Fatal(err)
	}
}

// broken cannot be read any more once it was sought so often.
type broken struct {
	*bytes.Reader
	seeks int
}

var errBroken = errors.New("the disk is gone")

func (b *broken) Seek(offset int64, whence int) (int64, error) {
	if whence == io.SeekStart && offset == 0 {
		if b.seeks--; b.seeks < 0 {
			return 0, errBroken
		}
	}
	return b.Reader.Seek(offset, whence)
}

// An import that broke off anywhere goes on, and events name each other by the sequences of the new store.
func TestImport_GoesOn(t *testing.T) {
	file := exported(t)
	p := bustest.New(t)
	for seeks := 1; ; seeks++ {
		done, err := export.Import(t.Context(), p.Bus, &broken{bytes.NewReader(file), seeks}, export.ImportOptions{})
		if errors.Is(err, errBroken) {
			continue
		}
		if err != nil || done.Stored+done.AlreadyStored != 6 || seeks < 5 {
			t.Fatalf("after %d reads: %+v, %v", seeks, done, err)
		}
		break
	}
	var step, trajectory uint64
	outcomes := map[string]string{
		schemas.StreamTrajectories: schemas.StopCompleted, schemas.StreamRewards: schemas.StatusFailed,
	}
	for stream, n := range map[string]int{
		schemas.StreamPrompts: 1, schemas.StreamGroups: 1, schemas.StreamSteps: 2,
		schemas.StreamTrajectories: 1, schemas.StreamRewards: 1,
	} {
		stored := 0
		for m, err := range p.Read(t.Context(), stream, nil, bus.ReadOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			stored++
			if said := m.Header.Get(schemas.HeaderOutcome); said != outcomes[stream] {
				t.Errorf("%s: its outcome for those who only look: %q", stream, said)
			}
			switch stream {
			case schemas.StreamPrompts:
				var e schemas.Prompt
				decode(t, m, &e)
				if m.Seq != 1 || e.UID != "p3" {
					t.Errorf("the prompt has the uid %q; want p3, of its old sequence", e.UID)
				}
			case schemas.StreamTrajectories:
				var e schemas.Trajectory
				decode(t, m, &e)
				trajectory, step = m.Seq, e.Steps[1].Seq
			}
		}
		if stored != n {
			t.Errorf("%s has %d events, want %d", stream, stored, n)
		}
	}
	if m, err := p.Get(t.Context(), schemas.StreamSteps, step); err != nil || !strings.HasSuffix(m.Subject, ".1") {
		t.Errorf("the second step is named as sequence %d: %v", step, err)
	}
	m, err := p.Last(t.Context(), schemas.StreamRewards, schemas.RewardFilter("r1", "p3", "p3"))
	if err != nil {
		t.Fatal(err)
	}
	var reward schemas.Reward
	if decode(t, m, &reward); reward.TrajectorySeq != trajectory {
		t.Errorf("the reward is of trajectory %d, want %d", reward.TrajectorySeq, trajectory)
	}
}

// What people say of a run goes with its archive; what the store has of it already stays.
func TestImport_Notes(t *testing.T) {
	p := bustest.New(t)
	publish(t, p.Bus, group("r1", "", 1))
	said, err := p.EditNotes(t.Context(), "r1", "ann", func(n *bus.Notes) { n.Tags, n.Note = []string{"best"}, "why" })
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), p.Bus, "r1", &archive); err != nil {
		t.Fatal(err)
	}
	for _, own := range []string{"", "mine"} {
		q, want := bustest.New(t), said
		if own != "" {
			want, err = q.EditNotes(t.Context(), "r1", "bob", func(n *bus.Notes) { n.Note = own })
			if err != nil {
				t.Fatal(err)
			}
		}
		if _, err := export.Import(t.Context(), q.Bus, bytes.NewReader(archive.Bytes()),
			export.ImportOptions{}); err != nil {
			t.Fatal(err)
		}
		if got, err := q.Notes(t.Context(), "r1"); err != nil || !reflect.DeepEqual(got["r1"], want) {
			t.Errorf("with %q: %+v, %v; want %+v", own, got["r1"], err, want)
		}
	}
	bad := pack(t, append(unpack(t, archive.Bytes())[:1], file{"notes.json", []byte(`{"tags": [""]}`)}), true)
	for _, err := range export.ReadArchive(bytes.NewReader(bad)) {
		if err != nil && strings.Contains(err.Error(), `"notes.json": tag: ""; must have 1 to 40 characters`) {
			return
		}
	}
	t.Error("a tag that cannot be was accepted")
}

// A run that is stored with anything else is refused by name, and stays as it is.
func TestImport_Other(t *testing.T) {
	file := exported(t)
	const notThere, differs = "is not in the export", "has other content in the export"
	for name, c := range map[string]struct{ subject, says string }{
		"another event":     {schemas.TrajectorySubject("r1", "elsewhere", 0, schemas.StageMain), notThere},
		"otherwise":         {schemas.TrajectorySubject("r1", "p3", 0, schemas.StageMain), differs},
		"a prompt too many": {schemas.PromptSubject("r1"), notThere},
	} {
		p := bustest.New(t)
		if _, err := p.PublishRaw(t.Context(), c.subject, []byte("x"), nil, ""); err != nil {
			t.Fatal(err)
		}
		_, err := export.Import(t.Context(), p.Bus, bytes.NewReader(file), export.ImportOptions{})
		if !errors.Is(err, export.ErrOther) || !strings.Contains(err.Error(), c.subject) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if n := p.Info(t, schemas.StreamSteps).State.Msgs; n > 0 {
			t.Errorf("%s: %d steps were written", name, n)
		}
	}
}

// during does something once when it is written to.
type during struct {
	bytes.Buffer
	at string
	do func()
}

func (d *during) Write(p []byte) (int, error) {
	if d.do != nil && bytes.Contains(p, []byte(d.at)) {
		do := d.do
		d.do = nil
		do()
	}
	return d.Buffer.Write(p)
}

// A run may be exported while it is worked on: no trajectory is in the export without its steps.
func TestWrite_InUse(t *testing.T) {
	p := bustest.New(t)
	sample := func(i int64) {
		step := stepOf("r1", "u", i, 0, make([]byte, 32))
		publish(t, p.Bus, completed("r1", "u", i, refTo(t, step, publish(t, p.Bus, step))))
	}
	sample(0)
	file := &during{at: "MDR_STEPS/", do: func() { sample(1) }}
	if _, err := export.WriteArchive(t.Context(), p.Bus, "r1", file); err != nil {
		t.Fatal(err)
	}
	if done, err := export.Import(t.Context(), bustest.New(t).Bus, bytes.NewReader(file.Bytes()),
		export.ImportOptions{}); err != nil || done.Stored != 2 {
		t.Errorf("imported %+v, %v; want the first sample", done, err)
	}
}
