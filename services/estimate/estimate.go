// Package estimate says what prompts will take before anything runs: samples, steps, evaluations
// of the model, bytes of each stream. The rules are intake's.
package estimate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// Estimate is everything that follows from prompts and from what a pipeline knows.
type Estimate struct {
	// Groups is one per prompt that no rule forbids, Refused counts the others; Reason is that
	// of the first.
	Groups  int    `json:"groups"`
	Refused int    `json:"refused"`
	Reason  string `json:"refused_reason,omitempty"`
	// Refusals are all reasons, as far as a few lines can say them, each with the prompts that it is for.
	Refusals []Refusal `json:"-"`
	// Warnings are what intake lets be: several where prompts differ.
	Warnings []string `json:"warnings,omitempty"`
	Samples  int64    `json:"samples"`
	// Model and what depends on its defaults is missing when no model is known.
	Model string `json:"model,omitempty"` // the first prompt's
	*Cost
	// Reward and Advantage are lines for people: several where prompts differ.
	Reward    []string `json:"reward"`
	Advantage []string `json:"advantage"`
	// Streams are what the stored bytes go to, with what is there and the limit.
	Streams []Stream `json:"streams"`
	// GroupSizes are the sizes there are, a few of them.
	GroupSizes []int64 `json:"-"`

	text        bool // that of a language model
	facts       *Facts
	promptBytes int64
}

// Refusal is why some prompts are refused.
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
	// AtMost says that Bytes is a bound: what is stored may be much less.
	AtMost bool `json:"at_most,omitempty"`
}

// Fits says whether the stream has room, as far as its limit is known.
func (s Stream) Fits() bool { return s.Limit == 0 || s.Used+s.Bytes <= s.Limit }

// New is the estimate of no prompts yet.
func New(f *Facts) *Estimate {
	p := &Estimate{facts: f}
	p.fill()
	return p
}

// Add counts one prompt, encoded as a client publishes it.
func (p *Estimate) Add(prompt []byte) {
	p.promptBytes += int64(len(prompt))
	var e schemas.Prompt
	err := schemas.Decode(prompt, &e)
	if err == nil {
		var warnings []string
		warnings, err = e.CheckUnknown(prompt)
		for _, w := range warnings {
			note(&p.Warnings, w)
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
			p.Reason = brief(text, err)
		}
		p.refuse(err.Error())
	}
	p.fill()
}

// refuse counts a prompt under its reason, as far as there is room for another.
func (p *Estimate) refuse(reason string) {
	i := slices.IndexFunc(p.Refusals, func(r Refusal) bool { return r.Reason == reason })
	if i < 0 && len(p.Refusals) == few {
		return
	}
	if i < 0 {
		i, p.Refusals = len(p.Refusals), append(p.Refusals, Refusal{Reason: reason})
	}
	p.Refusals[i].Prompts++
}

// AskRoom asks how full the streams of a server are that the prompts will go to.
func (p *Estimate) AskRoom(ctx context.Context, b *bus.Bus) error {
	err := p.facts.AskRoom(ctx, b)
	p.fill()
	return err
}

// resolve counts what intake would make of a valid prompt; where the policy of its lane is not
// known, only what does not depend on it. The draw of a window needs the run: where its
// steps need not be neighbours, the states kept may be a few more or less.
func (p *Estimate) resolve(e *schemas.Prompt) error {
	policy := p.facts.Policy(e.Model)
	if policy == nil && p.facts.Whole {
		return fmt.Errorf("model: %q is not served here; must be %s", e.Model, p.facts.Policies[0].Lane)
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
		reward := p.facts.Reward
		if reward == nil { // what intake has where nobody has set it up otherwise
			reward = intake.DefaultConfig().Reward
		}
		requests, err := intake.Resolve("-", e, policy, intake.Origin{Created: time.Now(), Reward: reward})
		if err != nil {
			return err
		}
		if w := intake.Young(e, policy); w != "" {
			note(&p.Warnings, w+"; until then the prompt waits")
		}
		for _, w := range intake.Unscored(requests[0]) {
			note(&p.Warnings, w)
		}
		p.text = requests[0].Text != nil
		n, advantage = int64(len(requests)), requests[0].Group.Advantage
		p.Model = policy.Model
		if p.Cost == nil {
			p.Cost = &Cost{}
		}
		if err := p.samples(requests, policy); err != nil {
			return err
		}
	}
	p.Groups++
	p.Samples += n
	note(&p.GroupSizes, n)
	note(&p.Reward, rewards)
	note(&p.Advantage, advantageLine(&advantage, e.GroupPolicy))
	return nil
}

// samples adds the cost of a group's. Those of scheduled sampling and of trees differ, others are all as one.
func (p *Estimate) samples(requests []*schemas.Request, policy *schemas.Policy) error {
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
		p.sum(cost, n)
	}
	return nil
}

// fill says what goes to which stream.
func (p *Estimate) fill() {
	p.Streams = []Stream{{Name: schemas.StreamPrompts, Bytes: p.promptBytes}}
	if p.Cost != nil {
		p.Streams = append(p.Streams, Stream{Name: schemas.StreamSteps, Bytes: p.StepBytes},
			Stream{Name: schemas.StreamTrajectories, Bytes: p.TrajectoryBytes}, Stream{Name: bus.BlobStream, Bytes: p.ImageBytes + p.ConditioningStored, AtMost: true})
	}
	for i, s := range p.Streams {
		room := p.facts.Room[s.Name]
		p.Streams[i].Used, p.Streams[i].Limit = room.Used, room.Limit
	}
}

// LargeRun is the size of the steps of texts from which on a run is warned of: full logits are for short answers.
const LargeRun = 1 << 30

// Texts says that the samples are texts.
func (p *Estimate) Texts() bool { return p.text && p.Cost != nil }

// Large says whether texts store so much that logits want a second thought.
func (p *Estimate) Large() bool { return p.Texts() && p.StepBytes >= LargeRun }

// Overfull are the streams that the samples are sure to overfill.
func (p *Estimate) Overfull() []Stream {
	return slices.DeleteFunc(slices.Clone(p.Streams), func(s Stream) bool { return s.Fits() || s.AtMost })
}

// few is how many values, or reasons, are shown of many.
const few = 4

// note adds a value that is not there yet, as far as a line can show.
func note[T comparable](list *[]T, v T) {
	if len(*list) < few && !slices.Contains(*list, v) {
		*list = append(*list, v)
	}
}

// brief is why a prompt is refused, in a line.
func brief(prompt string, err error) string {
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
