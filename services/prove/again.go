package prove

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/rescore"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/verify"
)

// again computes what led to the groups of an update once more, link by link. An error is of the server, or of ctx.
func (p *prover) again(ctx context.Context, groups []schemas.TrainedGroup, of string) error {
	for _, link := range []struct {
		name string
		do   func(context.Context, []schemas.TrainedGroup, string) (verdict, what string, err error)
	}{
		{LinkTrajectories, p.trajectoriesAgain},
		{LinkRewards, p.rewardsAgain},
		{LinkAdvantages, p.advantagesAgain},
		{LinkPrompts, p.promptsAgain},
	} {
		if !p.asked(link.name, of) {
			continue
		}
		verdict, what, err := link.do(ctx, groups, of)
		if err != nil {
			return fmt.Errorf("%s: %w", link.name, err)
		}
		p.add(link.name, of, verdict, "%s", what)
	}
	return nil
}

func uidsOf(groups []schemas.TrainedGroup) (out []schemas.UID) {
	for _, g := range groups {
		out = append(out, g.UID)
	}
	return out
}

// trajectoriesAgain computes steps, digests and log-probs again, as 'meander verify' does.
func (p *prover) trajectoriesAgain(ctx context.Context, groups []schemas.TrainedGroup, _ string,
) (verdict, what string, err error) {
	o := p.options.Verify
	o.UIDs = uidsOf(groups)
	r, err := verify.Run(ctx, p.bus, p.archive.run, o)
	_, model := errors.AsType[*verify.ModelError](err)
	_, weights := errors.AsType[*verify.WeightsError](err)
	switch {
	case model:
		return Unchecked, err.Error() + "; name its folder with --model", nil
	case weights:
		return Unchecked, err.Error(), nil
	case err != nil:
		return "", "", err
	}
	counted := fmt.Sprintf("%d samples", r.Trajectories)
	for _, x := range []struct {
		n    int
		text string
		most verify.Difference
	}{
		{r.Steps, "log-probs of steps computed again, max |ratio-1|", r.MaxRatio},
		{r.Rolled, "states computed again, max distance", r.MaxRolled},
		{r.Predictions, "predictions at steps computed again, max distance", r.MaxRolled},
		{r.Tokens, "tokens drawn again, max difference", r.MaxTokenDifference},
	} {
		if x.n > 0 {
			counted += fmt.Sprintf(": %d %s = %g", x.n, x.text, float64(x.most))
		}
	}
	faults := r.Faults(p.options.Tolerance)
	if len(faults) == 0 {
		return Holds, counted, nil
	}
	if len(r.Mismatches) > 0 {
		m := r.Mismatches[0]
		return Broken, fmt.Sprintf("%s #%d step %d: %s; %s", m.UID, m.SampleIndex, m.StepIndex, m.What,
			strings.Join(faults, "; ")), nil
	}
	if r.Unproven != "" && len(faults) == 1 || len(r.Missing) == len(faults) {
		return Unchecked, counted + "; " + strings.Join(faults, "; "), nil
	}
	return Broken, counted + "; " + strings.Join(faults, "; "), nil
}

// pass makes a pass over groups, with their own rewards and estimator. A why says what of the run is scored by nobody
// again.
func (p *prover) pass(ctx context.Context, of string, groups []schemas.TrainedGroup) (run schemas.Run,
	s *rescore.Source, why string, err error,
) {
	run = schemas.Run(strings.ReplaceAll("prove-"+of, " ", "-"))
	s, err = rescore.Read(ctx, p.bus, p.archive.run, uidsOf(groups)...)
	if err == nil {
		err = s.Apply(p.archive.run, rescore.Change{})
	}
	if err == nil {
		err = s.OpenGroups(ctx, p.bus, run)
	}
	if refused, ok := errors.AsType[*rescore.RequestError](err); ok {
		return run, nil, refused.Error(), nil
	}
	return run, s, "", err
}

// rewardsAgain scores the samples again, and compares each score.
func (p *prover) rewardsAgain(ctx context.Context, groups []schemas.TrainedGroup, of string) (string, string, error) {
	pass, source, why, err := p.pass(ctx, "rewards-"+of, groups)
	if err != nil || why != "" {
		return Unchecked, why, err
	}
	names := source.RewardNames()
	if err := reward.CheckNames(p.options.Reward, names); err != nil {
		return Unchecked, fmt.Sprintf("they cannot be scored here: %v", err), nil
	}
	samples := source.Samples(nil)
	if source.Staged {
		if samples, err = p.copyStages(ctx, source, pass, groups); err != nil {
			return "", "", err
		}
	}
	err = reward.Rescore(ctx, p.options.Reward, p.bus, p.options.Log, reward.Pass{
		Samples: samples, Change: func(t *schemas.Trajectory) { source.Join(t, pass) },
	})
	if err != nil {
		return "", "", err
	}
	stored, err := view.Rewards(ctx, p.bus, p.archive.run, "*")
	if err != nil {
		return "", "", err
	}
	made, err := view.Rewards(ctx, p.bus, pass, "*")
	if err != nil {
		return "", "", err
	}
	scores, worst, what := 0, Holds, ""
	for _, g := range groups {
		for _, m := range g.Members {
			key, at := view.Key{UID: g.UID, Index: m.SampleIndex}, fmt.Sprintf("%s #%d", g.UID, m.SampleIndex)
			was, now := stored[key], made[key]
			if m.Reward == nil && was == nil {
				continue // it had not come when the group closed
			}
			if was == nil || now == nil {
				return Unchecked, "the reward of " + at + " is not in the archive", nil
			}
			scores += len(was.Scores)
			verdict, why := compareScores(was, now)
			if verdict == Broken || verdict == Unchecked && worst == Holds {
				worst, what = verdict, at+": "+why
			}
		}
	}
	all := fmt.Sprintf("%d scores of %s are the same again", scores, strings.Join(names, ", "))
	n, verdict, why, err := p.stepsAgain(ctx, groups)
	if err != nil {
		return "", "", err
	}
	if n > 0 {
		all += fmt.Sprintf(", %d of them at steps", n)
	}
	if verdict == Broken || verdict == Unchecked && worst == Holds {
		worst, what = verdict, why
	}
	return worst, cmp.Or(what, all), nil
}

// compareScores compares the scores of a sample with those made again.
func compareScores(was, now *schemas.Reward) (verdict, why string) {
	for i, s := range was.Scores {
		n := slices.IndexFunc(now.Scores, func(x schemas.Score) bool { return x.Name == s.Name && x.Stage == s.Stage })
		switch {
		case n < 0:
			return Broken, s.Name + ": not scored again"
		case same(s.Value, now.Scores[n].Value):
			continue
		case s.Version != now.Scores[n].Version:
			return Unchecked, fmt.Sprintf("%s is version %q here, it was %q", s.Name, now.Scores[n].Version, s.Version)
		case strings.Contains(s.Name, ":"):
			return Unchecked, fmt.Sprintf("%s gives %s now, %s is stored: a judge from outside may not be "+
				"deterministic", s.Name, number(now.Scores[n].Value), number(s.Value))
		}
		return Broken, fmt.Sprintf("%s gives %s, %s is stored", was.Scores[i].Name, number(now.Scores[n].Value),
			number(s.Value))
	}
	if !same(was.Reward, now.Reward) {
		return Broken, fmt.Sprintf("the weighted sum is %s, %s is stored", number(now.Reward), number(was.Reward))
	}
	return Holds, ""
}

// same reports whether two numbers have equal bits, or are both absent.
func same(a, b *float64) bool {
	return a == nil && b == nil || a != nil && b != nil && math.Float64bits(*a) == math.Float64bits(*b)
}

func number(x *float64) string {
	if x == nil {
		return "nothing"
	}
	return fmt.Sprintf("%g", *x)
}

// advantagesAgain has the advantage service close the groups again, with the rewards that are stored.
func (p *prover) advantagesAgain(ctx context.Context, groups []schemas.TrainedGroup, of string,
) (verdict, what string, err error) {
	pass, source, why, err := p.pass(ctx, "advantages-"+of, groups)
	if err != nil || why != "" {
		return Unchecked, why, err
	}
	stored, err := view.Rewards(ctx, p.bus, p.archive.run, "*")
	if err != nil {
		return "", "", err
	}
	for _, g := range groups {
		for _, m := range g.Members {
			r := stored[view.Key{UID: g.UID, Index: m.SampleIndex}]
			if r == nil {
				return Unchecked, fmt.Sprintf("the reward of %s #%d is not in the archive", g.UID, m.SampleIndex), nil
			}
			r.Group, r.Run = source.Group(r.UID), pass
			if _, err := p.bus.Publish(ctx, r); err != nil {
				return "", "", err
			}
		}
	}
	made, refused, err := p.closeAgain(ctx, source, pass)
	if err != nil || refused != "" {
		return Broken, refused, err
	}
	n := 0
	for _, g := range groups {
		for i, m := range g.Members {
			now := made[g.UID].Members[i]
			if !same(m.Advantage, now.Advantage) || !slices.Equal(m.StepAdvantages, now.StepAdvantages) {
				return Broken, fmt.Sprintf("%s #%d: %s gives %s, %s is stored", g.UID, m.SampleIndex, g.Estimator,
					number(now.Advantage), number(m.Advantage)), nil
			}
			n++
		}
		now := *made[g.UID]
		if !reflect.DeepEqual(now.Credits, g.Credits) || !reflect.DeepEqual(now.Branches, g.Branches) {
			return Broken, fmt.Sprintf("%s: advantages of its stages, tracks or branches are others", g.UID), nil
		}
		now.RefilledBy = g.RefilledBy // the pass asks for no samples
		if other := otherFields(g.Advantage, &now); len(other) > 0 {
			return Broken, fmt.Sprintf("%s: its result has other %s", g.UID, strings.Join(other, ", ")), nil
		}
	}
	return Holds, fmt.Sprintf("%d advantages of %s are the same again", n, groups[0].Estimator), nil
}

// otherFields returns the names of what differs between a result and the one that was made again, but for what is of
// the run, of places in streams and of when it was made.
func otherFields(was, now *schemas.Advantage) (names []string) {
	a, b := reflect.ValueOf(was).Elem(), reflect.ValueOf(now).Elem()
	for _, f := range schemas.Fields(a.Type()) {
		switch f.Name {
		case "v", "run", "source_run", "opened", "closed", "members", "error", "refill":
			continue
		}
		if x, y := f.In(a), f.In(b); !reflect.DeepEqual(x.Interface(), y.Interface()) {
			names = append(names, f.Name)
		}
	}
	return names
}

// closeAgain has the advantage service close the groups of a pass, whose rewards are stored. refused is why it takes
// one of them for none of its group, which then never closes.
func (p *prover) closeAgain(ctx context.Context, source *rescore.Source, pass schemas.Run,
) (made map[schemas.UID]*schemas.Advantage, refused string, err error) {
	work, stop := context.WithCancel(ctx)
	var beside errgroup.Group
	beside.Go(func() error { return advantage.Run(work, p.options.Advantage, p.bus, p.options.Log) })
	await, giveUp := context.WithCancel(ctx)
	defer giveUp()
	beside.Go(func() error {
		for m, err := range p.bus.Read(work, schemas.StreamDead,
			[]string{schemas.Address{Kind: schemas.KindDead, Run: pass}.Filter()}, bus.ReadOptions{Live: true}) {
			var dead schemas.Dead
			if err == nil {
				err = bus.Fits(m, &dead)
			}
			if err == nil {
				refused = fmt.Sprintf("a reward of %s is refused: %s", dead.UID, dead.Reason)
				giveUp()
			}
			return err
		}
		return nil
	})
	made, err = source.Advantages(await, p.bus, pass)
	stop()
	failed := beside.Wait()
	if refused != "" {
		err = nil // of the wait that was given up
	}
	return made, refused, errors.Join(err, failed)
}

// promptsAgain makes the requests of the groups again out of their prompts, and compares them with what the samples say
// that was asked for.
func (p *prover) promptsAgain(_ context.Context, groups []schemas.TrainedGroup, _ string) (string, string, error) {
	requests := 0
	for _, g := range groups {
		record := p.archive.records[g.UID]
		if record == nil {
			return Unchecked, fmt.Sprintf("the record of group %s is not in the archive", g.UID), nil
		}
		asked, there := p.archive.prompts[record.Group.PromptSeq]
		if !there {
			return Unchecked, fmt.Sprintf("the prompt of group %s is not in the archive", g.UID), nil
		}
		policies, lacks := p.policiesOf(record)
		if lacks != "" {
			return Unchecked, lacks, nil
		}
		n, err := p.checkRequests(record, asked, policies, g.Trajectories)
		copied := *record
		copied.Stages = nil
		o := p.archive.openings[g.UID]
		if err == nil && o != nil && !reflect.DeepEqual(schemas.GroupRecord(*o), copied) {
			err = errors.New("what opened it is not its record")
		}
		if err != nil {
			return Broken, fmt.Sprintf("%s: %v", g.UID, err), nil
		}
		requests += n
	}
	return Holds, fmt.Sprintf("%d requests follow from %d prompts, such as %q", requests, len(groups),
		p.archive.records[groups[0].UID].Prompt), nil
}

// checkRequests makes the requests of a group again, and counts them: its record must be that of the first, and each
// sample must answer its own. Those of later stages follow from the record, which is a fact of the trajectories.
func (p *prover) checkRequests(record *schemas.GroupRecord, asked prompt, policies []*schemas.Policy,
	trajectories []*schemas.Trajectory,
) (n int, err error) {
	asked.UID = asked.GroupUID(record.Group.PromptSeq)
	origin := intake.Origin{Seq: record.Group.PromptSeq, Created: asked.stored}
	for _, r := range record.Group.Reward {
		origin.Reward = append(origin.Reward, r.Name)
	}
	if len(record.Stages) > 0 {
		made, err := intake.ResolveStages(p.archive.run, asked.Prompt, policies, origin)
		if err != nil {
			return 0, err
		}
		return len(record.Stages), record.MadeAgain(made.Record)
	}
	made, err := intake.Resolve(p.archive.run, asked.Prompt, policies[0], origin)
	if err != nil {
		return 0, err
	}
	first, err := made[0].Record()
	if err != nil {
		return 0, err
	}
	if err := record.MadeAgain(first); err != nil {
		return 0, err
	}
	for i, t := range trajectories {
		if t == nil {
			continue
		}
		r := made[i]
		r.Group.Deadline, r.Group.Created = record.Group.Deadline, record.Group.Created
		if t.Start != nil && r.Prune.BranchesOff() { // checkSelections holds it to its rule
			for _, e := range p.archive.selections[t.UID] {
				r.Follow(e)
			}
		}
		if err = r.AnsweredBy(t); err == nil {
			err = p.checkRule(r)
		}
		if err != nil {
			return 0, fmt.Errorf("#%d: %w", i, err)
		}
		n++
	}
	return n, nil
}

// policiesOf returns the models of the lane of a group, of its checkpoint, or of each of its stages, nil where an
// interaction makes it; lacks: one is not in the archive.
func (p *prover) policiesOf(record *schemas.GroupRecord) (list []*schemas.Policy, lacks string) {
	stages := record.Group.Stages
	if len(stages) == 0 {
		stages = []schemas.GroupStage{{Lane: record.Lane, Tenant: record.Tenant}}
	}
	for _, s := range stages {
		i := slices.IndexFunc(p.archive.policies, func(x *schemas.Policy) bool {
			return x.Lineage() == s.Lineage() && (len(record.Stages) > 0 || x.BaseDigest == record.BaseDigest)
		})
		switch {
		case s.Kind == schemas.StageInteraction:
			list = append(list, nil)
		case i < 0:
			return nil, fmt.Sprintf("the model of lane %s is not in the archive", s.Lineage())
		default:
			list = append(list, p.archive.policies[i])
		}
	}
	return list, ""
}
