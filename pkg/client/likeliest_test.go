package client_test

import (
	"encoding/binary"
	"math"
	"reflect"
	"testing"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// The likeliest tokens come with their log-probs: the logit less the log of the sum. What filters have left out is no
// choice; logits that do not fit are an error.
func TestLikeliest(t *testing.T) {
	e := &schemas.Tokens{LogSumExps: []float32{2, 1}, Logits: &schemas.TokenLogits{
		Form: schemas.LogitsTopK, IDs: &schemas.Tensor{DType: "U32", Shape: []int64{2, 3}}, Values: schemas.Tensor{DType: "F32", Shape: []int64{2, 3}},
	}}
	for i, v := range []float64{1.5, 1, 0.5, 0.75, math.Inf(-1), math.Inf(-1)} {
		e.Logits.IDs.Data = binary.LittleEndian.AppendUint32(e.Logits.IDs.Data, uint32(10+i))
		e.Logits.Values.Data = binary.LittleEndian.AppendUint32(e.Logits.Values.Data, math.Float32bits(float32(v)))
	}
	got, err := client.Likeliest(e, 2)
	want := [][]client.Choice{{{ID: 10, LogProb: -0.5}, {ID: 11, LogProb: -1}}, {{ID: 13, LogProb: -0.25}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	e.Logits.IDs.Data = e.Logits.IDs.Data[1:]
	if got, err := client.Likeliest(e, 2); err == nil {
		t.Errorf("ids that are cut short give %v", got)
	}
	if got, err := client.Likeliest(&schemas.Tokens{}, 2); err == nil {
		t.Errorf("no logits give %v", got)
	}
}
