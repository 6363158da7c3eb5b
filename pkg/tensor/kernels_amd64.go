package tensor

func kernelSets() []*kernelSet { return []*kernelSet{&goKernels} }
