package model

// Info describes a model without loading it.
type Info struct {
	// Card is that of the opened model as far as it can be told: fields whose
	// configuration cannot be read are zero, and there is neither a digest of weights nor
	// a backend.
	Card
	// Parts are the networks, as far as they could be read.
	Parts []PartInfo
	// Vocabulary is the number of token ids of the tokenizer, 0 where it cannot be read.
	Vocabulary int
	// Problems is everything for which the model would not open: files, tensors and fields
	// that are missing, mis-shaped, unexpected or not supported. None means that it opens.
	Problems []string
	// Pass is the most memory in bytes that a device takes beside the weights for a call of
	// so many rows: of Velocity, with guidance two for each image, and of Decode, one by one.
	// Its factors are of 4 bytes, or of 2. nil where the configurations cannot be read.
	Pass func(height, width, rows, factorBytes int) int
}

// PartInfo describes the checkpoint of one network.
type PartInfo struct {
	Name, Class string
	// Parameters is the elements of all tensors in the files, whether they are used or not.
	Parameters int
	// DTypes are the element types in the files, sorted.
	DTypes []string
	// Files is the number of files and FileBytes their size.
	Files, FileBytes int
	// MemoryBytes is what the loaded weights take in float32, FactorBytes on a device that
	// multiplies in bf16.
	MemoryBytes, FactorBytes int
}

// Problem notes an error, and each of joined ones by itself; nil is none.
func (i *Info) Problem(err error) {
	if err == nil {
		return
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			i.Problem(e)
		}
		return
	}
	i.Problems = append(i.Problems, err.Error())
}
