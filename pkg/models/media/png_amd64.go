package media

import "golang.org/x/sys/cpu"

// paethAVX2 is goPaeth for whole vectors. It is in png_amd64.s, which kernelgen writes.
//
//go:noescape
func paethAVX2(dst, x, a, b, c []byte)

// paeth filters dst, of whole vectors.
var paeth = func() func(dst, x, a, b, c []byte) {
	if cpu.X86.HasAVX2 {
		return paethAVX2
	}
	return goPaeth
}()
