// Package kernels holds the CUDA kernels as PTX of compute capability 8.0, which every
// later GPU takes. `make ptx` compiles them from the *.cu files beside it, which say what
// each computes; SUMS has the hashes of what was compiled.
package kernels

import _ "embed"

// PTX is one module with all kernels.
//
//go:embed sm_80.ptx
var PTX []byte
