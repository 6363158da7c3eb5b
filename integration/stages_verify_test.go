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
	replaced{subject, bustest.Encode(t, e)}.undo(t, b, stream)
	return replaced{subject, m.Data}
}

// undo stores what was there before.
func (r replaced) undo(t *testing.T, b *bus.Bus, stream string) {
	t.Helper()
	m, err := b.Last(t.Context(), stream, r.subject)
	if err == nil {
		err = b.Delete(t.Context(), stream, m.Seq)
	}
	if err == nil && r.was != nil {
		_, err = b.PublishRaw(t.Context(), r.subject, r.was, nil, "")
	}
	if err != nil {
		t.Fatal(err)
	}
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
	const all = 2 + 4 + 6 + 9 // thoughts and pictures of g; a sample of j ends in the second round, another in the third
	whole := func() {
		t.Helper()
		if r := verified(c.Bus); !r.OK(0) || r.Requests != all {
			t.Fatalf("%d requests, want %d; %v, %v", r.Requests, all, r.Faults(0), r.Mismatches)
		}
	}
	whole()

	at := func(uid schemas.UID, sample int64, stage schemas.Stage) string {
		return schemas.TrajectorySubject("r", uid, sample, stage)
	}
	trajectory := func(subject string, change func(*schemas.Trajectory)) func() replaced {
		return func() replaced {
			return edit(t, c.Bus, schemas.StreamTrajectories, subject, change)
		}
	}
	says := func(text string) func(*schemas.Trajectory) {
		return func(e *schemas.Trajectory) { e.Text.Turns[len(e.Text.Turns)-1].Text = text }
	}
	record := func(uid schemas.UID, change func(*schemas.GroupRecord)) func() replaced {
		return func() replaced {
			return edit(t, c.Bus, schemas.StreamGroups, schemas.GroupSubject("r", uid), change)
		}
	}
	const request = "request: not what follows from the group's record and the stages before: "
	for _, x := range []struct {
		name, stream string
		forge        func() replaced
		want         []string // each a sample, a stage and what is said of it
		gone         string
	}{
		{
			"a thought of two pictures", schemas.StreamTrajectories, trajectory(at("g", 2, "think"), says("99")),
			[]string{`g #2 paint ` + request + `prompt: "a sign that says \"`, `g #3 paint ` + request + `prompt: "a sign that says \"`}, "",
		},
		{
			"what a judge said", schemas.StreamTrajectories, trajectory(at("j", 1, "judge"), says(" yes")),
			[]string{`j #1 think-2 ` + request + `prompt: "`}, "",
		},
		{
			"the picture that a judge was shown", schemas.StreamTrajectories, trajectory(at("j", 0, "paint"), func(e *schemas.Trajectory) {
				e.Media[0].Ref = c.stage(t, "r", "j", 1, "paint").Media[0].Ref
			}),
			[]string{`j #0 judge ` + request + `conditions: `}, "",
		},
		{
			"a judge that ended the sample", schemas.StreamTrajectories, trajectory(at("j", 1, "judge"), func(e *schemas.Trajectory) {
				e.Text.Conversation = schemas.ConversationTerminated
			}),
			[]string{
				"j #1 think-2 " + request + "stage think-2: the sample ended with stage judge",
				"j #1 paint-2 " + request + "stage paint-2: the sample ended with stage judge",
			}, "",
		},
		{
			"the seed of a picture", schemas.StreamTrajectories, trajectory(at("g", 1, "paint"), func(e *schemas.Trajectory) { e.SampleSeed++ }),
			[]string{"g #1 paint " + request + "sample_seed: "}, "",
		},
		{
			"a template of the record", schemas.StreamGroups, record("g", func(e *schemas.GroupRecord) { e.Stages[1].Prompt = "{think.text}" }),
			[]string{"g #0  prompt_digest: the group's record has ", `g #3 paint ` + request + `prompt: "a sign that says`}, "",
		},
		{
			"the seed of the record", schemas.StreamGroups, record("g", func(e *schemas.GroupRecord) { *e.Seed = 6 }),
			[]string{"g #0 think " + request + "sample_seed: ", "g #3 paint " + request + "sample_seed: "}, "",
		},
		{
			"a request in the queue", schemas.StreamRequests, func() replaced {
				forged := *c.stage(t, "r", "g", 3, "paint")
				r := &schemas.Request{Identity: forged.Identity, Sampling: forged.Sampling, ScheduleDigest: forged.ScheduleDigest, Group: forged.Group}
				r.Prompt = "a sign that says nothing"
				if _, err := c.Publish(t.Context(), r); err != nil {
					t.Fatal(err)
				}
				return replaced{subject: schemas.RequestSubject("r", r.Lane, "g", 3, "paint")}
			},
			[]string{`g #3 paint ` + request + `prompt: "a sign that says nothing"; must be "a sign that says \"`}, "",
		},
		{
			"a thought that is gone", schemas.StreamTrajectories, func() replaced {
				m, err := c.Last(t.Context(), schemas.StreamTrajectories, at("g", 0, "think"))
				if err == nil {
					err = c.Delete(t.Context(), schemas.StreamTrajectories, m.Seq)
				}
				if err != nil {
					t.Fatal(err)
				}
				return replaced{m.Subject, m.Data}
			},
			nil, "the requests of 2 stages cannot be made again: stage think of g sample 0, before stage paint, is not stored",
		},
	} {
		was := x.forge()
		report := verified(c.Bus)
		named(t, x.name, report, x.want)
		if report.OK(0) || x.gone != "" && report.Unproven != x.gone {
			t.Errorf("%s: %v; want %q", x.name, report.Faults(0), x.gone)
		}
		if x.gone != "" {
			if _, err := c.PublishRaw(t.Context(), was.subject, was.was, nil, ""); err != nil {
				t.Fatal(err)
			}
		} else {
			was.undo(t, c.Bus, x.stream)
		}
	}
	whole()

	var file bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), c.Bus, "r", &file); err != nil {
		t.Fatal(err)
	}
	forged := rewritten(t, file.Bytes(), at("j", 1, "judge-2"), says(" maybe"))
	p := bustest.New(t)
	if _, err := export.Import(t.Context(), p.Bus, bytes.NewReader(forged), export.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	named(t, "an archive with sums that are right", verified(p.Bus), []string{`j #1 think-3 ` + request + `prompt: "`})
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
