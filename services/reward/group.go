package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// A function that rates whole groups is asked once all samples of the group have ended, or the group is about to close.
// What a function of the user's own says is stored (schemas.Rating) before any reward that it is part of. The stored
// answer counts: another replica, or another process after this one died, reads it and asks nobody.

// groupCall makes one group a job of a pool.
type groupCall struct {
	scorer.GroupScorer
	group   scorer.Group
	results []scorer.Result
	// preferences are by sample index.
	preferences []schemas.Preference
	passing     error // why a member could not be loaded now
}

// Score is never called: it makes groupCall a scorer.Scorer.
func (*groupCall) Score(context.Context, scorer.Input) (float64, error) {
	return 0, errors.ErrUnsupported
}

// ScoreDetail rates the group. The result is an error if the function did not answer; else results are there.
func (c *groupCall) ScoreDetail(ctx context.Context, _ scorer.Input) scorer.Result {
	g, load := c.group, c.group.Sample
	g.Sample = func(ctx context.Context, k int) (scorer.Input, func(), error) {
		in, release, err := load(ctx, k)
		if _, bad := errors.AsType[*bus.TerminalError](err); err != nil && !bad && !errors.Is(err, bus.ErrNotFound) {
			c.passing = fmt.Errorf("sample %d: %w", g.Members[k], err)
			err = fmt.Errorf("%w: %w", scorer.ErrUnavailable, c.passing)
		}
		return in, release, err
	}
	g.Compared = func(list []scorer.Preference) {
		c.preferences = nil // of an earlier try
		for _, x := range list {
			c.preferences = append(c.preferences, schemas.Preference{A: g.Members[x.A], B: g.Members[x.B], P: x.P})
		}
	}
	c.results = c.ScoreGroup(ctx, g)
	if c.passing != nil {
		return scorer.Result{Err: &imageError{c.passing}}
	}
	return scorer.Result{Err: unanswered(c.results)}
}

// rateGroup calls the functions that rate a group as a whole and have not answered yet, and puts their scores into g. A
// positive after says when to try again those that are busy or away. An error means that a sample cannot be loaded, or
// an answer not be stored, now.
func (s *service) rateGroup(ctx context.Context, t *schemas.Trajectory, members []member, g *groupMemo,
) (after time.Duration, err error) {
	due := s.due(t)
	if left := time.Until(g.next); left > 0 {
		return until(left, time.Now(), due), nil
	}
	if g.answers == nil {
		g.answers, g.waits = map[int]map[int64]scored{}, newWaits(len(t.Group.Reward))
	}
	var calls sync.WaitGroup
	var mu sync.Mutex
	for i, spec := range t.Group.Reward {
		if !ratesGroup(spec) || g.answers[i] != nil {
			continue
		}
		calls.Go(func() {
			answers, wait, fault := s.askGroup(ctx, t, members, i, &g.waits, due)
			mu.Lock()
			defer mu.Unlock()
			after, err = max(after, wait), cmp.Or(err, fault)
			if wait == 0 && fault == nil {
				g.answers[i] = answers
			}
		})
	}
	calls.Wait()
	if err := cmp.Or(ctx.Err(), err); err != nil {
		return 0, err
	}
	if after > 0 {
		g.next = time.Now().Add(after - time.Millisecond)
		return after, nil
	}
	g.scores = map[int64]map[int]scored{}
	for i, answers := range g.answers {
		for index, r := range answers {
			if g.scores[index] == nil {
				g.scores[index] = map[int]scored{}
			}
			g.scores[index][i] = r
		}
	}
	g.answers = nil
	return 0, nil
}

// askGroup returns what function i says of the members of a group, by sample index: what is stored, or else what it
// answers now, which is then stored. wait says when to ask again instead.
func (s *service) askGroup(ctx context.Context, t *schemas.Trajectory, members []member, i int, w *waits,
	due time.Time,
) (answers map[int64]scored, wait time.Duration, err error) {
	spec := t.Group.Reward[i]
	e, err := s.catalog.findGroup(spec.Name)
	if err != nil { // this service does not have it
		e.rater, e.pool = absent{spec.Name, err}, nil
	}
	rated, unseen, same, g := s.groupFor(ctx, t, members, spec, e)
	own := func(r *schemas.Rating) (fault, err error) { return otherRating(r, spec, members), nil }
	stored := func() error {
		r := &schemas.Rating{}
		_, err := s.bus.StoredEvent(ctx, schemas.StreamVerdicts, schemas.RatingSubject(t.Run, t.UID, int64(i)), r,
			func() (fault, err error) { return own(r) })
		answers = answersOf(r)
		return err
	}
	err = bus.ErrNotFound
	if ratesOutside(spec) {
		err = stored()
	}
	if errors.Is(err, bus.ErrNotFound) {
		answers, wait, err = s.callGroup(ctx, spec, rated, g, e, w, i, due)
		if err == nil && wait == 0 && ratesOutside(spec) && len(rated) > 0 {
			var ack bus.Ack
			ack, err = s.bus.Publish(ctx, ratingOf(t, rated, i, answers), bus.Against(own), bus.WaitForSpace())
			if err != nil {
				err = fmt.Errorf("store the rating of the group: %w", err)
			} else if ack.Duplicate { // another replica was first
				err = stored()
			}
		}
	}
	if err != nil || wait > 0 {
		return nil, wait, err
	}
	maps.Copy(answers, unseen)
	for i, as := range same {
		if r, there := answers[as]; there {
			answers[i] = r
		}
	}
	return answers, 0, nil
}

// absent is a function that this service does not have.
type absent struct {
	name string
	err  error
}

func (a absent) Name() string  { return a.name }
func (absent) Version() string { return "" }
func (a absent) ScoreGroup(_ context.Context, g scorer.Group) []scorer.Result {
	return slices.Repeat([]scorer.Result{{Err: a.err}}, len(g.Members))
}

// callGroup calls function i for the members of a group that it can rate, and returns a result for each, by sample
// index; wait says when to call again instead.
func (s *service) callGroup(ctx context.Context, spec schemas.RewardSpec, rated []member, g scorer.Group,
	e groupEntry, w *waits, i int, due time.Time,
) (answers map[int64]scored, wait time.Duration, err error) {
	answers = map[int64]scored{}
	call := &groupCall{GroupScorer: e.rater, group: g}
	put := func(r scored, of func(k int) scorer.Result) {
		for k, x := range rated {
			r.Result, r.members, r.preferences = of(k), 0, call.preferences
			if fault := faultOf(r.Value); r.Err == nil && fault != nil {
				r.Err = fmt.Errorf("score is %w", fault)
			}
			if r.Err == nil {
				r.members = int64(len(rated))
			}
			answers[x.SampleIndex] = r
		}
	}
	switch least := max(spec.GroupMin, 1); {
	case int64(len(rated)) < least:
		err := fmt.Errorf("%s is asked about groups of at least %d samples, and this one has %d to show", spec.Name,
			least, len(rated))
		put(scored{version: e.rater.Version()}, func(int) scorer.Result { return scorer.Result{Err: err} })
		return answers, 0, nil
	case e.pool == nil:
		put(scored{}, func(k int) scorer.Result { return e.rater.ScoreGroup(ctx, g)[k] })
		return answers, 0, nil
	}
	limited, expired := ctx, !time.Now().Before(due)
	if !expired {
		var cancel context.CancelFunc
		limited, cancel = context.WithDeadline(ctx, due)
		defer cancel()
	}
	since := w.since[i]
	if since.IsZero() {
		since = time.Now()
	}
	weight := s.weightOf(rated, spec, e)
	r := e.pool.score(scorer.WithRetryDeadline(limited, since.Add(s.cfg.ScorePatience)), call,
		func(ctx context.Context, _ bool) (scorer.Input, func(), error) {
			err := s.requests.Acquire(ctx, weight)
			return scorer.Input{}, func() { s.requests.Release(weight) }, err
		})
	if ctx.Err() != nil {
		return nil, 0, ctx.Err()
	}
	if p, ok := errors.AsType[*imageError](r.Err); ok {
		return nil, 0, p.error
	}
	if wait = s.retryAfter(w, i, spec.Name, &r, due, expired); wait > 0 {
		return nil, wait, nil
	}
	put(r, func(k int) scorer.Result {
		if r.Err != nil {
			return r.Result
		}
		return call.results[k]
	})
	return answers, 0, nil
}

// weightOf returns the memory in bytes that a request with the files of some members takes.
func (s *service) weightOf(rated []member, spec schemas.RewardSpec, of groupEntry) (weight int64) {
	for _, x := range rated {
		if m := judged(x.Trajectory, spec.Track, of.rater); x.Text == nil && m != nil {
			cost, _ := s.images.cost(m, x.Conditions) // one that is too large fails as it is loaded
			weight += cost
		}
	}
	return min(weight, int64(s.cfg.ImageMiB)<<20)
}

// groupFor returns the members that a function is asked about, and the group for it. Those that it cannot see although
// they ended well are in unseen, by sample index, with their error. Samples that come of one trajectory of a stage are
// one member, the first of them: same has it for the others.
func (s *service) groupFor(ctx context.Context, t *schemas.Trajectory, members []member, spec schemas.RewardSpec,
	of groupEntry,
) (rated []member, unseen map[int64]scored, same map[int64]int64, g scorer.Group) {
	unseen, same, g.Size = map[int64]scored{}, map[int64]int64{}, t.GroupSize
	for index := range t.GroupSize {
		why := ""
		switch at := slices.IndexFunc(members, func(x member) bool { return x.SampleIndex == index }); {
		case at < 0:
			why = "it had not ended when the group was rated"
		case members[at].StopReason != schemas.StopCompleted:
			why = fmt.Sprintf("trajectory %s: %s", members[at].StopReason, members[at].Error)
		default:
			x, err := members[at].judgedBy(&spec)
			if err == nil && x.Text == nil && judged(x.Trajectory, spec.Track, of.rater) == nil {
				err = noMedium(x.Trajectory, spec.Track)
			}
			if err == nil {
				if i := slices.IndexFunc(rated, func(o member) bool { return o.seq == x.seq }); i >= 0 {
					same[index] = rated[i].SampleIndex
				} else {
					rated, g.Members = append(rated, x), append(g.Members, index)
				}
				continue
			}
			unseen[index] = scored{version: of.rater.Version(), Result: scorer.Result{Err: err}}
			why = err.Error()
		}
		g.Missing = append(g.Missing, scorer.Missing{Index: index, Why: why})
	}
	trace := tracing.Header(ctx)
	g.Sample = func(ctx context.Context, k int) (in scorer.Input, release func(), err error) {
		in.Trace = trace
		return s.loadMember(ctx, rated[k].Trajectory, spec, of, in)
	}
	g.Store = func(ctx context.Context, data []byte) (string, error) {
		ref, err := s.bus.PutBlob(ctx, data)
		return ref.Digest, err
	}
	return rated, unseen, same, g
}

// judgedBy returns what a function rates of a member: of several stages the newest that it may. An error says that none
// of these ran.
func (x member) judgedBy(spec *schemas.RewardSpec) (member, error) {
	if len(x.ran) == 0 {
		return x, nil
	}
	of := stages.Judged(&x.Group, spec, trajectories(x.ran))
	i := slices.IndexFunc(x.ran, func(r bus.Made) bool { return r.Trajectory == of })
	if i < 0 {
		return x, whyNotJudged(x.Trajectory, spec)
	}
	x.Trajectory, x.seq, of = new(*of), x.ran[i].Seq, x.Trajectory
	x.SampleIndex = of.SampleIndex
	return x, nil
}

// loadMember adds to in what a function sees of a sample of a group.
func (s *service) loadMember(ctx context.Context, t *schemas.Trajectory, spec schemas.RewardSpec, of groupEntry,
	in scorer.Input,
) (_ scorer.Input, release func(), err error) {
	in.Prompt, in.Params = t.Prompt, spec.Params
	if len(t.Group.Stages) > 0 { // those of the stage differ among the members
		record, err := s.record(ctx, t.Run, t.UID)
		if err != nil {
			return in, nil, err
		}
		if record != nil {
			in.Prompt = record.Prompt
		}
	}
	in.GroundTruth, in.Truth = spec.GroundTruth.Text(), spec.GroundTruth.Value()
	if in.Metadata, err = t.Group.Metadata.Map(); err != nil {
		return in, nil, err
	}
	if t.Text != nil {
		in.Text, err = (&sharedText{bus: s.bus, t: t}).load(ctx)
		return in, func() {}, err
	}
	p := &sharedImage{bus: s.bus, memory: s.images, stored: judged(t, spec.Track, of.rater)}
	if scorer.SeesConditions(of.rater) {
		p.conditions = t.Conditions
	}
	held, err := p.hold(ctx, true)
	in.Media, in.Conditions = held.Spaced(scorer.FramesOf(of.rater)), held.conditions
	return in, p.release, err
}

// ratingOf returns the answers of function i as the event that is stored.
func ratingOf(t *schemas.Trajectory, rated []member, i int, answers map[int64]scored) *schemas.Rating {
	r := &schemas.Rating{
		Run: t.Run, UID: t.UID, Function: int64(i), Name: t.Group.Reward[i].Name, GroupSize: t.GroupSize,
		At: time.Now().UnixNano(),
	}
	for _, x := range rated {
		a := answers[x.SampleIndex]
		m := schemas.RatedMember{SampleIndex: x.SampleIndex, TrajectorySeq: x.seq, Detail: a.Detail}
		if len(t.Group.Stages) > 0 {
			m.Stage = x.Stage
		}
		if a.Err != nil {
			m.Error = a.Err.Error()
		} else {
			m.Value = new(a.Value)
		}
		r.Preferences = a.preferences
		r.Version, r.DurationNS = a.version, max(r.DurationNS, a.took.Nanoseconds())
		r.Members = append(r.Members, m)
	}
	return r
}

// answersOf is the opposite of ratingOf.
func answersOf(r *schemas.Rating) map[int64]scored {
	out := map[int64]scored{}
	for _, m := range r.Members {
		a := scored{
			Result: scorer.Result{Detail: m.Detail}, version: r.Version, took: time.Duration(r.DurationNS),
		}
		if m.Value != nil {
			a.Value, a.members = *m.Value, int64(len(r.Members))
		} else {
			a.Err = errors.New(m.Error)
		}
		out[m.SampleIndex] = a
	}
	return out
}

// otherRating returns why a stored rating is not one of these members by this function; nil: it is. Members that came
// later are in no rating.
func otherRating(r *schemas.Rating, spec schemas.RewardSpec, members []member) error {
	if r.Name != spec.Name {
		return fmt.Errorf("name: %s; must be %s", r.Name, spec.Name)
	}
	for _, m := range r.Members {
		i := slices.IndexFunc(members, func(x member) bool { return x.SampleIndex == m.SampleIndex })
		var x member
		if i >= 0 {
			x, _ = members[i].judgedBy(&spec)
		}
		if i < 0 || x.seq != m.TrajectorySeq || m.Stage != "" && x.Stage != m.Stage {
			return fmt.Errorf("members: trajectory %d of sample %d; must be the stored one", m.TrajectorySeq,
				m.SampleIndex)
		}
	}
	return nil
}
