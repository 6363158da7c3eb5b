package estimate

import "github.com/meander-rl/meander/schemas"

// Measured sizes in bytes: of an event of tokens without logits, what each token adds to it, and what each token adds
// to the trajectory of a text.
const (
	tokensEventBytes     = 900
	tokenBytes           = 28
	trajectoryTokenBytes = 21
)

// textCost returns the cost of a text sample of a lane's policy, if its answers are as long as allowed.
func textCost(r *schemas.Request, policy *schemas.Policy) *Cost {
	x := r.Text
	tokens := x.Answers() * x.MaxNewTokens
	c := &Cost{
		Settings: (*schemas.Settings)(&r.Sampling), text: true,
		TextCost: TextCost{Tokens: tokens, LogitsPerToken: x.PerToken(), LogitsBytes: x.LogitsBytes()},
	}
	if by := policy.Text.Engine; by != nil {
		c.DrawnBy = by.String()
		if by.Values != "" {
			n, _ := by.Gives(x) // intake has asked before
			for _, of := range []struct {
				given bool
				name  string
			}{
				{n.LogProbs, "log-probs"},
				{n.ProcessedLogProbs, "processed log-probs"},
				{n.LogSumExps, "log-sum-exps"},
				{n.Entropies, "entropies"},
			} {
				if of.given {
					c.Numbers = append(c.Numbers, of.name)
				}
			}
		}
	}
	if x.Logits != nil {
		c.LogitsDType = x.Logits.DType
	}
	all := x.Tokens(policy.Text.MaxTokens)
	c.Steps = x.Answers() * (1 + max(1, (x.MaxNewTokens+x.TokensPerEvent-1)/x.TokensPerEvent))
	c.Evaluations, c.FlatEvaluations = tokens, tokens
	logits := int64(0)
	for answer := range x.Answers() {
		if x.StoresLogits(answer) {
			logits += x.MaxNewTokens * c.LogitsBytes
		}
	}
	c.StepBytes = c.Steps*tokensEventBytes + tokenBytes*all + logits
	c.TrajectoryBytes = trajectoryBytes + trajectoryStepBytes*c.Steps + trajectoryTokenBytes*all + int64(len(r.Prompt))
	c.BytesOfSample = c.StepBytes
	return c
}

// keepLargest keeps the larger token and logits values of c and s, which are of two groups of texts.
func (c *TextCost) keepLargest(s *TextCost) {
	c.LogitsDiffer = c.LogitsDiffer || c.LogitsPerToken != s.LogitsPerToken || c.LogitsDType != s.LogitsDType
	if s.LogitsBytes > c.LogitsBytes {
		c.LogitsPerToken, c.LogitsDType, c.LogitsBytes = s.LogitsPerToken, s.LogitsDType, s.LogitsBytes
	}
	c.Tokens = max(c.Tokens, s.Tokens)
}
