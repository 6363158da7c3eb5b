package intake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// asked is what intake makes of a prompt.
type asked struct {
	// requests are to be published at once: those of all samples, or of the first stage of all.
	requests []*schemas.Request
	// policies are those of the prompt's lane, or of the lane of each stage, nil where an interaction makes it.
	policies []*schemas.Policy
	// Record has the plan of a prompt with stages; nil without.
	Record *schemas.GroupRecord
}

// policy returns that of the prompt's lane, or of the first stage's.
func (a *asked) policy() *schemas.Policy { return a.policies[0] }

// sizes returns how many bytes the steps of each sample take, of each stage in each round.
func (a *asked) sizes() (list []int64) {
	if a.Record == nil {
		for _, r := range a.requests {
			list = append(list, r.StepBytes(a.policy()))
		}
		return list
	}
	for i := range a.Record.Stages {
		g := &a.Record.Group
		var each []int64
		for _, r := range a.Shapes(i) {
			size := int64(0) // of an interaction
			if a.policies[i] != nil {
				size = r.StepBytes(a.policies[i])
			}
			each = append(each, size)
		}
		samples := a.Record.GroupSize / g.Stages[i].Every * g.Rounds // as many of each shape
		list = append(list, slices.Repeat(each, int(samples)/len(each))...)
	}
	return list
}

// Shapes returns stage i as the requests that differ in more than seeds and texts: its own, or those of the leaves of
// its tree. As many samples of the stage have each.
func (a *asked) Shapes(i int) (list []*schemas.Request) {
	s := &a.Record.Group.Stages[i]
	if s.Tree == nil {
		return []*schemas.Request{&a.Record.Stages[i]}
	}
	for leaf := range s.Tree.Leaves() {
		r := new(a.Record.Stages[i])
		r.SampleIndex = leaf * s.Every
		stages.StartAtParent(r, s.Tree, s.Every)
		list = append(list, r)
	}
	return list
}

// stepBytes returns how many bytes the steps of the group take.
func (a *asked) stepBytes() (bytes int64) {
	for _, n := range a.sizes() {
		bytes += n
	}
	return bytes
}

// claims returns the record that claims the prompt's uid.
func (a *asked) claims() (record *schemas.GroupRecord, err error) {
	if record = a.Record; record == nil {
		record, err = a.requests[0].Record()
	}
	if err != nil {
		return nil, bus.Terminal(schemas.CodeTooLarge, err)
	}
	record.StepBytes = a.stepBytes()
	return record, nil
}

// opening returns the copy of a record in the stream of rewards, without the requests that only makers of requests
// need.
func opening(r *schemas.GroupRecord) *schemas.Opening {
	if len(r.Stages) > 0 {
		r = new(*r)
		r.Stages = nil
	}
	return (*schemas.Opening)(r)
}

// lanePrompt returns stage i of a prompt as the prompt that it is for its lane, with what all stages have in common,
// but for the reward; nil: an interaction makes it.
func lanePrompt(p *schemas.Prompt, i int) *schemas.Prompt {
	if p.Stages[i].Interaction != nil {
		return nil
	}
	q := p.Stages[i].AsPrompt()
	q.UID, q.GroupSize, q.Seed, q.Metadata, q.Batch = p.UID, new(p.Samples()), p.Seed, p.Metadata, p.Batch
	q.Deadline, q.Validation, q.FreeReadSteps = p.Deadline, p.Validation, p.FreeReadSteps
	q.GroupPolicy, q.Rules, q.Refill = p.GroupPolicy, p.Rules, p.Refill
	if q.Priority == nil {
		q.Priority = p.Priority
	}
	if q.Tree != nil { // of as many samples; there may be several
		q.GroupSize = new(q.Tree.Leaves())
	}
	return q
}

// stageKinds returns what each stage makes, given the policies of their lanes.
func stageKinds(policies []*schemas.Policy) []string {
	kinds := make([]string, len(policies))
	for i, policy := range policies {
		switch {
		case policy == nil:
			kinds[i] = schemas.StageInteraction
		case policy.Text != nil:
			kinds[i] = schemas.StageText
		default:
			kinds[i] = schemas.KindImage
		}
	}
	return kinds
}

// stageRewards returns which of the prompt's reward functions are resolved as those of each stage: the last one that
// they may judge. If the prompt names none, the default functions are of the last stage that a lane makes. An error
// names a function that no stage is for, or is that of stages.Check.
func stageRewards(p *schemas.Prompt, policies []*schemas.Policy) (by [][]int, last int, err error) {
	by = make([][]int, len(p.Stages))
	for i, policy := range policies {
		if policy != nil {
			last = i
		}
	}
	var errs []error
	for k, r := range p.Reward {
		may, err := judgedStages(p, policies, &r)
		if err != nil {
			errs = append(errs, fmt.Errorf("reward[%d]: %w", k, err))
			continue
		}
		at := may[len(may)-1]
		by[at] = append(by[at], k)
	}
	return by, last, errors.Join(append(errs, stages.Check(p, stageKinds(policies)))...)
}

// judgedStages returns the stages that a reward function may judge, in order: the one that it names, or all whose
// output it takes and that make the same as the last of them, text or image: scores of the two do not compare. An error
// says why there is none.
func judgedStages(p *schemas.Prompt, policies []*schemas.Policy, r *schemas.RewardSpec) (may []int, fault error) {
	for i, policy := range policies {
		if policy == nil || r.Stage != "" && r.Stage != p.Stages[i].Name {
			continue
		}
		media, err := judged(mediaOf(lanePrompt(p, i), policy), r.Track, policy)
		if err == nil {
			err = scorer.CheckMedium(r.Name, media...)
		}
		if err != nil {
			fault = err
			continue
		}
		may = append(may, i)
	}
	if len(may) == 0 {
		return nil, cmp.Or(fault, errors.New("no stage for it"))
	}
	kind := policies[may[len(may)-1]].Text == nil
	return slices.DeleteFunc(may, func(i int) bool { return policies[i].Text == nil != kind }), nil
}

// findStages is findPolicy for all stages of a prompt.
func (s *service) findStages(ctx context.Context, run schemas.Run, p *schemas.Prompt,
	fresh bool,
) (policies []*schemas.Policy, waiting wait, err error) {
	v, err := s.lanes.view(ctx, fresh)
	if err != nil {
		return nil, wait{}, err
	}
	if s.cfg.Own != nil && !slices.Contains(s.cfg.Own, run) {
		return nil, forOther.waits("left for another pipeline: stages; this one serves the run %q", s.cfg.Own[0]), nil
	}
	policies = make([]*schemas.Policy, len(p.Stages))
	for i := range p.Stages {
		q := lanePrompt(p, i)
		if q == nil {
			continue
		}
		policies[i], waiting, err = s.findLane(ctx, v, q)
		if waiting.says != "" {
			waiting.says = fmt.Sprintf("stages[%d].%s", i, waiting.says)
		}
		if err != nil || waiting.says != "" {
			return []*schemas.Policy{policies[i]}, waiting, inStage(i, err)
		}
	}
	by, last, err := stageRewards(p, policies)
	if err != nil {
		return nil, wait{}, bus.Terminal(schemas.CodeInvalid, err)
	}
	for i, policy := range policies {
		if policy == nil || len(by[i]) == 0 && (i != last || len(p.Reward) > 0) {
			continue
		}
		q := lanePrompt(p, i)
		for _, k := range by[i] {
			q.Reward = append(q.Reward, p.Reward[k])
		}
		waiting, err = s.findRewards(v, q, policy)
		if err != nil || waiting.says != "" {
			return []*schemas.Policy{policy}, waiting, inStage(i, err)
		}
	}
	return policies, v.whyStepsFull(s.alarmTime()), nil
}

// inStage says in an error of which stage it is; nil stays nil.
func inStage(i int, err error) error {
	if terminal, ok := errors.AsType[*bus.TerminalError](err); ok {
		return bus.Terminal(bus.Code(terminal), fmt.Errorf("stages[%d]: %w", i, err))
	}
	return err
}

// resolveStages is resolve for a prompt with stages.
func (s *service) resolveStages(ctx context.Context, m *bus.Message, run schemas.Run, p *schemas.Prompt,
	policies []*schemas.Policy, put putBlob,
) (*asked, error) {
	q := new(*p)
	q.Stages = slices.Clone(p.Stages)
	for i := range q.Stages { // what is inline becomes a blob
		if policies[i] == nil {
			continue
		}
		lane := q.Stages[i].AsPrompt()
		err := s.storeStart(ctx, lane, put)
		if err == nil {
			err = s.storeConditions(ctx, lane, policies[i], put)
		}
		if err != nil {
			return nil, inStage(i, err)
		}
		q.Stages[i].ImageSettings = lane.ImageSettings
	}
	a, err := ResolveStages(run, q, policies,
		Origin{Seq: m.Seq, Created: m.Time, Reward: s.cfg.Reward, ExternalWait: s.cfg.ExternalWait})
	if err == nil {
		err = checkResultSize(a.Record.Stages, s.bus.MaxInline())
	}
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	for i := range a.Record.Stages {
		if err := s.checkBranch(ctx, &a.Record.Stages[i], policies[i]); err != nil {
			return nil, inStage(i, err)
		}
	}
	return a, nil
}

// ResolveStages is Resolve for a prompt with stages. policies are those of their lanes, nil of interactions. Each stage
// is resolved as a prompt of its own.
func ResolveStages(run schemas.Run, p *schemas.Prompt, policies []*schemas.Policy, o Origin) (*asked, error) {
	by, last, err := stageRewards(p, policies)
	if err != nil {
		return nil, err
	}
	rewards := make([]schemas.RewardSpec, len(p.Reward))
	plan := make([]schemas.Request, len(p.Stages))
	var group *schemas.Group
	deadline := int64(0)
	for i, policy := range policies {
		if policy == nil {
			continue
		}
		q := lanePrompt(p, i)
		for _, k := range by[i] {
			spec := p.Reward[k]
			spec.Stage = ""
			q.Reward = append(q.Reward, spec)
		}
		of := o
		of.Unscored = len(q.Reward) == 0 && (i != last || len(p.Reward) > 0)
		if i == last {
			q.Advantage = p.Advantage
		}
		requests, err := Resolve(run, q, policy, of)
		if err != nil {
			return nil, fmt.Errorf("stages[%d]: %w", i, err)
		}
		plan[i] = *requests[0]
		for k, spec := range plan[i].Group.Reward {
			if len(p.Reward) == 0 {
				rewards = append(rewards, spec)
				continue
			}
			spec.Stage = p.Reward[by[i][k]].Stage
			rewards[by[i][k]] = spec
		}
		if group == nil || i == last {
			group = new(plan[i].Group)
		}
		deadline = max(deadline, plan[i].Group.Deadline)
	}
	group.Deadline, group.Reward, group.Rounds, group.Tree = deadline, rewards, p.MostRounds(), nil
	if group.Advantage, err = stagesAdvantage(p, rewards, &plan[last]); err != nil {
		return nil, err
	}
	kinds := stageKinds(policies)
	for i := range p.Stages {
		s := &p.Stages[i]
		if s.Interaction != nil {
			if plan[i], err = interactionRequest(p, s, group); err != nil {
				return nil, fmt.Errorf("stages[%d]: %w", i, err)
			}
		}
		credit, err := resolveCredit(s.Credit, rewards, p.Advantage.Estimator, policies[i])
		if err != nil {
			return nil, fmt.Errorf("stages[%d].%w", i, err)
		}
		group.Stages = append(group.Stages, schemas.GroupStage{
			Name: s.Name, Kind: kinds[i], Lane: plan[i].Lane, Tenant: plan[i].Tenant, Every: p.EveryOf(i),
			Tree: s.Tree, Frozen: s.Frozen, Credit: credit,
		})
	}
	for k := range rewards {
		may, err := judgedStages(p, policies, &rewards[k])
		if err != nil {
			return nil, fmt.Errorf("reward[%d]: %w", k, err)
		}
		for _, i := range may {
			group.Stages[i].JudgedBy = append(group.Stages[i].JudgedBy, rewards[k].Name)
		}
	}
	for i := range plan {
		r := &plan[i]
		r.V, r.Run, r.UID, r.Stage, r.GroupSize = schemas.Version, run, p.UID, p.Stages[i].Name, p.Samples()
		r.Group = *group
		r.ScheduleDigest = r.ComputeScheduleDigest()
	}
	return askStages(run, p, policies, plan)
}

// checkStageFiles returns an error for a condition of a type that the stage which it names does not make.
func checkStageFiles(p *schemas.Prompt, policies []*schemas.Policy, plan []schemas.Request) error {
	for i := range plan {
		for _, c := range plan[i].Conditions {
			at := slices.IndexFunc(p.Stages, func(s schemas.StageSpec) bool { return s.Name == c.Stage })
			if at < 0 {
				continue
			}
			media := mediaOf(lanePrompt(p, at), policies[at])
			video := slices.Contains(media, scorer.MediumVideo)
			if !video && (c.Type == schemas.KindVideo || !slices.Contains(media, scorer.MediumImage)) ||
				c.Type == model.InputAudio {
				return fmt.Errorf("stages[%d].conditions: %s: type: %q; stage %s makes none", i, c.Name, c.Type,
					c.Stage)
			}
		}
	}
	return nil
}

// askStages returns the record of a group with a plan, and the requests of its first stage.
func askStages(run schemas.Run, p *schemas.Prompt, policies []*schemas.Policy,
	plan []schemas.Request,
) (*asked, error) {
	if err := checkStageFiles(p, policies, plan); err != nil {
		return nil, err
	}
	record := &schemas.GroupRecord{
		Run: run, UID: p.UID, GroupSize: p.Samples(), Prompt: p.Prompt, Lane: plan[0].Lane,
		Tenant: plan[0].Tenant, BaseDigest: plan[0].BaseDigest, ScheduleDigest: plan[0].ScheduleDigest, Stages: plan,
		Seed: p.Seed, Group: plan[0].Group,
	}
	a := &asked{policies: policies, Record: record}
	for _, at := range stages.First(&record.Group, record.GroupSize) {
		r, err := stages.Request(record, at, nil, nil)
		if err != nil {
			return nil, err
		}
		a.requests = append(a.requests, r)
	}
	record.SampleSeed, record.NoiseSeed = a.requests[0].SampleSeed, a.requests[0].NoiseSeed
	var err error
	record.PromptDigest, err = record.StagesDigest()
	if err == nil {
		err = record.Validate()
	}
	return a, err
}

// stagesAdvantage resolves the estimator of a prompt with stages, for all of its reward functions. last is the request
// of the last stage that a lane makes.
func stagesAdvantage(p *schemas.Prompt, rewards []schemas.RewardSpec, last *schemas.Request) (schemas.AdvantageSpec,
	error,
) {
	q := new(*p)
	q.GroupSize = new(p.Samples())
	for i := range p.Stages {
		q.Tree = cmp.Or(q.Tree, p.Stages[i].Tree)
	}
	trained := 1
	if last.Text == nil {
		trained = len(last.StochasticSteps())
	}
	return resolveAdvantage(q, rewards, trained)
}

// interactionRequest returns the request of a stage that an interaction makes, with its template.
func interactionRequest(p *schemas.Prompt, s *schemas.StageSpec, g *schemas.Group) (schemas.Request, error) {
	x := new(*s.Interaction)
	schemas.SetDefaults(x)
	x.MaxTurns = new(p.MostRounds())
	told := []schemas.Message{{Role: schemas.RoleUser, Content: p.Prompt}}
	if err := interaction.Check(x.Name, x.Params, told, g.GroundTruth().Text()); err != nil {
		return schemas.Request{}, fmt.Errorf("interaction: %s: %w", x.Name, err)
	}
	r := schemas.Request{
		Identity: schemas.Identity{Lane: schemas.Lane(x.Name)},
		Text: &schemas.TextRequest{
			Messages: []schemas.Message{{Role: schemas.RoleAssistant, Content: s.AsPrompt().Prompt}}, TopP: 1,
			Stop: []string{}, StopTokenIDs: []int64{}, TokensPerEvent: 1, Vocabulary: 1, Interaction: x,
		},
	}
	for _, c := range s.Conditions {
		c.Type = cmp.Or(c.Type, schemas.KindImage)
		r.Conditions = append(r.Conditions, c)
	}
	slices.SortStableFunc(r.Conditions, func(a, b schemas.Condition) int { return cmp.Compare(a.Name, b.Name) })
	return r, nil
}

// checkStageRewards returns the reward functions of a prompt with stages, each checked against the text of the stage
// that it names, or of the last one that a lane makes.
func checkStageRewards(p *schemas.Prompt) (list []schemas.RewardSpec, err error) {
	for _, r := range p.Reward {
		last := 0
		for i, s := range p.Stages {
			if s.Interaction == nil && (r.Stage == "" || r.Stage == s.Name) {
				last = i
			}
		}
		q := p.Stages[last].AsPrompt()
		q.Reward = []schemas.RewardSpec{r}
		specs, fault := resolveRewards(q, &schemas.Policy{}, Origin{})
		list, err = slices.Concat(list, specs), errors.Join(err, fault)
	}
	return list, err
}

// askOpenStages publishes the requests of the stages that lost samples of a group are at, and returns how many. What
// an interaction makes is left to the reward service: its messages are not acknowledged before.
func (s *service) askOpenStages(ctx context.Context, g bus.OpenGroup, samples []int64) (int, error) {
	stored, err := s.bus.Made(ctx, g.Run, g.UID)
	if err != nil {
		return 0, err
	}
	made := func(at stages.Place) *schemas.Trajectory { return stored[at].Trajectory }
	var todo []*schemas.Request
	seen := map[stages.Place]bool{}
	for _, i := range samples {
		at, before, open := stages.Open(&g.Group, i, made)
		if !open || seen[at] || g.Group.IsInteraction(at.Stage) {
			continue
		}
		seen[at] = true
		r, err := stages.Request(g.GroupRecord, at, before, func(data []byte) (schemas.Ref, error) {
			return s.bus.PutBlob(ctx, data)
		})
		if _, fault := errors.AsType[*stages.Fault](err); fault {
			continue // the reward service fails the sample
		}
		if err != nil {
			return 0, err
		}
		todo = append(todo, r)
	}
	if len(todo) == 0 {
		return 0, nil
	}
	return len(todo), s.publishRequests(ctx, g.Run, g.UID, todo)
}
