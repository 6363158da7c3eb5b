package ptxvm_test

import (
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// counted launches kernel k of a text on 2^16 bytes that image begins and 2^16 more, and returns what it did.
func counted(
	t *testing.T, text string, capability int, g driver.Grid, image []uint32,
) (c ptxvm.Counts, in, out driver.Pointer) {
	t.Helper()
	vm := ptxvm.New(ptxvm.Options{Count: true, Capability: capability, Memory: 1 << 40})
	f := load(t, vm, text)
	for _, at := range []*driver.Pointer{&in, &out} {
		var err error
		if *at, err = vm.Alloc(1 << 16); err != nil {
			t.Fatal(err)
		}
	}
	if len(image) > 0 {
		if err := vm.CopyIn(in, words(image...)); err != nil {
			t.Fatal(err)
		}
	}
	if err := vm.Launch(f, g, driver.Address(in), driver.Address(out)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if err := vm.CopyOut(b, out); err != nil || unpack(b)[0] != 0 {
		t.Errorf("memory that nothing was copied to holds %v, %v", b, err)
	}
	return vm.Counts(), in, out
}

// Each warp that comes to an instruction counts, and each lane whose guard is on: here 40 threads are two warps, and
// loop three times. Memory that nothing was copied to is 0.
func TestCounts(t *testing.T) {
	text := kernel(`
	ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
	mov.u32 %r2, 0;
again:
	fma.rn.f32 %f1, %f1, %f2, %f3;
	add.s32 %r2, %r2, 1;
	setp.lt.s32 %p1, %r2, 3;
	@%p1 bra again;
	setp.lt.u32 %p2, %r1, 4;
	@%p2 mul.rn.f32 %f1, %f1, %f2;
	div.rn.f32 %f5, %f1, 0f3f800000;
	st.global.f32 [%rd4], %f5;`)
	c, in, out := counted(t, text, 80, driver.Grid{Blocks: driver.Dim{X: 2}, Threads: driver.Dim{X: 40}}, nil)
	if want := 4 * (6 + 2 + 3*4 + 5); c.Instructions != want {
		t.Errorf("%d instructions, want %d", c.Instructions, want)
	}
	if want := 2 * (40*3*2 + 4 + 40); c.Flops != want || c.Special != 2*40 || c.Products != 0 {
		t.Errorf("%d FLOP, %d special, %d of tensor cores; want %d, 80, 0", c.Flops, c.Special, c.Products, want)
	}
	if c.Read[in] != 2*40*16 || c.Written[out] != 2*40*4 || len(c.Read) != 1 || len(c.Written) != 1 {
		t.Errorf("reads %v of %v, writes %v of %v", c.Read, in, c.Written, out)
	}
}

// Products of tensor cores are those of the whole warp or warpgroup.
func TestCounts_Products(t *testing.T) {
	p := tiled{n: 128}
	g := driver.Grid{Threads: driver.Dim{X: 128}, Shared: 4 * len(p.image())}
	if c, _, _ := counted(t, p.text(), 90, g, p.image()); c.Products != 2*64*128*64 {
		t.Errorf("%d FLOP of a product of a warpgroup, want %d", c.Products, 2*64*128*64)
	}
	text := kernel(`
	mov.f32 %f1, 0f00000000; mov.u32 %r2, 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r2, %r2, %r2, %r2}, {%r2, %r2}, {%f1, %f1, %f1, %f1};`)
	if c, _, _ := counted(t, text, 80, driver.Grid{Threads: driver.Dim{X: 64}}, nil); c.Products != 2*2*16*8*16 {
		t.Errorf("%d FLOP of two products of warps, want %d", c.Products, 2*2*16*8*16)
	}
}
