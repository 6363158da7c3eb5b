package reward

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// A sample of several stages goes on here: this service is given each trajectory, so it makes the requests of the stage
// after it, and scores the samples of which it is the last one. What it publishes has a subject of its own, and is made
// of the group's record and of stored trajectories alone, so to do it again changes nothing. A trajectory is
// acknowledged when what comes of it is stored.

// goOn makes what comes after the trajectory of a stage, at a sequence: the requests of the next one, what an
// interaction says, or the rewards of the samples that end with it. Delays and errors are those of advance.
func (s *service) goOn(ctx context.Context, t *schemas.Trajectory, seq uint64) (delay, error) {
	next := stages.Next(&t.Group, t)
	from, to := stages.Leaves(&t.Group, t.Place())
	if len(next) == 0 {
		return s.endSamples(ctx, &t.Group, bus.Made{Trajectory: t, Seq: seq}, from, to, nil)
	}
	record, err := s.record(ctx, t.Run, t.UID)
	if err == nil && record == nil {
		err = fmt.Errorf("record of group %s: %w", t.UID, bus.ErrNotFound)
	}
	if err != nil {
		return delay{}, err
	}
	path, err := s.pathTo(ctx, t)
	if err != nil {
		return delay{}, err
	}
	made, err := s.madeAt(ctx, t, next)
	if err != nil {
		return delay{}, err
	}
	var work errgroup.Group
	work.SetLimit(maxParallel)
	for _, at := range next {
		if _, there := made[at]; there {
			continue // by an earlier delivery
		}
		work.Go(func() error {
			r, err := stages.Request(record, at, trajectories(path), func(data []byte) (schemas.Ref, error) {
				return s.bus.PutBlob(ctx, data)
			})
			if _, fault := errors.AsType[*stages.Fault](err); fault {
				from, to := stages.Leaves(&t.Group, at)
				_, err = s.endSamples(ctx, &t.Group, path[len(path)-1], from, to, err)
				return err
			}
			if err != nil {
				return err
			}
			if t.Group.IsInteraction(at.Stage) {
				return s.interact(ctx, r)
			}
			its := bus.Against(func(other *schemas.Request) (fault, err error) { return r.SameSample(other), nil })
			_, err = s.bus.Publish(ctx, r, its, bus.WaitForSpace())
			return err
		})
	}
	return delay{}, work.Wait()
}

func trajectories(path []bus.Made) (list []*schemas.Trajectory) {
	for _, x := range path {
		list = append(list, x.Trajectory)
	}
	return list
}

// pathTo returns what was made for a sample up to a trajectory, in order.
func (s *service) pathTo(ctx context.Context, t *schemas.Trajectory) ([]bus.Made, error) {
	path, err := s.ranFor(ctx, t, t.Stage)
	if want := stages.Path(&t.Group, t.SampleIndex, t.Stage); err == nil && len(path) < len(want) {
		err = fmt.Errorf("stage %s of sample %d of %s, on the way to %s: %w", want[len(path)].Stage, t.SampleIndex,
			t.UID, t.Stage, bus.ErrNotFound)
	}
	return path, err
}

// madeAt returns the trajectories at places of a group that are stored, and belong to it as t does.
func (s *service) madeAt(ctx context.Context, t *schemas.Trajectory,
	places []stages.Place,
) (map[stages.Place]bus.Made, error) {
	subjects := make([]string, len(places))
	for i, at := range places {
		subjects[i] = schemas.TrajectorySubject(source(t), t.UID, at.SampleIndex, at.Stage)
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamTrajectories, subjects)
	if err != nil {
		return nil, fmt.Errorf("look up the stages of %s: %w", t.UID, err)
	}
	made := map[stages.Place]bus.Made{}
	for _, m := range stored {
		x := &schemas.Trajectory{}
		if bus.Fits(m, x) != nil {
			continue
		}
		if rescored(t) {
			x.Run, x.Group = t.Run, t.Group
		}
		if x.GroupSize == t.GroupSize && x.Group.Same(&t.Group) {
			made[x.Place()] = bus.Made{Trajectory: x, Seq: m.Seq}
		}
	}
	return made, nil
}

// endSamples completes the samples [from, to) of a group, which end with a trajectory; cause says why no more comes,
// nil: that was the last one. It returns the longest delay that one of them needs.
func (s *service) endSamples(ctx context.Context, g *schemas.Group, last bus.Made, from, to int64,
	cause error,
) (longest delay, err error) {
	failed := cause != nil || last.StopReason != schemas.StopCompleted
	if !failed && g.IsInteraction(last.Stage) {
		path, err := s.pathTo(ctx, last.Trajectory)
		if err != nil {
			return delay{}, err
		}
		for _, x := range path { // what was judged stands for the sample
			if !g.IsInteraction(x.Stage) {
				last = x
			}
		}
	}
	for i := from; i < to; i++ {
		t := new(*last.Trajectory)
		t.SampleIndex, t.Group = i, *g
		if cause != nil {
			t.StopReason, t.Error = schemas.StopFailed, cause.Error()
		}
		p, err := s.advance(ctx, t, last.Seq)
		if err != nil {
			return delay{}, err
		}
		if p.after > longest.after {
			longest = p
		}
	}
	return longest, nil
}

// stagesOf returns what a reward says of the stages that ran for its sample.
func stagesOf(path []bus.Made) (list []schemas.StageScored) {
	for _, x := range path {
		list = append(list, x.AsStage(x.Seq))
	}
	return list
}

// ranFor returns what was made for a sample, in order, up to a stage; "": all. t is any trajectory of the group, with
// the index of the sample.
func (s *service) ranFor(ctx context.Context, t *schemas.Trajectory, to schemas.Stage) (path []bus.Made, err error) {
	places := stages.Path(&t.Group, t.SampleIndex, to)
	made, err := s.madeAt(ctx, t, places)
	if err != nil {
		return nil, err
	}
	for _, at := range places {
		x, ok := made[at]
		if !ok {
			break
		}
		path = append(path, x)
	}
	return path, nil
}

// standsFor returns the trajectory that stands for a sample that has ended, and its sequence; nil: it has not.
func (s *service) standsFor(ctx context.Context, of *schemas.Trajectory, sample int64) (*schemas.Trajectory, uint64,
	error,
) {
	at := new(*of)
	at.SampleIndex = sample
	path, err := s.ranFor(ctx, at, "")
	if err != nil || len(path) == 0 {
		return nil, 0, err
	}
	last := path[len(path)-1]
	if len(stages.Next(&of.Group, last.Trajectory)) > 0 {
		return nil, 0, nil
	}
	for _, x := range path {
		if last.StopReason == schemas.StopCompleted && !of.Group.IsInteraction(x.Stage) {
			at, last.Seq = new(*x.Trajectory), x.Seq
		}
	}
	if last.StopReason != schemas.StopCompleted {
		at = new(*last.Trajectory)
	}
	at.SampleIndex = sample
	return at, last.Seq, nil
}

// interact asks the interaction that makes a stage, and stores what it says as the stage's trajectory. One that gives
// no answer fails the stage; other errors are temporary.
func (s *service) interact(ctx context.Context, r *schemas.Request) error {
	x := r.Text.Interaction
	_, round := r.Stage.Split()
	t := &schemas.Trajectory{
		Identity: r.Identity, Outcome: schemas.Outcome{StopReason: schemas.StopCompleted}, Sampling: r.Sampling,
		Text: &schemas.TextResult{Settings: *r.Text, SaidBy: x.Name}, ScheduleDigest: r.ScheduleDigest, Group: r.Group,
		Provenance: schemas.Provenance{Attempt: "said", Sampler: "reward", Backend: "interaction/" + x.Name},
	}
	t.Timings.Received = time.Now().UnixNano()
	t.Timings.Started = t.Timings.Received
	ask := &schemas.InteractRequest{
		Name: x.Name, Params: x.Params, Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, Stage: r.Stage,
		Attempt: t.Attempt, Answer: round - 1, MaxTurns: r.Group.Rounds, Messages: r.Text.Messages,
		FinishReason: schemas.FinishStop, GroundTruth: r.Group.GroundTruth(), Metadata: r.Group.Metadata,
		LogitsKind: schemas.LogitsRaw, IDs: []int64{}, LogProbs: []float32{}, ProcessedLogProbs: []float32{},
		LogSumExps: []float32{}, Entropies: []float32{},
	}
	if ask.Params == nil {
		ask.Params = map[string]string{}
	}
	files, err := loadConditions(ctx, s.bus, r.Conditions)
	if err != nil {
		return err
	}
	for _, f := range files {
		ask.Conditions = append(ask.Conditions, schemas.ScoreCondition{Name: f.Name, Type: f.Type, File: f.File})
	}
	reply, err := interaction.Ask(ctx, s.bus.Conn(), ask, x.Timeout())
	t.Timings.Finished = time.Now().UnixNano()
	switch fault, final := errors.AsType[*interaction.Fault](err); {
	case final:
		t.StopReason, t.Error = schemas.StopFailed, fmt.Sprintf("interaction %s: %v", x.Name, fault)
		t.Text.Conversation = fault.State
	case err != nil:
		return fmt.Errorf("interaction %s: %w", x.Name, err)
	default:
		t.Text.Turns = []schemas.Turn{{
			Generated: true, FinishReason: schemas.FinishStop, Text: reply.Content, Score: reply.Score,
			Metadata: reply.Metadata,
		}}
		if reply.Terminate {
			t.Text.Conversation = schemas.ConversationTerminated
		}
	}
	its := bus.Against(func(first *schemas.Trajectory) (fault, err error) { return r.AnsweredBy(first), nil })
	if _, err := s.bus.Publish(ctx, t, its, bus.WaitForSpace()); err != nil {
		return fmt.Errorf("store what interaction %s said: %w", x.Name, err)
	}
	return nil
}
