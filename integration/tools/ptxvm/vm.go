package ptxvm

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Options of a VM. The zero value checks everything.
type Options struct {
	// Numerics is how mma.sync adds.
	Numerics Numerics
	// Jitter moves results of .approx functions by up to 2^-22, as hardware may.
	Jitter bool
	// Unchecked looks neither for uninitialised memory nor for races: faster.
	Unchecked bool
	// Capability is the compute capability, 90 for 9.0; default 80. A module that is for that one only is refused by
	// others.
	Capability int
	// Memory is the bytes that can be allocated, default 1 GiB.
	Memory int
	// Gap is the bytes of addresses between allocations, default 16 KiB. With many of them rows that are allocations
	// lie as far apart as those of a matrix that fills a GPU.
	Gap int
	// Budget is the instructions of warps that a launch may take, default 2^32.
	Budget int
	// Count counts what each launch does; see Counts. Nothing is checked then but bounds, and allocations that nothing
	// was copied to take no memory: they are zeros and keep nothing. So it does not take a GPU's memory to launch what
	// does.
	Count bool
}

// VM is a driver.Driver that interprets. One goroutine uses it at a time.
type VM struct {
	options Options
	heap    heap
	host    int   // bytes of Host
	serial  stamp // of the next block
	draws   uint64
	lost    error // the fault after which nothing works
	counts  Counts
}

var _ driver.Driver = (*VM)(nil)

// New makes a device without memory in use.
func New(o Options) *VM {
	if o.Memory == 0 {
		o.Memory = 1 << 30
	}
	if o.Capability == 0 {
		o.Capability = 80
	}
	if o.Budget == 0 {
		o.Budget = 1 << 32
	}
	if o.Gap == 0 {
		o.Gap = globalGap
	}
	memory := heap{next: globalStart, limit: o.Memory, gap: o.Gap, checks: !o.Unchecked && !o.Count, hollow: o.Count}
	return &VM{options: o, serial: 1, heap: memory}
}

// Name is ptxvm.
func (vm *VM) Name() string { return "ptxvm" }

// Capability is that of Options.
func (vm *VM) Capability() int { return vm.options.Capability }

// Bind has nothing to do: there is no thread to keep to.
func (vm *VM) Bind() (release func(), err error) { return func() {}, nil }

// Memory is what Options.Memory leaves.
func (vm *VM) Memory() (free, total int, err error) {
	return vm.options.Memory - vm.heap.used, vm.options.Memory, nil
}

// Host is ordinary memory, which it counts.
func (vm *VM) Host(bytes int) ([]byte, error) {
	if vm.lost != nil {
		return nil, vm.lost
	}
	vm.host += bytes
	return make([]byte, bytes), nil
}

// FreeHost gives it back.
func (vm *VM) FreeHost(b []byte) error {
	vm.host -= len(b)
	return vm.lost
}

// Close has nothing to give back.
func (vm *VM) Close() error { return nil }

// Used is the bytes that are allocated, on the device and for Host.
func (vm *VM) Used() int { return vm.heap.used + vm.host }

type module struct {
	vm *VM
	p  *program
}

// decoded is what a text is on every device whose memory goes on at the same address. Only copies
// of it run: instructions note where they found memory last.
type decoded struct {
	text string
	at   uint64
	p    *program
}

// latest keeps the last decoded text: tests make many devices of the same one.
var latest atomic.Pointer[decoded]

// LoadModule parses a text and decodes all of its kernels.
func (vm *VM) LoadModule(ptx []byte) (driver.Module, error) {
	if vm.lost != nil {
		return nil, vm.lost
	}
	text, at := strings.TrimRight(string(ptx), "\x00"), vm.heap.next
	if d := latest.Load(); d != nil && d.text == text && d.at == at {
		if _, err := vm.place(d.p); err != nil {
			return nil, fmt.Errorf("load module: %w", err)
		}
		return &module{vm, d.p.clone()}, nil
	}
	p, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("load module: %w: %w", driver.ErrInvalidPTX, err)
	}
	if p.addresses, err = vm.place(p); err != nil {
		return nil, fmt.Errorf("load module: %w", err)
	}
	lines := strings.Split(text, "\n")
	for _, name := range sortedKeys(p.kernels) {
		if err := compile(p, p.kernels[name], lines); err != nil {
			return nil, fmt.Errorf("load module: kernel %s: %w: %w", name, driver.ErrInvalidPTX, err)
		}
	}
	latest.Store(&decoded{text, at, p})
	return &module{vm, p.clone()}, nil
}

// place gives the constants and global variables of a text memory, until the end. It returns where
// each lies.
func (vm *VM) place(p *program) (map[string]uint64, error) {
	addresses := map[string]uint64{}
	for _, name := range sortedKeys(p.variables) {
		v := p.variables[name]
		if v.space != "const" && v.space != "global" || v.extern {
			continue
		}
		r, err := vm.heap.alloc(max(v.size, 1), "variable "+name)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", name, err)
		}
		data := v.data
		if data == nil {
			data = make([]byte, v.size)
		}
		if err := vm.heap.copyIn(r.base, data); err != nil {
			return nil, err
		}
		r.readOnly = v.space == "const"
		addresses[name] = r.base
	}
	return addresses, nil
}

// Function finds a kernel.
func (m *module) Function(name string) (driver.Function, error) {
	k := m.p.kernels[name]
	if k == nil {
		return nil, fmt.Errorf("kernel %s: %w", name, driver.ErrNotFound)
	}
	return k, nil
}

// ParamSizes is the bytes of each parameter of a kernel, in order.
func ParamSizes(f driver.Function) []int {
	var sizes []int
	for _, v := range f.(*kernel).paramOrder {
		sizes = append(sizes, v.size)
	}
	return sizes
}

// Alloc fills new memory with NaN and notes that none of it is written.
func (vm *VM) Alloc(bytes int) (driver.Pointer, error) {
	if vm.lost != nil {
		return 0, vm.lost
	}
	r, err := vm.heap.alloc(bytes, fmt.Sprintf("an allocation of %d bytes", bytes))
	if err != nil {
		return 0, err
	}
	return driver.Pointer(r.base), nil
}

// Free gives memory back; accesses to it are faults from now on.
func (vm *VM) Free(p driver.Pointer) error {
	if vm.lost != nil {
		return vm.lost
	}
	return vm.heap.free(uint64(p))
}

// CopyIn writes memory.
func (vm *VM) CopyIn(dst driver.Pointer, src []byte) error {
	if vm.lost != nil {
		return vm.lost
	}
	return vm.heap.copyIn(uint64(dst), src)
}

// CopyOut reads memory, written or not.
func (vm *VM) CopyOut(dst []byte, src driver.Pointer) error {
	if vm.lost != nil {
		return vm.lost
	}
	return vm.heap.copyOut(dst, uint64(src))
}

// Send is CopyIn: launches are done when they return.
func (vm *VM) Send(dst driver.Pointer, src []byte) error { return vm.CopyIn(dst, src) }

// Fetch is CopyOut.
func (vm *VM) Fetch(dst []byte, src driver.Pointer) (driver.Event, error) {
	return nil, vm.CopyOut(dst, src)
}

// Wait has nothing to wait for.
func (vm *VM) Wait(driver.Event) error { return nil }

// Sync returns the fault of an earlier launch.
func (vm *VM) Sync() error { return vm.lost }

// Launch runs a kernel to its end. A fault is returned here and by every later call.
func (vm *VM) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) (err error) {
	if vm.lost != nil {
		return vm.lost
	}
	k, ok := f.(*kernel)
	if !ok {
		return fmt.Errorf("launch of what is no kernel: %w", driver.ErrInvalidValue)
	}
	for _, d := range []*driver.Dim{&g.Blocks, &g.Threads} {
		d.X, d.Y, d.Z = max(d.X, 1), max(d.Y, 1), max(d.Z, 1)
	}
	if err := k.check(g, args); err != nil {
		return fmt.Errorf("launch %s: %w", k.name, err)
	}
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(*Fault)
			if !ok {
				panic(r)
			}
			vm.lost, err = fault, fault
		}
	}()
	vm.launch(k, g, args)
	return nil
}

// Limits of a launch, those of compute capability 8.0. Kernels for 9.0 may have all of its
// shared memory, as if the attribute of the function that asks for it were set.
const (
	maxThreads      = 1024
	maxStatic       = 48 << 10 // bytes of shared memory that a text may declare
	maxSharedHopper = 227 << 10
	maxBlocks       = 1<<serialBits - 2
)

// check refuses what a driver would refuse.
func (k *kernel) check(g driver.Grid, args []driver.Arg) error {
	threads := g.Threads
	switch {
	case threads.X > maxThreads || threads.Y > maxThreads || threads.Z > 64 || threads.Count() > maxThreads:
		return fmt.Errorf("blocks of %d x %d x %d threads; must be at most %d: %w", threads.X, threads.Y, threads.Z,
			maxThreads, driver.ErrInvalidValue)
	case k.maxThreads > 0 && threads.Count() > k.maxThreads:
		return fmt.Errorf("blocks of %d threads; the kernel allows %d: %w", threads.Count(), k.maxThreads,
			driver.ErrInvalidValue)
	case g.Blocks.Y > 65535 || g.Blocks.Z > 65535 || g.Blocks.X > 1<<31-1 || g.Blocks.Count() > maxBlocks:
		return fmt.Errorf("a grid of %d x %d x %d blocks: %w", g.Blocks.X, g.Blocks.Y, g.Blocks.Z,
			driver.ErrInvalidValue)
	case g.Shared < 0 || k.shared > maxStatic || k.shared+g.Shared > k.maxShared:
		return fmt.Errorf("%d + %d bytes of shared memory; must be at most %d, of which static %d: %w", k.shared,
			g.Shared, k.maxShared, maxStatic, driver.ErrResources)
	case g.Shared > 0 && !k.dynamic:
		return fmt.Errorf("%d bytes of dynamic shared memory, of which the kernel has none: %w", g.Shared,
			driver.ErrInvalidValue)
	case len(args) != len(k.paramOrder):
		return fmt.Errorf("%d arguments; must be %d: %w", len(args), len(k.paramOrder), driver.ErrInvalidValue)
	}
	return nil
}

// block is what the warps of one block share.
type block struct {
	vm     *VM
	kernel *kernel
	grid   driver.Grid
	index  driver.Dim
	params []byte
	shared *region
	serial stamp
	floor  stamp // the first stamp of this launch
	steps  int   // instructions left
	all    []*warp
	issues [][]issue // products so far of each warpgroup
	named  [16]meeting
	epoch  stamp // of the last barrier with a number of threads

	executed []executed // of each instruction; nil: they are not counted
}

// meeting is a barrier with a number of threads: who has arrived since it last opened, and who waits.
type meeting struct {
	threads, arrived int
	waiting          []*warp
}

// arrive is bar.sync and bar.arrive with a number of threads: the warp arrives, and has to wait unless it is the last.
// That orders memory as a barrier of the whole block would: of warps that do not meet here a race can go unseen.
func arrive(w *warp, in *inst, m uint32) {
	lane, b := bits.TrailingZeros32(m), w.block
	id, threads := w.r32[in.list[0][0]], w.r32[in.list[0][1]]
	for rest := m; rest != 0; rest &= rest - 1 {
		if l := bits.TrailingZeros32(rest); id[l] != id[lane] || threads[l] != threads[lane] {
			w.fail(Divergence, l, "barrier %d for %d threads, and %d for %d of lane %d", id[l], threads[l], id[lane],
				threads[lane], lane)
		}
	}
	if id[lane] > 15 || threads[lane] == 0 || threads[lane]%32 != 0 {
		w.fail(Divergence, lane, "barrier %d for %d threads; must be 0 to 15, for a multiple of 32", id[lane],
			threads[lane])
	}
	at := &b.named[id[lane]]
	if at.arrived > 0 && at.threads != int(threads[lane]) {
		w.fail(Divergence, lane, "barrier %d for %d threads; it is for %d of others", id[lane], threads[lane],
			at.threads)
	}
	at.threads = int(threads[lane])
	if at.arrived += 32; in.control == barrier {
		at.waiting = append(at.waiting, w)
	} else {
		w.paused = !b.ahead() // the one that waits goes on first: what it reads too early is not there
	}
	if at.arrived < at.threads {
		return
	}
	if b.epoch++; b.epoch >= 1<<epochBits {
		w.fail(Budget, 0, "more than %d barriers", 1<<epochBits-1)
	}
	for _, one := range at.waiting {
		one.synced(b.epoch)
	}
	*at = meeting{}
}

func (b *block) ahead() bool { return b.serial%2 == 0 }

// meet runs the warps of a block with such barriers in turn until all have ended. In every other block the last ones
// run first, and as far as they can: those that fill memory for others are too early where nothing holds them.
func (b *block) meet() {
	b.named, b.epoch = [16]meeting{}, 0
	order := b.all
	if b.ahead() {
		order = slices.Clone(order)
		slices.Reverse(order)
	}
	for ran := true; ran; {
		ran = false
		for _, w := range order {
			if w.alive != 0 && w.waiting < 0 {
				w.run()
				ran = true
			}
		}
	}
	for _, w := range b.all {
		if w.waiting >= 0 {
			w.at = &b.kernel.code[w.waiting]
			w.fail(Divergence, 0, "waits for threads that do not come")
		}
	}
	for id, at := range b.named {
		if at.arrived > 0 {
			b.all[0].fail(Divergence, 0, "%d threads arrived at barrier %d, and nobody waited", at.arrived, id)
		}
	}
}

func (vm *VM) launch(k *kernel, g driver.Grid, args []driver.Arg) {
	if vm.serial+stamp(g.Blocks.Count()) > 1<<serialBits-1 {
		for _, r := range vm.heap.regions {
			clear(r.cells)
		}
		vm.serial = 1
	}
	b := &block{
		vm: vm, kernel: k, grid: g, floor: vm.serial << serialShift, steps: vm.options.Budget,
		params: make([]byte, k.paramBytes+8),
	}
	for i, v := range k.paramOrder {
		binary.LittleEndian.PutUint64(b.params[v.offset:], uint64(args[i]))
	}
	b.shared = newRegion("shared memory", sharedStart, k.shared+g.Shared, vm.heap.checks)
	if k.products && b.shared.cells != nil {
		b.shared.proxies = make([]proxy, len(b.shared.cells))
	}
	if vm.options.Count {
		b.executed = make([]executed, len(k.code))
		defer func() { vm.counts = vm.newCounts(b) }()
	}
	b.all = b.warps()
	for z := range g.Blocks.Z {
		for y := range g.Blocks.Y {
			for x := range g.Blocks.X {
				b.index = driver.Dim{X: x, Y: y, Z: z}
				b.serial = vm.serial
				vm.serial++
				b.run()
			}
		}
	}
}

// warps makes those of a block, with their constants.
func (b *block) warps() []*warp {
	k, threads := b.kernel, b.grid.Threads.Count()
	warps := make([]*warp, (threads+31)/32)
	for i := range warps {
		w := &warp{block: b, first: 32 * i, start: allLanes}
		if left := threads - 32*i; left < 32 {
			w.start = 1<<left - 1
		}
		w.r32, w.r64, w.p = make([]v32, k.banks[bank32]), make([]v64, k.banks[bank64]), make([]uint32,
			k.banks[bankPred])
		for value, slot := range k.consts[bank32] {
			for lane := range 32 {
				w.r32[slot][lane] = uint32(value)
			}
		}
		for value, slot := range k.consts[bank64] {
			for lane := range 32 {
				w.r64[slot][lane] = value
			}
		}
		warps[i] = w
	}
	return warps
}

// run executes one block.
func (b *block) run() {
	warps := b.all
	b.shared.renew()
	if b.kernel.products {
		b.issues = make([][]issue, (len(warps)+3)/4)
	}
	for _, w := range warps {
		w.reset(b)
		for name, slot := range b.kernel.specials {
			f := specials[name]
			for lane := range 32 {
				w.r32[slot][lane] = uint32(f(b, w.first+lane, lane))
			}
		}
	}
	if b.kernel.named {
		b.meet()
		b.sameProducts()
		return
	}
	for epoch := stamp(1); ; epoch++ {
		at := -1
		for _, w := range warps {
			w.run()
			if w.waiting < 0 {
				continue
			}
			if at >= 0 && w.waiting != at {
				w.fail(Divergence, 0, "other warps of the block wait at line %d", b.kernel.code[at].line)
			}
			at = w.waiting
		}
		if at < 0 {
			b.sameProducts()
			return
		}
		if epoch >= 1<<epochBits {
			warps[0].fail(Budget, 0, "more than %d barriers", 1<<epochBits-1)
		}
		for _, w := range warps {
			w.synced(epoch)
		}
	}
}
