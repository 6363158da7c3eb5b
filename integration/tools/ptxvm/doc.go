// Package ptxvm interprets PTX in plain Go: it plays the driver of a GPU (package driver)
// where there is none, so that the kernels that ship, with the code that launches them,
// run in every build.
//
// A kernel is decoded once: each register, immediate and special register becomes a slot
// of 32 lanes, each instruction a function over slots. The lanes of a warp run in
// lockstep; where they diverge, the group with the lowest program counter runs first, and
// groups that meet join. An instruction that the whole warp must execute parks its group
// until the others arrive or end. Warps of a block run in turn from barrier to barrier,
// blocks one after another, so a launch has one result.
//
// What a GPU lets pass, or crashes on without a word, is a [Fault] here that names the
// kernel, the line of the PTX, block and thread: accesses out of bounds or misaligned, to
// freed memory, of bytes never written or still being copied, races between threads and
// between blocks whatever order they happened to run in, warp-wide instructions with
// missing lanes, barriers that some threads miss, endless loops. An instruction that is
// not known fails the load.
//
// Products of a warpgroup (wgmma, of bf16, with tiles of 128 swizzled bytes) are computed
// when a warp starts them. What may happen to them up to the wait is checked: registers of a
// product under way that others use, or that no wgmma.fence orders before it, shared memory
// that is written while it may be read, or that a fence.proxy.async of its writer and a
// barrier do not make visible, warps of a group that do not start the same products.
//
// Arithmetic is IEEE where PTX says so, with the same bits as a GPU. The .approx
// functions are correctly rounded, or, with jitter, off by as much as hardware may be.
// The accumulation of mma.sync, which PTX leaves open, follows a published model of the
// hardware or is a chain of float32 additions; see [Numerics].
package ptxvm
