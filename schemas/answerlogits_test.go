package schemas_test

import (
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// Logits beside a question are those of the answer's tokens, of all of the vocabulary in the form full.
func TestInteractRequest_Logits(t *testing.T) {
	t.Parallel()
	nan := math.NaN()
	for _, c := range []struct {
		shape  []int64
		values []float64
		want   string
	}{
		{[]int64{2, 3}, []float64{1, 2, 3, 4, 5, 6}, ""},
		{[]int64{1, 3}, []float64{1, 2, 3}, "logits.values.shape: [1 3]; must be [2, 3]"},
		{[]int64{2, 2}, []float64{1, 2, 3, 4}, "logits.values.shape: [2 2]; must be [2, 3]"},
		{[]int64{2, 3}, []float64{1, 2, 3, 0, 0, 0}, "logits.values[1]: all zero"},
		{[]int64{2, 3}, []float64{1, nan, 3, 4, 5, 6}, "logits.values[0]: NaN"},
		{[]int64{2, 3}, []float64{1, 2, 3, 4, 5, math.Inf(1)}, "logits.values[1]: +inf"},
	} {
		r := &schemas.InteractRequest{
			Stage: schemas.StageMain,
			Name:  "tutor", Params: map[string]string{}, Run: "r", UID: "u", Attempt: "a-1", MaxTurns: 3,
			Messages: []schemas.Message{{Role: "assistant", Content: "4"}}, FinishReason: "stop", IDs: []int64{1, 2},
			LogProbs: []float32{}, ProcessedLogProbs: []float32{}, LogSumExps: []float32{}, Entropies: []float32{},
			LogitsKind: "raw", LogitsForm: "full", Vocabulary: 3,
			Logits: &schemas.TokenLogits{Form: "full", Values: *vector("F32", c.shape, c.values...)},
		}
		if err := r.Validate(); c.want == "" && err != nil || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v %v: %v; want %q", c.shape, c.values, err, c.want)
		}
	}
}
