//go:build !amd64 && !arm64

package tensor

func kernelSets() []*kernelSet { return []*kernelSet{&goKernels} }
