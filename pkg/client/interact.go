package client

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// AnswerLogits returns the logits that are stored of the answer which an interaction is asked about, of all its tokens
// and of any size: those that came with the request, or those of the answer's events. nil: the prompt asked for none of
// this answer. It fails if they are not logits of its tokens: another shape, NaN, +inf, a row of zeros.
func (c *Client) AnswerLogits(ctx context.Context, r *schemas.InteractRequest) (*schemas.TokenLogits, error) {
	logits, tokens := r.Logits, int64(len(r.IDs))
	if logits == nil && r.LogitsForm == "" {
		return nil, nil
	}
	if logits == nil {
		logits, tokens = &schemas.TokenLogits{}, 0
		for n := r.FirstEvent; n < r.FirstEvent+r.EventCount; n++ {
			subject := schemas.TokensSubject(r.Run, r.UID, r.SampleIndex, r.Stage, r.Attempt, n)
			m, err := c.bus.Last(ctx, schemas.StreamSteps, subject)
			if err != nil {
				return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
			}
			e, err := c.bus.LoadTokens(ctx, m)
			if err != nil {
				return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
			}
			if tokens += int64(len(e.IDs)); e.Logits != nil {
				logits.Append(e.Logits)
			}
		}
	}
	if tokens == 0 && len(logits.Values.Shape) > 0 { // more than the request names
		tokens = logits.Values.Shape[0]
	}
	if err := logits.Check(tokens, r.Vocabulary, r.LogitsKind); err != nil {
		return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
	}
	return logits, nil
}
