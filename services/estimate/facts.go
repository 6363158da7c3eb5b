package estimate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/sampler"
)

// Facts is what a pipeline knows and prompts do not say.
type Facts struct {
	// Policies are the lanes, Live the names of those that a sampler serves now.
	Policies []*schemas.Policy
	Live     []schemas.Lane
	// Whole says that no other lane is served than that of the first policy.
	Whole bool
	// Reward are the functions of a prompt that names none, where its model names none either.
	Reward []string
	// Room is that of the streams, by name.
	Room map[string]Room
}

// Room is how full a stream is, in bytes.
type Room struct {
	Used  int64
	Limit int64 // 0: not known
}

// Unknown is a pipeline of which nothing is known; its streams are new.
func Unknown() *Facts {
	f := &Facts{Room: map[string]Room{}}
	for _, spec := range schemas.Streams() {
		f.Room[spec.Name] = Room{Limit: spec.MaxBytes}
	}
	return f
}

// Of is a pipeline that does not run yet. Of the model it reads the configuration, no weights.
func Of(c pipeline.Config) (*Facts, error) {
	f := Unknown()
	policy, problems, err := sampler.Registry{Images: c.Sampler.Models, Text: c.Sampler.Languages}.PolicyOf(c.Sampler.Model)
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

// Ask asks a pipeline that runs. Which rewards its intake has for prompts and models that name
// none it does not say.
func Ask(ctx context.Context, b *bus.Bus) (*Facts, error) {
	f := Unknown()
	var err error
	if f.Policies, err = b.Policies(ctx); err != nil {
		return nil, err
	}
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
	return f, f.AskRoom(ctx, b)
}

// AskRoom asks how full the streams of a server are.
func (f *Facts) AskRoom(ctx context.Context, b *bus.Bus) error {
	for _, name := range []string{schemas.StreamPrompts, schemas.StreamSteps, schemas.StreamTrajectories, bus.BlobStream} {
		info, err := b.StreamInfo(ctx, name)
		if err != nil {
			return fmt.Errorf("limits of %s: %w", name, err)
		}
		f.Room[name] = Room{Used: int64(info.State.Bytes), Limit: max(info.Config.MaxBytes, 0)}
	}
	return nil
}

// Policy is that of the lane which a prompt for a model goes to, nil when it is not known.
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

// Rewards are the functions of a prompt that names none, on a lane; nil: not known.
func (f *Facts) Rewards(e *schemas.Prompt, p *schemas.Policy) []string {
	switch {
	case p == nil:
		return f.Reward
	case p.Text != nil:
		return p.Reward
	}
	return intake.DefaultRewards(e, p.Reward, f.Reward)
}
