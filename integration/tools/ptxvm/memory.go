package ptxvm

import (
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Where addresses lie. Shared and local addresses are offsets in their space, or generic
// ones in a window.
const (
	sharedStart  = 1024 // so that 0 is no address
	sharedWindow = 1 << 40
	localStart   = 64
	localWindow  = 1 << 41
	globalStart  = 1 << 44
	globalGap    = 1 << 14 // between allocations, by default: what runs over an end hits nothing
	fresh        = 0xff    // every byte of new memory: NaN
)

// States of a byte.
const (
	unwritten = iota
	written
	copying // the destination of a cp.async that nothing has waited for
)

// region is a piece of memory with what is known of each byte.
type region struct {
	what     string
	base     uint64
	data     []byte
	state    []byte  // of each byte; nil: all are written
	cells    []cell  // of each two bytes; nil: no races are looked for
	proxies  []proxy // of each two bytes, where products may read them
	readOnly bool
	freed    bool
	hollow   bool // data is zeros of all that are hollow
	read     int  // bytes of the launch, where they are counted
	written  int
}

// cell is the last write and the last read of two bytes, as stamps.
type cell struct{ write, read stamp }

// stamp says who touched a cell and when, from the top: the block's serial number since
// the start, the barriers that the block had passed, the bar.warp.syncs of the warp since
// the last of them, the thread, and whether there were other readers.
type stamp uint64

const (
	serialBits = 22
	epochBits  = 20
	syncBits   = 10
	threadBits = 10

	waited = 1<<syncBits - 1 // in the place of the bar.warp.syncs: all of the warp waited for the access

	threadShift = 2
	syncShift   = threadShift + threadBits
	epochShift  = syncShift + syncBits
	serialShift = epochShift + epochBits
)

// Other readers of a cell, in the lowest bits of a stamp.
const (
	oneThread stamp = iota
	oneWarp
	oneBlock
	manyBlocks
)

func (s stamp) readers() stamp { return s & 3 }
func (s stamp) thread() stamp  { return s >> threadShift & (1<<threadBits - 1) }

// clash reports whether an access by now is not ordered after the access before, which a
// launch that began at floor made.
func clash(before, now, floor stamp) bool {
	switch {
	case before < floor:
		return false
	case before>>serialShift != now>>serialShift || before.readers() == manyBlocks:
		return true
	case before>>epochShift != now>>epochShift:
		return false
	case before.readers() == oneThread && before.thread() == now.thread():
		return false
	case before.readers() != oneBlock && before.thread()/32 == now.thread()/32:
		return before>>syncShift == now>>syncShift // bar.warp.sync orders within a warp
	}
	return true
}

// joined is the stamp of a cell's readers after one more.
func joined(before, now, floor stamp) stamp {
	switch {
	case before < floor:
		return now
	case before>>serialShift != now>>serialShift || before.readers() == manyBlocks:
		return now | manyBlocks
	case before>>epochShift != now>>epochShift:
		return now
	case before.thread()/32 != now.thread()/32:
		return now | oneBlock
	case before.readers() != oneBlock && before>>syncShift != now>>syncShift: // ordered within the warp
		return now
	case before.thread() != now.thread():
		return now | max(before.readers(), oneWarp)
	}
	return now | before.readers()
}

func newRegion(what string, base uint64, bytes int, checks bool) *region {
	r := &region{what: what, base: base, data: make([]byte, bytes)}
	for i := range r.data {
		r.data[i] = fresh
	}
	if checks {
		r.state = make([]byte, bytes)
		r.cells = make([]cell, (bytes+1)/2)
	}
	return r
}

// renew makes the memory as of a new block.
func (r *region) renew() {
	for i := range r.data {
		r.data[i] = fresh
	}
	clear(r.state)
}

// heap is the global memory.
type heap struct {
	regions []*region // by address
	next    uint64
	used    int
	limit   int
	gap     int // between allocations
	checks  bool
	hollow  bool   // memory is, until something is copied to it
	zeros   []byte // of all memory that is hollow
	sink    [16]byte
}

func (h *heap) alloc(bytes int, what string) (*region, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("allocate %d bytes: %w", bytes, driver.ErrInvalidValue)
	}
	if h.used+bytes > h.limit {
		return nil, fmt.Errorf("allocate %d bytes with %d of %d in use: %w", bytes, h.used, h.limit, driver.ErrMemory)
	}
	r := h.region(what, bytes)
	h.used += bytes
	h.next += (uint64(bytes) + uint64(h.gap) + 255) &^ 255
	h.regions = append(h.regions, r)
	return r, nil
}

// region makes the memory of an allocation.
func (h *heap) region(what string, bytes int) *region {
	if !h.hollow {
		return newRegion(what, h.next, bytes, h.checks)
	}
	if len(h.zeros) < bytes {
		h.zeros = make([]byte, bytes)
	}
	return &region{what: what, base: h.next, data: h.zeros[:bytes], hollow: true}
}

// find returns the region whose first byte is the last at or before the address.
func (h *heap) find(address uint64) *region {
	i, exact := slices.BinarySearchFunc(h.regions, address, func(r *region, a uint64) int {
		switch {
		case r.base < a:
			return -1
		case r.base > a:
			return 1
		}
		return 0
	})
	if exact {
		return h.regions[i]
	}
	if i == 0 {
		return nil
	}
	return h.regions[i-1]
}

// free keeps the entry, so that later accesses can be told what they hit.
func (h *heap) free(address uint64) error {
	r := h.find(address)
	if r == nil || r.base != address || r.freed || r.readOnly {
		return fmt.Errorf("free %#x, which is no allocation: %w", address, driver.ErrInvalidValue)
	}
	h.used -= len(r.data)
	r.freed, r.data, r.state, r.cells = true, nil, nil, nil
	return nil
}

// span finds n bytes for the host.
func (h *heap) span(address uint64, n int) (*region, int, error) {
	r := h.find(address)
	if r == nil || r.freed || address-r.base > uint64(len(r.data)) || uint64(n) > uint64(len(r.data))-(address-r.base) {
		return nil, 0, fmt.Errorf("copy %d bytes at %#x, which is not within an allocation: %w", n, address,
			driver.ErrInvalidValue)
	}
	return r, int(address - r.base), nil
}

func (h *heap) copyIn(address uint64, src []byte) error {
	r, at, err := h.span(address, len(src))
	if err != nil {
		return err
	}
	if r.hollow {
		r.data, r.hollow = make([]byte, len(r.data)), false
	}
	copy(r.data[at:], src)
	if r.state != nil {
		for i := range src {
			r.state[at+i] = written
		}
	}
	return nil
}

func (h *heap) copyOut(dst []byte, address uint64) error {
	r, at, err := h.span(address, len(dst))
	if err != nil {
		return err
	}
	copy(dst, r.data[at:])
	return nil
}

type space int

const (
	global space = iota
	shared
	local
	constant
	generic
)

// find resolves an address for a lane: the region, and the offset in it.
func (w *warp) find(in *inst, lane int, address uint64) (*region, uint64) {
	s := in.space
	if s == generic {
		switch {
		case address >= globalStart:
			s = global
		case address >= localWindow:
			s = local
		default:
			s = shared
		}
	}
	switch s {
	case shared:
		if address >= sharedWindow {
			address -= sharedWindow
		}
		return w.block.shared, address - sharedStart
	case local:
		if address >= localWindow {
			address -= localWindow
		}
		return w.localOf(lane), address - localStart
	}
	if r := in.hit; r != nil && address-r.base < uint64(len(r.data)) {
		return r, address - r.base
	}
	r := w.block.vm.heap.find(address)
	if r == nil {
		w.fail(Bounds, lane, "address %#x is below all memory", address)
	}
	in.hit = r
	return r, address - r.base
}

func (w *warp) localOf(lane int) *region {
	if w.local[lane] == nil {
		w.local[lane] = newRegion("local memory", localWindow+localStart, w.block.kernel.local, w.block.vm.heap.checks)
		w.local[lane].cells = nil
	}
	return w.local[lane]
}

// access checks that a lane may read or write n bytes at an address, and returns them.
func (w *warp) access(in *inst, lane int, address uint64, n int, write bool) []byte {
	r, at := w.find(in, lane, address)
	verb := "reads"
	if write {
		verb = "writes"
	}
	if at+uint64(n) > uint64(len(r.data)) || at+uint64(n) < at {
		if r.freed {
			w.fail(Freed, lane, "%s %d bytes at %#x, byte %d of %s, which is freed", verb, n, address, at, r.what)
		}
		w.fail(Bounds, lane, "%s %d bytes at byte %d of %s, which has %d", verb, n, int64(at), r.what, len(r.data))
	}
	if address&uint64(n-1) != 0 {
		w.fail(Misaligned, lane, "%s %d bytes at %#x, byte %d of %s", verb, n, address, at, r.what)
	}
	if write && r.readOnly {
		w.fail(ReadOnly, lane, "writes %s", r.what)
	}
	if r.state != nil {
		w.state(r, lane, int(at), n, write)
	}
	if r.cells != nil {
		w.race(r, lane, int(at), n, write)
	}
	if w.block.executed != nil {
		return w.counted(r, at, n, write)
	}
	return r.data[at : at+uint64(n)]
}

// counted is access where it is counted.
func (w *warp) counted(r *region, at uint64, n int, write bool) []byte {
	if write {
		r.written += n
	} else {
		r.read += n
	}
	if write && r.hollow {
		return w.block.vm.heap.sink[:n]
	}
	return r.data[at : at+uint64(n)]
}

// state checks that bytes were written before they are read.
func (w *warp) state(r *region, lane, at, n int, write bool) {
	for i, s := range r.state[at : at+n] {
		if s == copying {
			w.fail(Pending, lane, "byte %d of %s is the destination of a cp.async that was not waited for", at+i,
				r.what)
		}
		if write {
			r.state[at+i] = written
		} else if s == unwritten {
			w.fail(Uninitialised, lane, "byte %d of %s was never written", at+i, r.what)
		}
	}
}

// race checks that others touched the bytes before a barrier, or not at all.
func (w *warp) race(r *region, lane, at, n int, write bool) {
	now, floor := w.stamp+stamp(lane)<<threadShift, w.block.floor
	if r == w.block.shared { // what earlier blocks had is gone
		floor = w.block.serial << serialShift
	}
	if write && r.proxies != nil {
		w.overwrite(r, lane, at, n)
	}
	cells := r.cells[at/2 : (at+n+1)/2]
	for i := range cells {
		c := &cells[i]
		if c.write >= floor && clash(c.write, now, floor) {
			w.raced(r, lane, at+2*i, c.write, "wrote", write)
		}
		if write {
			if c.read >= floor && clash(c.read, now, floor) {
				w.raced(r, lane, at+2*i, c.read, "read", write)
			}
			c.write = now
		} else if c.read != now {
			c.read = joined(c.read, now, floor)
		}
	}
}

func (w *warp) raced(r *region, lane, at int, other stamp, did string, write bool) {
	does := "read here"
	if write {
		does = "written here"
	}
	who := fmt.Sprintf("thread %d", other.thread())
	if other>>serialShift != w.stamp>>serialShift || other.readers() == manyBlocks {
		who = "another block"
	}
	w.fail(Race, lane, "byte %d of %s, %s, is what %s %s with no barrier between", at, r.what, does, who, did)
}
