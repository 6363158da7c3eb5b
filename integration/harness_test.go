package integration_test

import (
	"context"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

const raceEnabled = harness.Race

// program is the path of one built program.
func program(t *testing.T, name string) string {
	t.Helper()
	return harness.Program(t, name)
}

// skipShort skips a test that takes long in the short form. Those that start programs need not call it.
func skipShort(t *testing.T) {
	t.Helper()
	harness.SkipShort(t)
}

// limited bounds a context by a test's patience.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), bustest.Patience)
	t.Cleanup(cancel)
	return ctx
}
