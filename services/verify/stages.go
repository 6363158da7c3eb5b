package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// checkRequests makes the request of each stage of a group again, out of the group's record and of the trajectories
// before it (stages.Request), and compares it with the trajectory that answers it, and with the request itself while it
// is in the queue or parked. Differences are faults; an error is of the server.
func (v *verifier) checkRequests(ctx context.Context, uid schemas.UID) error {
	// In this order: what comes out of something is read before it, so a run that goes on lacks nothing.
	asked, err := v.openRequests(ctx, uid)
	if err != nil {
		return err
	}
	stored, err := v.bus.Made(ctx, v.report.Run, uid)
	if err != nil {
		return err
	}
	record, err := v.bus.Group(ctx, v.report.Run, uid)
	if errors.Is(err, bus.ErrNotFound) {
		v.report.addStageGone(len(stored)+len(asked), fmt.Sprintf("the record of group %s is not stored", uid))
		return nil
	}
	if err != nil {
		return err
	}
	if digest, err := record.StagesDigest(); err != nil || digest != record.PromptDigest {
		v.report.addFault(&schemas.Identity{UID: uid, Stage: schemas.StageMain}, -1,
			fmt.Sprintf("prompt_digest: the group's record has %.16s, its stages give %.16s", record.PromptDigest,
				digest))
	}
	for _, at := range slices.SortedFunc(maps.Keys(stored), func(a, b schemas.Place) int {
		return cmp.Or(cmp.Compare(a.SampleIndex, b.SampleIndex), cmp.Compare(stored[a].Seq, stored[b].Seq))
	}) {
		v.checkRequest(record, stored, stored[at].Trajectory, nil)
	}
	for _, r := range asked {
		v.checkRequest(record, stored, unanswered(r), r)
	}
	return nil
}

// openRequests returns the requests of a group that are in the queue or parked.
func (v *verifier) openRequests(ctx context.Context, uid schemas.UID) (open []*schemas.Request, err error) {
	for stream, kind := range map[string]string{
		schemas.StreamRequests: schemas.KindRequest, schemas.StreamParked: schemas.KindParked,
	} {
		filter := schemas.Address{Kind: kind, Run: v.report.Run, UID: uid}.Filter()
		found, err := v.bus.LastMany(ctx, stream, []string{filter})
		if err != nil {
			return nil, fmt.Errorf("look up open requests: %w", err)
		}
		for _, m := range found {
			r := &schemas.Request{}
			if err := schemas.DecodeValid(m.Data, r); err != nil {
				v.report.Mismatches = append(v.report.Mismatches, Mismatch{
					UID: m.Subject, StepIndex: -1, What: err.Error(),
				})
				continue
			}
			open = append(open, r)
		}
	}
	slices.SortFunc(open, func(a, b *schemas.Request) int {
		return cmp.Or(cmp.Compare(a.SampleIndex, b.SampleIndex), cmp.Compare(a.Stage, b.Stage))
	})
	return open, nil
}

// unanswered returns the trajectory that repeats a request, as one does that fails before it begins.
func unanswered(r *schemas.Request) *schemas.Trajectory {
	t := &schemas.Trajectory{
		Identity: r.Identity, Sampling: r.Sampling, ScheduleDigest: r.ScheduleDigest, Group: r.Group,
		Outcome: schemas.Outcome{StopReason: schemas.StopFailed},
	}
	if r.Text != nil {
		t.Text = &schemas.TextResult{Settings: *r.Text}
	}
	return t
}

// checkRequest compares what a trajectory says that was asked for with the request of its stage, made again. open is
// the request itself while no trajectory answers it, else nil.
func (v *verifier) checkRequest(record *schemas.GroupRecord, stored map[schemas.Place]bus.Made, t *schemas.Trajectory,
	open *schemas.Request,
) {
	if v.options.Lane != "" && t.Lane != v.options.Lane {
		return
	}
	before, gone, fault := pathTo(record, stored, t.Place())
	if gone != nil {
		v.report.addStageGone(1, fmt.Sprintf("stage %s of %s sample %d, before stage %s, is not stored", gone.Stage,
			t.UID, gone.SampleIndex, t.Stage))
		return
	}
	var r *schemas.Request
	if fault == nil {
		r, fault = stages.Request(record, t.Place(), before, func(file []byte) (schemas.Ref, error) {
			return bus.RefOf(file), nil
		})
	}
	if fault == nil {
		fault = r.AnsweredBy(t)
	}
	if fault == nil && open != nil {
		fault = r.SameSample(open)
	}
	if fault != nil {
		v.report.addFault(&t.Identity, -1, fmt.Sprintf(
			"request: not what follows from the group's record and the stages before: %v", fault))
		return
	}
	v.report.Requests++
}

// pathTo returns the trajectories before a place of a group, in order; gone is the first that is not stored. A fault
// says that none may be at the place: it is none of the group's, or the sample ended before.
func pathTo(record *schemas.GroupRecord, stored map[schemas.Place]bus.Made, at schemas.Place,
) (before []*schemas.Trajectory, gone *schemas.Place, fault error) {
	g := &record.Group
	if g.StageIndex(at.Stage) < 0 {
		return nil, nil, fmt.Errorf("stage %s: not one of the group's stages", at.Stage)
	}
	for _, place := range stages.Path(g, at.SampleIndex, at.Stage) {
		if place == at {
			return before, nil, nil
		}
		t := stored[place].Trajectory
		if t == nil {
			return nil, &place, nil
		}
		if before = append(before, t); len(stages.Next(g, t)) == 0 {
			return nil, nil, fmt.Errorf("stage %s: the sample ended with stage %s", at.Stage, t.Stage)
		}
	}
	return nil, nil, fmt.Errorf("sample_index: %d; must be that of a sample of stage %s", at.SampleIndex, at.Stage)
}
