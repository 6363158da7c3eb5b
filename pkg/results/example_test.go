package results_test

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/results"
)

// Read gives groups of a run as this one; the package of services/pipeline has it all at work.
func ExampleGroup_Best() {
	group := results.Group{UID: "p1", Prompt: "a red fox", Members: []results.Member{
		{SampleIndex: 0, Status: "scored", Reward: new(0.25), Advantage: new(-1.0)},
		{SampleIndex: 1, Status: "failed"},
		{SampleIndex: 2, Status: "scored", Reward: new(0.75), Advantage: new(1.0)},
	}}
	for _, m := range group.Best() {
		fmt.Println(m.SampleIndex, m.Status)
	}
	// Output:
	// 2 scored
	// 0 scored
	// 1 failed
}
