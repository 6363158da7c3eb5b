package model_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
)

// reader is a model that can only encode; it notes how it was asked.
type reader struct {
	model.Model
	prompts int
	asked   []string
}

func (m *reader) Card() model.Card { return model.Card{Name: "reader", Prompts: m.prompts} }

func (m *reader) note(how string, n int, texts any) ([]*model.Conditioning, error) {
	m.asked = append(m.asked, fmt.Sprint(how, texts))
	return make([]*model.Conditioning, n), nil
}

func (m *reader) Encode(_ context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.note("whole ", len(prompts), prompts)
}

func (m *reader) EncodeTruncated(_ context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.note("cut ", len(prompts), prompts)
}

// severalReader is a reader with several text encoders.
type severalReader struct{ *reader }

func (m severalReader) EncodeTexts(_ context.Context, prompts []model.Texts, cut bool) ([]*model.Conditioning, error) {
	return m.note(fmt.Sprint("texts ", cut, " "), len(prompts), prompts)
}

func TestEncode(t *testing.T) {
	one, two := &reader{}, severalReader{&reader{prompts: 2}}
	for _, c := range []struct {
		m       model.Model
		prompts []model.Texts
		cut     bool
		want    string // how it is asked, or the error
	}{
		{one, []model.Texts{{"a"}, {"b"}}, false, "whole [a b]"},
		{one, []model.Texts{{"a"}}, true, "cut [a]"},
		{one, []model.Texts{{"a", "b"}}, false, "2 texts; must be 1 to 1 for reader"},
		{one, []model.Texts{{}}, false, "0 texts; must be 1 to 1"},
		{two, []model.Texts{{"a"}, {"b"}}, false, "whole [a b]"},
		{two, []model.Texts{{"a", "b"}, {"c"}}, true, "texts true [[a b] [c]]"},
		{two, []model.Texts{{"a", "b", "c"}}, false, "3 texts; must be 1 to 2"},
		{&reader{prompts: 3}, []model.Texts{{"a", "b"}}, false, "several texts; the model reader encodes one"},
	} {
		one.asked, two.asked = nil, nil
		conds, err := model.Encode(t.Context(), c.m, c.prompts, c.cut)
		switch {
		case err != nil:
			if !errors.Is(err, model.ErrPrompt) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q: %v; want %q", c.prompts, err, c.want)
			}
		case len(conds) != len(c.prompts) || !slices.Equal(append(one.asked, two.asked...), []string{c.want}):
			t.Errorf("%q: %d conditionings, asked %q; want %q", c.prompts, len(conds), append(one.asked, two.asked...),
				c.want)
		}
	}
}
