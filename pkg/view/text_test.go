package view_test

import (
	"encoding/json"
	"testing"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// Messages, turns and who drew a text have the names of the contract.
func TestText_MarshalJSON(t *testing.T) {
	got, err := json.Marshal(&view.Text{
		Answer: "405", Messages: []schemas.Message{{Role: "user", Content: "347+58=?"}}, Turns: []schemas.Turn{{End: 3, Generated: true, Score: new(1.0)}},
		Drawn: &schemas.Drawn{Weights: []schemas.WeightSpan{{Version: "a", End: 3}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var found struct {
		Answer   string
		Messages []struct{ Role string }
		Turns    []map[string]any
		Drawn    struct{ Weights []map[string]any }
	}
	if err := json.Unmarshal(got, &found); err != nil {
		t.Fatal(err)
	}
	if found.Answer != "405" || found.Messages[0].Role != "user" || found.Turns[0]["generated"] != true ||
		found.Turns[0]["score"] != 1.0 || found.Drawn.Weights[0]["version"] != "a" {
		t.Errorf("%s", got)
	}
}
