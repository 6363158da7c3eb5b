package safetensors_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

func ExampleFolder_Archive() {
	dir, err := os.MkdirTemp("", "checkpoint")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	w, _ := safetensors.FloatTensor("w", tensor.BF16, []int{2, 2}, []float32{1, 2, 3, 4})
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), []safetensors.Tensor{w}, nil); err != nil {
		panic(err)
	}
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		panic(err)
	}
	defer folder.Close()
	a, err := folder.Archive(".")
	if err != nil {
		panic(err)
	}
	defer a.Close()
	info, _ := a.Info("w")
	x, err := a.Floats("w")
	fmt.Println(info.DType, info.Shape, x, err)
	// Output: BF16 [2 2] [1 2 3 4] <nil>
}
