package verify

import (
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// DefaultEngineTolerance is for servers that compute in float32, and those that do not show in what.
const DefaultEngineTolerance = 1e-3

// Tolerances for images that a server made: of a network in float32, and of one in fewer bits, whose states are rounded
// to these after each step.
const (
	exactImageTolerance   = 1e-5
	roundedImageTolerance = 2e-2
)

// engineTolerances are for servers of texts that compute in fewer bits: logits are at most about 16, and a logit of
// that size is rounded by 2^-5 in bf16 and by 2^-8 in fp16. The rounding of the layers before it adds to that.
var engineTolerances = map[string]float64{schemas.PrecisionFP16: 0.02, schemas.PrecisionBF16: 0.2}

// Deviation is a number of a server that differs by more than passes from what the model here gives.
type Deviation struct {
	UID         string `json:"uid"`
	SampleIndex int64  `json:"sample_index"`
	StepIndex   int64  `json:"step_index"`
	// Token is the index in the sequence of the token whose number it is; nil: it is one of a step.
	Token *int64 `json:"token,omitempty"`
	// Quantity names the number, Stored is the server's, Computed that of the model here. Passes is the tolerance.
	Quantity string     `json:"quantity"`
	Stored   Difference `json:"stored"`
	Computed Difference `json:"computed"`
	Passes   float64    `json:"passes"`
	// Server drew the sample. Why says what gives such a difference, and what to do.
	Server string `json:"server"`
	Why    string `json:"why"`
}

// String says which sample, token or step and number it is, by how much it is off, and why, on one line.
func (d *Deviation) String() string {
	at := fmt.Sprintf("step %d", d.StepIndex)
	if d.Token != nil {
		at = fmt.Sprintf("token %d", *d.Token)
	}
	return fmt.Sprintf("%s #%d, %s: the %s is %.6g by %s and %.6g by the model here; at most a difference of %g "+
		"passes (--engine-tolerance): %s",
		d.UID, d.SampleIndex, at, d.Quantity, float64(d.Stored), d.Server, float64(d.Computed), d.Passes, d.Why)
}

// magnitude returns the size of a difference; +Inf if it is not a number.
func magnitude(d float64) Difference {
	if math.IsNaN(d) {
		return Difference(math.Inf(1))
	}
	return Difference(math.Abs(d))
}

// drawnBy returns the server that drew the tokens; nil if the sampler drew them itself.
func (s *sample) drawnBy() *schemas.Engine {
	if by := s.t.Drawn; by != nil {
		return &by.Engine
	}
	return nil
}

// inexactServer returns the server that drew the sample if it cannot give the same bits again, and notes it in the
// report: the numbers of the sample are then held to a tolerance (MaxDrawnDifference), and its tokens are not drawn
// again. nil: what is computed again must be what is stored.
func (s *sample) inexactServer() *schemas.Engine {
	by := s.drawnBy()
	if by == nil || by.VerifyMode() == schemas.VerifyExact {
		return nil
	}
	if !slices.Contains(s.report.DrawnBy, by.String()) {
		s.report.DrawnBy = append(s.report.DrawnBy, by.String())
	}
	s.report.EngineTolerance = max(s.report.EngineTolerance, s.engineTolerance(by))
	return by
}

// engineTolerance returns how far a number of a server may be off: what the options say, or what its precision
// explains.
func (s *sample) engineTolerance(by *schemas.Engine) float64 {
	if s.options.EngineTolerance > 0 {
		return s.options.EngineTolerance
	}
	switch t := engineTolerances[by.Precision]; {
	case s.t.Text != nil && t > 0:
		return t
	case s.t.Text != nil, by.Precision == "":
		return DefaultEngineTolerance
	case by.Precision == schemas.PrecisionFP32:
		return exactImageTolerance
	}
	return roundedImageTolerance
}

// recordServed raises the report's largest difference of what an inexact server says to that of one number, as stored
// and as computed again. at says where and what it is. Beyond the tolerance it is counted, and the worst is kept.
func (s *sample) recordServed(by *schemas.Engine, at Deviation, stored, computed float64) {
	d := magnitude(stored - computed)
	s.report.MaxDrawnDifference = max(s.report.MaxDrawnDifference, d)
	if at.Passes = s.engineTolerance(by); float64(d) <= at.Passes {
		return
	}
	s.report.Deviations++
	if w := s.report.Worst; w != nil && magnitude(float64(w.Stored-w.Computed)) >= d {
		return
	}
	at.UID, at.SampleIndex, at.Server = string(s.t.UID), s.t.SampleIndex, by.String()
	at.Stored, at.Computed = Difference(stored), Difference(computed)
	switch explained := s.t.Text != nil && float64(d) <= engineTolerances[schemas.PrecisionBF16]; {
	case !explained:
		at.Why = "the server has other weights than the model here"
	case engineTolerances[by.Precision] > 0:
		at.Why = "its precision, " + by.Precision + ", explains as much"
	default:
		at.Why = "its dtype explains as much, if that is not float32 (vLLM: start it with --dtype float32), and so " +
			"do weights that are a little different"
	}
	s.report.Worst = &at
}
