package schemas_test

import (
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// The second scale of guidance holds below the boundary of timesteps, which are float32, and not at it.
func TestSampling_CFGScale(t *testing.T) {
	s := schemas.Sampling{TrueCFGScale: 4, TrueCFGScale2: 3, BoundaryRatio: 0.9}
	for sigma, want := range map[float32]float64{
		1: 4, 0.91: 4, 0.89: 3, 0: 3,
		0.9:    4, // as float32 it is below 0.9, its timestep is 900
		0.8999: 3,
	} {
		if got := s.CFGScale(sigma); got != want {
			t.Errorf("scale %g at sigma %v; want %g", got, sigma, want)
		}
	}
	s.TrueCFGScale = 1
	if got := s.CFGScale(0.5); got != 1 {
		t.Errorf("scale %g without guidance; want 1", got)
	}
}
