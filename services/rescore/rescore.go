// Package rescore scores the stored samples of a run again, with other rewards or another estimator. The results go
// into a run of their own, the pass. A Source holds what the run stored; a Change says what differs in the pass. The
// reward service scores the samples, the advantage service closes the groups; this package finds the samples and
// makes the groups of the pass.
//
// 'meander rescore' reads a Source, applies the Change, claims the name of the pass, opens its groups, has the
// samples scored and waits for the advantages, in this order.
package rescore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/reward"
)

// Change says how a pass differs from its run.
type Change struct {
	// Rewards have all defaults set; none: the run's. GroundTruth is for the rewards that need one; empty: the run's.
	Rewards     []schemas.RewardSpec
	GroundTruth schemas.Truth
	// Advantage is the estimator; nil: the run's. BasisGiven says that its StdBasis was given, not a default.
	Advantage  *estimator.Config
	BasisGiven bool
}

// RequestError says that a pass cannot be made as requested.
type RequestError struct{ err error }

func (e *RequestError) Error() string { return e.err.Error() }
func (e *RequestError) Unwrap() error { return e.err }

// refuse returns a RequestError.
func refuse(format string, args ...any) error { return &RequestError{fmt.Errorf(format, args...)} }

// Source is what a run has stored of its samples. It holds no images.
type Source struct {
	run    schemas.Run
	groups map[schemas.UID]*group // by uid
	// Refills says that the rules of some group ask for refills, which a pass does not do; Staged that samples have
	// several stages, which the pass must have trajectories of.
	Refills, Staged bool
}

// group is one group of the run, and then of the pass.
type group struct {
	uid     schemas.UID
	prompt  string
	size    int64
	seqs    map[int64]uint64 // of the trajectories, by sample index
	trained bool
	// group is what the samples share: as in the run, and after Apply as in the pass.
	group  schemas.Group
	result *schemas.Advantage // of the run
}

// questionOf returns the text in which reward functions look for a target: the prompt, or what the messages ask.
func questionOf(t *schemas.Trajectory) string {
	if t.Text == nil {
		return t.Prompt
	}
	return intake.Asked(t.Prompt, t.Text.Settings.Messages)
}

// Read finds the stored samples and results of a run, or of only some groups of it. It fails if a group is still open,
// as its samples may still come, and if the run is itself a pass or has no samples.
func Read(ctx context.Context, b *bus.Bus, run schemas.Run, only ...schemas.UID) (*Source, error) {
	s := &Source{run: run, groups: map[schemas.UID]*group{}}
	for t, err := range view.Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		if len(only) > 0 && !slices.Contains(only, t.UID) {
			continue
		}
		g := s.groups[t.UID]
		if g == nil {
			g = &group{
				uid: t.UID, prompt: questionOf(t.Trajectory), size: t.GroupSize, seqs: map[int64]uint64{},
				group: t.Group,
			}
			s.groups[t.UID], s.Staged = g, s.Staged || len(t.Group.Stages) > 0
		}
		if t.StopReason == schemas.StopCompleted {
			g.prompt = questionOf(t.Trajectory)
			g.trained = g.trained || len(t.StochasticSteps()) > 0
		}
		g.seqs[t.SampleIndex] = t.Seq
	}
	stored, err := b.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")})
	if err != nil {
		return nil, fmt.Errorf("read advantages: %w", err)
	}
	for _, m := range stored {
		a := &schemas.Advantage{}
		if bus.Fits(m, a) != nil {
			continue
		}
		if g := s.groups[a.UID]; g != nil {
			g.result = a
		} else if a.SourceRun != "" {
			return nil, refuse("--run: %q is itself a pass over run %q; score that one again", run, a.SourceRun)
		}
	}
	if len(s.groups) == 0 {
		return nil, refuse("--run: %q has no stored trajectories; 'meander show' shows the latest run", run)
	}
	var open []schemas.UID
	for _, uid := range slices.Sorted(maps.Keys(s.groups)) {
		if g := s.groups[uid]; g.result == nil && int64(len(g.seqs)) < g.size {
			open = append(open, uid)
		}
	}
	if len(open) > 0 {
		return nil, fmt.Errorf("run %s still makes samples of %s, %s among them; wait for it", run, groups(len(open)),
			open[0])
	}
	return s, nil
}

// Apply turns the groups into those of the pass over run: with the rewards and the estimator of the change. All
// faults of the change are returned, joined; the source must not be used then.
func (s *Source) Apply(run schemas.Run, c Change) error {
	rootsOfBatch := map[string]map[schemas.UID]bool{} // roots by batch
	for _, g := range s.groups {
		if rootsOfBatch[g.group.Batch] == nil {
			rootsOfBatch[g.group.Batch] = map[schemas.UID]bool{}
		}
		root := g.uid
		if g.group.Refill != nil {
			root = g.group.Refill.Root
		}
		rootsOfBatch[g.group.Batch][root] = true
	}
	var errs []error
	for _, uid := range slices.Sorted(maps.Keys(s.groups)) {
		g := s.groups[uid]
		if err := g.apply(run, c, int64(len(rootsOfBatch[g.group.Batch]))); err != nil {
			errs = append(errs, fmt.Errorf("group %s: %w", uid, err))
		}
		if p := g.group.GroupPolicy; p != nil && (p.ZeroStd == schemas.GroupRefill || p.Failed == schemas.GroupRefill) {
			policy := *p
			if policy.ZeroStd == schemas.GroupRefill {
				policy.ZeroStd = schemas.GroupKeep
			}
			if policy.Failed == schemas.GroupRefill {
				policy.Failed = schemas.GroupKeep
			}
			g.group.GroupPolicy, s.Refills = &policy, true
		}
	}
	return errors.Join(errs...)
}

// apply turns one group into that of the pass over run. batchGroups is how many prompts of its batch have
// trajectories: refused prompts have none. The error joins what of the change does not fit this group.
func (g *group) apply(run schemas.Run, c Change, batchGroups int64) error {
	x := &g.group
	x.SourceRun, x.Deadline = run, 0
	if x.BatchGroups > 0 {
		x.BatchGroups = batchGroups
	}
	if len(c.Rewards) > 0 {
		truth := c.GroundTruth
		for _, old := range x.Reward {
			if truth == "" {
				truth = old.GroundTruth
			}
		}
		x.Reward = slices.Clone(c.Rewards)
		for i := range x.Reward {
			if scorer.WantsTruth(x.Reward[i].Name) {
				x.Reward[i].GroundTruth = truth
			}
		}
	}
	var errs []error
	for i := 0; len(c.Rewards) > 0 && i < len(x.Reward); i++ { // intake has checked those of the run
		spec := x.Reward[i]
		errs = append(errs, scorer.Check(spec.Name, g.prompt, spec.GroundTruth.Value(), spec.Params),
			scorer.CheckGroup(spec.Name, spec.GroupMin, g.size))
	}
	if c.Advantage != nil {
		a := *c.Advantage
		if !g.trained && !c.BasisGiven && a.Gamma == 1 {
			a.StdBasis = a.BasisWithoutSteps()
		}
		x.Advantage = schemas.AdvantageSpec{}
		a.Resolve(&x.Advantage)
		switch {
		case a.NeedsBatch() && x.BatchGroups == 0:
			errs = append(errs,
				fmt.Errorf("--estimator: %s with std %s normalises over a batch of groups, and the run had none",
					a.Name, a.Std))
		case !g.trained && a.CountsSteps():
			errs = append(errs, fmt.Errorf("--std-basis: %q counts trained steps, and the run had none", a.StdBasis))
		}
	}
	optional := slices.ContainsFunc(x.Reward, func(r schemas.RewardSpec) bool { return !*r.Required })
	if name := x.Advantage.Estimator; optional && estimator.PropertiesOf(name).Scores {
		errs = append(errs, fmt.Errorf("--optional-reward: %s normalises each reward, so all are required", name))
	}
	return errors.Join(errs...)
}

// OpenGroups stores the records of the pass's groups, as intake does for prompts. From them the advantage service
// knows the groups. To repeat it is harmless. An error is of the server.
func (s *Source) OpenGroups(ctx context.Context, b *bus.Bus, pass schemas.Run) error {
	p := b.NewPublisher(256, 16<<20)
	defer p.Close()
	for _, uid := range slices.Sorted(maps.Keys(s.groups)) {
		g := s.groups[uid]
		record := &schemas.GroupRecord{Run: pass, UID: uid, GroupSize: g.size, Prompt: g.prompt, Group: g.group}
		if len(g.group.Stages) > 0 {
			stored, err := b.Group(ctx, s.run, uid)
			if err != nil {
				return refuse("the record of group %s: %w", uid, err)
			}
			record = new(*stored)
			record.Run, record.Group = pass, g.group
		}
		for _, e := range []schemas.Keyed{record, (*schemas.Opening)(record)} {
			if _, err := p.Publish(ctx, e); err != nil {
				return fmt.Errorf("open group %s of pass %s: %w", uid, pass, err)
			}
		}
	}
	if err := p.Flush(ctx); err != nil {
		return fmt.Errorf("open the groups of pass %s: %w", pass, err)
	}
	return nil
}

// RewardNames returns the names of all reward functions of the pass, sorted.
func (s *Source) RewardNames() []string {
	names := map[string]bool{}
	for _, g := range s.groups {
		for _, r := range g.group.Reward {
			names[r.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// Size returns the number of samples.
func (s *Source) Size() int {
	n := 0
	for _, g := range s.groups {
		n += int(g.size)
	}
	return n
}

// Samples returns the samples of the pass that have no reward yet, for reward.Rescore. rewards has the subjects of
// the stored rewards.
func (s *Source) Samples(rewards map[string]uint64) []reward.PassSample {
	done := map[string]bool{}
	for subject := range rewards {
		if a, ok := schemas.ParseSubject(subject); ok {
			done[string(a.UID)+"."+a.Sample] = true
		}
	}
	var out []reward.PassSample
	for _, uid := range slices.Sorted(maps.Keys(s.groups)) {
		g := s.groups[uid]
		var any uint64
		for _, seq := range g.seqs {
			any = max(any, seq)
		}
		for i := range g.size {
			if done[string(uid)+"."+strconv.FormatInt(i, 10)] {
				continue
			}
			if seq, ok := g.seqs[i]; ok {
				out = append(out, reward.PassSample{Seq: seq, Index: i})
			} else {
				out = append(out, reward.PassSample{Seq: any, Index: i, Lost: true})
			}
		}
	}
	return out
}

// Claim stores the definition of the pass at its first use, so that the same name cannot mean another pass later;
// that is a RequestError. A pass that was interrupted is claimed again without an error.
func (s *Source) Claim(ctx context.Context, b *bus.Bus, pass schemas.Run, c Change) error {
	type passSpec struct {
		Source  schemas.Run `json:"source_run"`
		Digest  string      `json:"digest"`
		Created int64       `json:"created"`
	}
	what, err := json.Marshal([]any{s.run, c.Rewards, c.GroundTruth, c.Advantage})
	if err != nil {
		return err
	}
	sum := sha256.Sum256(what)
	mine := passSpec{s.run, hex.EncodeToString(sum[:]), time.Now().UnixNano()}
	data, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	have, created, err := b.CreateRun(ctx, pass, data)
	if err != nil || created {
		return err
	}
	var old passSpec
	if err := json.Unmarshal(have, &old); err != nil {
		return fmt.Errorf("stored spec of run %q: %w", pass, err)
	}
	if old.Source != mine.Source || old.Digest != mine.Digest {
		return refuse("--pass: %q is already a run with other rewards or settings; choose another name with --pass",
			pass)
	}
	return nil
}

// Advantages waits until every group of the pass has a result, and returns the results by uid. An error is of the
// server or of ctx.
func (s *Source) Advantages(
	ctx context.Context, b *bus.Bus, pass schemas.Run,
) (map[schemas.UID]*schemas.Advantage, error) {
	out := map[schemas.UID]*schemas.Advantage{}
	for m, err := range b.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(pass, "*")},
		bus.ReadOptions{Live: true}) {
		if err != nil {
			return nil, fmt.Errorf("follow pass %s: %w", pass, err)
		}
		a := &schemas.Advantage{}
		if bus.Fits(m, a) != nil {
			continue // not a result; the true one will replace it
		}
		if s.groups[a.UID] != nil {
			out[a.UID] = a
		}
		if len(out) == len(s.groups) {
			return out, nil
		}
	}
	return nil, context.Cause(ctx)
}

// Groups returns the run's groups with the results of run and pass, sorted by uid.
func (s *Source) Groups(advantages map[schemas.UID]*schemas.Advantage) (list []results.ScoredAgain) {
	for _, uid := range slices.Sorted(maps.Keys(s.groups)) {
		g := s.groups[uid]
		list = append(list, results.ScoredAgain{UID: uid, Prompt: g.prompt, Before: g.result, After: advantages[uid]})
	}
	return list
}

// Group returns what the samples of a group share, as in the pass.
func (s *Source) Group(uid schemas.UID) schemas.Group { return s.groups[uid].group }

// Join turns a trajectory of the run into one of the pass.
func (s *Source) Join(t *schemas.Trajectory, pass schemas.Run) {
	t.Run, t.Group = pass, s.groups[t.UID].group
}

func groups(n int) string {
	if n == 1 {
		return "1 group"
	}
	return fmt.Sprintf("%d groups", n)
}
