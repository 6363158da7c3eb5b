package integration_test

import (
	"os"
	"strconv"
	"testing"
)

// soakSeed is the seed of a soak, from MEANDER_SOAK; 0 where tests run in their short form.
func soakSeed(t *testing.T) uint64 {
	t.Helper()
	v := os.Getenv("MEANDER_SOAK")
	if v == "" {
		return 0
	}
	seed, err := strconv.ParseUint(v, 10, 64)
	if err != nil || seed == 0 {
		t.Fatalf("MEANDER_SOAK: %q; must be a positive number, the seed", v)
	}
	return seed
}

// soak is how much a test does: the short form where it runs with all others, the long one
// in `make soak`.
func soak(t *testing.T, short, long int) int {
	t.Helper()
	if soakSeed(t) != 0 {
		return long
	}
	return short
}
