//go:build !amd64

package flow

// fillNormal fills nothing: there is no assembly.
func fillNormal([]float32, uint64, uint32, uint32) int { return 0 }
