// Package enginetest has what tests of engines share: a function that steps episodes, and names for faults of models.
package enginetest

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// What a row of a poison prompt, or of a poison token, does to its call.
const (
	Panics  = "panics"
	Fails   = "fails"
	Spoils  = "is not finite"
	Infects = "makes all rows not finite"
)

// Poisons are all of them.
var Poisons = []string{Panics, Fails, Spoils, Infects}

// ErrModel is what a model that Fails returns.
var ErrModel = errors.New("the model cannot compute it")

// NaN is what a model that Spoils gives.
var NaN = float32(math.NaN())

// Strike makes a scripted model fail as a poison in its input says: it panics, returns ErrModel, or puts NaN into the
// row's output, or into those of all rows. Another word does nothing.
func Strike(poison string, row []float32, all ...[]float32) error {
	switch poison {
	case Panics:
		panic("index out of range")
	case Fails:
		return ErrModel
	case Spoils:
		row[3] = NaN
	case Infects:
		for _, other := range all {
			other[0] = NaN
		}
	}
	return nil
}

// StepAll steps episodes in one batch until none is left, and returns for each the bytes of its latents, or its
// fault. An error of the whole batch fails the test.
func StepAll(t *testing.T, e engine.Engine, episodes []engine.Episode) (states []string, faults []error) {
	t.Helper()
	states, faults = make([]string, len(episodes)), make([]error, len(episodes))
	for {
		var active []engine.Episode
		for i, p := range episodes {
			if faults[i] == nil && !p.Done() {
				active = append(active, p)
			}
		}
		if len(active) == 0 {
			return states, faults
		}
		if err := e.Step(t.Context(), active); err != nil {
			t.Fatal(err)
		}
		for i, p := range episodes {
			if !slices.Contains(active, p) {
				continue
			}
			var events []schemas.StepEvent
			events, faults[i] = p.Take()
			for _, event := range events {
				if step, ok := event.(*schemas.Step); ok {
					for _, l := range step.Latents {
						states[i] += string(l.Tensor.Data)
					}
				}
			}
		}
	}
}
