package model

import (
	"context"
	"fmt"
)

// MaxTexts bounds Card.Prompts.
const MaxTexts = 3

// Texts are the texts of one prompt, one for each text encoder of a network; encoders beyond them get the first. There
// is at least one, and there are at most Card.Prompts.
type Texts []string

// TextsEncoder is a model whose card has several Prompts.
type TextsEncoder interface {
	// EncodeTexts is Encode, or EncodeTruncated, of prompts with several texts. Texts that are all equal give the
	// conditioning that Encode gives for one of them.
	EncodeTexts(ctx context.Context, prompts []Texts, truncate bool) ([]*Conditioning, error)
}

// Encode encodes prompts with a model, as EncodeTruncated if truncate is set, else as Encode. A prompt of more texts
// than the model takes is an ErrPrompt.
func Encode(ctx context.Context, m Model, prompts []Texts, truncate bool) ([]*Conditioning, error) {
	if m.Card().Pipeline != nil {
		return nil, fmt.Errorf("%w: texts alone; the model %s takes a recipe", ErrPrompt, m.Card().Name)
	}
	single := make([]string, len(prompts))
	several := false
	for i, p := range prompts {
		if most := max(m.Card().Prompts, 1); len(p) < 1 || len(p) > most {
			return nil, fmt.Errorf("%w: %d texts; must be 1 to %d for %s", ErrPrompt, len(p), most, m.Card().Name)
		}
		single[i], several = p[0], several || len(p) > 1
	}
	e, ok := m.(TextsEncoder)
	switch {
	case several && !ok:
		return nil, fmt.Errorf("%w: several texts; the model %s encodes one", ErrPrompt, m.Card().Name)
	case several:
		return e.EncodeTexts(ctx, prompts, truncate)
	case truncate:
		return m.EncodeTruncated(ctx, single)
	}
	return m.Encode(ctx, single)
}
