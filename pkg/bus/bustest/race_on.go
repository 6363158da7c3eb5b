//go:build race

package bustest

// Race says whether the race detector is built in.
const Race = true
