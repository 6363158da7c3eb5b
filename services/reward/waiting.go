package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Some scores need more than the sample: a verdict from outside, or the whole group. A sample that lacks it is put back
// until its deadline. The handler of the missing event completes it:
//
//   - The handler of a verdict completes the verdict's sample.
//   - The handler of the trajectory that was stored last completes all samples of the group, its own last.
//
// No sample is missed: each event is stored before its handler looks for others, so of two events that need each other
// the handler of the later one finds both. If a lagging replica answers the look-up, or the handler dies, the sample is
// delivered again after longestWait and at its deadline.

// longestWait is how long a sample waits for the event that completes it before it is delivered again.
const longestWait = 10 * time.Minute

// ratesGroup reports whether a function rates whole groups.
func ratesGroup(r schemas.RewardSpec) bool { return scorer.RatesGroup(r.Name, r.GroupMin) }

// ratesOutside reports whether it is one of the user's own, which may take its time, and whose answer is stored.
func ratesOutside(r schemas.RewardSpec) bool { return r.GroupMin > 0 }

// scoredElsewhere reports whether complete does not call a function: its score is a verdict, or it rates whole groups.
func scoredElsewhere(r schemas.RewardSpec) bool {
	return ratesGroup(r) || scorer.VerdictName(r.Name) != ""
}

// needsGroup reports whether a function of the sample rates its group as a whole.
func needsGroup(t *schemas.Trajectory) bool { return slices.ContainsFunc(t.Group.Reward, ratesGroup) }

// due returns when a sample is finished with the scores it has. That is a little before the deadline of its group, so
// that the group still gets the reward, which says what is missing. Without a limit it is a time far in the future.
func (s *service) due(t *schemas.Trajectory) time.Time {
	if t.Group.Deadline > 0 {
		deadline := time.Unix(0, t.Group.Deadline)
		return deadline.Add(-min(2*time.Second, max(0, deadline.Sub(time.Unix(0, t.Group.Created)))/10))
	}
	if needsGroup(t) && !rescored(t) {
		due := time.Unix(0, t.Timings.Finished).Add(s.cfg.GroupWait)
		if slices.ContainsFunc(t.Group.Reward, ratesOutside) {
			due = due.Add(s.cfg.ScoreTimeout)
		}
		return due
	}
	return time.Unix(1<<33, 0) // never, and no overflow in differences
}

// closing returns until when a sample waits for the rest of its group. What is there is rated then: a function of the
// user's own has the time of one call for that, at most a quarter of the time that the group has.
func (s *service) closing(t *schemas.Trajectory) time.Time {
	due := s.due(t)
	if !slices.ContainsFunc(t.Group.Reward, ratesOutside) {
		return due
	}
	took := s.cfg.ScoreTimeout
	if t.Group.Deadline > 0 {
		took = min(took, max(0, due.Sub(time.Unix(0, t.Group.Created)))/4)
	}
	return due.Add(-took)
}

// rescored reports whether a pass scores the stored trajectory again (see Rescore): then no more verdicts or samples
// come.
func rescored(t *schemas.Trajectory) bool { return t.Group.SourceRun != "" }

// source returns the run that made the trajectory; in a pass it differs from the trajectory's run.
func source(t *schemas.Trajectory) schemas.Run {
	if rescored(t) {
		return t.Group.SourceRun
	}
	return t.Run
}

// waitForOthers returns the delay of a sample that the handler of another event completes.
func (s *service) waitForOthers(due time.Time) delay {
	return delay{after: until(longestWait, time.Now(), due), completedByOther: true}
}

// useVerdicts adds the stored verdicts of a sample to its scores in m, before functions are called, and reports
// whether the sample waits for more. From due on, and in a pass, verdicts that did not come are failed scores. An
// error is of the server.
func (s *service) useVerdicts(ctx context.Context, t *schemas.Trajectory, m *memo,
	due time.Time,
) (waits bool, err error) {
	names := map[string][]int{}
	for i, spec := range t.Group.Reward {
		if name := scorer.VerdictName(spec.Name); name != "" && m.scores[i] == nil {
			names[name] = append(names[name], i)
		}
	}
	if len(names) == 0 {
		return false, nil
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamVerdicts,
		[]string{schemas.VerdictSubject(source(t), t.UID, t.SampleIndex, "*")})
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
			continue // its own handler makes it a dead letter
		}
		var r scored
		if v.Value != nil {
			r.Value, r.Detail = *v.Value, v.Comment
		} else {
			r.Err = errors.New(v.Error)
		}
		put(v.Name, r)
	}
	final := rescored(t) || !time.Now().Before(due)
	for name := range names {
		if !final {
			return true, nil
		}
		why := fmt.Errorf("no verdict came by %s", clock(due))
		if rescored(t) {
			why = errors.New("no verdict is stored")
		}
		put(name, scored{Result: scorer.Result{Err: why}})
	}
	return false, nil
}

// verdictVersion is the version of scores that are verdicts.
const verdictVersion = "1"

// advance completes a sample: it scores it and publishes its reward. If functions rate the group as a whole, the sample
// waits until all samples of the group are stored or the deadline has come. Then the group is rated once, and the
// handler of the trajectory with the highest sequence completes the others too. The delay says when to try again; zero:
// the sample is done.
func (s *service) advance(ctx context.Context, t *schemas.Trajectory, seq uint64) (delay, error) {
	return s.advanceTo(ctx, t, seq, seq)
}

// advanceTo is advance of a sample that has ended with the trajectory at the sequence end: of several stages it may be
// another than the one that stands for it. Without a stop reason the sample is cut short: no more stages can be asked
// for.
func (s *service) advanceTo(ctx context.Context, t *schemas.Trajectory, seq, end uint64) (delay, error) {
	cut := t.StopReason == ""
	if !needsGroup(t) || cut {
		// The reward of one that is cut short tells the others that it has ended.
		if p, err := s.complete(ctx, t, seq, nil); !needsGroup(t) || err != nil || p.after > 0 {
			return p, err
		}
	}
	g := s.cache.group(t)
	if err := g.lock(ctx); err != nil {
		return delay{}, err
	}
	was, rated := g.rated[t.SampleIndex]
	known := g.scores != nil && (!rated || was == seq) // otherwise another trajectory has replaced it
	var members []member
	if !known || g.last == end {
		var err error
		if members, err = s.members(ctx, t); err != nil {
			g.unlock()
			return delay{}, err
		}
	}
	if !known && int64(len(members)) >= t.GroupSize && !rescored(t) {
		var err error
		if members, err = s.validMembers(ctx, t, members); err != nil {
			g.unlock()
			return delay{}, err
		}
	}
	// The handler of the last sample rates the group, so that of several replicas one asks its functions.
	closing, complete := s.closing(t), int64(len(members)) >= t.GroupSize
	later := !cut && slices.ContainsFunc(members, func(x member) bool { return x.end > end })
	if !known && (!complete || later) && !rescored(t) && time.Now().Before(closing) {
		g.unlock()
		return s.waitForOthers(closing), nil
	}
	if !known {
		after, err := s.rateGroup(ctx, t, members, g)
		if err != nil || after > 0 {
			g.unlock()
			return delay{after: after}, err
		}
		g.last, g.rated = 0, map[int64]uint64{}
		for _, x := range members {
			g.rated[x.SampleIndex], g.last = x.seq, max(g.last, x.end)
		}
	}
	scores, last := g.scores, g.last == end || cut
	g.unlock()
	if last {
		// The last sample is done after the others: its message is delivered again until they are.
		p, err := s.completeOthers(ctx, t, members, scores)
		if err != nil || p.after > 0 {
			return p, err
		}
	}
	return s.complete(ctx, t, seq, scores[t.SampleIndex])
}

// member is a trajectory that stands for a sample of a group, and its sequence in the stream. end is that of the one
// with which the sample ended. ran are the stages of the sample, in order; none: it has one.
type member struct {
	*schemas.Trajectory
	seq, end uint64
	ran      []bus.Made
}

// members reads the stored trajectories of a sample's group, by sample index. Those that are not valid are left out. An
// error is of the server.
func (s *service) members(ctx context.Context, t *schemas.Trajectory) ([]member, error) {
	if len(t.Group.Stages) > 0 {
		return s.stagedMembers(ctx, t)
	}
	messages, err := s.bus.LastMany(ctx, schemas.StreamTrajectories,
		[]string{schemas.TrajectoryFilter(source(t), t.UID)})
	if err != nil {
		return nil, fmt.Errorf("look up the group: %w", err)
	}
	var out []member
	for _, m := range messages {
		x := &schemas.Trajectory{}
		if bus.Fits(m, x) != nil {
			continue // its own handler makes it a dead letter
		}
		if rescored(t) {
			x.Run, x.Group = t.Run, t.Group // those of the pass
		}
		out = append(out, member{x, m.Seq, m.Seq, nil})
	}
	slices.SortFunc(out, func(a, b member) int { return cmp.Compare(a.SampleIndex, b.SampleIndex) })
	return out, nil
}

// stagedMembers is members for samples of several stages: those that have ended, by their last stage, or because no
// later one could be asked for, which their reward says.
func (s *service) stagedMembers(ctx context.Context, t *schemas.Trajectory) (out []member, err error) {
	made, err := s.bus.Made(ctx, t.Run, t.UID)
	if err != nil {
		return nil, err
	}
	done, err := s.rewardsOf(ctx, t)
	if err != nil {
		return nil, err
	}
	for i := range t.GroupSize {
		var ran []bus.Made
		_, _, open := stages.Open(&t.Group, i, func(at stages.Place) *schemas.Trajectory {
			x := made[at]
			if x.Trajectory == nil || x.GroupSize != t.GroupSize || !x.Group.Same(&t.Group) {
				return nil
			}
			ran = append(ran, x)
			return x.Trajectory
		})
		r := done[i]
		if len(ran) == 0 || open && (r == nil || r.Status == schemas.StatusScored) {
			continue
		}
		x, seq := standing(ran, i)
		if open {
			x.StopReason, x.Error = schemas.StopFailed, r.Error
		}
		out = append(out, member{x, seq, ran[len(ran)-1].Seq, ran})
	}
	return out, nil
}

// validMembers returns the members of a group without those that their own handlers will reject: they do not belong to
// this group, or name steps that are not stored. advance calls it before the group is rated. An error is of the server.
func (s *service) validMembers(ctx context.Context, t *schemas.Trajectory, members []member) ([]member, error) {
	var out []member
	for _, x := range members {
		fault, err := s.check(ctx, x.Trajectory)
		for k := 0; k < len(x.ran) && fault == nil && err == nil; k++ {
			fault, err = s.check(ctx, x.ran[k].Trajectory)
		}
		if err != nil {
			return nil, err
		}
		if fault == nil && x.Group.Same(&t.Group) {
			out = append(out, x)
		}
	}
	return out, nil
}

// completeOthers completes all samples of a group except the last, in parallel, once the group is rated as a whole.
// It returns the longest delay that one of them needs before another try. Samples that wait for a verdict are left to
// the verdict's handler.
func (s *service) completeOthers(ctx context.Context, last *schemas.Trajectory, members []member,
	scores map[int64]map[int]scored,
) (delay, error) {
	done, err := s.rewardsOf(ctx, last)
	if err != nil {
		return delay{}, err
	}
	var work errgroup.Group
	work.SetLimit(maxParallel)
	delays, errs := make([]delay, len(members)), make([]error, len(members))
	for i, x := range members {
		if x.SampleIndex == last.SampleIndex {
			continue
		}
		if r := done[x.SampleIndex]; r != nil && sameSample(r, outline(x.Trajectory, x.seq)) == nil {
			continue
		}
		work.Go(func() error {
			delays[i], errs[i] = s.complete(ctx, x.Trajectory, x.seq, scores[x.SampleIndex])
			return nil
		})
	}
	_ = work.Wait()
	var longest delay
	for i, p := range delays {
		// The handler of the sample's own message deals with a terminal error.
		if _, own := errors.AsType[*bus.TerminalError](errs[i]); errs[i] != nil && !own {
			return delay{}, errs[i]
		}
		if !p.completedByOther && p.after > longest.after {
			longest = p
		}
	}
	return longest, nil
}

// rewardsOf returns the rewards of a trajectory's group that are stored, by sample index.
func (s *service) rewardsOf(ctx context.Context, t *schemas.Trajectory) (map[int64]*schemas.Reward, error) {
	have, err := s.bus.LastMany(ctx, schemas.StreamRewards,
		[]string{schemas.RewardFilter(t.Run, t.Group.Batch, t.UID)})
	if err != nil {
		return nil, fmt.Errorf("look up the rewards of the group: %w", err)
	}
	done := map[int64]*schemas.Reward{}
	for _, m := range have {
		if r := (&schemas.Reward{}); bus.Fits(m, r) == nil {
			done[r.SampleIndex] = r
		}
	}
	return done, nil
}

// maxParallel bounds how many samples of a group are completed at once.
const maxParallel = 64
