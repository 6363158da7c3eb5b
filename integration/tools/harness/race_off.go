//go:build !race

package harness

// Race says whether the race detector is built in, into the programs too.
const Race = false
