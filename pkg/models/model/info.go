package model

// Info describes a model without loading it.
type Info struct {
	// Card is the card of the opened model, without the digest of the weights and the
	// backend. Fields whose configuration cannot be read are zero.
	Card
	// Parts are the networks that could be read.
	Parts []PartInfo `json:"parts"`
	// CountTokens counts the tokens of a prompt as MaxPromptTokens does; nil where it cannot without the weights.
	CountTokens func(prompt string) (int, error) `json:"-"`
	// Vocabulary is the number of token ids of the tokenizer, 0 where it cannot be read.
	Vocabulary int `json:"vocabulary"`
	// Problems lists why the model would not open: files, tensors and fields that are
	// missing, mis-shaped, unexpected or not supported. Without problems it opens.
	Problems []string `json:"problems"`
	// Pass returns the most memory in bytes that a device needs besides the weights for a call
	// of Velocity with so many rows (two per image with guidance) or of Decode for one image.
	// factorBytes is 4 or 2, the size of a factor of matrix products on the device. nil if the
	// configurations cannot be read.
	Pass func(size Size, rows, factorBytes int) int `json:"-"`
	// LoRA returns the memory in bytes that a LoRA of that rank on all projections takes on a GPU; nil as Pass is.
	LoRA func(rank, factorBytes int) int `json:"-"`
}

// PartInfo describes the checkpoint of one network.
type PartInfo struct {
	Name  string `json:"name"`
	Class string `json:"class"`
	// Parameters is the number of elements of all tensors in the files, used or not.
	Parameters int `json:"parameters"`
	// DTypes are the element types in the files, sorted.
	DTypes []string `json:"dtypes"`
	// Files is the number of files and FileBytes their size.
	Files     int `json:"files"`
	FileBytes int `json:"file_bytes"`
	// MemoryBytes is the memory of the loaded weights in float32, FactorBytes that with factors and tables in bf16.
	MemoryBytes int `json:"memory_bytes"`
	FactorBytes int `json:"memory_bytes_bf16"`
}

// Problem adds an error to Problems, joined errors one by one. It ignores nil.
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
