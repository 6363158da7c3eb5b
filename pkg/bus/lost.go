package bus

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// OpenGroup is a group without its result. Claimed is when its record was stored.
type OpenGroup struct {
	*schemas.GroupRecord
	Claimed time.Time
}

// Lost are samples of an open group that are neither made nor asked for: a server has lost their requests, or someone
// has removed them.
type Lost struct {
	Group   OpenGroup
	Samples []int64
}

const recordsAtOnce = 256

// AsksForSamples reports whether intake asks samplers for the samples of the group: its prompt was accepted, and it is
// no pass over stored samples.
func (g OpenGroup) AsksForSamples() bool { return g.Error == "" && g.Group.SourceRun == "" }

// WantsVerdict reports whether people or batch jobs score samples of the group.
func (g OpenGroup) WantsVerdict() bool {
	return slices.ContainsFunc(g.Group.Reward, schemas.RewardSpec.IsVerdict)
}

// OpenGroups returns the groups of a run, or of all runs with "*", that have no result.
func (b *Bus) OpenGroups(ctx context.Context, run schemas.Run) ([]OpenGroup, error) {
	groups, err := b.Subjects(ctx, schemas.StreamGroups, schemas.Address{Kind: schemas.KindGroup, Run: run}.Filter())
	if err != nil {
		return nil, fmt.Errorf("open groups: %w", err)
	}
	closed, err := b.Subjects(ctx, schemas.StreamAdvantages,
		schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter())
	if err != nil {
		return nil, fmt.Errorf("open groups: %w", err)
	}
	var subjects []string
	for subject := range groups {
		if of, _ := schemas.ParseSubject(subject); closed[schemas.AdvantageSubject(of.Run, of.UID)] == 0 {
			subjects = append(subjects, subject)
		}
	}
	return b.groupsAt(ctx, subjects)
}

// GroupsOf returns groups of a run that are known to be open.
func (b *Bus) GroupsOf(ctx context.Context, run schemas.Run, uids iter.Seq[schemas.UID]) ([]OpenGroup, error) {
	var subjects []string
	for uid := range uids {
		subjects = append(subjects, schemas.GroupSubject(run, uid))
	}
	return b.groupsAt(ctx, subjects)
}

// groupsAt returns the groups with records at these subjects.
func (b *Bus) groupsAt(ctx context.Context, subjects []string) (out []OpenGroup, err error) {
	slices.Sort(subjects)
	for part := range slices.Chunk(subjects, recordsAtOnce) {
		stored, err := b.LastMany(ctx, schemas.StreamGroups, part)
		if err != nil {
			return nil, fmt.Errorf("open groups: %w", err)
		}
		for _, m := range stored {
			r := &schemas.GroupRecord{}
			if Fits(m, r) == nil {
				out = append(out, OpenGroup{r, m.Time})
			}
		}
	}
	return out, nil
}

// askedAfter is how long after its claim a group may be without requests: intake stores them one by one.
const askedAfter = 2 * time.Second

// LostSamples returns which samples of open groups are lost. None is while the queue of requests is full: intake waits
// then to ask for the rest.
func (b *Bus) LostSamples(ctx context.Context, open []OpenGroup) ([]Lost, error) {
	if len(open) == 0 {
		return nil, nil
	}
	run := open[0].Run
	if slices.ContainsFunc(open, func(g OpenGroup) bool { return g.Run != run }) {
		run = "*"
	}
	present, err := b.Present(ctx)
	if err != nil {
		return nil, err
	}
	asked := map[schemas.Making]bool{}
	for _, p := range present {
		for _, m := range p.Making {
			asked[m] = true
		}
	}
	// A request is stored before the parked one of a resumed run goes, a parked one before the request goes, and a
	// trajectory before the request goes: what is read in this order cannot be missed.
	for _, of := range []struct{ stream, kind string }{
		{schemas.StreamRequests, schemas.KindRequest},
		{schemas.StreamParked, schemas.KindParked},
		{schemas.StreamRequests, schemas.KindRequest},
	} {
		subjects, err := b.Subjects(ctx, of.stream, schemas.Address{Kind: of.kind, Run: run}.Filter())
		if err != nil {
			return nil, fmt.Errorf("lost requests: %w", err)
		}
		noteSamples(asked, subjects, nil)
	}
	queue, _, err := b.streamStats(ctx, storedIn{schemas.StreamRequests, true, true})
	if err != nil || queue.State == StateFull {
		return nil, err
	}
	now, unasked := time.Now(), map[schemas.Run][]Lost{}
	for _, g := range open {
		late := g.Group.Deadline > 0 && now.UnixNano() > g.Group.Deadline
		if late || !g.AsksForSamples() || now.Sub(g.Claimed) < askedAfter {
			continue
		}
		if missing := samplesWithout(asked, g); len(missing) > 0 {
			unasked[g.Run] = append(unasked[g.Run], Lost{g, missing})
		}
	}
	var out []Lost
	for _, run := range slices.Sorted(maps.Keys(unasked)) {
		made, err := b.madeOf(ctx, unasked[run])
		if err != nil {
			return nil, fmt.Errorf("lost requests: %w", err)
		}
		for _, l := range unasked[run] {
			l.Samples = slices.DeleteFunc(l.Samples, func(i int64) bool { return made[l.Group.sample(i)] })
			if len(l.Samples) > 0 {
				out = append(out, l)
			}
		}
	}
	return out, nil
}

// madeOf returns which samples of groups of one run are made or rewarded. Of several groups it asks for the whole run:
// those that wait for verdicts are many, and asked about again and again.
func (b *Bus) madeOf(ctx context.Context, groups []Lost) (map[schemas.Making]bool, error) {
	of := schemas.Address{Run: groups[0].Group.Run}
	if len(groups) == 1 {
		of.UID = groups[0].Group.UID
	}
	// Of several stages the last one ends a sample; one that ended before has a reward, or will have one.
	last := map[schemas.UID]schemas.Stage{}
	for _, l := range groups {
		if n := len(l.Group.Group.Stages); n > 0 {
			last[l.Group.UID] = l.Group.Group.Stages[n-1].Name.Token(l.Group.Group.Rounds)
		}
	}
	ends := func(a schemas.Address) bool {
		stage, several := last[a.UID]
		return a.Kind != schemas.KindTrajectory || !several || a.Stage == stage
	}
	made := map[schemas.Making]bool{}
	for stream, kind := range map[string]string{
		schemas.StreamTrajectories: schemas.KindTrajectory, schemas.StreamRewards: schemas.KindReward,
	} {
		of.Kind = kind
		subjects, err := b.Subjects(ctx, stream, of.Filter())
		if err != nil {
			return nil, err
		}
		noteSamples(made, subjects, ends)
	}
	return made, nil
}

func (g OpenGroup) sample(index int64) schemas.Making {
	return schemas.Making{Run: g.Run, UID: g.UID, SampleIndex: index}
}

// samplesWithout returns the samples of a group that are not among those given.
func samplesWithout(have map[schemas.Making]bool, g OpenGroup) (out []int64) {
	if have[g.sample(-1)] {
		return nil
	}
	for i := range g.GroupSize {
		has := have[g.sample(i)]
		for _, s := range g.Group.Stages { // a sample of an inner stage stands for those that it leads to
			has = has || have[g.sample(i-i%s.Every)]
		}
		if !has {
			out = append(out, i)
		}
	}
	return out
}

// noteSamples notes the samples of subjects, those that count; nil: all do.
func noteSamples(to map[schemas.Making]bool, subjects map[string]uint64, counts func(schemas.Address) bool) {
	for subject := range subjects {
		a, _ := schemas.ParseSubject(subject)
		if counts != nil && !counts(a) {
			continue
		}
		if i, err := strconv.ParseInt(a.Sample, 10, 64); err == nil {
			to[schemas.Making{Run: a.Run, UID: a.UID, SampleIndex: i}] = true
		}
	}
}
