package interaction_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/schemas"
)

// What sums says to an answer.
func TestSums(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		prompt, truth, answer, finish, says string
		score                               float64
	}{
		{"347+58=?", "", "405", "stop", "", 1},
		{"347+58=?", "", "395", "stop", "too low", 0},
		{"347+58=?", "", "4050", "stop", "too high", 0},
		{"5-9=?", "", "-4", "stop", "", 1},
		{"5-9=?", "", "-5", "stop", "too low", 0},
		{"5-5=?", "", "-0", "stop", interaction.NotANumber, 0},
		{"347+58=?", "", "0405", "stop", interaction.NotANumber, 0},
		{"347+58=?", "", "405", "length", interaction.NotANumber, 0}, // cut off
		{"347+58=?", "", "", "stop", interaction.NotANumber, 0},
		{"347+58=?", "7", "7", "stop", "", 1},
	} {
		r := &schemas.InteractRequest{
			Stage: schemas.StageMain,
			Name:  interaction.Sums, GroundTruth: schemas.Truth(c.truth), FinishReason: c.finish,
			Messages: []schemas.Message{{Role: "user", Content: c.prompt}, {Role: "assistant", Content: "1"}, {Role: "user", Content: "too low"}, {Role: "assistant", Content: c.answer}},
		}
		reply, err := interaction.Ask(t.Context(), nil, r, 0)
		if err != nil || reply.Content != c.says || reply.Terminate != (c.says == "") || *reply.Score != c.score {
			t.Errorf("%s %q: %+v, %v; want %q", c.prompt, c.answer, reply, err, c.says)
		}
	}
	r := &schemas.InteractRequest{
		Stage: schemas.StageMain, Name: interaction.Sums,
		Messages: []schemas.Message{{Role: "user", Content: "what is it?"}, {Role: "assistant", Content: "1"}},
	}
	_, err := interaction.Ask(t.Context(), nil, r, 0)
	if f, ok := errors.AsType[*interaction.Fault](err); !ok || f.State != schemas.ConversationError ||
		!strings.Contains(err.Error(), "no sum such as") {
		t.Errorf("no sum: %v", err)
	}
}

// A built-in interaction that could say nothing is refused; what workers can say is theirs to know.
func TestCheck(t *testing.T) {
	t.Parallel()
	sum := []schemas.Message{{Role: "user", Content: "1+1=?"}}
	for name, err := range map[string]error{
		"":                        interaction.Check("sums", nil, sum, ""),
		"params: 1; must be none": interaction.Check("sums", map[string]string{"a": "b"}, sum, ""),
		"no sum such as":          interaction.Check("sums", nil, nil, ""),
		"must be one number":      interaction.Check("sums", nil, sum, "red"),
		" ":                       interaction.Check("tutor", map[string]string{"a": "b"}, nil, ""),
	} {
		if ok := strings.TrimSpace(name) == ""; ok != (err == nil) || !ok && !strings.Contains(err.Error(), name) {
			t.Errorf("%v; want %q", err, name)
		}
	}
}

// A fault says its kind, with or without a cause.
func TestFault(t *testing.T) {
	t.Parallel()
	for want, f := range map[string]*interaction.Fault{
		"timeout":        {State: schemas.ConversationTimeout},
		"absent: no one": {State: schemas.ConversationAbsent, Err: errors.New("no one")},
	} {
		if got := f.Error(); got != want {
			t.Errorf("%q; want %q", got, want)
		}
	}
}
