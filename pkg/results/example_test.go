package results_test

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/view"

	"github.com/meander-rl/meander/pkg/results"
)

// Read gives groups of a run as this one.
func ExampleGroup_Best() {
	group := results.Group{Members: []view.Member{
		{SampleResult: view.SampleResult{SampleIndex: 0, Status: "scored", Reward: new(0.25), Advantage: new(-1.0)}},
		{SampleResult: view.SampleResult{SampleIndex: 1, Status: "failed"}},
		{SampleResult: view.SampleResult{SampleIndex: 2, Status: "scored", Reward: new(0.75), Advantage: new(1.0)}},
	}}
	for _, m := range group.Best() {
		fmt.Println(m.SampleIndex, m.Status)
	}
	// Output:
	// 2 scored
	// 0 scored
	// 1 failed
}
