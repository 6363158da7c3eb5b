package estimate

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/pipeline"
)

// Facts is what a pipeline knows and prompts do not say: its lanes, default rewards and streams.
type Facts struct {
	// Policies has one policy for each lane. Live are the lanes that a sampler serves now.
	Policies []*schemas.Policy
	Live     []schemas.Lane
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
	f.Policies = slices.DeleteFunc(all, func(p *schemas.Policy) bool { return p.Tenant != schemas.TenantMain })
	present, err := b.Present(ctx)
	if err != nil {
		return nil, err
	}
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
