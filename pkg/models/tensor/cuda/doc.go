// Package cuda is the tensor.Device of an NVIDIA GPU. Weights are in its memory; it runs the
// kernels of package kernels in one order on one stream. Results of CopyOutLater are copied on
// another stream, while the kernels of the next session run.
//
// The GPU is behind an interface, package driver, so that all of this also runs without
// one: package ptxvm interprets the same PTX. Computation is in float32 with IEEE
// operations only: the interpreter's bits are those that IEEE 754 asks of a GPU. With
// [Options].Factors BF16, products and attention round their factors and run on tensor
// cores, whose sums differ from one GPU to another. Every sum has one order, whatever the
// batch, but those of cuBLASLt, which multiplies in bf16 where it is installed: the name
// of the device says so, and [Options].Deterministic keeps it out.
//
// Memory comes from a pool with a ceiling. An operation of a session cannot fail; what
// goes wrong in one (no memory, a faulty kernel, a lost device) makes the operations after
// it do nothing, and is what Run returns.
package cuda
