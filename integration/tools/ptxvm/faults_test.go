package ptxvm_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

const loop = `
FOREVER: bra FOREVER; // guilty`

// faults are planted bugs, and how each is reported: at the guilty line.
var faults = []struct {
	name string
	text string
	grid driver.Grid
	kind ptxvm.Kind
	code driver.Code
}{
	{"beyond the end", kernel("st.global.u32 [%rd4+4], %r1; // guilty"), threads(64), ptxvm.Bounds, driver.ErrAddress},
	{
		"before the start", kernel("ld.global.u32 %r10, [%rd3+-4]; // guilty"), threads(1), ptxvm.Bounds,
		driver.ErrAddress,
	},
	{
		"no address", kernel("mov.u64 %rd5, 0; ld.shared.u32 %r10, [%rd5]; // guilty"), threads(1), ptxvm.Bounds,
		driver.ErrAddress,
	},
	{
		"vector at a word", kernel("ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1+4]; // guilty"), threads(1),
		ptxvm.Misaligned, driver.ErrMisaligned,
	},
	{
		"never written", kernel("ld.global.u32 %r10, [%rd4]; // guilty"), threads(1), ptxvm.Uninitialised,
		driver.ErrLaunchFailed,
	},
	{"shared memory never written", shared(`
	st.shared.u32 [%rd6], %r1;
	bar.sync 0;
	ld.shared.u32 %r10, [%rd6+128]; // guilty`), threads(32), ptxvm.Uninitialised, driver.ErrLaunchFailed},
	{"no barrier between warps", shared(`
	st.shared.u32 [%rd6], %r1;
	bar.warp.sync -1;
	xor.b32 %r10, %r1, 32; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r10, [%rd7]; // guilty`), threads(64), ptxvm.Uninitialised, driver.ErrLaunchFailed},
	{"no barrier before the next write", shared(`
	st.shared.u32 [%rd6], %r1;
	bar.sync 0;
	xor.b32 %r10, %r1, 32; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r10, [%rd7]; // guilty
	st.shared.u32 [%rd6], %r10;`), threads(64), ptxvm.Race, driver.ErrLaunchFailed},
	{"exchange within a warp without bar.warp.sync", shared(`
	st.shared.u32 [%rd6], %r1;
	xor.b32 %r10, %r1, 1; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r10, [%rd7]; // guilty`), threads(32), ptxvm.Race, driver.ErrLaunchFailed},
	{
		"two threads write one word", shared("st.shared.u32 [%rd5], %r1; // guilty"), threads(32), ptxvm.Race,
		driver.ErrLaunchFailed,
	},
	{
		"two blocks write one word", kernel("st.global.u32 [%rd4], %r1; // guilty"),
		driver.Grid{Blocks: driver.Dim{X: 2}, Threads: driver.Dim{X: 32}},
		ptxvm.Race, driver.ErrLaunchFailed,
	},
	{"one block reads what another wrote", kernel(`
	mov.u32 %r2, %ctaid.x;
	setp.ne.s32 %p1, %r2, 0;
	@%p1 bra READ;
	st.global.u32 [%rd4], %r1;
	ret;
READ: ld.global.u32 %r10, [%rd4]; // guilty`), driver.Grid{Blocks: driver.Dim{X: 2}, Threads: driver.Dim{X: 32}}, ptxvm.Race, driver.ErrLaunchFailed},
	{"one block writes what others read", kernel(`
	ld.global.u32 %r10, [%rd3];
	mov.u32 %r2, %ctaid.x;
	setp.ne.s32 %p1, %r2, 2;
	@%p1 ret;
	st.global.u32 [%rd3], %r1; // guilty`), driver.Grid{Blocks: driver.Dim{X: 3}, Threads: driver.Dim{X: 32}}, ptxvm.Race, driver.ErrLaunchFailed},
	{"barrier under a condition", kernel(`
	setp.gt.s32 %p1, %r1, 10;
	@%p1 bra SKIP;
	bar.sync 0; // guilty
SKIP: bar.sync 0;`), threads(32), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"guarded barrier", kernel(`
	setp.gt.s32 %p1, %r1, 10;
	@%p1 bar.sync 0; // guilty`), threads(32), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"warps at different barriers", kernel(`
	setp.gt.s32 %p1, %r1, 31;
	@%p1 bra HIGH;
	bar.sync 0;
	ret;
HIGH: bar.sync 0; // guilty`), threads(64), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"shuffle in a branch", kernel(`
	setp.gt.s32 %p1, %r1, 10;
	@%p1 bra SKIP;
	shfl.sync.idx.b32 %r10, %r1, 0, 31, -1; // guilty
SKIP: shfl.sync.idx.b32 %r10, %r1, 0, 31, -1;`), threads(32), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"shuffle from a lane outside of the mask", kernel(`
	setp.gt.s32 %p1, %r1, 15;
	@%p1 ret;
	shfl.sync.bfly.b32 %r10, %r1, 16, 31, 0xffff; // guilty`), threads(32), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"bra.uni that parts", kernel(`
	setp.gt.s32 %p1, %r1, 10;
	@%p1 bra.uni SKIP; // guilty
SKIP: st.global.u32 [%rd4], %r1;`), threads(32), ptxvm.Divergence, driver.ErrLaunchFailed},
	{"copy read before the wait", shared(`
	cp.async.ca.shared.global [%rd6], [%rd3], 4;
	cp.async.commit_group;
	ld.shared.u32 %r10, [%rd6]; // guilty
	cp.async.wait_all;`), threads(32), ptxvm.Pending, driver.ErrLaunchFailed},
	{"a wait that is one group too weak", shared(`
	cp.async.ca.shared.global [%rd6], [%rd3], 4;
	cp.async.commit_group;
	cp.async.wait_group 1;
	ld.shared.u32 %r10, [%rd6]; // guilty
	cp.async.wait_all;`), threads(32), ptxvm.Pending, driver.ErrLaunchFailed},
	{"copy of another thread without a barrier", shared(`
	cp.async.ca.shared.global [%rd6], [%rd3], 4;
	cp.async.wait_all;
	xor.b32 %r10, %r1, 1; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd5, %rd7;
	ld.shared.u32 %r10, [%rd7]; // guilty`), threads(32), ptxvm.Race, driver.ErrLaunchFailed},
	{
		"copy that nobody waits for", shared("cp.async.ca.shared.global [%rd6], [%rd3], 4;\nret; // guilty\n"),
		threads(32), ptxvm.Pending, driver.ErrLaunchFailed,
	},
	{"copy of too many bytes", shared("mov.u32 %r10, 8;\ncp.async.ca.shared.global [%rd6], [%rd3], 4, %r10; // " +
		"guilty\n"), threads(1), ptxvm.Bounds, driver.ErrAddress},
	{
		"matrix load without all lanes", shared("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%rd5]; // guilty"),
		threads(31), ptxvm.Divergence, driver.ErrLaunchFailed,
	},
	{
		"division by 0", kernel("div.s32 %r10, %r1, %r1; // guilty"), threads(1), ptxvm.Arithmetic,
		driver.ErrLaunchFailed,
	},
	{"endless loop", kernel(loop), threads(32), ptxvm.Budget, driver.ErrTimeout},
	{
		"constant written", strings.Replace(kernel("mov.u64 %rd5, table;\nst.global.u32 [%rd5], %r1; // guilty"),
			".visible", ".const .align 4 .b32 table[1] = {1};\n.visible", 1), threads(1), ptxvm.ReadOnly,
		driver.ErrAddress,
	},
}

func TestVM_Faults(t *testing.T) {
	for _, tt := range faults {
		t.Run(tt.name, func(t *testing.T) {
			_, err := launch(t, ptxvm.Options{Budget: 100000}, tt.text, tt.grid, make([]uint32, 64), 64)
			var fault *ptxvm.Fault
			if !errors.As(err, &fault) {
				t.Fatalf("got %v, want a fault", err)
			}
			line := 1 + strings.Count(tt.text[:strings.Index(tt.text, "// guilty")], "\n")
			if fault.Kind != tt.kind || !errors.Is(err, tt.code) || fault.Line != line || fault.Kernel != "k" {
				t.Errorf("got %v (%v), want %s (%v) at line %d", err, fault.Unwrap(), tt.kind, tt.code, line)
			}
		})
	}
}
