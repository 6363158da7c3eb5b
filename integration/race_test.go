package integration_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// sequential skips a test under the race detector: it reads files, or does one thing after the other.
func sequential(t *testing.T) {
	t.Helper()
	bustest.Sequential(t, "nothing here is concurrent")
}
