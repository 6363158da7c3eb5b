package scorer_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scorer"
)

// The worked numbers of logits 2, 1, 0, -1 at temperature 1.
var (
	fourLogits = []float32{2, 1, 0, -1}
	fourLSE    = float32(2.440189698561)
)

func fourTokens() *scorer.Text {
	return &scorer.Text{
		Answer: "405", Messages: []scorer.Message{{Role: "user", Content: "347+58=?"}}, Vocabulary: 4,
		LogProbs: []float32{-0.440189698561}, TopLogProbs: []float32{-0.440189698561}, Entropies: []float32{0.947536963975},
		TopLogits: func(_ context.Context, k int) ([][]float32, []float32, error) {
			return [][]float32{fourLogits[:k]}, []float32{fourLSE}, nil
		},
	}
}

func TestTexts_WorkedNumbers(t *testing.T) {
	for _, c := range []struct {
		name   string
		params map[string]string
		want   float64
	}{
		{scorer.MaxProbMean, nil, 0.643914259888},
		{scorer.EntropyMean, nil, 0.947536963975},
		{scorer.Confidence, nil, 0.316496560507},
		{scorer.TopKMass, map[string]string{"k": "2"}, 0.880797077978},
		{scorer.TopKMass, map[string]string{"k": "4"}, 1},
	} {
		got, err := open(t, c.name).Score(t.Context(), scorer.Input{Text: fourTokens(), Params: c.params})
		if err != nil || math.Abs(got-c.want) > 1e-7 { // of float32 log-probs
			t.Errorf("%s %v: %v, %v; want %v", c.name, c.params, got, err, c.want)
		}
	}
	mix := []scorer.Part{
		{Name: "exact_match", Weight: 0.7, Value: 1, Required: true},
		{Name: "confidence", Weight: 0.3, Value: 0.316496560507, Required: true},
	}
	if got, err := scorer.Combine(mix); err != nil || math.Abs(got-0.794948968152) > 1e-12 {
		t.Errorf("0.7 text and 0.3 confidence: %v, %v", got, err)
	}
}

func TestTexts_Refuse(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	none := &scorer.Text{Vocabulary: 4}
	lost := fourTokens()
	lost.TopLogits = func(context.Context, int) ([][]float32, []float32, error) {
		return nil, nil, errors.New("none are stored")
	}
	for _, name := range []string{
		scorer.MaxProbMean, scorer.EntropyMean, scorer.Confidence, scorer.TopKMass,
		scorer.ExactMatch, scorer.NumericMatch,
	} {
		for want, in := range map[string]scorer.Input{
			"no text":         {GroundTruth: "4"},
			"unknown name":    {Text: fourTokens(), GroundTruth: "4", Params: map[string]string{"quality": "80"}},
			"params.k: \"0\"": {Text: fourTokens(), GroundTruth: "4", Params: map[string]string{"k": "0"}},
		} {
			if _, err := open(t, name).Score(t.Context(), in); err == nil || !strings.Contains(err.Error(), want) ||
				!strings.HasPrefix(err.Error(), name+": ") {
				t.Errorf("%s: %v, want one about %q", name, err, want)
			}
		}
		if _, err := open(t, name).Score(cancelled, scorer.Input{Text: fourTokens(), GroundTruth: "4"}); !errors.Is(err,
			context.Canceled) {
			t.Errorf("%s, cancelled: %v", name, err)
		}
	}
	for _, name := range []string{scorer.MaxProbMean, scorer.EntropyMean, scorer.Confidence, scorer.TopKMass} {
		if _, err := open(t, name).Score(t.Context(), scorer.Input{Text: none}); err == nil ||
			!strings.Contains(err.Error(), "no tokens") {
			t.Errorf("%s of no tokens: %v", name, err)
		}
	}
	if _, err := open(t, scorer.TopKMass).Score(t.Context(), scorer.Input{Text: lost}); err == nil ||
		!strings.Contains(err.Error(), "none are stored") {
		t.Errorf("topk_mass without logits: %v", err)
	}
}

func TestTexts_Matches(t *testing.T) {
	for _, c := range []struct {
		name, prompt, truth, answer string
		params                      map[string]string
		want                        float64
	}{
		{scorer.ExactMatch, "", "405", " 405\n", nil, 1},
		{scorer.ExactMatch, "", "405", "4050", nil, 0},
		{scorer.ExactMatch, "", "Yes", "yes", nil, 0},
		{scorer.ExactMatch, "", "Yes", "yes", map[string]string{"case": "ignore"}, 1},
		{scorer.NumericMatch, "347+58=?", "", "405", nil, 1},
		{scorer.NumericMatch, "347+58=?", "", "347+58 is 405.", nil, 1},
		{scorer.NumericMatch, "347+58=?", "", "305", nil, 0},
		{scorer.NumericMatch, "347+58=?", "", "", nil, 0},
		{scorer.NumericMatch, "12-70=?", "", "-58", nil, 1},
		{scorer.NumericMatch, "12*12=?", "", "144", nil, 1},
		{scorer.NumericMatch, "how much?", "#### 1,234.50", "it is 1234.5", nil, 1},
		{scorer.NumericMatch, "how much?", "48/2 = 24 clips\n#### 72\n", "72", nil, 1},
		{scorer.NumericMatch, "1+2=?", "1e3", "3", nil, 0},
		{scorer.NumericMatch, "1+2=?", "1e3", "1,000", nil, 1},
		{scorer.NumericMatch, "1+2=?", "1000", "it is 1e3", nil, 1},
		{scorer.NumericMatch, "1+2=?", "3", "1e3", nil, 0},
		{scorer.NumericMatch, "1+2=?", "2.5E−1", "0.25", nil, 1},
		{scorer.NumericMatch, "1+2=?", "−3", "3", nil, 0},
		{scorer.NumericMatch, "1+2=?", "−3", "-3", nil, 1},
		{scorer.NumericMatch, "1+2=?", "-3", "it is −3", nil, 1},
		{scorer.NumericMatch, "1+2=?", ".5", "it is .5", nil, 1},
		{scorer.NumericMatch, "1+2=?", "0.5", "-.5", nil, 0},
		{scorer.NumericMatch, "1+2=?", "42.", "42", nil, 1},
		{scorer.NumericMatch, "1+2=?", "#### $18", "It costs $18.", nil, 1},
		{scorer.NumericMatch, "1+2=?", `-$1,\!018`, "-1018", nil, 1},
		{scorer.NumericMatch, "1+2=?", "18\\%", "18%", nil, 1},
		{scorer.NumericMatch, "1+2=?", "- 5", "-5", nil, 1},
		{scorer.NumericMatch, "1+2=?", `$\boxed{10\,000}$`, `\boxed{10{,}000}`, nil, 1},
		{scorer.NumericMatch, "347+58=?", "", "404", map[string]string{"scale": "2"}, math.Exp(-0.5)},
	} {
		in := scorer.Input{
			Prompt: c.prompt, GroundTruth: c.truth, Params: c.params,
			Text: &scorer.Text{Answer: c.answer, Messages: []scorer.Message{{Role: "user", Content: c.prompt}}},
		}
		got, err := open(t, c.name).Score(t.Context(), in)
		if err != nil || math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%s of %q to %q: %v, %v; want %v", c.name, c.answer, c.prompt+c.truth, got, err, c.want)
		}
	}
	retry := &scorer.Text{Answer: "405", Messages: []scorer.Message{
		{Role: "user", Content: "347+58=?"},
		{Role: "assistant", Content: "400"},
		{Role: "user", Content: "too low"},
	}}
	if got, err := open(t, scorer.NumericMatch).Score(t.Context(),
		scorer.Input{Prompt: "too low", Text: retry}); err != nil || got != 1 {
		t.Errorf("an answer after a retry: %v, %v", got, err)
	}
	for name, fault := range map[string]error{
		"exact_match without a truth":  scorer.Check(scorer.ExactMatch, "x", "", nil),
		"numeric_match without a sum":  scorer.Check(scorer.NumericMatch, "how much?", "", nil),
		"a truth without a number":     scorer.Check(scorer.NumericMatch, "1+1=?", "two", nil),
		"a fraction":                   scorer.Check(scorer.NumericMatch, "1+1=?", "1/3", nil),
		"digits with _":                scorer.Check(scorer.NumericMatch, "1+1=?", "1_003", nil),
		"a comma for the point":        scorer.Check(scorer.NumericMatch, "1+1=?", "3,14", nil),
		"two numbers":                  scorer.Check(scorer.NumericMatch, "1+1=?", "3 or 4", nil),
		"a root":                       scorer.Check(scorer.NumericMatch, "1+1=?", `\sqrt{2}`, nil),
		"a power":                      scorer.Check(scorer.NumericMatch, "1+1=?", "2^10", nil),
		"a unit":                       scorer.Check(scorer.NumericMatch, "1+1=?", "42 apples", nil),
		"a sign alone":                 scorer.Check(scorer.NumericMatch, "1+1=?", "-", nil),
		"two numbers after ####":       scorer.Check(scorer.NumericMatch, "1+1=?", "#### 3 4", nil),
		"a number without end":         scorer.Check(scorer.NumericMatch, "1+1=?", "1e999", nil),
		"no digit after ####":          scorer.Check(scorer.NumericMatch, "1+1=?", "3 ####", nil),
		"params of another":            scorer.Check(scorer.Confidence, "x", "", map[string]string{"k": "3"}),
		"a scale that is none":         scorer.Check(scorer.NumericMatch, "1+1=?", "", map[string]string{"scale": "-1"}),
		"an image's function of texts": scorer.CheckMedium(scorer.Glyph, scorer.MediumText),
		"a video's function of images": scorer.CheckMedium(scorer.Motion, scorer.MediumImage),
		"a text's function of images":  scorer.CheckMedium(scorer.ExactMatch, scorer.MediumVideo),
	} {
		if fault == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

// Functions of this program compare with a text or a number; others take any value.
func TestCheck_TruthOfAnotherKind(t *testing.T) {
	for _, truth := range []any{[]any{"a"}, map[string]any{"a": 1}, true} {
		for _, name := range []string{scorer.ExactMatch, scorer.NumericMatch, scorer.OCR} {
			if err := scorer.Check(name, "1+1=?", truth, nil); err == nil ||
				!strings.Contains(err.Error(), "must be a text or a number for "+name) {
				t.Errorf("%s with %v: %v", name, truth, err)
			}
		}
		if err := scorer.Check("nats:own", "x", truth, nil); err != nil {
			t.Errorf("nats:own with %v: %v", truth, err)
		}
	}
	if err := scorer.Check(scorer.NumericMatch, "how much?", int64(42), nil); err != nil {
		t.Errorf("a number: %v", err)
	}
}
