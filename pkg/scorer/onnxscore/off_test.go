//go:build !onnx || !cgo

package onnxscore_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scorer/onnxscore"
)

// A program without ONNX says how to get one that has it.
func TestNew_WithoutONNX(t *testing.T) {
	cfg := onnxscore.DefaultConfig()
	cfg.Model = "testdata/aesthetic.onnx"
	_, err := onnxscore.New("aesthetic", cfg)
	for _, want := range []string{
		"onnx:aesthetic: ", "go build -tags onnx", "ONNXRUNTIME_LIB",
		"pip install onnxruntime",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
}
