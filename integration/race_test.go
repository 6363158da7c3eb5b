package integration_test

import "testing"

// sequential skips a test under the race detector: it reads files, or does one thing after
// the other, and runs without the detector.
func sequential(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("nothing here is concurrent; it runs without the race detector")
	}
}
