package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/reward"
)

// change is how a pass differs from its run.
type change struct {
	rewards     []schemas.RewardSpec // empty: those of the run
	groundTruth string
	advantage   *estimator.Config // nil: that of the run
	basisGiven  bool              // advantage.StdBasis was asked for, and is no default
}

// rewardSpecs are the rewards of the flags, with nothing left to resolve.
func rewardSpecs(list []any) ([]schemas.RewardSpec, error) {
	var out []schemas.RewardSpec
	for _, v := range list {
		spec := v.(map[string]any) // as rewards makes them
		s := schemas.RewardSpec{Name: spec["name"].(string), Weight: new(1.0), Required: new(true)}
		if w, ok := spec["weight"].(float64); ok {
			s.Weight = &w
		}
		if required, ok := spec["required"].(bool); ok {
			s.Required = &required
		}
		if params, ok := spec["params"].(map[string]any); ok {
			s.Params = map[string]string{}
			for k, v := range params {
				s.Params[k] = v.(string)
			}
		}
		out = append(out, s)
	}
	total := 0.0
	for _, s := range out {
		total += *s.Weight
	}
	if len(out) > schemas.MaxRewards || len(out) > 0 && !(total > 0) {
		return nil, fmt.Errorf("--reward: %d functions, weights %v in all; at most %d, and more than 0 in all", len(out), total, schemas.MaxRewards)
	}
	return out, nil
}

// sourceRun is what a run has stored of its samples. It holds no images.
type sourceRun struct {
	groups map[schemas.UID]*sourceGroup // by uid
	// refills: the policy of some group would have it replaced.
	refills bool
}

type sourceGroup struct {
	uid     schemas.UID
	prompt  string
	size    int64
	seqs    map[int64]uint64 // of the trajectories, by sample index
	trained bool
	// group is what the samples have in common, first as the run has it, then as the pass
	// does.
	group  schemas.Group
	result *schemas.Advantage // of the run
}

// askedOf is what reward functions look for a target in.
func askedOf(t *schemas.Trajectory) string {
	if t.Text == nil {
		return t.Prompt
	}
	return intake.Asked(t.Prompt, t.Text.Settings.Messages)
}

// readSource finds the samples of a run. A group that is still open is an error: its
// samples may be on their way.
func readSource(ctx context.Context, b *bus.Bus, run schemas.Run) (*sourceRun, error) {
	s := &sourceRun{groups: map[schemas.UID]*sourceGroup{}}
	for t, err := range results.Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		g := s.groups[t.UID]
		if g == nil {
			g = &sourceGroup{uid: t.UID, prompt: askedOf(t.Trajectory), size: t.GroupSize, seqs: map[int64]uint64{}, group: t.Group}
			s.groups[t.UID] = g
		}
		if t.StopReason == schemas.StopCompleted {
			g.prompt = askedOf(t.Trajectory)
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
			return nil, usage(fmt.Errorf("--run: %q is itself a pass over run %q; score that one again", run, a.SourceRun))
		}
	}
	if len(s.groups) == 0 {
		return nil, usage(fmt.Errorf("--run: %q has no stored trajectories; 'meander show' shows the latest run", run))
	}
	var open []schemas.UID
	for _, uid := range sortedKeys(s.groups) {
		if g := s.groups[uid]; g.result == nil && int64(len(g.seqs)) < g.size {
			open = append(open, uid)
		}
	}
	if len(open) > 0 {
		return nil, fmt.Errorf("run %s still makes samples of %s, %s among them; wait for it", run, count(len(open), "group"), open[0])
	}
	return s, nil
}

// apply makes the groups those of the pass.
func (s *sourceRun) apply(run schemas.Run, c change) error {
	places := map[string]map[schemas.UID]bool{} // roots by batch
	for _, g := range s.groups {
		if places[g.group.Batch] == nil {
			places[g.group.Batch] = map[schemas.UID]bool{}
		}
		root := g.uid
		if g.group.Refill != nil {
			root = g.group.Refill.Root
		}
		places[g.group.Batch][root] = true
	}
	var errs []error
	for _, uid := range sortedKeys(s.groups) {
		g := s.groups[uid]
		if err := g.apply(run, c, int64(len(places[g.group.Batch]))); err != nil {
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
			g.group.GroupPolicy, s.refills = &policy, true
		}
	}
	return errors.Join(errs...)
}

// apply makes one group that of the pass. places are those that its batch has trajectories
// for: prompts that were refused have none.
func (g *sourceGroup) apply(run schemas.Run, c change, places int64) error {
	x := &g.group
	x.SourceRun, x.Deadline = run, 0
	if x.BatchGroups > 0 {
		x.BatchGroups = places
	}
	if len(c.rewards) > 0 {
		truth := c.groundTruth
		for _, old := range x.Reward {
			if truth == "" {
				truth = old.GroundTruth
			}
		}
		x.Reward = slices.Clone(c.rewards)
		for i := range x.Reward {
			if compares(x.Reward[i].Name) {
				x.Reward[i].GroundTruth = truth
			}
		}
	}
	var errs []error
	for _, spec := range x.Reward {
		errs = append(errs, scorer.Check(spec.Name, g.prompt, spec.GroundTruth, spec.Params))
	}
	if c.advantage != nil {
		a := *c.advantage
		if !g.trained && !c.basisGiven && a.Gamma == 1 {
			a.StdBasis = a.BasisWithoutSteps()
		}
		x.Advantage = schemas.AdvantageSpec{Estimator: a.Name, Std: a.Std, StdBasis: a.StdBasis, Epsilon: new(a.Epsilon), Mode: a.Mode, Singleton: a.Singleton}
		if a.AdvClipMax > 0 {
			x.Advantage.AdvClipMax = new(a.AdvClipMax)
		}
		if a.Gamma != 1 {
			x.Advantage.Gamma = new(a.Gamma)
		}
		switch {
		case a.NeedsBatch() && x.BatchGroups == 0:
			errs = append(errs, fmt.Errorf("--estimator: %s with std %s normalises over a batch of groups, and the run had none", a.Name, a.Std))
		case !g.trained && (a.StdBasis == estimator.BasisExpanded || a.Gamma != 1):
			errs = append(errs, fmt.Errorf("--std-basis: %q counts trained steps, and the run had none", a.StdBasis))
		}
	}
	if x.Advantage.Estimator == estimator.GDPO && slices.ContainsFunc(x.Reward, func(r schemas.RewardSpec) bool { return !*r.Required }) {
		errs = append(errs, errors.New("--optional-reward: gdpo normalises each reward, so all are required"))
	}
	return errors.Join(errs...)
}

// open stores the records of the groups of the pass, as intake does those of prompts: the
// advantage service knows the groups from them.
func (s *sourceRun) open(ctx context.Context, b *bus.Bus, pass schemas.Run) error {
	p := b.NewPublisher(256, 16<<20)
	defer p.Close()
	for _, uid := range sortedKeys(s.groups) {
		g := s.groups[uid]
		record := &schemas.GroupRecord{Run: pass, UID: uid, GroupSize: g.size, Prompt: g.prompt, Group: g.group}
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

// rewardNames are the functions of the pass, sorted.
func (s *sourceRun) rewardNames() []string {
	names := map[string]bool{}
	for _, g := range s.groups {
		for _, r := range g.group.Reward {
			names[r.Name] = true
		}
	}
	return sortedKeys(names)
}

func (s *sourceRun) size() int {
	n := 0
	for _, g := range s.groups {
		n += int(g.size)
	}
	return n
}

// samples are those without a reward, given the subjects of the rewards that are stored.
func (s *sourceRun) samples(rewards map[string]uint64) []reward.PassSample {
	done := map[string]bool{}
	for subject := range rewards {
		if a, ok := schemas.ParseSubject(subject); ok {
			done[string(a.UID)+"."+a.Sample] = true
		}
	}
	var out []reward.PassSample
	for _, uid := range sortedKeys(s.groups) {
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
