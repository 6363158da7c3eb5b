package ptxvm_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

const header = ".version 7.8\n.target sm_80\n.address_size 64\n"

// registers that the bodies of tests use. %rd1 is the address of in, %rd2 that of out, both
// with 4 bytes a thread: %rd3 and %rd4 are this thread's words.
const prologue = `
	.reg .pred %p<8>;
	.reg .b16 %rs<8>;
	.reg .b32 %r<40>;
	.reg .f32 %f<40>;
	.reg .b64 %rd<20>;
	ld.param.u64 %rd1, [in];
	ld.param.u64 %rd2, [out];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd10, %r1, 4;
	add.s64 %rd3, %rd1, %rd10;
	add.s64 %rd4, %rd2, %rd10;
`

func kernel(body string) string {
	return header + ".visible .entry k(.param .u64 in, .param .u64 out)\n{" + prologue + body + "\nret;\n}\n"
}

func words(x ...uint32) []byte {
	var b []byte
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

func unpack(b []byte) []uint32 {
	out := make([]uint32, len(b)/4)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return out
}

// load returns kernel k of a text.
func load(t *testing.T, vm *ptxvm.VM, text string) driver.Function {
	t.Helper()
	m, err := vm.LoadModule([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.Function("k")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// launch runs kernel k of a text on in, with as many words of out.
func launch(t *testing.T, o ptxvm.Options, text string, g driver.Grid, in []uint32, out int) ([]uint32, error) {
	t.Helper()
	vm := ptxvm.New(o)
	f := load(t, vm, text)
	a, err := vm.Alloc(4 * len(in))
	if err != nil {
		t.Fatal(err)
	}
	b, err := vm.Alloc(4 * out)
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.CopyIn(a, words(in...)); err != nil {
		t.Fatal(err)
	}
	if err := vm.Launch(f, g, driver.Address(a), driver.Address(b)); err != nil {
		return nil, err
	}
	got := make([]byte, 4*out)
	if err := vm.CopyOut(got, b); err != nil {
		t.Fatal(err)
	}
	return unpack(got), nil
}

func threads(n int) driver.Grid { return driver.Grid{Threads: driver.Dim{X: n}} }

func bits(x float32) uint32 { return math.Float32bits(x) }

const (
	one, two, three = 0x3f800000, 0x40000000, 0x40400000
	nan, inf        = 0x7fc00000, 0x7f800000
	minus           = 0xffffffff
)

// instructions are given operands %r10, %r11, %r12, which %rd11 to %rd13 have sign
// extended, and put the result that the ISA states in %r20 or %rd15.
var instructions = []struct {
	code    string
	a, b, c uint32
	want    uint64
}{
	{"add.rn.f32 %r20, %r10, %r11;", one, two, 0, three},
	{"sub.f32 %r20, %r10, %r11;", three, two, 0, one},
	{"mul.f32 %r20, %r10, %r11;", 0x00800000, 0x3f000000, 0, 0x00400000}, // into the subnormals
	{"div.rn.f32 %r20, %r10, %r11;", one, three, 0, 0x3eaaaaab},
	{"rcp.rn.f32 %r20, %r10;", three, 0, 0, 0x3eaaaaab},
	{"sqrt.rn.f32 %r20, %r10;", two, 0, 0, 0x3fb504f3},
	{"fma.rn.f32 %r20, %r10, %r11, %r12;", 0x3f800001, 0x3f800001, 0xbf800002, 0x28800000}, // only 2^-46 is left
	{"max.f32 %r20, %r10, %r11;", nan, one, 0, one},
	{"max.f32 %r20, %r10, %r11;", 0x80000000, 0, 0, 0},
	{"min.f32 %r20, %r10, %r11;", two, nan, 0, two},
	{"min.f32 %r20, %r10, %r11;", 0, 0x80000000, 0, 0x80000000},
	{"neg.f32 %r20, %r10;", one, 0, 0, 0xbf800000},
	{"abs.f32 %r20, %r10;", 0xbf800000, 0, 0, one},
	{"ex2.approx.ftz.f32 %r20, %r10;", bits(-1.5), 0, 0, 0x3eb504f3},
	{"ex2.approx.ftz.f32 %r20, %r10;", bits(-127), 0, 0, 0}, // flushed
	{"lg2.approx.ftz.f32 %r20, %r10;", bits(8), 0, 0, three},
	{"rsqrt.approx.ftz.f32 %r20, %r10;", bits(4), 0, 0, 0x3f000000},
	{"rcp.approx.ftz.f32 %r20, %r10;", bits(4), 0, 0, 0x3e800000},
	{"mul.lo.s32 %r20, %r10, %r11;", minus, 7, 0, 0xfffffff9},
	{"mul.hi.s32 %r20, %r10, %r11;", minus, 7, 0, minus},
	{"mul.hi.u32 %r20, %r10, %r11;", minus, 7, 0, 6},
	{"mad.lo.s32 %r20, %r10, %r11, %r12;", 3, 4, 5, 17},
	{"div.s32 %r20, %r10, %r11;", 0xfffffff9, 2, 0, 0xfffffffd},
	{"rem.s32 %r20, %r10, %r11;", 0xfffffff9, 2, 0, minus},
	{"div.u32 %r20, %r10, %r11;", 0xfffffff9, 2, 0, 0x7ffffffc},
	{"max.s32 %r20, %r10, %r11;", minus, 1, 0, 1},
	{"max.u32 %r20, %r10, %r11;", minus, 1, 0, minus},
	{"abs.s32 %r20, %r10;", 0xfffffff9, 0, 0, 7},
	{"shl.b32 %r20, %r10, %r11;", 3, 31, 0, 0x80000000},
	{"shl.b32 %r20, %r10, %r11;", 3, 32, 0, 0},
	{"shr.s32 %r20, %r10, %r11;", 0x80000000, 40, 0, minus},
	{"shr.u32 %r20, %r10, %r11;", 0x80000000, 31, 0, 1},
	{"bfe.u32 %r20, %r10, 8, 8;", 0x12345678, 0, 0, 0x56},
	{"prmt.b32 %r20, %r10, %r11, 0x5410;", 0x11112222, 0x33334444, 0, 0x44442222},
	{"not.b32 %r20, %r10;", 0x0f0f0f0f, 0, 0, 0xf0f0f0f0},
	{"popc.b32 %r20, %r10;", 0xf0f0, 0, 0, 8},
	{"mul.hi.u16 %r20, %r10, %r11;", 0x18000, 0x4, 0, 2},
	{"sub.s16 %r20, %r10, %r11;", 1, 2, 0, 0xffff},
	{"cvt.rn.f32.s32 %r20, %r10;", minus, 0, 0, 0xbf800000},
	{"cvt.rn.f32.u32 %r20, %r10;", minus, 0, 0, 0x4f800000},
	{"cvt.rzi.s32.f32 %r20, %r10;", bits(-2.75), 0, 0, 0xfffffffe},
	{"cvt.rni.s32.f32 %r20, %r10;", bits(2.5), 0, 0, 2},
	{"cvt.rmi.s32.f32 %r20, %r10;", bits(-2.25), 0, 0, 0xfffffffd},
	{"cvt.rzi.s32.f32 %r20, %r10;", bits(3e9), 0, 0, 0x7fffffff}, // saturates
	{"cvt.rzi.s32.f32 %r20, %r10;", nan, 0, 0, 0},
	{"cvt.rmi.f32.f32 %r20, %r10;", bits(-2.25), 0, 0, uint64(bits(-3))},
	{"cvt.rn.bf16.f32 %r20, %r10;", 0x3f808000, 0, 0, 0x3f80}, // ties to even
	{"cvt.rn.bf16.f32 %r20, %r10;", 0x3f818000, 0, 0, 0x3f82},
	{"cvt.rn.bf16.f32 %r20, %r10;", inf + 1, 0, 0, 0x7fff},
	{"cvt.rn.bf16x2.f32 %r20, %r10, %r11;", one, two, 0, 0x3f804000}, // the first is the upper half
	{"cvt.s32.s16 %r20, %r10;", 0x18000, 0, 0, 0xffff8000},
	{"cvt.s8.s32 %r20, %r10;", 0x1f0, 0, 0, 0xfff0},
	{"cvt.s32.s8 %r20, %r10;", 0x1f0, 0, 0, 0xfffffff0},
	{"shr.s16 %r20, %r10, 4;", 0x18000, 0, 0, 0xf800},
	{"mul.wide.s16 %r20, %r10, %r11;", 0x1ffff, 3, 0, 0xfffffffd},
	{"cvt.u32.u16 %r20, %r10;", 0x18000, 0, 0, 0x8000},
	{"mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r20, {%rs2, %rs1};", 0x12345678, 0, 0, 0x56781234},
	{"setp.lt.s32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", minus, 1, 0, 1},
	{"setp.lt.u32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", minus, 1, 0, 0},
	{"setp.neu.f32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", nan, nan, 0, 1},
	{"setp.ne.f32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", nan, nan, 0, 0},
	{"setp.gt.s16 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", 1, 0xffff, 0, 1},
	{"setp.lt.s64 %p1, %rd11, %rd12; selp.b32 %r20, 1, 0, %p1;", minus, 1, 0, 1},
	{"setp.lt.u64 %p1, %rd11, %rd12; selp.b32 %r20, 1, 0, %p1;", minus, 1, 0, 0},
	{"mov.pred %p1, -1; not.pred %p2, %p1; xor.pred %p3, %p1, %p2; selp.b32 %r20, 5, 6, %p3;", 0, 0, 0, 5},
	{"mov.u32 %r20, 4; setp.eq.s32 %p1, %r10, 0; @!%p1 mov.u32 %r20, 9;", 0, 0, 0, 4},
	{"cvt.u32.u64 %r20, %rd11;", minus, 0, 0, minus},
	{"mul.wide.u32 %rd15, %r10, -766435501;", 2, 0, 0, 2 * uint64(0xffffffff-766435500)}, // cut, then widened
	{"mul.wide.s32 %rd15, %r10, %r11;", minus, 7, 0, 1<<64 - 7},
	{"mad.wide.u32 %rd15, %r10, %r11, %rd13;", 1 << 31, 4, 5, 1<<33 + 5},
	{"shl.b64 %rd15, %rd11, %r11;", 1, 63, 0, 1 << 63},
	{"shr.s64 %rd15, %rd11, %r11;", minus, 8, 0, 1<<64 - 1},
	{"shr.u64 %rd15, %rd11, %r11;", minus, 8, 0, 1<<56 - 1},
	{"max.s64 %rd15, %rd11, %rd12;", minus, 2, 0, 2},
	{"mov.b64 {%r21, %r22}, %rd11; mov.b64 %rd15, {%r22, %r21};", 5, 0, 0, 5 << 32},
	{"add.u64 %rd15, %rd11, %rd12;", minus, 2, 0, 1},
}

func TestVM_Instructions(t *testing.T) {
	for _, tt := range instructions {
		body := `
	ld.global.u32 %r10, [%rd1]; ld.global.u32 %r11, [%rd1+4]; ld.global.u32 %r12, [%rd1+8];
	cvt.s64.s32 %rd11, %r10; cvt.s64.s32 %rd12, %r11; cvt.s64.s32 %rd13, %r12;
	mov.u32 %r20, 0; mov.u64 %rd15, 0;
	` + tt.code + `
	cvt.u64.u32 %rd16, %r20; or.b64 %rd15, %rd15, %rd16;
	st.global.u64 [%rd2], %rd15;`
		got, err := launch(t, ptxvm.Options{}, kernel(body), threads(1), []uint32{tt.a, tt.b, tt.c}, 2)
		if err != nil {
			t.Errorf("%s: %v", tt.code, err)
			continue
		}
		if got := uint64(got[0]) | uint64(got[1])<<32; got != tt.want {
			t.Errorf("%s with %#x, %#x, %#x: got %#x, want %#x", tt.code, tt.a, tt.b, tt.c, got, tt.want)
		}
	}
}

// A shuffle's formulas, by the text of the ISA.
func TestVM_Shuffle(t *testing.T) {
	in := make([]uint32, 32)
	for i := range in {
		in[i] = uint32(100 + i)
	}
	for _, tt := range []struct {
		mode    string
		b, c    int
		from    func(lane int) int
		invalid func(lane int) bool
	}{
		{"bfly", 5, 31, func(l int) int { return l ^ 5 }, nil},
		{"up", 3, 0, func(l int) int { return l - 3 }, func(l int) bool { return l < 3 }},
		{"down", 3, 31, func(l int) int { return l + 3 }, func(l int) bool { return l > 28 }},
		{"idx", 7, 31, func(int) int { return 7 }, nil},
		{"idx", 2, 24<<8 | 31, func(l int) int { return l&^7 + 2 }, nil}, // segments of 8 lanes
		{"down", 1, 24<<8 | 31, func(l int) int { return l + 1 }, func(l int) bool { return l%8 == 7 }},
	} {
		got, err := launch(t, ptxvm.Options{}, kernel(fmt.Sprintf(`
	ld.global.u32 %%r10, [%%rd3];
	shfl.sync.%s.b32 %%r11|%%p1, %%r10, %d, %d, -1;
	selp.b32 %%r12, 1000, 0, %%p1;
	add.s32 %%r11, %%r11, %%r12;
	st.global.u32 [%%rd4], %%r11;`, tt.mode, tt.b, tt.c)), threads(32), in, 32)
		if err != nil {
			t.Fatal(err)
		}
		for lane, g := range got {
			want := uint32(1100 + tt.from(lane))
			if tt.invalid != nil && tt.invalid(lane) {
				want = uint32(100 + lane)
			}
			if g != want {
				t.Errorf("%s by %d: lane %d has %d, want %d", tt.mode, tt.b, lane, g, want)
			}
		}
	}
}

// Lanes that part meet again: a loop of a different length in each lane, a switch that
// falls through, threads that end before a barrier, a shuffle of half a warp.
func TestVM_Divergence(t *testing.T) {
	in := make([]uint32, 64)
	for i := range in {
		in[i] = uint32(i * 7 % 40)
	}
	type test struct {
		name, body string
		want       func(i int) uint32
	}
	for _, tt := range []test{
		{"loop", `
	ld.global.u32 %r10, [%rd3];
	mov.u32 %r11, 0;
LOOP:
	setp.eq.s32 %p1, %r10, 0;
	@%p1 bra DONE;
	add.s32 %r11, %r11, 3; sub.s32 %r10, %r10, 1;
	bra.uni LOOP;
DONE:
	bar.sync 0;
	st.global.u32 [%rd4], %r11;`, func(i int) uint32 { return 3 * in[i] }},
		{"switch", `
	and.b32 %r10, %r1, 3;
	mov.u32 %r11, 0;
	setp.eq.s32 %p1, %r10, 1; @%p1 bra ONE; setp.eq.s32 %p1, %r10, 2; @%p1 bra TWO;
	bra.uni END;
ONE: add.s32 %r11, %r11, 1;
TWO: add.s32 %r11, %r11, 2;
END: st.global.u32 [%rd4], %r11;`, func(i int) uint32 { return []uint32{0, 3, 2, 0}[i&3] }},
		{"early end", `
	st.global.u32 [%rd4], %r1;
	setp.gt.s32 %p1, %r1, 40;
	@%p1 ret;
	bar.sync 0; bar.sync 0;
	st.global.u32 [%rd4], 7;`, func(i int) uint32 {
			if i > 40 {
				return uint32(i)
			}
			return 7
		}},
		{"half a warp", `
	and.b32 %r10, %r1, 31;
	mov.u32 %r11, 0;
	setp.lt.s32 %p1, %r10, 16;
	@!%p1 bra END;
	shfl.sync.bfly.b32 %r11, %r1, 1, 31, 0xffff;
END: st.global.u32 [%rd4], %r11;`, func(i int) uint32 {
			if i%32 < 16 {
				return uint32(i ^ 1)
			}
			return 0
		}},
		{"both sides meet at a shuffle", `
	setp.lt.s32 %p1, %r1, 5;
	mov.u32 %r10, %r1;
	@%p1 bra LOW;
	add.s32 %r10, %r10, 100;
	bra MEET;
LOW: add.s32 %r10, %r10, 200;
MEET: shfl.sync.idx.b32 %r11, %r10, 0, 31, -1;
	st.global.u32 [%rd4], %r11;`, func(i int) uint32 {
			if i < 32 {
				return 200
			}
			return 132
		}},
	} {
		got, err := launch(t, ptxvm.Options{}, kernel(tt.body), threads(64), in, 64)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		for i, g := range got {
			if want := tt.want(i); g != want {
				t.Errorf("%s: thread %d has %d, want %d", tt.name, i, g, want)
				break
			}
		}
	}
}

// shared is a kernel with shared memory at %rd5, a word for each thread at %rd6.
func shared(body string) string {
	return header + ".visible .entry k(.param .u64 in, .param .u64 out)\n{\n.shared .align 16 .b8 tile[4096];\n" +
		prologue +
		"mov.u64 %rd5, tile; add.s64 %rd6, %rd5, %rd10;" + body + "\nret;\n}\n"
}

// What is ordered is no race: the same exchanges with their barriers.
func TestVM_OrderedAccesses(t *testing.T) {
	in := make([]uint32, 64)
	got, err := launch(t, ptxvm.Options{}, shared(`
	cp.async.ca.shared.global [%rd6], [%rd3], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	xor.b32 %r10, %r1, 32; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r11, [%rd7];
	bar.sync 0;
	add.s32 %r11, %r11, %r1;
	st.shared.u32 [%rd6], %r11;
	bar.warp.sync -1;
	xor.b32 %r10, %r1, 1; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r11, [%rd7];
	bar.warp.sync -1;
	st.shared.u32 [%rd6], %r11;
	ld.shared.u32 %r12, [%rd6];
	st.global.u32 [%rd4], %r12;`), threads(64), in, 64)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range got {
		if g != uint32(i^1) {
			t.Errorf("thread %d has %d, want %d", i, g, i^1)
		}
	}
}

// A block's shared memory is new: it holds nothing of the block before.
func TestVM_SharedMemoryOfBlocks(t *testing.T) {
	for _, write := range []string{"", "st.shared.u32 [%rd6], %r1;"} {
		_, err := launch(t, ptxvm.Options{}, shared(`
	mov.u32 %r2, %ctaid.x;
	setp.eq.s32 %p1, %r2, 0;
	@%p1 st.shared.u32 [%rd6], %r1;
	`+write+`
	ld.shared.u32 %r10, [%rd6];`), driver.Grid{Blocks: driver.Dim{X: 3}, Threads: driver.Dim{X: 32}}, []uint32{0}, 1)
		var fault *ptxvm.Fault
		if errors.As(err, &fault) != (write == "") || fault != nil &&
			(fault.Kind != ptxvm.Uninitialised || fault.Block.X != 1) {
			t.Errorf("with %q: got %v", write, err)
		}
	}
}

// Local memory is each thread's own, constants are there, dynamic shared memory follows
// the static.
func TestVM_Memories(t *testing.T) {
	text := `
.const .align 4 .b32 table[4] = {10, 20, 0x1e, 40};
.extern .shared .align 16 .b8 dynamic[];
`
	body := strings.Replace(shared(`
	.local .align 8 .b8 stack[16];
	mov.u64 %rd7, stack;
	cvta.local.u64 %rd7, %rd7;
	st.u32 [%rd7+4], %r1;
	ld.local.u32 %r10, [%rd7+4];
	and.b32 %r11, %r1, 3; mul.wide.u32 %rd8, %r11, 4; mov.u64 %rd9, table; add.s64 %rd8, %rd8, %rd9;
	ld.const.u32 %r11, [%rd8];
	mov.u64 %rd9, dynamic; add.s64 %rd9, %rd9, %rd10;
	cvta.shared.u64 %rd9, %rd9;
	st.u32 [%rd9], %r11;
	st.shared.u32 [%rd6], %r10;
	ld.u32 %r11, [%rd9];
	cvta.to.shared.u64 %rd9, %rd9;
	ld.shared.u32 %r12, [%rd9];
	ld.shared.u32 %r10, [%rd6];
	add.s32 %r10, %r10, %r11; add.s32 %r10, %r10, %r12;
	st.global.u32 [%rd4], %r10;`), ".visible", text+".visible", 1)
	got, err := launch(t, ptxvm.Options{}, body, driver.Grid{Threads: driver.Dim{X: 40}, Shared: 160},
		make([]uint32, 40), 40)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range got {
		if want := uint32(i + 2*[]int{10, 20, 30, 40}[i&3]); g != want {
			t.Errorf("thread %d has %d, want %d", i, g, want)
		}
	}
}

// Special registers, over a grid of three dimensions.
// Rows that are allocations of their own may be as far apart as a test wants.
func TestVM_Gap(t *testing.T) {
	vm := ptxvm.New(ptxvm.Options{Gap: 3 << 30})
	var at [3]driver.Pointer
	for i := range at {
		p, err := vm.Alloc(100)
		if err != nil {
			t.Fatal(err)
		}
		at[i] = p
	}
	if d := at[1] - at[0]; d < 3<<30 || at[2]-at[1] != d {
		t.Errorf("allocations at %#x, want the same distance of 3 GiB between them", at)
	}
}

func TestVM_SpecialRegisters(t *testing.T) {
	const body = `
	mov.u32 %r2, %tid.y; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ntid.x; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %ctaid.x; mov.u32 %r7, %laneid;
	mad.lo.s32 %r10, %r2, %r4, %r1;
	mad.lo.s32 %r11, %r3, %r5, %r6;
	mad.lo.s32 %r11, %r11, 12, %r10;
	mul.wide.u32 %rd5, %r11, 4; add.s64 %rd5, %rd2, %rd5;
	mad.lo.s32 %r11, %r11, 100, %r7;
	st.global.u32 [%rd5], %r11;`
	got, err := launch(t, ptxvm.Options{}, kernel(body),
		driver.Grid{Blocks: driver.Dim{X: 2, Y: 3}, Threads: driver.Dim{X: 4, Y: 3}}, []uint32{0}, 72)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range got {
		if want := uint32(100*i + i%12); g != want {
			t.Errorf("word %d is %d, want %d", i, g, want)
		}
	}
}

// What a driver refuses, before anything runs; only a fault ends the device.
func TestVM_Driver(t *testing.T) {
	vm := ptxvm.New(ptxvm.Options{Memory: 1 << 20})
	m, err := vm.LoadModule([]byte(strings.Replace(kernel("st.global.u32 [%rd4], %r1;"), "\n{",
		"\n.maxntid 64, 1, 1\n{", 1)))
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.Function("k")
	if err != nil {
		t.Fatal(err)
	}
	p, err := vm.Alloc(256)
	if err != nil || p%256 != 0 {
		t.Fatalf("got %#x, %v, want an address aligned to 256", p, err)
	}
	a := driver.Address(p)
	is := func(what string, err error, code driver.Code) {
		t.Helper()
		if !errors.Is(err, code) {
			t.Errorf("%s: got %v, want %v", what, err, code)
		}
	}
	_, err = m.Function("other")
	is("kernel of another name", err, driver.ErrNotFound)
	_, err = vm.Alloc(1 << 20)
	is("too much memory", err, driver.ErrMemory)
	_, err = vm.Alloc(0)
	is("no memory", err, driver.ErrInvalidValue)
	is("too many threads", vm.Launch(f, threads(65), a, a), driver.ErrInvalidValue)
	is("too many blocks", vm.Launch(f, driver.Grid{Blocks: driver.Dim{Y: 1 << 16}, Threads: driver.Dim{X: 1}}, a, a),
		driver.ErrInvalidValue)
	is("an argument short", vm.Launch(f, threads(64), a), driver.ErrInvalidValue)
	is("dynamic shared memory", vm.Launch(f, driver.Grid{Threads: driver.Dim{X: 1}, Shared: 16}, a, a),
		driver.ErrInvalidValue)
	is("too much shared memory", vm.Launch(f, driver.Grid{Threads: driver.Dim{X: 1}, Shared: 64 << 10}, a, a),
		driver.ErrResources)
	is("a copy beyond the end", vm.CopyIn(p+252, make([]byte, 8)), driver.ErrInvalidValue)
	is("a copy from nowhere", vm.CopyOut(make([]byte, 8), 4096), driver.ErrInvalidValue)
	is("free in the middle", vm.Free(p+8), driver.ErrInvalidValue)
	if err := vm.Launch(f, threads(64), a, a); err != nil {
		t.Error(err)
	}
	if vm.Used() != 256 {
		t.Errorf("%d bytes in use, want 256", vm.Used())
	}
	if err := vm.Free(p); err != nil || vm.Used() != 0 {
		t.Errorf("free: %v, %d bytes in use", err, vm.Used())
	}
	is("free twice", vm.Free(p), driver.ErrInvalidValue)
	err = vm.Launch(f, threads(64), a, a)
	is("freed memory", err, driver.ErrAddress)
	var fault *ptxvm.Fault
	if !errors.As(err, &fault) || fault.Kind != ptxvm.Freed {
		t.Errorf("got %v, want a fault of freed memory", err)
	}
	is("a device that is lost", vm.Sync(), driver.ErrAddress)
	_, err = vm.Alloc(256)
	is("a device that is lost", err, driver.ErrAddress)
}

// Texts that must not load, with what the error names.
func TestVM_LoadErrors(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{
			kernel("add.f16x2 %r10, %r10, %r11;"),
			"line 17: add.f16x2 %r10, %r10, %r11;: instruction add.f16x2 is not known",
		},
		{kernel("ld.global.v8.f32 %r10, [%rd1];"), "is not known"},
		{kernel("setp.lt.and.s32 %p1, %r1, %r2, %p2;"), "operands"},
		{kernel("shfl.sync.rot.b32 %r1, %r2, 1, 31, -1;"), "shfl.sync.rot.b32 is not known"},
		{kernel("add.s32 %rd1, %r1, %r2;"), "result's size"},
		{kernel("add.s32 %r1, %r1, %rd2;"), "another size"},
		{kernel("add.s32 %r1, %r1;"), "2 operands; must be 3"},
		{kernel("bra NOWHERE;"), "label NOWHERE"},
		{kernel("mov.u64 %rd1, nothing;"), "nothing is not declared"},
		{kernel("mov.u32 %r1, %clock;"), `operand "%clock"`},
		{kernel("@%r1 bra X; X:"), "must be a predicate"},
		{kernel("cp.async.cg.shared.global [%rd1], [%rd2], 8;"), "copies are of 16 bytes"},
		{kernel("bar.sync 0, 64, 64;"), "3 operands"},
		{kernel("bar.arrive 0;"), "1 operands; must be 2"},
		{kernel("setmaxnreg.inc.sync.aligned.u32 100;"), "multiple of 8"},
		{kernel("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};"), "is not known"},
		{kernel("add.s32 %r10, %r1, %r11;"), "register %r11 may be read before it is written"},
		{kernel("@%p1 bra END; END:"), "before it is written"},
		{
			kernel("setp.eq.s32 %p1, %r1, 0; @%p1 bra END;\nmov.u32 %r10, 1;\nEND: st.global.u32 [%rd4], %r10;"),
			"line 19: END: st.global.u32 [%rd4], %r10;: register %r10",
		},
		{header + ".func f() { ret; }", `directive ".func"`},
		{header + ".visible .entry k(", "ends early"},
		{header + ".shared .align 3 .b8 x[4];", "power of two"},
		{header + ".shared .b8 x[99999999];", "at most"},
	} {
		_, err := ptxvm.New(ptxvm.Options{}).LoadModule([]byte(tt.text))
		if !errors.Is(err, driver.ErrInvalidPTX) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want %q", err, tt.want)
		}
	}
}

func FuzzLoadModule(f *testing.F) {
	f.Add(kernel("st.global.u32 [%rd4], %r1;"))
	f.Add(shared("LOOP: @%p1 bra LOOP; { .reg .b16 %t; mov.b32 {%t, %rs1}, %r1; }"))
	f.Add(tiled{n: 8}.text())
	f.Add(header + ".const .align 4 .f32 x[2] = {0f3F800000, 1};")
	f.Add("/* \"")
	f.Fuzz(func(t *testing.T, text string) {
		vm := ptxvm.New(ptxvm.Options{Memory: 1 << 20, Budget: 1000})
		m, err := vm.LoadModule([]byte(text))
		if err != nil {
			if !errors.Is(err, driver.ErrInvalidPTX) && !errors.Is(err, driver.ErrMemory) {
				t.Errorf("got %v, want a driver's code", err)
			}
			return
		}
		k, err := m.Function("k")
		if err != nil {
			return
		}
		p, err := vm.Alloc(64)
		if err != nil {
			return
		}
		err = vm.Launch(k, threads(33), driver.Address(p), driver.Address(p))
		if err != nil && !slices.ContainsFunc([]driver.Code{
			driver.ErrAddress, driver.ErrMisaligned, driver.ErrLaunchFailed, driver.ErrTimeout, driver.ErrInvalidValue,
			driver.ErrResources,
		}, func(c driver.Code) bool { return errors.Is(err, c) }) {
			t.Errorf("got %v, want a driver's code", err)
		}
	})
}
