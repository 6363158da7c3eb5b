package boot

import (
	"os"
	"sync"
)

// headroom is what a program may allocate between two collections at least.
const headroom = 128 << 20

// SpareGC makes collections rare while the heap is small, at the price of up to twice the
// headroom of memory. A program that passes messages on has little in hand and allocates
// much. The array is never touched and takes no memory, but the collector counts it and
// starts later. Where there is a limit ($GOMEMLIMIT), which would count it too, there is
// no headroom.
func SpareGC() { ballast() }

var ballast = sync.OnceValue(func() []byte {
	if os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, headroom)
})
