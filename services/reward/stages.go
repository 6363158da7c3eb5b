package reward

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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

// pausedRetry is when a sample of a paused run is looked at again whose next stage is an interaction's: requests are
// parked, and an interaction has none.
const pausedRetry = 15 * time.Second

// goOn makes what comes after the trajectory of a stage, at a sequence: the requests of the next one, what an
// interaction says, or the rewards of the samples that end with it. Delays and errors are those of advance.
func (s *service) goOn(ctx context.Context, t *schemas.Trajectory, seq uint64) (delay, error) {
	next := stages.Next(&t.Group, t)
	path := []bus.Made{{Trajectory: t, Seq: seq}}
	var made map[stages.Place]bus.Made
	if len(next) > 0 || t.Group.IsInteraction(t.Stage) {
		var err error
		if path, made, err = s.ranFor(ctx, t, t.Stage, next...); err != nil {
			return delay{}, err
		}
	}
	if len(next) == 0 {
		return s.endSamples(ctx, path, t.Place(), nil)
	}
	switch _, err := s.bus.Result(ctx, t.Run, t.UID, t.GroupSize, t.Group.Batch); {
	case err == nil:
		return delay{}, nil // it has closed without this sample
	case !errors.Is(err, bus.ErrNotFound):
		return delay{}, err
	}
	if t.Group.IsInteraction(next[0].Stage) && s.controls.Of(t.Run, t.UID).Paused() != nil {
		return delay{after: pausedRetry, paused: true}, nil
	}
	record, err := s.record(ctx, t.Run, t.UID)
	if err == nil && record == nil {
		err = fmt.Errorf("record of group %s: %w", t.UID, bus.ErrNotFound)
	}
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
				_, err = s.endSamples(ctx, path, at, err)
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

// ranFor returns what is stored of a sample, in the order of its stages, up to a stage, which must be stored; "": up to
// the one that the sample is at. of is any trajectory of the group, with the index of the sample. made has what is
// stored at other places besides.
func (s *service) ranFor(ctx context.Context, of *schemas.Trajectory, to schemas.Stage, others ...stages.Place) (
	path []bus.Made, made map[stages.Place]bus.Made, err error,
) {
	places := stages.Path(&of.Group, of.SampleIndex, to)
	if made, err = s.bus.Made(ctx, of.Run, of.UID, slices.Concat(places, others)...); err != nil {
		return nil, nil, err
	}
	maps.DeleteFunc(made, func(_ stages.Place, x bus.Made) bool {
		return x.GroupSize != of.GroupSize || !x.Group.Same(&of.Group)
	})
	for _, at := range places {
		x, there := made[at]
		if !there && to != "" {
			return nil, nil, fmt.Errorf("stage %s of sample %d of %s, on the way to %s: %w", at.Stage, of.SampleIndex,
				of.UID, to, bus.ErrNotFound)
		}
		if !there {
			break
		}
		path = append(path, x)
	}
	return path, made, nil
}

// standing returns the trajectory that stands for a sample, given its path, and the sequence of it.
func standing(path []bus.Made, sample int64) (*schemas.Trajectory, uint64) {
	x := path[stages.Standing(trajectories(path))]
	t := new(*x.Trajectory)
	t.SampleIndex = sample
	return t, x.Seq
}

// endSamples completes the samples that a stage leads to. They end with the last trajectory of their path; cause says
// why no more comes, nil: that was the last one. It returns the longest delay that one of them needs.
func (s *service) endSamples(ctx context.Context, path []bus.Made, at stages.Place, cause error) (longest delay,
	err error,
) {
	last := path[len(path)-1]
	if cause != nil {
		last.Trajectory = new(*last.Trajectory)
		last.StopReason, last.Error = "", cause.Error()
		path = append(path[:len(path)-1:len(path)-1], last) // that of the caller stays
	}
	from, to := stages.Leaves(&last.Group, at)
	for i := from; i < to; i++ {
		t, seq := standing(path, i)
		p, err := s.advanceTo(ctx, t, seq, path[len(path)-1].Seq)
		if err != nil {
			return delay{}, err
		}
		if p.after > longest.after {
			longest = p
		}
	}
	return longest, nil
}

// standsFor returns the trajectory that stands for a sample that has ended, and its sequence; nil: it has not.
func (s *service) standsFor(ctx context.Context, of *schemas.Trajectory, sample int64) (*schemas.Trajectory, uint64,
	error,
) {
	at := new(*of)
	at.SampleIndex = sample
	path, _, err := s.ranFor(ctx, at, "")
	if err != nil || len(path) == 0 || len(stages.Next(&of.Group, path[len(path)-1].Trajectory)) > 0 {
		return nil, 0, err
	}
	t, seq := standing(path, sample)
	return t, seq, nil
}

// stopIfControlled calls stop when the group of a request is cancelled, or all samples that it leads to are pruned: no
// stage comes after what an interaction says then. It returns when ctx ends.
func (s *service) stopIfControlled(ctx context.Context, stop func(), r *schemas.Request) {
	for ctx.Err() == nil {
		changed := s.controls.Changed()
		if s.controls.Of(r.Run, r.UID).Cancelled() != nil || s.controls.Pruned(r) != nil {
			stop()
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}

// interact asks the interaction that makes a stage, and stores what it says as the stage's trajectory. One that gives
// no answer, or none before the deadline of the group, fails the stage; other errors are temporary.
func (s *service) interact(ctx context.Context, r *schemas.Request) error {
	x := r.Text.Interaction
	_, round := r.Stage.Split()
	t := &schemas.Trajectory{
		Identity: r.Identity, Outcome: schemas.Outcome{StopReason: schemas.StopCompleted}, Sampling: r.Sampling,
		Text: &schemas.TextResult{Settings: *r.Text, SaidBy: x.Name}, ScheduleDigest: r.ScheduleDigest, Group: r.Group,
		Provenance: schemas.Provenance{Attempt: "said", Sampler: "reward", Backend: "interaction/" + x.Name},
	}
	t.Timings.Received = time.Now().UnixNano()
	t.Timings.Started, t.Timings.Finished = t.Timings.Received, t.Timings.Received
	pruned := func() bool {
		c := s.controls.Pruned(r)
		if c != nil {
			t.StopReason, t.Error = schemas.StopPruned, c.Sentence()
		}
		return c != nil
	}
	store := func() error {
		its := bus.Against(func(first *schemas.Trajectory) (fault, err error) { return r.AnsweredBy(first), nil })
		if _, err := s.bus.Publish(ctx, t, its, bus.WaitForSpace()); err != nil {
			return fmt.Errorf("store what interaction %s said: %w", x.Name, err)
		}
		return nil
	}
	if pruned() {
		return store()
	}
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
	due := s.due(t)
	asked, stop := context.WithDeadline(ctx, due)
	defer stop()
	go s.stopIfControlled(asked, stop, r)
	reply, err := interaction.Ask(asked, s.bus.Conn(), ask, x.Timeout())
	if err != nil && asked.Err() != nil && ctx.Err() == nil {
		err = &interaction.Fault{
			State: schemas.ConversationTimeout,
			Err:   fmt.Errorf("no answer by %s, the deadline of the group", clock(due)),
		}
	}
	t.Timings.Finished = time.Now().UnixNano()
	switch fault, final := errors.AsType[*interaction.Fault](err); {
	case err != nil && s.controls.Of(r.Run, r.UID).Cancelled() != nil:
		return nil
	case err != nil && pruned():
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
	return store()
}
