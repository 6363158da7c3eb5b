package policyloss_test

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/client/policyloss"
)

func ExamplePPO() {
	// One step of two samples: the policy moved towards the better one.
	l, err := policyloss.PPO(policyloss.DefaultConfig(), []float64{-0.9, -1.1}, []float64{-1, -1}, []float64{1, -1},
		nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("ratio %.4f loss %.4f clipped %.2f\n", l.Ratios, l.Mean, l.ClipFraction)
	// Output: ratio [1.1052 0.9048] loss -0.0001 clipped 1.00
}

func ExampleGuard() {
	// The mean moved by 0.01 in each of four elements, at noise 0.4 over a step of 0.2.
	before, after := []float64{0.1, 0.2, 0.3, 0.4}, []float64{0.11, 0.19, 0.31, 0.39}
	l, err := policyloss.Guard(policyloss.DefaultConfig(), []float64{-0.65}, []float64{-0.6502}, []float64{1}, nil,
		[][]float64{after}, [][]float64{before}, 0.4, 0.2)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("ratio %.6f loss %.6f\n", l.Ratios[0], l.Mean)
	// Output: ratio 1.000205 loss -5.000500
}

func ExampleImageKL() {
	// As it is logged, with std_dev_t; and exact, with the width of a step of 0.1.
	means, reference, std := [][]float64{{0.1, 0.2}}, [][]float64{{0.12, 0.2}}, 0.5
	for _, width := range []float64{std, std * math.Sqrt(0.1)} {
		kl, err := policyloss.ImageKL(means, reference, []float64{width})
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%.4f\n", kl[0])
	}
	// Output:
	// 0.0004
	// 0.0040
}

func ExampleCorrection_Apply() {
	// Log-probs of two samples of two steps, by the trainer and by the rollout's engine.
	old, rollout := [][]float64{{-1, -1.1}, {-0.9, -1.3}}, [][]float64{{-1.02, -1.05}, {-1.2, -1}}
	c := policyloss.Correction{
		Level: policyloss.LevelToken, Threshold: "1.25",
		Rejections: []policyloss.Rejection{{Rule: "token_k1", Threshold: "0.5_1.3"}},
	}
	got, err := c.Apply(old, rollout)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("weights %.4f\n", got.Weights)
	fmt.Printf("kl %.4f, rejected %.2f\n", got.Metrics["kl"], got.Metrics["rollout_rs_masked_fraction"])
	// Output:
	// weights [[1.0202 0.9512] [1.2500 0.0000]]
	// kl 0.0075, rejected 0.25
}
