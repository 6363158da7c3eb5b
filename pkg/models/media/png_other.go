//go:build !amd64

package media

// paeth filters dst, of whole vectors.
var paeth = goPaeth
