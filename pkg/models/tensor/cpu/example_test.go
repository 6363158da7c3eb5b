package cpu_test

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// A layer y = x w^T + b with weights in torch's layout.
func ExampleCPU_Linear() {
	c := cpu.NewCPU(nil)
	w := cpu.Pack([]float32{
		1, 0, 0,
		0, 1, 1,
	}, 2, 3)
	x := cpu.NewMatrix([]float32{1, 2, 3}, 1, 3)
	y := cpu.NewMatrix(make([]float32, 2), 1, 2)
	c.Linear(y, x, w, cpu.Epilogue{Bias: []float32{10, 20}})
	fmt.Println(y.Data)
	// Output: [11 25]
}

// Two sequences whose text rows (0, 1) and image rows (2 to 4) lie apart.
func ExampleCPU_Attention() {
	c := cpu.NewCPU(nil)
	v := cpu.NewMatrix([]float32{1, 10, 2, 4, 20}, 5, 1)
	same := cpu.NewMatrix(make([]float32, 5), 5, 1) // equal scores: the mean of the values
	y := cpu.NewMatrix(make([]float32, 5), 5, 1)
	c.Attention(y, same, same, v, tensor.Attention{Heads: 1, Sequences: [][]int32{{0, 2}, {1, 4}}})
	fmt.Println(y.Data)
	// Output: [1.5 15 1.5 0 15]
}
