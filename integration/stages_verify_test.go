package integration_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// replaced is a stored event that was forged.
type replaced struct {
	subject string
	was     []byte
}

// edit stores another event in the place of one.
func edit[T any, E interface {
	*T
	schemas.Keyed
}](t *testing.T, b *bus.Bus, stream, subject string, change func(E),
) replaced {
	t.Helper()
	m, err := b.Last(t.Context(), stream, subject)
	if err != nil {
		t.Fatal(err)
	}
	e := E(new(T))
	if err := schemas.Decode(m.Data, e); err != nil {
		t.Fatal(err)
	}
	change(e)
	replaced{subject, bustest.Encode(t, e)}.restore(t, b)
	return replaced{subject, m.Data}
}

// restore stores what was there before, or nothing.
func (r replaced) restore(t *testing.T, b *bus.Bus) {
	t.Helper()
	spec, _ := schemas.StreamOf(r.subject)
	m, err := b.Last(t.Context(), spec.Name, r.subject)
	if err == nil {
		err = b.Delete(t.Context(), spec.Name, m.Seq)
	} else if errors.Is(err, bus.ErrNotFound) {
		err = nil
	}
	if err == nil && r.was != nil {
		_, err = b.PublishRaw(t.Context(), r.subject, r.was, nil, "")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// falsifier changes what is stored of a run.
type falsifier struct {
	*crew
	t *testing.T
}

func trajectoryAt(uid schemas.UID, sample int64, stage schemas.Stage) string {
	return schemas.TrajectorySubject("r", uid, sample, stage)
}

func (f falsifier) trajectory(uid schemas.UID, sample int64, stage schemas.Stage,
	change func(*schemas.Trajectory),
) replaced {
	return edit(f.t, f.Bus, schemas.StreamTrajectories, trajectoryAt(uid, sample, stage), change)
}

func (f falsifier) record(uid schemas.UID, change func(*schemas.GroupRecord)) replaced {
	return edit(f.t, f.Bus, schemas.StreamGroups, schemas.GroupSubject("r", uid), change)
}

// request asks for a stage that has ended once more, with another text.
func (f falsifier) request(uid schemas.UID, sample int64, stage schemas.Stage) replaced {
	of := f.stage(f.t, "r", uid, sample, stage)
	r := &schemas.Request{
		Identity: of.Identity, Sampling: of.Sampling, ScheduleDigest: of.ScheduleDigest, Group: of.Group,
	}
	r.Prompt = "a sign that says nothing"
	if _, err := f.Publish(f.t.Context(), r); err != nil {
		f.t.Fatal(err)
	}
	return replaced{subject: r.Subject()}
}

// gone removes a trajectory.
func (f falsifier) gone(uid schemas.UID, sample int64, stage schemas.Stage) replaced {
	m, err := f.Last(f.t.Context(), schemas.StreamTrajectories, trajectoryAt(uid, sample, stage))
	if err == nil {
		err = f.Delete(f.t.Context(), schemas.StreamTrajectories, m.Seq)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return replaced{m.Subject, m.Data}
}

func says(text string) func(*schemas.Trajectory) {
	return func(e *schemas.Trajectory) { e.Text.Turns[len(e.Text.Turns)-1].Text = text }
}

const (
	notAsked = "request: not what follows from the group's record and the stages before: "
	lacks    = "the requests of 2 stages cannot be made again: " +
		"stage think of g sample 0, before stage paint, is not stored"
)

// falsifications are changes of a run of two groups, and what must be said of each: a sample, its stage and what is
// wrong.
var falsifications = []struct {
	name string
	make func(f falsifier) replaced
	want []string
	gone string // why the run is unproven, with nothing wrong
}{
	{"a thought of two images", func(f falsifier) replaced { return f.trajectory("g", 2, "think", says("99")) }, []string{
		"g #2 paint " + notAsked + `prompt: "a sign that says \"`, "g #3 paint " + notAsked + `prompt: "a sign that says \"`,
	}, ""},
	{"what a judge said", func(f falsifier) replaced { return f.trajectory("j", 1, "judge", says(" yes")) }, []string{
		"j #1 think-2 " + notAsked + `prompt: "`,
	}, ""},
	{"the image that a judge was shown", func(f falsifier) replaced {
		return f.trajectory("j", 0, "paint", func(e *schemas.Trajectory) {
			e.Media[0].Ref = f.stage(f.t, "r", "j", 1, "paint").Media[0].Ref
		})
	}, []string{"j #0 judge " + notAsked + "conditions: "}, ""},
	{"a judge that ended the sample", func(f falsifier) replaced {
		return f.trajectory("j", 1, "judge", func(e *schemas.Trajectory) {
			e.Text.Conversation = schemas.ConversationTerminated
		})
	}, []string{
		"j #1 think-2 " + notAsked + "stage think-2: the sample ended with stage judge",
		"j #1 paint-2 " + notAsked + "stage paint-2: the sample ended with stage judge",
	}, ""},
	{"the seed of an image", func(f falsifier) replaced {
		return f.trajectory("g", 1, "paint", func(e *schemas.Trajectory) { e.SampleSeed++ })
	}, []string{"g #1 paint " + notAsked + "sample_seed: "}, ""},
	{"a template of the record", func(f falsifier) replaced {
		return f.record("g", func(e *schemas.GroupRecord) { e.Stages[1].Prompt = "{think.text}" })
	}, []string{
		"g #0  prompt_digest: the group's record has ", "g #3 paint " + notAsked + `prompt: "a sign that says`,
	}, ""},
	{"the seed of the record", func(f falsifier) replaced {
		return f.record("g", func(e *schemas.GroupRecord) { *e.Seed = 6 })
	}, []string{"g #0 think " + notAsked + "sample_seed: ", "g #3 paint " + notAsked + "sample_seed: "}, ""},
	{"a request in the queue", func(f falsifier) replaced { return f.request("g", 3, "paint") }, []string{
		"g #3 paint " + notAsked + `prompt: "a sign that says nothing"; must be "a sign that says \"`,
	}, ""},
	{"a thought that is gone", func(f falsifier) replaced { return f.gone("g", 0, "think") }, nil, lacks},
}

// The request of each stage follows from the record of its group and from what was made before it. A stored text, a
// record or a request that is another is found, by sample and stage.
func TestStages_Verify(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	critic(t, c)
	c.publish(t, "r", thinkAndPaint("g", 4))
	c.publish(t, "r", judged("j", 2))
	c.advantages(t, "r", 2)
	for _, s := range c.serving {
		s.Stop() // they would put away what is forged
	}
	options := verify.Options{Model: []string{"synthetic", sumsFolder(t)}}
	verified := func(b *bus.Bus) *verify.Report {
		t.Helper()
		report, err := verify.Run(t.Context(), b, "r", options)
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	// Thoughts and images of g; one sample of j ends in the second round, the other in the third.
	const all = 2 + 4 + 6 + 9
	whole := func() {
		t.Helper()
		if r := verified(c.Bus); !r.OK(0) || r.Requests != all {
			t.Fatalf("%d requests, want %d; %v, %v", r.Requests, all, r.Faults(0), r.Mismatches)
		}
	}
	whole()
	for _, x := range falsifications {
		was := x.make(falsifier{c, t})
		report := verified(c.Bus)
		named(t, x.name, report, x.want)
		if report.OK(0) || x.gone != "" && report.Unproven != x.gone {
			t.Errorf("%s: %v; want %q", x.name, report.Faults(0), x.gone)
		}
		was.restore(t, c.Bus)
	}
	whole()

	var file bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), c.Bus, "r", &file); err != nil {
		t.Fatal(err)
	}
	forged := rewritten(t, file.Bytes(), trajectoryAt("j", 1, "judge-2"), says(" maybe"))
	p := bustest.New(t)
	if _, err := export.Import(t.Context(), p.Bus, bytes.NewReader(forged), export.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	named(t, "an archive with sums that are right", verified(p.Bus), []string{"j #1 think-3 " + notAsked + `prompt: "`})
}

// named checks that a report names each difference.
func named(t *testing.T, name string, r *verify.Report, want []string) {
	t.Helper()
	var got []string
	for _, m := range r.Mismatches {
		got = append(got, fmt.Sprintf("%s #%d %s %s", m.UID, m.SampleIndex, m.Stage, m.What))
	}
	for _, w := range want {
		if !strings.Contains("\n"+strings.Join(got, "\n"), "\n"+w) {
			t.Errorf("%s: %q is not in\n%s", name, w, strings.Join(got, "\n"))
		}
	}
}

// rewritten returns an archive in which one trajectory is another, with the sums of what it has now.
func rewritten(t *testing.T, archive []byte, subject string, change func(*schemas.Trajectory)) []byte {
	t.Helper()
	var out, sums bytes.Buffer
	to, found := tar.NewWriter(&out), false
	for from := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(from)
		if err != nil {
			t.Fatal(err)
		}
		if e := (&schemas.Trajectory{}); schemas.DecodeValid(data, e) == nil && e.Subject() == subject {
			change(e)
			data, found = bustest.Encode(t, e), true
		}
		if h.Name == "SHA256SUMS" {
			data = sums.Bytes()
		} else {
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), h.Name)
		}
		h.Size = int64(len(data))
		if err := errors.Join(to.WriteHeader(h), second(to.Write(data))); err != nil {
			t.Fatal(err)
		}
	}
	if err := to.Close(); err != nil || !found {
		t.Fatalf("%s in the archive: %v, %v", subject, found, err)
	}
	return out.Bytes()
}

func second[A, B any](_ A, b B) B { return b }
