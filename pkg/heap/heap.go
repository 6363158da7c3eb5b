// Package heap bounds the memory of a program beside what it has in use: it says when Go's collector runs.
package heap

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

const (
	// mostRoom is how much a program with little in use may allocate between two collections, in bytes.
	mostRoom = 256 << 20
	// leastRoom is the same where memory is short: with less the collector would always run.
	leastRoom = 16 << 20
	// shareOfRoom is the part of the memory limit that is room.
	shareOfRoom = 16
	// firstHeap is what Go's runtime starts to collect at, at GOGC=100.
	firstHeap = 4 << 20
)

// Bound sets the memory limit of Go's runtime to 90 % of what the process may have: the limit of its cgroup, else the
// memory of the machine. And it says how much may be allocated from one collection to the next: 256 MiB, or a
// sixteenth of the limit if that is less; or as much as the objects in use that have pointers, if that is more. What
// the collector need not look into, such as weights and images, lets no garbage grow. A program that passes messages
// on keeps little and allocates much: it is seldom collected.
//
// $GOMEMLIMIT replaces the limit, and $GOGC the room.
func Bound() { bound() }

var bound = sync.OnceFunc(func() {
	// An error means that the memory is not known: then there is no limit.
	_, _ = memlimit.Set(memlimit.WithProvider(memlimit.ApplyFallback(memlimit.FromCgroup, memlimit.FromSystem)))
	if os.Getenv("GOGC") != "" {
		return
	}
	room := uint64(min(max(debug.SetMemoryLimit(-1)/shareOfRoom, leastRoom), mostRoom))
	debug.SetGCPercent(int(100 * room / firstHeap))
	afterCollection(func() { makeRoom(room) })
})

// afterCollection calls do after each collection: something that nobody uses is found by each.
func afterCollection(do func()) {
	type unused struct{ _ *unused }
	runtime.AddCleanup(&unused{}, func(do func()) {
		do()
		afterCollection(do)
	}, do)
}

// makeRoom has the next collection begin when room was allocated since the last, or as much as it looks into.
func makeRoom(room uint64) {
	m := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"},
		{Name: "/gc/scan/heap:bytes"},
		{Name: "/gc/scan/stack:bytes"},
		{Name: "/gc/scan/globals:bytes"},
	}
	metrics.Read(m)
	live, scanned := m[0].Value.Uint64(), m[1].Value.Uint64()
	base := live + m[2].Value.Uint64() + m[3].Value.Uint64() // what GOGC is a percentage of
	debug.SetGCPercent(int(100*max(room, min(scanned, live))/max(base, firstHeap)) + 1)
}
