// Package decoding is the mathematics of one token of a language model. A Distribution is
// made from logits and Params; it draws a token from a seed, and returns the numbers that
// are recorded of a token (Choice), such as its log-prob. Filters (top-k, top-p, min-p)
// leave out unlikely tokens.
//
// All of it is a pure function of the logits, the parameters, a seed and the token's position,
// so that retries, batching and resumption never change a token. schemas/noise.md states every
// bit.
package decoding

import (
	"errors"
	"fmt"
	"math"
)

// Params say how a token is drawn. The zero value is greedy: it chooses the likeliest token.
type Params struct {
	// Temperature divides the logits; 0 chooses the likeliest token.
	Temperature float64 `json:"temperature"`
	// TopK keeps the k likeliest tokens; 0 keeps all.
	TopK int `json:"top_k"`
	// TopP keeps the smallest set of likeliest tokens with at least this probability together;
	// 1 and 0 keep all.
	TopP float64 `json:"top_p"`
	// MinP keeps the tokens with at least this share of the probability of the likeliest one.
	MinP float64 `json:"min_p"`
	// MinPFirst uses the order of vLLM: MinP before TopK and TopP, so that TopP is a share of the tokens that both
	// keep, and all tokens with the logit of the last of the k are kept. Otherwise the order is TopK, TopP, MinP,
	// and of equal logits the lower id comes first, as noise.md specifies.
	MinPFirst bool `json:"-"`
}

// MaxTemperature bounds temperatures: beyond it all tokens are as likely, to a rounding.
const MaxTemperature = 1000

// Validate joins all faults of the parameters; each names its field. Readers of a model's defaults
// call it; schemas checks those of prompts.
func (p Params) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(p.Temperature == 0 || p.Temperature >= 1e-3 && p.Temperature <= MaxTemperature,
		"temperature: %g; must be 0.001 to %d, or 0 for the likeliest token", p.Temperature, MaxTemperature)
	check(p.TopK >= 0, "top_k: %d; must be at least 0", p.TopK)
	check(p.TopP >= 0 && p.TopP <= 1, "top_p: %g; must be 0 to 1", p.TopP)
	check(p.MinP >= 0 && p.MinP <= 1, "min_p: %g; must be 0 to 1", p.MinP)
	return errors.Join(errs...)
}

// Greedy reports whether the likeliest token is chosen without a random draw.
func (p Params) Greedy() bool { return p.Temperature == 0 }

// filters reports whether some tokens may be left out.
func (p Params) filters() bool { return p.TopK > 0 || p.TopP > 0 && p.TopP < 1 || p.MinP > 0 }

// ErrLogits is wrapped by the error for values that cannot be logits.
var ErrLogits = errors.New("no logits")

// Check counts the logits that are -Inf: tokens that a mask leaves out. It returns an ErrLogits for
// NaN, for +Inf, if all logits are masked and if all are 0: a broken model, from whose output no
// token must be drawn.
func Check(logits []float32) (masked int, err error) {
	zeros := 0
	for i, z := range logits {
		switch {
		case z != z || math.IsInf(float64(z), 1):
			return 0, fmt.Errorf("%w: token %d: %v; must be a number, or -Inf where it is masked", ErrLogits, i, z)
		case math.IsInf(float64(z), -1):
			masked++
		case z == 0:
			zeros++
		}
	}
	if masked == len(logits) || zeros == len(logits) && len(logits) > 1 {
		return 0, fmt.Errorf("%w: of %d tokens %d are masked, %d are 0; must differ", ErrLogits, len(logits), masked,
			zeros)
	}
	return masked, nil
}
