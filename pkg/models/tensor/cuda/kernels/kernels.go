// Package kernels holds the CUDA kernels as PTX. `make ptx` compiles them from the *.cu files beside it, which say what
// each computes; SUMS has the hashes of what was compiled.
package kernels

import _ "embed"

// PTX is one module with all kernels, of compute capability 8.0, which every later GPU takes.
//
//go:embed sm_80.ptx
var PTX []byte

// Hopper is a module with faster ones for GPUs of compute capability 9.0, which no other GPU takes.
//
//go:embed sm_90a.ptx
var Hopper []byte
