//go:build !onnx || !cgo

package onnxscore

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
)

// errNotBuilt says how to get a program with ONNX.
var errNotBuilt = errors.New("this program was built without ONNX; build one with CGO_ENABLED=1 go build -tags " +
	"onnx ./services/cmd/..., " +
	"and set " + LibraryVariable + " to the ONNX Runtime library (" + libraryHelp + ")")

// Scorer has no instances in this build.
type Scorer struct{ scorer.BatchScorer }

// Close does nothing in this build.
func (*Scorer) Close() error { return nil }

// New checks the settings and then says how to build a program that has ONNX.
func New(name string, cfg Config) (*Scorer, error) {
	if err := wire.CheckName(name); err != nil {
		return nil, fmt.Errorf("onnx scorer: %w", err)
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("onnx:%s: %w", name, err)
	}
	return nil, fmt.Errorf("onnx:%s: %w", name, errNotBuilt)
}
