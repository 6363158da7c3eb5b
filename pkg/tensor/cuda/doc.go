// Package cuda is the tensor.Device of an NVIDIA GPU: weights in its memory, kernels of
// package kernels, launches in one order on one stream.
//
// The GPU is behind an interface, package driver, so that all of this also runs without
// one: package ptxvm interprets the same PTX. Computation is in float32 with IEEE
// operations only, and every sum has one order, whatever the batch: the interpreter's bits
// are those that IEEE 754 asks of a GPU.
//
// Memory comes from a pool with a ceiling. An operation of a session cannot fail; what
// goes wrong in one (no memory, a faulty kernel, a lost device) makes the operations after
// it do nothing, and is what Run returns.
package cuda
