// Package decoding is the mathematics of one token of a language model: from logits to a
// distribution, from a random number to a token, and the numbers that are recorded of it.
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

// Params say how a token is drawn. The zero value is greedy.
type Params struct {
	// Temperature divides the logits; 0 takes the likeliest token.
	Temperature float64
	// TopK leaves the k likeliest tokens; 0 leaves all.
	TopK int
	// TopP leaves the fewest likeliest tokens that have this probability together; 1, and 0,
	// leave all.
	TopP float64
	// MinP leaves the tokens that have at least this share of the likeliest one's probability.
	MinP float64
	// MinPFirst has the filters work as vLLM's: MinP before TopK and TopP, so that TopP is a share of what both of
	// them leave, and all tokens stay whose logit is that of the last of the k. Without it they come in the order
	// TopK, TopP, MinP, and equal logits are told apart by their ids: what the draws of noise.md are made with.
	MinPFirst bool
}

// MaxTemperature bounds temperatures: beyond it all tokens are as likely, to a rounding.
const MaxTemperature = 1000

// Validate joins by field what is wrong.
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

// Greedy reports whether the likeliest token is taken, and nothing drawn.
func (p Params) Greedy() bool { return p.Temperature == 0 }

// filters reports whether some tokens may be left out.
func (p Params) filters() bool { return p.TopK > 0 || p.TopP > 0 && p.TopP < 1 || p.MinP > 0 }

// ErrLogits is wrapped by the errors of logits that are none.
var ErrLogits = errors.New("no logits")

// Check counts the logits that are -Inf: tokens that a mask left out. NaN, +Inf, logits that
// are all masked and those that are all 0 are an ErrLogits.
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
		return 0, fmt.Errorf("%w: of %d tokens %d are masked, %d are 0; must differ", ErrLogits, len(logits), masked, zeros)
	}
	return masked, nil
}
