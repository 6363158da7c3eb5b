package intake

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

const (
	// defaultEvents is the most events that a sample gets if the prompt does not set tokens_per_event.
	defaultEvents = 4096
	// defaultTopK is how many logits of a token are stored in the form topk if the prompt does not say.
	defaultTopK = 20
)

// resolveText is Resolve for a lane that serves a language model. It also refuses reward functions and logits that
// need more than the lane's engine, the program that draws the tokens, gives.
func resolveText(run schemas.Run, prompt *schemas.Prompt, policy *schemas.Policy,
	o Origin,
) ([]*schemas.Request, error) {
	p := new(*prompt)
	if p.Text == nil {
		p.Text = &schemas.Text{}
	}
	if err := p.Validate(); err != nil { // with text set, this refuses settings of images
		return nil, err
	}
	p.GroupSize = new(p.Samples())
	schemas.SetDefaults(p)
	p.Advantage = prompt.Advantage // its defaults depend on the estimator, see resolveAdvantage
	text, err := resolveTextSettings(p, policy, o.Created)
	if err != nil {
		return nil, err
	}
	numbers, err := policy.Text.Engine.Gives(text)
	if err != nil {
		return nil, err
	}
	if x := text.Interaction; x != nil {
		if err := interaction.Check(x.Name, x.Params, text.Messages,
			(&schemas.Group{Reward: p.Reward}).GroundTruth().Text()); err != nil {
			return nil, fmt.Errorf("text.interaction: %s: %w", x.Name, err)
		}
	}
	for i, r := range p.Reward {
		if looks := scorer.NeededNumbers(r.Name); looks == scorer.Entropies && !numbers.Entropies ||
			looks == scorer.TopLogProbs && !numbers.TopLogProbs {
			return nil, fmt.Errorf("reward[%d]: %s: must be a function that looks at no %s: the lane's tokens are "+
				"drawn by %s, which does not give them here", i, r.Name, looks, policy.Text.Engine)
		}
		if err := scorer.CheckText(r.Name, r.Params, text.HasTop, text.Interaction != nil); err != nil {
			return nil, fmt.Errorf("reward[%d]: %s: %w", i, r.Name, err)
		}
	}
	p.Prompt = text.Messages[len(text.Messages)-1].Content
	group, err := resolveGroup(p, policy, o, 1)
	if err != nil {
		return nil, err
	}
	request := newRequest(run, p, policy, group)
	request.Text = text
	request.ScheduleDigest = request.ComputeScheduleDigest()
	base := flow.RunBase(string(run))
	if p.Seed != nil {
		base = flow.SeedBase(*p.Seed)
	}
	requests := requestPerSample(request, base, false)
	if err := requests[0].Validate(); err != nil {
		return nil, fmt.Errorf("resolved request: %w", err)
	}
	return requests, nil
}

// Asked returns the text in which reward functions look for their target: the prompt, or all that the user says in a
// conversation.
func Asked(prompt string, messages []schemas.Message) string {
	if len(messages) == 0 {
		return prompt
	}
	list := make([]scorer.Message, len(messages))
	for i, m := range messages {
		list[i] = scorer.Message(m)
	}
	return scorer.UserTexts(list)
}

// resolveTextSettings returns how a language model is to answer a valid prompt; p has its defaults. Settings that the
// prompt leaves out are the model's. The error names a setting that exceeds a limit.
//
// The day of a template that asks for it is that of stored: a prompt that is delivered again has the same.
func resolveTextSettings(p *schemas.Prompt, policy *schemas.Policy, stored time.Time) (*schemas.TextRequest, error) {
	t, model := p.Text, policy.Text
	x := &schemas.TextRequest{
		Messages: slices.Clone(p.Messages), MaxNewTokens: valueOr(t.MaxNewTokens, model.MaxNewTokens),
		Temperature: valueOr(t.Temperature, model.Temperature),
		TopK:        valueOr(t.TopK, model.TopK), TopP: valueOr(t.TopP, model.TopP), MinP: valueOr(t.MinP, model.MinP),
		Stop: append([]string{}, t.Stop...), StopTokenIDs: append([]int64{}, t.StopTokenIDs...),
		Vocabulary: model.Vocabulary,
	}
	x.ChatTemplateKwargs = maps.Clone(t.ChatTemplateKwargs)
	if _, fixed := x.ChatTemplateKwargs[schemas.StrftimeNow]; model.Dated && !fixed {
		if x.ChatTemplateKwargs == nil {
			x.ChatTemplateKwargs = map[string]string{}
		}
		x.ChatTemplateKwargs[schemas.StrftimeNow] = stored.UTC().Format(time.DateOnly)
	}
	if len(x.Messages) == 0 {
		x.Messages = []schemas.Message{{Role: schemas.RoleUser, Content: p.Prompt}}
	}
	if x.MaxNewTokens > model.MaxTokens {
		return nil, fmt.Errorf("text.max_new_tokens: %d; must be at most %d, the context of model %q", x.MaxNewTokens,
			model.MaxTokens, policy.Model)
	}
	if t.Interaction != nil {
		x.Interaction = new(*t.Interaction)
		schemas.SetDefaults(x.Interaction)
	}
	if err := resolveLogits(x, t.Logits); err != nil {
		return nil, err
	}
	full := x.Logits != nil && x.Logits.Form == schemas.LogitsFull
	tokens := x.Answers() * x.MaxNewTokens
	x.TokensPerEvent = min(schemas.MaxTokensPerEvent, max(1, (tokens+defaultEvents-1)/defaultEvents))
	if prompt := t.TokensPerEvent; prompt != nil {
		x.TokensPerEvent = *prompt
	} else if full {
		x.TokensPerEvent = 1
	}
	if n := x.EventCount(); n > schemas.MaxTokenEvents {
		fix := fmt.Sprintf("tokens_per_event must be at least %d", (tokens+defaultEvents-1)/defaultEvents)
		if full {
			fix = fmt.Sprintf("max_new_tokens must be at most %d: full logits are an event for each token",
				defaultEvents/x.Answers())
		}
		return nil, fmt.Errorf("text.max_new_tokens: %d, in %d answers, %d tokens to an event: %d events; %s",
			x.MaxNewTokens, x.Answers(), x.TokensPerEvent, n, fix)
	}
	return x, nil
}

// resolveLogits sets which logits of each token are stored; x.Logits stays nil if none are. It refuses more than the
// vocabulary has.
func resolveLogits(x *schemas.TextRequest, asked *schemas.Logits) error {
	if asked == nil || asked.Form == "" || asked.Form == schemas.LogitsNone {
		return nil
	}
	l := new(*asked)
	schemas.SetDefaults(l)
	if l.Form == schemas.LogitsTopK {
		if l.K == nil {
			l.K = new(min(defaultTopK, x.Vocabulary))
		}
		if *l.K > x.Vocabulary {
			return fmt.Errorf("text.logits.k: %d; must be at most %d, the vocabulary", *l.K, x.Vocabulary)
		}
	}
	x.Logits = l
	return nil
}
