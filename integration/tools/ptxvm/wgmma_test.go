package ptxvm_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// tiled is a product of one warpgroup, D [64, n] of A [64, 64] and B [64, n], where tiles
// are what the canonical layouts of CUTLASS say, in shared memory.
type tiled struct {
	n         int
	registers bool // A is in registers
	nMajor    bool // B is
	keep      bool // D is added to
	lines     map[string]string
	guilty    string // the line that is marked as such
	threads   int    // default 128
}

const atB = 9 * 1024 // where B starts, after A

// swizzle is CUTLASS's Swizzle<3, 4, 3> of a byte offset.
func swizzle(offset int) int { return offset ^ offset&(7<<7)>>3 }

func (p tiled) a(m, k int) float32 { return float32((m*64+k)*7%31 - 15) }
func (p tiled) b(k, n int) float32 { return float32((k*p.n+n)*5%29 - 14) }
func (p tiled) d(m, n int) float32 { return float32(m - n) }

// image is what the tiles are in shared memory: ((8,m),(64)):((64,512),(1)) elements of A,
// of B the same or ((64,m),(8,k)):((1,4096),(64,512)).
func (p tiled) image() []uint32 {
	bytes := make([]byte, atB+(p.n+63)/64*8192+1024)
	put := func(tile, offset int, x float32) {
		binary.LittleEndian.PutUint16(bytes[tile+swizzle(2*offset):], uint16(bits(x)>>16))
	}
	for m := range 64 {
		for k := range 64 {
			put(0, m/8*512+m%8*64+k, p.a(m, k))
		}
	}
	for n := range p.n {
		for k := range 64 {
			if p.nMajor {
				put(atB, n/64*4096+n%64+k/8*512+k%8*64, p.b(k, n))
			} else {
				put(atB, n/8*512+n%8*64+k, p.b(k, n))
			}
		}
	}
	return unpack(bytes)
}

// text is a kernel that copies the image to shared memory, and multiplies. lines, by name,
// are put in the place of others.
func (p tiled) text() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		if other, ok := p.lines[name]; ok {
			text = other
		}
		if name != "" && name == p.guilty && !strings.Contains(b.String(), "// guilty") {
			text += " // guilty"
		}
		fmt.Fprintln(&b, text)
	}
	line("", ".reg .f32 %%d<%d>;\n.reg .b32 %%a<4>;\nmov.u64 %%rd5, tile;", p.n/2)
	line("", "mul.wide.u32 %%rd7, %%r1, 16; add.s64 %%rd8, %%rd1, %%rd7; add.s64 %%rd9, %%rd5, %%rd7;")
	words := len(p.image())
	for i := 0; i < 4*words; i += 2048 {
		line("", "ld.global.v4.u32 {%%r10, %%r11, %%r12, %%r13}, [%%rd8+%d];", i)
		line("", "st.shared.v4.u32 [%%rd9+%d], {%%r10, %%r11, %%r12, %%r13};", i)
	}
	var d []string
	for i := range p.n / 2 {
		d = append(d, fmt.Sprintf("%%d%d", i))
	}
	// D at the start: row - column.
	line("", "shr.u32 %%r20, %%r1, 5; mul.lo.s32 %%r20, %%r20, 16;")
	line("", "shr.u32 %%r21, %%r1, 2; and.b32 %%r21, %%r21, 7;")
	line("", "add.s32 %%r20, %%r20, %%r21; and.b32 %%r21, %%r1, 3; mul.lo.s32 %%r21, %%r21, 2;")
	line("", "sub.s32 %%r20, %%r20, %%r21;")
	for i := range p.n / 2 {
		line("start", "add.s32 %%r21, %%r20, %d; cvt.rn.f32.s32 %%d%d, %%r21;", i>>1&1*8-i/4*8-i&1, i)
	}
	line("fence", "fence.proxy.async;")
	line("barrier", "bar.sync 0;")
	line("", "shr.u64 %%rd11, %%rd5, 4;")
	line("", "mov.u64 %%rd12, %d; or.b64 %%rd11, %%rd11, %%rd12;", 1<<62|1024>>4<<32)
	line("", "add.s64 %%rd13, %%rd11, %d;", atB>>4)
	if p.nMajor {
		line("", "mov.u64 %%rd12, %d; or.b64 %%rd13, %%rd13, %%rd12;", 8192>>4<<16)
	}
	line("descriptor", "")
	scale := 1
	if p.keep {
		scale = 0
	}
	line("scale", "setp.ge.s32 %%p1, %%r1, 0; setp.eq.s32 %%p2, %d, 0;", scale)
	line("arrive", "wgmma.fence.sync.aligned;")
	for i := range 4 {
		keep, operand, trans := "%p1", "%rd11", "0, 0"
		if i == 0 {
			keep = "%p2"
		}
		if p.nMajor {
			trans = "0, 1"
		}
		if p.registers {
			operand, trans = "{%a0, %a1, %a2, %a3}", trans[3:]
			p.fragment(line, i)
		}
		line("product", "wgmma.mma_async.sync.aligned.m64n%dk16.f32.bf16.bf16 {%s}, %s, %%rd13, %s, 1, 1, %s;", p.n,
			strings.Join(d, ", "), operand, keep, trans)
		step := 32
		if p.nMajor {
			step = 2048
		}
		line("", "add.s64 %%rd11, %%rd11, %d; add.s64 %%rd13, %%rd13, %d;", 32>>4, step>>4)
		if p.registers {
			line("", "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
		}
	}
	line("after", "")
	line("commit", "wgmma.commit_group.sync.aligned;")
	line("wait", "wgmma.wait_group.sync.aligned 0;")
	line("store", "mul.wide.u32 %%rd7, %%r1, %d; add.s64 %%rd9, %%rd2, %%rd7;", 2*p.n)
	for i := range p.n / 2 {
		line("read", "st.global.f32 [%%rd9+%d], %%d%d;", 4*i, i)
	}
	return headerHopper + ".extern .shared .align 1024 .b8 tile[];\n" + kernel(b.String())[len(header):]
}

// fragment loads the registers of A for a step: rows g and g+8, columns 2t and 2t+8.
func (p tiled) fragment(line func(name, format string, args ...any), step int) {
	for i := range 4 {
		line("", "shr.u32 %%r22, %%r1, 5; mul.lo.s32 %%r22, %%r22, 16;")
		line("", "shr.u32 %%r23, %%r1, 2; and.b32 %%r23, %%r23, 7;")
		line("", "add.s32 %%r22, %%r22, %%r23; add.s32 %%r22, %%r22, %d; mul.lo.s32 %%r22, %%r22, 128;", 8*(i&1))
		line("", "and.b32 %%r23, %%r1, 3; mul.lo.s32 %%r23, %%r23, 4; add.s32 %%r22, %%r22, %%r23;")
		line("", "add.s32 %%r22, %%r22, %d; and.b32 %%r23, %%r22, 896; shr.u32 %%r23, %%r23, 3;", 32*step+16*(i>>1))
		line("", "xor.b32 %%r22, %%r22, %%r23; cvt.u64.u32 %%rd7, %%r22; add.s64 %%rd7, %%rd7, %%rd5;")
		line("", "ld.shared.u32 %%a%d, [%%rd7];", i)
	}
	line("arrive", "wgmma.fence.sync.aligned;")
}

func (p tiled) run(t *testing.T, o ptxvm.Options) ([]uint32, error) {
	t.Helper()
	image := p.image()
	if p.threads == 0 {
		p.threads = 128
	}
	return launch(t, o, p.text(), driver.Grid{Threads: driver.Dim{X: p.threads}, Shared: 4 * len(image)}, image, 64*p.n)
}

// Tiles and fragments of wgmma lie as the ISA says: products of small integers are exact
// in every mode.
func TestWGMMA_Layout(t *testing.T) {
	for i, p := range []tiled{
		{n: 8},
		{n: 32, keep: true},
		{n: 32, nMajor: true},
		{n: 64, registers: true},
		{n: 64, nMajor: true, keep: true},
		{n: 96, registers: true, nMajor: true, keep: true},
		{n: 128, keep: true},
		{n: 128, nMajor: true},
		{n: 256, nMajor: true},
		{n: 256, registers: true},
	} {
		p.check(t, ptxvm.Options{Numerics: []ptxvm.Numerics{ptxvm.Hopper, ptxvm.Chain, ptxvm.Ampere}[i%3]})
		p.check(t, ptxvm.Options{Unchecked: true})
	}
}

// check compares all of D.
func (p tiled) check(t *testing.T, o ptxvm.Options) {
	t.Helper()
	got, err := p.run(t, o)
	if err != nil {
		t.Fatalf("%+v: %v", p, err)
	}
	for thread := range 128 {
		for r := range p.n / 2 {
			m := 16*(thread/32) + thread%32/4 + 8*(r>>1&1)
			n := r/4*8 + 2*(thread%4) + r&1
			want := float32(0)
			if p.keep {
				want = p.d(m, n)
			}
			for k := range 64 {
				want += p.a(m, k) * p.b(k, n)
			}
			if g := math.Float32frombits(got[thread*p.n/2+r]); g != want {
				t.Fatalf("%+v: element (%d, %d) is %v, want %v", p, m, n, g, want)
			}
		}
	}
}

const (
	// again writes what is there to 16 bytes of the rows of A that the thread's warp multiplies.
	again = `
	shr.u32 %r20, %r1, 5; mul.lo.s32 %r20, %r20, 1536; mul.wide.u32 %rd7, %r20, 1; add.s64 %rd7, %rd7, %rd9;
	ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%rd7]; st.shared.v4.u32 [%rd7], {%r10, %r11, %r12, %r13};`
	overwrite = "st.shared.v4.u32 [%rd9+9216], {%r10, %r11, %r12, %r13};" // of B
	another   = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " +
		"{%d0, %d1, %d2, %d3}, %rd11, %rd13, %p1, 1, 1, 0, 0;"
)

// What is ordered is no fault.
func TestWGMMA_Ordered(t *testing.T) {
	for _, p := range []tiled{
		{n: 32, lines: map[string]string{"start": ""}}, // D is not added to
		{n: 8, lines: map[string]string{"wait": "wgmma.wait_group.sync.aligned 0; bar.sync 0;" + overwrite}},
		{n: 8, lines: map[string]string{
			"wait": "bar.sync 0; wgmma.wait_group.sync.aligned 0; bar.sync 0;" + overwrite,
		}},
		{n: 8, lines: map[string]string{"descriptor": again + "fence.proxy.async.shared::cta; bar.warp.sync -1;"}},
		{n: 8, lines: map[string]string{ // by the warp that waited
			"wait": "wgmma.wait_group.sync.aligned 0;" + again,
		}},
		{n: 8, lines: map[string]string{"fence": "cp.async.cg.shared.global [%rd9], [%rd8], 16; " +
			"cp.async.wait_all; fence.proxy.async;"}},
		{n: 8, lines: map[string]string{ // as compilers put assembly
			"arrive": "wgmma.fence.sync.aligned;\n// begin inline asm\n{\n.reg .pred p;\nsetp.ne.b32 p, %r2, 0;\n" +
				strings.NewReplacer("%p1", "p", "%d2,", "\n%d2,").Replace(another) + "\n}\n// end inline asm",
			"start": "mov.u32 %r2, %ntid.x; mov.f32 %d0, 0f00000000; mov.f32 %d1, %d0; mov.f32 %d2, %d0; " +
				"mov.f32 %d3, %d0;",
		}},
		{n: 8, lines: map[string]string{ // D is not that of the group that still runs
			"after": "wgmma.commit_group.sync.aligned; setp.lt.s32 %p1, %r1, 0; mov.u64 %rd11, %rd13;" +
				strings.ReplaceAll(another, "%d", "%f"),
			"wait": "wgmma.wait_group.sync.aligned 1; add.f32 %d0, %d0, 0f00000000; wgmma.wait_group.sync.aligned 0;",
		}},
	} {
		p.check(t, ptxvm.Options{})
	}
}

const headerHopper = ".version 8.0\n.target sm_90a\n.address_size 64\n"

// What wgmma cannot do, and what this package does not know, does not load.
func TestWGMMA_LoadErrors(t *testing.T) {
	product := func(shape, operands string) string {
		return "mov.f32 %f1, 0f00000000; setp.eq.s32 %p1, %r1, 0;\n" +
			"wgmma.mma_async.sync.aligned." + shape + " {%f1, %f2, %f3, %f4}, " + operands + ";"
	}
	const small = "m64n8k16.f32.bf16.bf16"
	for _, tt := range []struct{ body, want string }{
		{product(small, "%rd1, %rd2, %p1, -1, 1, 0, 0"), "imm-scale-a is -1"},
		{product(small, "%rd1, %rd2, %p1, 1, -1, 0, 0"), "imm-scale-b is -1"},
		{product(small, "%rd1, %rd2, %p1, 1, 1, 1, 0"), "imm-trans-a is 1"},
		{product(small, "%rd1, %rd2, %p1, 1, 1, 0, 2"), "imm-trans-b is 2"},
		{product(small, "%rd1, %rd2, 1, 1, 1, 0, 0"), "must be a predicate"},
		{product(small, "%rd1, %rd2, %p1, 1, 1, 0"), "7 operands; must be 8"},
		{product(small, "{%r1, %r1, %r1, %r1}, %rd2, %p1, 1, 1, 0, 0"), "8 operands; must be 7"},
		{product(small, "{%r1, %r1}, %rd2, %p1, 1, 1, 0"), "2 registers; must be 4"},
		{product("m64n16k16.f32.bf16.bf16", "%rd1, %rd2, %p1, 1, 1, 0, 0"), "4 registers; must be 8"},
		{product("m64n12k16.f32.bf16.bf16", "%rd1, %rd2, %p1, 1, 1, 0, 0"), "is not known"},
		{product("m64n264k16.f32.bf16.bf16", "%rd1, %rd2, %p1, 1, 1, 0, 0"), "is not known"},
		{product("m64n8k16.f32.f16.f16", "%rd1, %rd2, %p1, 1, 1, 0, 0"), "is not known"},
		{"wgmma.wait_group.sync.aligned;", "0 operands"},
		{"wgmma.wait_group.sync.aligned 8;", "from 0 to 7"},
		{"fence.sc.gpu;", "is not known"},
	} {
		text := headerHopper + kernel(tt.body)[len(header):]
		_, err := ptxvm.New(ptxvm.Options{}).LoadModule([]byte(text))
		if !errors.Is(err, driver.ErrInvalidPTX) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.body, err, tt.want)
		}
	}
	for _, other := range []string{".version 8.8\n.target sm_90\n", ".version 7.8\n.target sm_90a\n"} {
		text := other + kernel("wgmma.fence.sync.aligned;")[len(header):]
		_, err := ptxvm.New(ptxvm.Options{}).LoadModule([]byte(text))
		if err == nil || !strings.Contains(err.Error(), "needs .target sm_90a and .version 8.0") {
			t.Errorf("%q: got %v", other, err)
		}
	}
}

// A kernel for Hopper may have 227 KiB of shared memory, aligned as it asks for.
func TestVM_SharedMemoryOfHopper(t *testing.T) {
	text := headerHopper + ".extern .shared .align 1024 .b8 tile[];\n" + kernel(`
	.shared .align 4 .b8 first[4];
	mov.u64 %rd5, first; st.shared.u32 [%rd5], %r1;
	fence.proxy.async.shared::cta;
	mov.u64 %rd5, tile; cvt.u32.u64 %r10, %rd5; and.b32 %r10, %r10, 1023;
	st.shared.u32 [%rd5+231420], %r10;
	ld.shared.u32 %r11, [%rd5+231420];
	st.global.u32 [%rd4], %r11;`)[len(header):]
	grid := driver.Grid{Threads: driver.Dim{X: 1}, Shared: 226 << 10}
	got, err := launch(t, ptxvm.Options{}, text, grid, []uint32{0}, 1)
	if err != nil || got[0] != 0 {
		t.Errorf("got %v, %v, want an address aligned to 1024", got, err)
	}
	grid.Shared++
	if _, err := launch(t, ptxvm.Options{}, text, grid, []uint32{0}, 1); !errors.Is(err, driver.ErrResources) {
		t.Errorf("got %v, want %v", err, driver.ErrResources)
	}
	text = ".target sm_80\n" + text[strings.Index(text, ".address_size"):]
	text = strings.Replace(text, "fence.proxy.async.shared::cta;", "", 1)
	if _, err := launch(t, ptxvm.Options{}, text, grid, []uint32{0}, 1); !errors.Is(err, driver.ErrResources) {
		t.Errorf("got %v, want %v", err, driver.ErrResources)
	}
}

// mistakes are those that people make with wgmma, and how each is reported.
var mistakes = []struct {
	name string
	p    tiled
	kind ptxvm.Kind
}{
	{"no wait", tiled{guilty: "read", lines: map[string]string{"wait": ""}}, ptxvm.Pending},
	{"a wait that is one group too weak", tiled{guilty: "read", lines: map[string]string{
		"wait": "wgmma.wait_group.sync.aligned 1;",
	}}, ptxvm.Pending},
	{"a group that is not committed", tiled{guilty: "read", lines: map[string]string{"commit": ""}}, ptxvm.Pending},
	{"a thread ends", tiled{lines: map[string]string{"wait": "ret; // guilty"}}, ptxvm.Pending},
	{"D is written", tiled{lines: map[string]string{"after": "mov.f32 %d0, 0f00000000; // guilty"}}, ptxvm.Pending},
	{"D of another shape", tiled{n: 16, lines: map[string]string{"after": another + "// guilty"}}, ptxvm.Pending},
	{"A is written", tiled{registers: true, lines: map[string]string{
		"product": "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, " +
			"%rd13, %p2, 1, 1, 0;\nmov.b32 %a1, 0; // guilty",
	}}, ptxvm.Pending},
	{"A is D of a product", tiled{lines: map[string]string{
		"after": "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%d0, %d1, %d2, %d3}, " +
			"%rd13, %p2, 1, 1, 0; // guilty",
	}}, ptxvm.Pending},
	{"no wgmma.fence", tiled{guilty: "product", lines: map[string]string{"arrive": ""}}, ptxvm.Race},
	{"D is written after wgmma.fence", tiled{guilty: "product", lines: map[string]string{
		"arrive": "wgmma.fence.sync.aligned; mov.f32 %d1, 0f00000000;",
	}}, ptxvm.Race},
	{
		"D that was never written",
		tiled{guilty: "product", keep: true, lines: map[string]string{"start": ""}},
		ptxvm.Uninitialised,
	},
	{"no proxy fence", tiled{guilty: "product", lines: map[string]string{"fence": ""}}, ptxvm.Proxy},
	{"a proxy fence before the write", tiled{guilty: "product", lines: map[string]string{
		"fence": "fence.proxy.async; st.shared.v4.u32 [%rd9], {%r10, %r11, %r12, %r13};",
	}}, ptxvm.Proxy},
	{"a proxy fence after the barrier", tiled{guilty: "product", lines: map[string]string{
		"fence": "bar.sync 0;", "barrier": "fence.proxy.async;",
	}}, ptxvm.Proxy},
	{"a proxy fence of one thread after the barrier", tiled{guilty: "product", lines: map[string]string{
		"fence":   "setp.lt.s32 %p3, %r1, 32; @!%p3 fence.proxy.async;",
		"barrier": "bar.sync 0; @%p3 fence.proxy.async; bar.warp.sync -1;",
	}}, ptxvm.Proxy},
	{"no barrier in the warp", tiled{guilty: "product", lines: map[string]string{
		"descriptor": again + "fence.proxy.async;",
	}}, ptxvm.Race},
	{"no barrier", tiled{guilty: "product", lines: map[string]string{"barrier": ""}}, ptxvm.Race},
	{"a copy that was not waited for", tiled{guilty: "product", lines: map[string]string{
		"fence": "cp.async.cg.shared.global [%rd9], [%rd8], 16; cp.async.commit_group; fence.proxy.async;",
	}}, ptxvm.Pending},
	{"B is overwritten before the wait", tiled{lines: map[string]string{
		"after": "bar.sync 0;\n" + overwrite + "// guilty",
	}}, ptxvm.Race},
	{"B is copied to before the wait", tiled{lines: map[string]string{
		"after": "bar.sync 0;\ncp.async.cg.shared.global [%rd9+9216], [%rd8], 16; // guilty",
	}}, ptxvm.Race},
	{"B is overwritten before others wait", tiled{lines: map[string]string{
		"wait": "bar.sync 0; setp.ge.s32 %p3, %r1, 32; wgmma.wait_group.sync.aligned 0; @%p3 bra SKIP;\n" + overwrite +
			"// guilty\nSKIP:",
	}}, ptxvm.Race},
	{"B is overwritten by the last that waits", tiled{lines: map[string]string{
		"wait": "bar.sync 0; setp.lt.s32 %p3, %r1, 96; wgmma.wait_group.sync.aligned 0; @%p3 bra SKIP;\n" +
			"st.shared.v4.u32 [%rd9+7680], {%r10, %r11, %r12, %r13}; // guilty\nSKIP:",
	}}, ptxvm.Race},
	{"A is in the tile of no one", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "add.s64 %rd11, %rd11, 8192;",
	}}, ptxvm.Bounds},
	{"no swizzle", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "shl.b64 %rd11, %rd11, 2; shr.u64 %rd11, %rd11, 2;",
	}}, ptxvm.Descriptor},
	{"another swizzle", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "mov.u64 %rd12, -9223372036854775808; or.b64 %rd13, %rd13, %rd12;",
	}}, ptxvm.Descriptor},
	{"a base offset", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "or.b64 %rd11, %rd11, 562949953421312;",
	}}, ptxvm.Descriptor},
	{"an address that is not shifted", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "or.b64 %rd11, %rd11, 16384;",
	}}, ptxvm.Descriptor},
	{
		"rows across 128 bytes", tiled{guilty: "product", lines: map[string]string{
			"descriptor": "add.s64 %rd11, %rd11, 7;",
		}}, ptxvm.Descriptor,
	},
	{"lanes of another descriptor", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "and.b32 %r20, %r1, 2; cvt.u64.u32 %rd12, %r20; add.s64 %rd13, %rd13, %rd12;",
	}}, ptxvm.Divergence},
	{"warps of another descriptor", tiled{guilty: "product", lines: map[string]string{
		"descriptor": "shr.u32 %r20, %r1, 6; mul.wide.u32 %rd12, %r20, 2; add.s64 %rd11, %rd11, %rd12;",
	}}, ptxvm.Divergence},
	{"lanes of another scale-d", tiled{guilty: "product", lines: map[string]string{
		"scale": "setp.ge.s32 %p1, %r1, 0; setp.eq.s32 %p2, %r1, 3;",
	}}, ptxvm.Divergence},
	{"half of a warpgroup", tiled{guilty: "product", threads: 64}, ptxvm.Divergence},
	{"a warp skips a product", tiled{lines: map[string]string{
		"arrive": "wgmma.fence.sync.aligned; setp.lt.s32 %p3, %r1, 32; @%p3 bra SKIP;\n" + another + "// guilty\nSKIP:",
	}}, ptxvm.Divergence},
	{"a warp ends after fewer products", tiled{lines: map[string]string{
		"after": "setp.lt.s32 %p3, %r1, 32; @%p3 bra SKIP;\n" + another + "\nSKIP:",
		"wait":  "wgmma.wait_group.sync.aligned 0;\nret; // guilty",
	}}, ptxvm.Divergence},
	{"lanes skip a product", tiled{guilty: "product", lines: map[string]string{
		"arrive": "wgmma.fence.sync.aligned; setp.lt.s32 %p3, %r1, 31; @!%p3 bra SKIP;", "after": "SKIP:",
	}}, ptxvm.Divergence},
}

// Each is reported by its kind, at the guilty line.
func TestWGMMA_Faults(t *testing.T) {
	for _, tt := range mistakes {
		t.Run(tt.name, func(t *testing.T) {
			if tt.p.n == 0 {
				tt.p.n = 8
			}
			_, err := tt.p.run(t, ptxvm.Options{})
			var fault *ptxvm.Fault
			if !errors.As(err, &fault) {
				t.Fatalf("got %v, want a fault", err)
			}
			text := tt.p.text()
			line := 1 + strings.Count(text[:strings.Index(text, "// guilty")], "\n")
			if fault.Kind != tt.kind || fault.Line != line {
				t.Errorf("got %v, want %s at line %d", err, tt.kind, line)
			}
		})
	}
}
