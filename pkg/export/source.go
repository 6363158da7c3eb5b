package export

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// ErrNoSource means that an archive is of a pass, and that the run whose samples the pass scored is not stored.
var ErrNoSource = errors.New("its source run is not in this store")

// missingSeq replaces a sequence by which an event names one that is no longer stored: no stream comes to it, and JSON
// has it exactly. 0 would say that there never was one, and another number might be that of another event.
const missingSeq = 1<<53 - 1

// sampleID is a sample of any run.
type sampleID struct {
	run   schemas.Run // that made it
	uid   schemas.UID
	index int64
}

// sampleFacts are what a trajectory and its reward have in common.
type sampleFacts struct {
	schedule          string
	started, finished int64
}

// sampleRef is a sample that an event names by the sequence of its trajectory.
type sampleRef struct {
	sampleID
	seq   uint64
	facts *sampleFacts // of a reward, or nil
}

// references are what the events of an archive name by sequence. A pass has no prompts and trajectories of its own:
// those that it names are of its source run.
type references struct {
	sources map[schemas.Run]bool
	samples []sampleRef
	prompts map[uint64]sampleID // of a pass: a sample of the group, by the sequence of its prompt
}

// add notes what a decoded event names, and returns the run whose samples a pass scored; "" for events of other runs.
func (r *references) add(e schemas.Event) (source schemas.Run) {
	group := func(g *schemas.GroupRecord) {
		if source = g.Group.SourceRun; source != "" {
			r.prompts[g.Group.PromptSeq] = sampleID{run: source, uid: g.UID}
		}
	}
	switch e := e.(type) {
	case *schemas.GroupRecord:
		group(e)
	case *schemas.Opening:
		group((*schemas.GroupRecord)(e))
	case *schemas.Reward:
		if source = e.Group.SourceRun; e.TrajectorySeq > 0 {
			r.samples = append(r.samples, sampleRef{
				sampleID{cmp.Or(source, e.Run), e.UID, e.SampleIndex},
				e.TrajectorySeq,
				&sampleFacts{e.ScheduleDigest, e.SampleStarted, e.SampleFinished},
			})
		}
	case *schemas.Advantage:
		source = e.SourceRun
		for _, m := range e.Members {
			if m.TrajectorySeq > 0 {
				id := sampleID{cmp.Or(source, e.Run), e.UID, m.SampleIndex}
				r.samples = append(r.samples, sampleRef{id, m.TrajectorySeq, nil})
			}
		}
	}
	if source != "" {
		r.sources[source] = true
	}
	return source
}

// findSources finds the events on the server that those of a pass name, and notes their sequences. It fails when the
// run that the pass scored is not stored, or has other samples: then a reward would name the wrong one.
func (m *importer) findSources(ctx context.Context) error {
	for run := range m.check.references.sources {
		samples, prompts, err := m.readSource(ctx, run)
		if err != nil {
			return err
		}
		for _, x := range m.check.references.samples {
			stored, ok := samples[x.sampleID]
			if !ok || x.seq == missingSeq { // a number that many events may have
				continue
			}
			if x.facts != nil && !stored.facts.fit(x.facts) {
				return fmt.Errorf("%w: sample %d of group %s of run %s is not the one that the pass scored; remove "+
					"that run and import its export first, or use another store", ErrOther, x.index, x.uid, run)
			}
			m.newSeqs[schemas.StreamTrajectories][x.seq] = stored.seq
		}
		for seq, id := range m.check.references.prompts {
			if stored, ok := prompts[id.uid]; ok && id.run == run && seq != missingSeq {
				m.newSeqs[schemas.StreamPrompts][seq] = stored
			}
		}
	}
	missing := map[sampleID]bool{}
	for _, x := range m.check.references.samples {
		if _, ok := m.newSeqs[schemas.StreamTrajectories][x.seq]; !ok && !m.check.trajectories[x.seq] {
			missing[x.sampleID] = true
		}
	}
	m.result.MissingTrajectories = len(missing)
	return ctx.Err()
}

// fit reports whether a reward with the facts r can be of the stored sample.
func (s *sampleFacts) fit(r *sampleFacts) bool {
	return s.schedule == r.schedule && (r.finished == 0 || s.finished == r.finished) &&
		(r.started == 0 || s.started == r.started)
}

// storedSample is a trajectory of the source run on the server.
type storedSample struct {
	seq   uint64
	facts sampleFacts
}

// readSource reads the samples of the run that a pass scored, and the sequences of their prompts by group. It returns
// ErrNoSource if nothing of the run is stored.
func (m *importer) readSource(ctx context.Context,
	run schemas.Run,
) (samples map[sampleID]*storedSample, prompts map[schemas.UID]uint64, err error) {
	samples, prompts = map[sampleID]*storedSample{}, map[schemas.UID]uint64{}
	for t, err := range view.Trajectories(ctx, m.b, run, "*") {
		if err != nil {
			return nil, nil, err
		}
		samples[sampleID{run, t.UID, t.SampleIndex}] = &storedSample{
			t.Seq, sampleFacts{t.ScheduleDigest, max(0, t.Timings.Started), max(0, t.Timings.Finished)},
		}
		prompts[t.UID] = t.Group.PromptSeq
	}
	if len(samples) > 0 {
		return samples, prompts, nil
	}
	// The samples may be gone while the run is there: its groups stay longest.
	_, err = m.b.Last(ctx, schemas.StreamGroups, schemas.GroupSubject(run, "*"))
	if errors.Is(err, bus.ErrNotFound) {
		err = nil
		if !m.options.WithoutSource {
			err = fmt.Errorf("%w: it is a pass over run %s; import an export of run %s first", ErrNoSource, run, run)
		}
	}
	return samples, prompts, err
}
