// Package estimate says what prompts need before anything runs: samples, steps, evaluations of the model, bytes in
// each stream. Facts is what is known of the pipeline: its lanes, its default rewards and the space in its streams.
// An Estimate of these facts resolves each prompt by intake's rules and sums up the Cost of its samples.
//
// 'meander publish --dry-run' and 'meander run --dry-run' print an Estimate. Intake resolves a prompt: it makes the
// requests of its samples, with every setting filled in.
//
// Add is called for each prompt: it resolves the prompt and adds the cost of its samples. An error is intake's
// refusal of the prompt, and is counted.
package estimate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/pipeline"
)

// Estimate sums up what prompts need, or says why they are refused.
type Estimate struct {
	// Groups counts the prompts that intake would accept, Refused the others; Reason is for the
	// first refused one.
	Groups  int    `json:"groups"`
	Refused int    `json:"refused"`
	Reason  string `json:"refused_reason,omitempty"`
	// Refusals are the first few reasons, each with the number of its prompts.
	Refusals []Refusal `json:"-"`
	// Warnings are what intake accepts with a warning; several if prompts differ.
	Warnings []string `json:"warnings,omitempty"`
	Samples  int64    `json:"samples"`
	// Stages are those of samples that have several, each with how many samples of it are made at most, in all rounds.
	Stages []Stage `json:"stages,omitempty"`
	// Rounds is how often the stages run at most.
	Rounds int64 `json:"rounds,omitempty"`
	// Model is missing if no model is known, and so is what depends on the model's defaults.
	Model string `json:"model,omitempty"` // the first prompt's
	*Cost
	// Reward and Advantage are lines for people; several if prompts differ.
	Reward    []string `json:"reward"`
	Advantage []string `json:"advantage"`
	// Streams are the streams that the samples fill.
	Streams []Stream `json:"streams"`
	// GroupSizes are the first few different sizes of groups.
	GroupSizes []int64 `json:"-"`

	text        bool // the prompts are for a language model
	facts       *Facts
	promptBytes int64
}

// Stage is a stage by its name, and how many samples of it are made at most.
type Stage struct {
	Name    schemas.Stage `json:"name"`
	Samples int64         `json:"samples"`
	// Cost is what they need; nil: no lane makes them, or it is not known.
	*Cost
}

// Refusal is a reason, and how many prompts are refused for it.
type Refusal struct {
	Reason  string
	Prompts int
}

// Stream is a stream that the samples fill; all sizes are in bytes.
type Stream struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	Used  int64  `json:"used"`
	Limit int64  `json:"limit"` // 0: not known
	// AtMost says that Bytes is an upper bound: the stored bytes may be much less.
	AtMost bool `json:"at_most,omitempty"`
}

// Fits reports whether the stream has space for the samples. A stream without a known limit has.
func (s Stream) Fits() bool { return s.Limit == 0 || s.Used+s.Bytes <= s.Limit }

// New returns the estimate of no prompts yet.
func New(f *Facts) *Estimate {
	p := &Estimate{facts: f}
	p.setStreams()
	return p
}

// Add adds one prompt, encoded as a client publishes it. An invalid prompt counts as refused, with the reason.
func (p *Estimate) Add(prompt []byte) {
	p.promptBytes += int64(len(prompt))
	var e schemas.Prompt
	err := schemas.Decode(prompt, &e)
	if err == nil {
		var warnings []string
		warnings, err = e.CheckUnknown(prompt)
		for _, w := range warnings {
			addNew(&p.Warnings, w)
		}
		err = errors.Join(err, e.Validate())
	}
	text := e.Prompt
	if last := len(e.Messages) - 1; last >= 0 {
		text = e.Messages[last].Content
	}
	if err == nil {
		err = p.resolve(&e)
	}
	if err != nil {
		if p.Refused++; p.Refused == 1 {
			p.Reason = refusalLine(text, err)
		}
		p.refuse(err.Error())
	}
	p.setStreams()
}

// refuse counts a refused prompt under its reason; beyond a few reasons new ones are not noted.
func (p *Estimate) refuse(reason string) {
	i := slices.IndexFunc(p.Refusals, func(r Refusal) bool { return r.Reason == reason })
	if i < 0 && len(p.Refusals) == maxShown {
		return
	}
	if i < 0 {
		i, p.Refusals = len(p.Refusals), append(p.Refusals, Refusal{Reason: reason})
	}
	p.Refusals[i].Prompts++
}

// AskCapacity asks a server how full the streams are that the prompts will go to.
func (p *Estimate) AskCapacity(ctx context.Context, b *bus.Bus) error {
	err := p.facts.AskCapacity(ctx, b)
	p.setStreams()
	return err
}

// resolve adds what intake would make of a valid prompt. If the policy of its lane is not known, it adds only what
// does not depend on it. A random window of steps depends on the run: the number of kept states may then be off by a
// few. The error is intake's refusal.
func (p *Estimate) resolve(e *schemas.Prompt) error {
	if len(e.Stages) > 0 {
		return p.resolveStages(e)
	}
	policy, err := p.facts.policyOf(e.Model, e.Tenant)
	if err != nil {
		return err
	}
	if policy == nil && p.facts.Whole {
		return p.notServed(e.Model)
	}
	rewards := rewardLine(e, p.facts.Rewards(e, policy), policy)
	if e.GroupPolicy != nil {
		schemas.SetDefaults(e.GroupPolicy)
	}
	n, advantage := int64(0), e.Advantage
	if policy == nil {
		if err := intake.Check(e, intake.Origin{Reward: p.facts.Reward}); err != nil {
			return err
		}
		n = e.Samples()
	} else {
		e.UID = cmp.Or(e.UID, "-") // intake names it
		requests, err := intake.Resolve("-", e, policy, p.facts.origin())
		if err != nil {
			return err
		}
		if w := intake.PolicyPending(e, policy); w != "" && p.facts.knows(e.Tenant) {
			addNew(&p.Warnings, w+"; until then the prompt waits")
		}
		for _, w := range intake.Unscored(requests[0]) {
			addNew(&p.Warnings, w)
		}
		p.text = requests[0].Text != nil
		n, advantage = int64(len(requests)), requests[0].Group.Advantage
		p.Model = policy.Model
		if p.Cost == nil {
			p.Cost = &Cost{}
		}
		if err := p.addSamples(requests, policy); err != nil {
			return err
		}
	}
	p.addGroup(e, n, rewards, &advantage)
	return nil
}

func (p *Estimate) addGroup(e *schemas.Prompt, n int64, rewards string, advantage *schemas.AdvantageSpec) {
	p.Groups++
	p.Samples += n
	addNew(&p.GroupSizes, n)
	addNew(&p.Reward, rewards)
	addNew(&p.Advantage, advantageLine(advantage, e.GroupPolicy))
}

func (p *Estimate) notServed(model schemas.Lane) error {
	return fmt.Errorf("model: %q is not served here; must be %s", model, p.facts.Policies[0].Lane)
}

// resolveStages is resolve for a prompt with stages. It adds what they need if the policies of all their lanes are
// known.
func (p *Estimate) resolveStages(e *schemas.Prompt) error {
	policies, known := make([]*schemas.Policy, len(e.Stages)), true
	for i := range e.Stages {
		s := &e.Stages[i]
		if s.Interaction != nil {
			continue
		}
		var err error
		if policies[i], err = p.facts.policyOf(s.Model, s.Tenant); err != nil {
			return fmt.Errorf("stages[%d].%w", i, err)
		}
		if policies[i] == nil && p.facts.Whole {
			return fmt.Errorf("stages[%d].%w", i, p.notServed(s.Model))
		}
		if known = known && policies[i] != nil; policies[i] == nil {
			addNew(&p.Warnings, fmt.Sprintf("stages: the lane of %s is not known, so steps and bytes are not", s.Name))
		} else if w := intake.PolicyPending(s.AsPrompt(), policies[i]); w != "" && p.facts.knows(s.Tenant) {
			addNew(&p.Warnings, fmt.Sprintf("stages[%d].%s; until then the prompt waits", i, w))
		}
	}
	rewards, advantage := rewardLine(e, p.facts.Rewards(e, nil), nil), e.Advantage
	if e.GroupPolicy != nil {
		schemas.SetDefaults(e.GroupPolicy)
	}
	costs := make([][]*Cost, len(e.Stages)) // of each shape
	if known {
		e.UID = cmp.Or(e.UID, "-")
		a, err := intake.ResolveStages("-", e, policies, p.facts.origin())
		if err != nil {
			return err
		}
		plan := a.Record.Stages
		advantage = plan[0].Group.Advantage
		for i := range plan {
			if policies[i] == nil {
				continue
			}
			for _, r := range a.Shapes(i) {
				cost, err := costOf(r, policies[i])
				if err != nil {
					return fmt.Errorf("stages[%d]: %w", i, err)
				}
				costs[i] = append(costs[i], cost)
			}
		}
		for _, w := range intake.Unscored(&plan[0]) {
			addNew(&p.Warnings, w)
		}
	} else if err := intake.Check(e, intake.Origin{Reward: p.facts.Reward}); err != nil {
		return err
	}
	for i, s := range e.Stages {
		at := slices.IndexFunc(p.Stages, func(x Stage) bool { return x.Name == s.Name })
		if at < 0 {
			at, p.Stages = len(p.Stages), append(p.Stages, Stage{Name: s.Name})
		}
		of, n := &p.Stages[at], e.Samples()/e.EveryOf(i)*e.MostRounds()
		if of.Samples += n; costs[i] == nil {
			continue
		}
		if of.Cost == nil {
			of.Cost = &Cost{}
		}
		for _, cost := range costs[i] {
			of.addSamplesOf(cost, n/int64(len(costs[i])))
		}
	}
	p.Rounds = max(p.Rounds, e.MostRounds())
	p.addGroup(e, e.Samples(), rewards, &advantage)
	return nil
}

// addSamples adds the cost of a group's samples, given their requests. Samples of scheduled sampling and of trees
// differ from each other; all others cost the same.
func (p *Estimate) addSamples(requests []*schemas.Request, policy *schemas.Policy) error {
	n := int64(len(requests))
	if requests[0].ScheduledSampling == nil && requests[0].Group.Tree == nil {
		requests = requests[:1]
	} else {
		n = 1
	}
	for _, r := range requests {
		cost, err := costOf(r, policy)
		if err != nil {
			return err
		}
		p.Cost.addSamplesOf(cost, n)
	}
	if r := requests[0]; r.Prune.ByReward() && r.Prune.Keep != nil && !r.Prune.BranchesOff() {
		_, end := r.Segment()
		p.Cost.PrunedEvaluations += max(0, n-*r.Prune.Keep) * sampling.Evaluations(&r.Sampling, r.Prune.StepIndex, end)
	}
	return nil
}

// setStreams sets how many bytes go to which stream; Add calls it when the sums have changed.
func (p *Estimate) setStreams() {
	p.Streams = []Stream{{Name: schemas.StreamPrompts, Bytes: p.promptBytes}}
	var all Totals
	for _, of := range append([]Stage{{Cost: p.Cost}}, p.Stages...) {
		if of.Cost != nil {
			all.addTimes(of.Totals, 1)
		}
	}
	if all.TrajectoryBytes > 0 {
		p.Streams = append(p.Streams, Stream{Name: schemas.StreamSteps, Bytes: all.StepBytes},
			Stream{Name: schemas.StreamTrajectories, Bytes: all.TrajectoryBytes},
			Stream{Name: schemas.StreamBlobBucket, Bytes: all.ImageBytes + all.ConditioningStored, AtMost: true})
	}
	for i, s := range p.Streams {
		capacity := p.facts.Capacity[s.Name]
		p.Streams[i].Used, p.Streams[i].Limit = capacity.Used, capacity.Limit
	}
}

// LargeRun is the size of text steps, in bytes, from which the user is warned: full logits are for short answers.
const LargeRun = 1 << 30

// Texts reports whether the samples are texts.
func (p *Estimate) Texts() bool { return p.text && p.Cost != nil }

// Large reports whether texts store so much that the user should reconsider the logits.
func (p *Estimate) Large() bool { return p.Texts() && p.StepBytes >= LargeRun }

// Overfull returns the streams that the samples will certainly overfill.
func (p *Estimate) Overfull() []Stream {
	return slices.DeleteFunc(slices.Clone(p.Streams), func(s Stream) bool { return s.Fits() || s.AtMost })
}

// maxShown is how many different values, or reasons, are shown.
const maxShown = 4

// addNew appends v unless it is in the list already, or the list has maxShown values.
func addNew[T comparable](list *[]T, v T) {
	if len(*list) < maxShown && !slices.Contains(*list, v) {
		*list = append(*list, v)
	}
}

// refusalLine says in one short line which prompt is refused, and why.
func refusalLine(prompt string, err error) string {
	const most = 40
	if r := []rune(prompt); len(r) > most {
		prompt = string(r[:most]) + "..."
	}
	reason, _, more := strings.Cut(err.Error(), "\n")
	if more {
		reason += " ..."
	}
	return fmt.Sprintf("%q: %s", prompt, reason)
}

// Facts is what a pipeline knows and prompts do not say: its lanes, default rewards and streams.
type Facts struct {
	// Policies has one policy for each lane, that of main. Live are the lanes that a sampler serves now.
	Policies []*schemas.Policy
	Live     []schemas.Lane
	// Tenants has the versions that the others have; nil: they are not known.
	Tenants map[schemas.Lineage]int64
	// Whole says that only the lane of the first policy is served.
	Whole bool
	// Reward are the default functions, for a prompt that names none with a model that names none.
	Reward []string
	// Capacity says how full the streams are, by name.
	Capacity map[string]StreamCapacity
}

// StreamCapacity says how full a stream is, in bytes.
type StreamCapacity struct {
	Used  int64
	Limit int64 // 0: not known
}

// Unknown returns the facts of an unknown pipeline with new, empty streams.
func Unknown() *Facts {
	f := &Facts{Capacity: map[string]StreamCapacity{}}
	for _, spec := range schemas.Streams() {
		f.Capacity[spec.Name] = StreamCapacity{Limit: spec.MaxBytes}
	}
	return f
}

// FromConfig returns the facts of a pipeline that does not run yet, from its settings. It reads the model's
// configuration, not its weights. It fails if there is no such model.
func FromConfig(ctx context.Context, c pipeline.Config) (*Facts, error) {
	f := Unknown()
	policy, problems, err := c.Sampler.PolicyOf(ctx)
	if err != nil {
		return nil, err
	}
	if policy.Text == nil && (policy.LatentChannels == 0 || policy.PixelsPerToken == 0) {
		return nil, fmt.Errorf("model %q: %s", c.Sampler.Model, strings.Join(problems, "; "))
	}
	policy.Lane = c.Lane()
	f.Policies, f.Reward, f.Whole = []*schemas.Policy{policy}, c.Intake.Reward, true
	return f, nil
}

// FromServer returns the facts of a running pipeline. Reward stays empty: a pipeline does not tell its intake's
// default rewards. An error is of the server.
func FromServer(ctx context.Context, b *bus.Bus) (*Facts, error) {
	f := Unknown()
	all, err := b.Policies(ctx)
	if err != nil {
		return nil, err
	}
	present, err := b.Present(ctx)
	if err != nil {
		return nil, err
	}
	f.noteTenants(all, present)
	f.Policies = slices.DeleteFunc(all, func(p *schemas.Policy) bool { return p.Tenant != schemas.TenantMain })
	for i, p := range f.Policies {
		if f.Policies[i], err = b.ServedPolicy(ctx, p, present); err != nil {
			return nil, err
		}
	}
	for _, p := range present {
		if p.Service == schemas.ServiceSampler && !slices.Contains(f.Live, p.Lane) {
			f.Live = append(f.Live, p.Lane)
		}
	}
	return f, f.AskCapacity(ctx, b)
}

// AskCapacity asks a server how full the streams are, and sets Capacity.
func (f *Facts) AskCapacity(ctx context.Context, b *bus.Bus) error {
	for _, name := range []string{
		schemas.StreamPrompts, schemas.StreamSteps, schemas.StreamTrajectories,
		schemas.StreamBlobBucket,
	} {
		info, err := b.StreamInfo(ctx, name)
		if err != nil {
			return fmt.Errorf("limits of %s: %w", name, err)
		}
		f.Capacity[name] = StreamCapacity{Used: int64(info.State.Bytes), Limit: max(info.Config.MaxBytes, 0)}
	}
	return nil
}

// AskTenants asks a server, whose pipeline does not run, which tenants its lanes have.
func (f *Facts) AskTenants(ctx context.Context, b *bus.Bus) error {
	all, err := b.Policies(ctx)
	f.noteTenants(all, nil)
	return err
}

func (f *Facts) noteTenants(all []*schemas.Policy, present []*schemas.Presence) {
	f.Tenants = map[schemas.Lineage]int64{}
	for _, p := range all {
		f.Tenants[p.Lineage()] = bus.ServedVersion(p, present)
	}
}

// knows reports whether the versions of a tenant are known.
func (f *Facts) knows(tenant schemas.Tenant) bool { return tenant == "" || f.Tenants != nil }

// policyOf is Policy for a tenant of the lane. The error is intake's refusal of one that it does not have.
func (f *Facts) policyOf(model schemas.Lane, tenant schemas.Tenant) (*schemas.Policy, error) {
	p := f.Policy(model)
	if p == nil || tenant == "" || tenant == schemas.TenantMain || f.Tenants == nil {
		return p, nil
	}
	own := *p
	own.Tenant = tenant
	version, has := f.Tenants[own.Lineage()]
	if !has {
		return nil, intake.NoTenant(own.Lineage(), maps.Keys(f.Tenants))
	}
	own.PolicyVersion = version
	return &own, nil
}

// Policy returns the policy of the lane that intake would choose for a model; nil if it is not known.
func (f *Facts) Policy(model schemas.Lane) *schemas.Policy {
	switch {
	case model == "" && len(f.Live) == 1: // as intake picks it
		model = f.Live[0]
	case model == "" && len(f.Policies) == 1:
		return f.Policies[0]
	}
	i := slices.IndexFunc(f.Policies, func(p *schemas.Policy) bool { return p.Lane == model })
	if i < 0 {
		return nil
	}
	return f.Policies[i]
}

// origin returns what intake needs to resolve a prompt of now.
func (f *Facts) origin() intake.Origin {
	reward := f.Reward
	if reward == nil { // intake's default
		reward = intake.DefaultConfig().Reward
	}
	return intake.Origin{Created: time.Now(), Reward: reward}
}

// Rewards returns the reward functions of a prompt that names none, on the lane of p; nil if they are not known.
func (f *Facts) Rewards(e *schemas.Prompt, p *schemas.Policy) []string {
	switch {
	case p == nil:
		return f.Reward
	case p.Text != nil:
		return p.Reward
	}
	return intake.DefaultRewards(e, p.Reward, f.Reward)
}
