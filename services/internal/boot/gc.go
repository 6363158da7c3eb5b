package boot

import (
	"os"
	"sync"
)

// headroom is the least that a program may allocate between two collections, in bytes.
const headroom = 128 << 20

// SpareGC makes garbage collections rare while the heap is small, at the price of up to twice the headroom of memory.
// A program that passes messages on keeps little and allocates much. The array is never touched and uses no memory,
// but the collector counts it and starts later. With a memory limit ($GOMEMLIMIT) there is no headroom, because the
// limit would count it too.
func SpareGC() { ballast() }

var ballast = sync.OnceValue(func() []byte {
	if os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, headroom)
})
