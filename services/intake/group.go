package intake

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Check returns all faults of a prompt that can be found before its lane is known: names and params of its reward
// functions, and its estimator. The prompt has passed Validate.
func Check(p *schemas.Prompt, o Origin) error {
	specs, rewards := resolveRewards(p, &schemas.Policy{}, o)
	if len(p.Stages) > 0 {
		specs, rewards = checkStageRewards(p)
	}
	c, err := estimator.Of(p.Advantage)
	if err == nil {
		c.Weigh(specs)
		err = c.Validate()
	}
	if err != nil {
		err = advantageError(err)
	}
	return errors.Join(rewards, stages.Check(p, nil), err)
}

// CheckRewardName refuses a name that is none of a reward function, and says what may be meant.
func CheckRewardName(name string) error {
	kind, _, _ := strings.Cut(name, ":")
	if scorer.Hint(kind) == "" && !scorer.Known(kind) {
		return oneOf("name", name, scorer.Kinds())
	}
	_, _, err := scorer.SplitName(name)
	return err
}

// oneOf returns what a name must be, with the nearest one.
func oneOf(field, name string, names []string) error {
	hint := ""
	if near := schemas.Nearest(name, names); near != "" {
		hint = "did you mean " + near + "? "
	}
	return fmt.Errorf("%s: %q; %smust be one of %s", field, name, hint, strings.Join(names, ", "))
}

// resolveGroup returns what the stages after the sampler need of a prompt, with all defaults filled in: reward
// functions, estimator, group rules, batch and deadline. It returns an error if they do not fit together. trained is W,
// the number of stochastic steps.
func resolveGroup(p *schemas.Prompt, policy *schemas.Policy, o Origin, trained int) (*schemas.Group, error) {
	g := &schemas.Group{
		Batch: string(p.UID), Deadline: valueOr(p.Deadline, 0), Validation: p.Validation, Metadata: p.Metadata,
		PromptSeq: o.Seq, Created: o.Created.UnixNano(), GroupPolicy: p.GroupPolicy, Refill: p.Refill,
		Rules: p.Rules, FreeReadSteps: p.FreeReadSteps,
	}
	if p.Tree != nil && p.Tree.Leaf == nil {
		g.Tree = p.Tree
	}
	if b := p.Batch; b != nil {
		g.Batch, g.BatchGroups, g.BatchStep, g.BatchEpoch = b.ID, b.Groups, b.Step, b.Epoch
	}
	rewards, err := resolveRewards(p, policy, o)
	if err != nil {
		return nil, err
	}
	g.Reward = rewards
	if g.Deadline == 0 && slices.ContainsFunc(rewards, isVerdict) {
		g.Deadline = o.Created.Add(o.ExternalWait).UnixNano()
	}
	if g.Credit, err = resolveCredit(p.Credit, rewards, p.Advantage.Estimator, policy); err != nil {
		return nil, err
	}
	g.Advantage, err = resolveAdvantage(p, rewards, trained)
	return g, err
}

// resolveCredit returns the shares of a credit with the tracks that they are for, where one names a track. It refuses
// tracks that the states do not have, and what a sample may have no reward of: some of a part's functions must be
// required.
func resolveCredit(list []schemas.CreditShare, rewards []schemas.RewardSpec, name string,
	policy *schemas.Policy,
) (out []schemas.CreditShare, err error) {
	tracks := []string{""}
	if slices.ContainsFunc(list, func(s schemas.CreditShare) bool { return s.Track != "" }) {
		tracks = nil
		if pipeline, err := pipelineOf(policy); err == nil && pipeline != nil && len(pipeline.Tracks) > 1 {
			for _, t := range pipeline.Tracks {
				tracks = append(tracks, t.Name)
			}
		}
	}
	for k, s := range list {
		if s.Track != "" && !slices.Contains(tracks, s.Track) {
			return nil, fmt.Errorf("credit[%d].track: %q; must be one of the states' tracks, which are %s", k, s.Track,
				cmp.Or(strings.Join(tracks, ", "), "one"))
		}
	}
	for _, track := range tracks {
		shares, required, total := len(out), false, 0.0
		for _, s := range list {
			at := slices.IndexFunc(rewards, func(r schemas.RewardSpec) bool { return r.Name == s.Reward })
			if s.Track == "" || s.Track == track {
				s.Track, required, total = track, required || *rewards[at].Required, total+s.Weight
				out = append(out, s)
			}
		}
		of := ""
		if track != "" {
			of = " of track " + track
		}
		switch {
		case len(out) == shares:
		case !required:
			return nil, fmt.Errorf("credit: rewards%s that are all optional; must have one that is required: else a "+
				"sample could have none", of)
		case estimator.PropertiesOf(name).Scores && !(total > 0):
			return nil, fmt.Errorf("credit: weights%s of %v in all; must be above 0 with %s", of, total, name)
		}
	}
	return out, nil
}

// resolveRewards returns the reward functions of the prompt; if it names none, those of the model or of the service
// (see DefaultRewards). Weights are filled in. It returns an error if a function does not fit the prompt or the model's
// medium, image or text.
func resolveRewards(p *schemas.Prompt, policy *schemas.Policy, o Origin) ([]schemas.RewardSpec, error) {
	list, whose := slices.Clone(p.Reward), ""
	if len(list) == 0 && o.Unscored {
		return []schemas.RewardSpec{}, nil
	}
	if len(list) == 0 && p.ScheduledSampling == nil { // samples of scheduled sampling need no reward
		names := policy.Reward
		if policy.Text == nil { // the defaults of the service are for images
			names = DefaultRewards(p, policy.Reward, o.Reward)
		}
		whose = " (the default)"
		if slices.Equal(names, policy.Reward) {
			whose = fmt.Sprintf(" (the default of model %q)", policy.Model)
		}
		for _, name := range names {
			list = append(list, schemas.RewardSpec{Name: name})
		}
	}
	var errs []error
	if policy.Text != nil && len(list) == 0 && p.ScheduledSampling == nil {
		return nil, fmt.Errorf("reward: absent; must name functions that rate texts: model %q names none (%s)",
			policy.Model, strings.Join(scorer.OfTexts(), ", "))
	}
	for i := range list {
		r := &list[i]
		schemas.SetDefaults(r)
		if policy.Lane != "" {
			media, err := judged(mediaOf(p, policy), r.Track, policy)
			if err == nil {
				err = scorer.CheckMedium(r.Name, media...)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("reward[%d]%s: %w", i, whose, err))
				continue
			}
		}
		err := CheckRewardName(r.Name)
		if err == nil {
			err = scorer.Check(r.Name, Asked(p.Prompt, p.Messages), r.GroundTruth.Value(), r.Params)
		}
		if err == nil {
			err = scorer.CheckGroup(r.Name, r.GroupMin, p.Samples())
		}
		if err == nil && len(r.AtSteps) > 0 && scorer.RatesGroup(r.Name, r.GroupMin) {
			err = fmt.Errorf("at_steps: given; must be absent of %s, which rates whole groups of finished samples",
				r.Name)
		}
		if err == nil && policy.Lane != "" {
			err = scorer.CheckConditions(r.Name, conditionTypes(p, policy))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("reward[%d]%s: %w", i, whose, err))
		}
	}
	return list, errors.Join(errs...)
}

// mediaOf returns what the samples of a prompt are.
func mediaOf(p *schemas.Prompt, policy *schemas.Policy) (media []scorer.Medium) {
	pipeline, err := pipelineOf(policy)
	kinds := []string{schemas.KindImage}
	if err == nil && pipeline != nil {
		if kinds = pipeline.Media; len(kinds) == 0 { // not known before the weights are read: all
			kinds = []string{schemas.KindImage, schemas.KindAudio}
		}
	}
	seen := slices.Contains(kinds, schemas.KindImage)
	switch {
	case policy.Text != nil:
		return []scorer.Medium{scorer.MediumText}
	case seen && valueOr(p.Frames, policy.Frames) > 1:
		media = append(media, scorer.MediumVideo)
	case seen:
		media = append(media, scorer.MediumImage)
	}
	if slices.Contains(kinds, schemas.KindAudio) {
		media = append(media, scorer.MediumSound)
	}
	return media
}

// judged returns those media of samples that a reward function is given that names a track; an error: they have none.
func judged(media []scorer.Medium, track string, policy *schemas.Policy) ([]scorer.Medium, error) {
	if track == "" {
		return media, nil
	}
	names := map[string]scorer.Medium{}
	for _, m := range media {
		switch m {
		case scorer.MediumSound:
			names[schemas.KindAudio] = m
		case scorer.MediumVideo:
			names[schemas.KindVideo], names[schemas.KindImage] = m, scorer.MediumImage
		case scorer.MediumImage:
			names[schemas.KindImage] = m
		}
	}
	if pipeline, err := pipelineOf(policy); err == nil && pipeline != nil && len(pipeline.Tracks) > 1 {
		for i, m := range media[:min(len(media), 2)] { // pixels are of the first track, sound of the last
			if name := pipeline.Tracks[i*(len(pipeline.Tracks)-1)].Name; names[name] == "" {
				names[name] = m
			}
		}
	}
	if m, ok := names[track]; ok {
		return []scorer.Medium{m}, nil
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("track: %q; must be absent, the samples are texts", track)
	}
	return nil, fmt.Errorf("track: %q; must be one of %s", track, strings.Join(slices.Sorted(maps.Keys(names)), ", "))
}

// DefaultRewards returns the reward functions of a prompt that names none: those of the model if it has any, otherwise
// those of the service. It also returns those of the service if none of the model's can score the prompt: for example,
// a function that reads text needs a text in double quotes as its target. In a batch it does not do that, as rewards of
// different kinds would be normalised together.
func DefaultRewards(p *schemas.Prompt, model, service []string) []string {
	fits := func(name string) bool { return scorer.Check(name, p.Prompt, "", nil) == nil }
	if len(model) == 0 || p.Batch == nil && !slices.ContainsFunc(model, fits) {
		return service
	}
	return model
}

// isVerdict reports whether a score comes from outside, such as from a person.
func isVerdict(r schemas.RewardSpec) bool {
	kind, _, err := scorer.SplitName(r.Name)
	return err == nil && kind == scorer.External
}

// resolveAdvantage fills in the estimator's defaults. It refuses options that the estimator does not have, and those
// that need something this prompt lacks: a batch, stochastic steps, or required rewards.
func resolveAdvantage(p *schemas.Prompt, rewards []schemas.RewardSpec, trained int) (schemas.AdvantageSpec, error) {
	a := p.Advantage
	c, err := estimator.Of(a)
	if err != nil {
		return a, advantageError(err)
	}
	if trained == 0 && a.StdBasis == "" && c.Gamma == 1 {
		c.StdBasis = c.BasisWithoutSteps()
	}
	c.Columns = max(trained, 1)
	for i, r := range rewards {
		if estimator.PropertiesOf(c.Name).Scores && !*r.Required {
			return a, fmt.Errorf("reward[%d].required: false; must be true: %s normalises each reward", i, c.Name)
		}
	}
	c.Weigh(rewards)
	if err := c.Validate(); err != nil {
		return a, advantageError(err)
	}
	switch {
	case c.NeedsBatch() && p.Batch == nil:
		return a, fmt.Errorf("batch: absent; must be there: %s with std %s normalises over a batch of groups", c.Name,
			c.Std)
	case c.NeedsTwo() && p.Batch.Groups == 1 && *p.GroupSize == 1:
		return a, fmt.Errorf("batch.groups: 1; must be above 1 with group_size 1, else there is nothing to "+
			"normalise %s over", c.Name)
	case trained == 0 && c.CountsSteps():
		return a, fmt.Errorf("advantage.std_basis: %q; must be sample or population: it counts trained steps, and "+
			"this rollout has no stochastic step", c.StdBasis)
	}
	c.Resolve(&a)
	if p.Tree != nil && p.Tree.Leaf == nil {
		if c.Gamma != 1 {
			return a, fmt.Errorf("advantage.gamma: %v; must be 1 of a tree, whose segments have one advantage each",
				c.Gamma)
		}
		a.BranchScope = cmp.Or(a.BranchScope, schemas.BranchSiblings)
	}
	return a, nil
}

// advantageError puts the path of the prompt's field, "advantage.", before each line of an estimator's error.
func advantageError(err error) error {
	return errors.New("advantage." + strings.ReplaceAll(err.Error(), "\n", "\nadvantage."))
}
