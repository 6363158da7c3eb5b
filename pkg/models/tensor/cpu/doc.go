// Package cpu is the tensor.Device of the CPU, in float32: matrix products with packed
// weights, attention, norms, rotary embeddings, convolutions.
//
// Operations are methods of [CPU] and write to their first argument, dst. After the
// largest shape they allocate no more: temporary memory comes from the scratch of the
// CPU, memory for results from an [Arena]. Inputs are not modified, unless they may
// alias dst and do.
//
// # Bits
//
// A result depends only on the arguments: not on the number of threads, the other
// rows of a call, or the instruction set. This is because
//
//   - an element of a matrix product is one chain of fused multiply-adds over k in
//     ascending order, acc = fma(a[i,k], b[k,j], acc), starting from the bias or 0; 3x3
//     convolutions take such products of transformed pixels (see patches.go),
//   - a sum along a row (softmax, norms) goes to 16 lanes, lane l adding the
//     elements l, l+16, l+32, ... in ascending order, and the lanes are added
//     pairwise: l and l+8, then l and l+4, l and l+2, l and l+1,
//   - exp is one polynomial, and no other operation is fused unless its formula
//     here is written with fma.
//
// Norm statistics are accumulated in float64, everything else in float32. The
// plain Go kernels are the definition; the assembly ones give the same bits.
//
// # Misuse
//
// Shapes that do not fit are a programming error and panic with "tensor: ...". A sampler survives it: the sample fails.
package cpu
