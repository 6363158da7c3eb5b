package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Some functions need more than the sample: a verdict from outside, or the whole group.
// A sample that lacks it is put back until its deadline, and the event it lacks completes
// it: the handler of a verdict its sample, the handler of the trajectory of a group that was
// stored last all samples of it, and its own after the others: a reward of the last one
// says that the group is done. No wake-up is lost, because an event is stored before its
// handler looks around: of two events that need each other, the handler of the one stored
// last finds both. Should a look-up be answered by a replica that lags behind, or the handler
// die, the sample looks again by itself, every longestWait and at its deadline.

// longestWait is how long a sample stays away that something else will complete.
const longestWait = 10 * time.Minute

// awaited says whether a function has no pool, because its scores come with others.
func awaited(name string) bool { return scorer.NewGroup(name) != nil || scorer.VerdictName(name) != "" }

func needsGroup(t *schemas.Trajectory) bool {
	return slices.ContainsFunc(t.Group.Reward, func(r schemas.RewardSpec) bool { return scorer.NewGroup(r.Name) != nil })
}

// due is when a sample is finished with what there is, so that its group closes with the
// reasons: a little before the deadline of the group.
func (s *service) due(t *schemas.Trajectory) time.Time {
	if t.Group.Deadline > 0 {
		deadline := time.Unix(0, t.Group.Deadline)
		return deadline.Add(-min(2*time.Second, max(0, deadline.Sub(time.Unix(0, t.Group.Created)))/10))
	}
	if needsGroup(t) && !again(t) {
		return time.Unix(0, t.Timings.Finished).Add(s.cfg.GroupWait)
	}
	return time.Unix(1<<33, 0) // never, and no overflow in differences
}

// again says whether the trajectory is scored again: then everything there will be is
// there.
func again(t *schemas.Trajectory) bool { return t.Group.SourceRun != "" }

// source is the run that made the trajectory.
func source(t *schemas.Trajectory) schemas.Run {
	if again(t) {
		return t.Group.SourceRun
	}
	return t.Run
}

func (s *service) awaitOthers(due time.Time) pause {
	return pause{after: soonest(longestWait, time.Now(), due), woken: true}
}

// verdicts puts the verdicts of a sample among its scores, and says whether it waits for
// more.
func (s *service) verdicts(ctx context.Context, t *schemas.Trajectory, m *memo, due time.Time) (waits bool, err error) {
	names := map[string][]int{}
	for i, spec := range t.Group.Reward {
		if name := scorer.VerdictName(spec.Name); name != "" && m.scores[i] == nil {
			names[name] = append(names[name], i)
		}
	}
	if len(names) == 0 {
		return false, nil
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamVerdicts, []string{schemas.VerdictSubject(source(t), t.UID, t.SampleIndex, "*")})
	if err != nil {
		return false, fmt.Errorf("look up verdicts: %w", err)
	}
	put := func(name string, r scored) {
		r.version = verdictVersion
		for _, i := range names[name] {
			m.scores[i] = &r
		}
		delete(names, name)
	}
	for _, stored := range stored {
		var v schemas.Verdict
		if schemas.DecodeValid(stored.Data, &v) != nil || v.Subject() != stored.Subject {
			continue // a dead letter of its own
		}
		var r scored
		if v.Value != nil {
			r.Value, r.Detail = *v.Value, v.Comment
		} else {
			r.Err = errors.New(v.Error)
		}
		put(v.Name, r)
	}
	final := again(t) || !time.Now().Before(due)
	for name := range names {
		if !final {
			return true, nil
		}
		why := fmt.Errorf("no verdict came by %s", clock(due))
		if again(t) {
			why = errors.New("no verdict is stored")
		}
		put(name, scored{Result: scorer.Result{Err: why}})
	}
	return false, nil
}

// verdictVersion is the version of scores that are verdicts.
const verdictVersion = "1"

// advance completes a sample, and the others of its group when that is complete with it.
func (s *service) advance(ctx context.Context, t *schemas.Trajectory, seq uint64) (pause, error) {
	if !needsGroup(t) {
		return s.complete(ctx, t, seq, nil)
	}
	g := s.memory.group(t)
	if err := g.lock(ctx); err != nil {
		return pause{}, err
	}
	was, rated := g.rated[t.SampleIndex]
	known := g.scores != nil && (!rated || was == seq) // another may have taken its place
	var members []stored
	if !known || g.last == seq {
		var err error
		if members, err = s.group(ctx, t); err != nil {
			g.unlock()
			return pause{}, err
		}
	}
	if !known && int64(len(members)) >= t.GroupSize && !again(t) {
		var err error
		if members, err = s.sound(ctx, t, members); err != nil {
			g.unlock()
			return pause{}, err
		}
	}
	if due := s.due(t); !known && int64(len(members)) < t.GroupSize && !again(t) && time.Now().Before(due) {
		g.unlock()
		return s.awaitOthers(due), nil
	}
	if !known {
		scores, err := s.rateGroup(ctx, t, members)
		if err != nil {
			g.unlock()
			return pause{}, err
		}
		g.scores, g.last, g.rated = scores, 0, map[int64]uint64{}
		for _, x := range members {
			g.rated[x.SampleIndex], g.last = x.seq, max(g.last, x.seq)
		}
	}
	scores, last := g.scores, g.last == seq
	g.unlock()
	if last {
		// The last one is not done before the others are: its message comes again for them.
		p, err := s.completeOthers(ctx, t, members, scores)
		if err != nil || p.after > 0 {
			return p, err
		}
	}
	return s.complete(ctx, t, seq, scores[t.SampleIndex])
}

// stored is a trajectory and its place in the stream.
type stored struct {
	*schemas.Trajectory
	seq uint64
}

// group reads the trajectories of a sample's group that are there, in order of their
// sample index.
func (s *service) group(ctx context.Context, t *schemas.Trajectory) ([]stored, error) {
	messages, err := s.bus.LastMany(ctx, schemas.StreamTrajectories, []string{schemas.TrajectoryFilter(source(t), t.UID)})
	if err != nil {
		return nil, fmt.Errorf("look up the group: %w", err)
	}
	var out []stored
	for _, m := range messages {
		x := &schemas.Trajectory{}
		if bus.Fits(m, x) != nil {
			continue // a dead letter of its own, and the true one comes
		}
		if again(t) {
			x.Run, x.Group = t.Run, t.Group // those of the pass
		}
		out = append(out, stored{x, m.Seq})
	}
	slices.SortFunc(out, func(a, b stored) int { return cmp.Compare(a.SampleIndex, b.SampleIndex) })
	return out, nil
}

// sound leaves out what will not stay: what its own handler finds to be no trajectory of
// this group, or to name steps that are not there.
func (s *service) sound(ctx context.Context, t *schemas.Trajectory, members []stored) ([]stored, error) {
	var out []stored
	for _, x := range members {
		fault, err := s.check(ctx, x.Trajectory)
		if err != nil {
			return nil, err
		}
		if fault == nil && x.Group.Same(&t.Group) {
			out = append(out, x)
		}
	}
	return out, nil
}

// rateGroup lets the functions that rate the group as a whole do so, with the samples that
// are there and have an image. One group is rated at a time.
func (s *service) rateGroup(ctx context.Context, t *schemas.Trajectory, members []stored) (map[int64]map[int]scored, error) {
	select {
	case s.grouping <- struct{}{}:
		defer func() { <-s.grouping }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	out := map[int64]map[int]scored{}
	var made []stored
	for _, x := range members {
		if x.StopReason == schemas.StopCompleted && x.Image != nil {
			made = append(made, x)
			out[x.SampleIndex] = map[int]scored{}
		}
	}
	for i, spec := range t.Group.Reward {
		rater := scorer.NewGroup(spec.Name)
		if rater == nil || len(made) == 0 {
			continue
		}
		began := time.Now()
		var passing error
		results := rater.ScoreGroup(ctx, len(made), func(k int) (scorer.Input, func(), error) {
			p := &sharedImage{bus: s.bus, room: s.room, stored: made[k].Image}
			im, err := p.hold(ctx, true)
			if _, bad := errors.AsType[*bus.TerminalError](err); err != nil && !bad && !errors.Is(err, bus.ErrNotFound) {
				passing = fmt.Errorf("sample %d: %w", made[k].SampleIndex, err)
			}
			return scorer.Input{Image: im, Prompt: made[k].Prompt, GroundTruth: spec.GroundTruth, Params: spec.Params}, p.release, err
		})
		if err := cmp.Or(ctx.Err(), passing); err != nil {
			return nil, err
		}
		took := time.Since(began)
		s.metrics.seconds.WithLabelValues(spec.Name).Observe(took.Seconds())
		for k, r := range results[:len(made)] {
			out[made[k].SampleIndex][i] = scored{r, rater.Version(), took}
		}
	}
	return out, nil
}

// completeOthers completes the samples of a group but the last, side by side. Those
// that wait for a verdict are left to it.
func (s *service) completeOthers(ctx context.Context, last *schemas.Trajectory, members []stored, scores map[int64]map[int]scored) (pause, error) {
	have, err := s.bus.LastMany(ctx, schemas.StreamRewards, []string{schemas.RewardFilter(last.Run, last.Group.Batch, last.UID)})
	if err != nil {
		return pause{}, fmt.Errorf("look up the rewards of the group: %w", err)
	}
	done := map[int64]*schemas.Reward{}
	for _, m := range have {
		if r := (&schemas.Reward{}); bus.Fits(m, r) == nil {
			done[r.SampleIndex] = r
		}
	}
	var work sync.WaitGroup
	pauses, errs := make([]pause, len(members)), make([]error, len(members))
	at := make(chan struct{}, sideBySide)
	for i, x := range members {
		if x.SampleIndex == last.SampleIndex {
			continue
		}
		if r := done[x.SampleIndex]; r != nil && sameSample(r, outline(x.Trajectory, x.seq)) == nil {
			continue
		}
		work.Go(func() {
			at <- struct{}{}
			defer func() { <-at }()
			pauses[i], errs[i] = s.complete(ctx, x.Trajectory, x.seq, scores[x.SampleIndex])
		})
	}
	work.Wait()
	var longest pause
	for i, p := range pauses {
		// What is wrong with a sample itself is for the handler of its own message.
		if _, own := errors.AsType[*bus.TerminalError](errs[i]); errs[i] != nil && !own {
			return pause{}, errs[i]
		}
		if !p.woken && p.after > longest.after {
			longest = p
		}
	}
	return longest, nil
}

// sideBySide bounds the samples of one group that are completed at once.
const sideBySide = 64
