package scorer

import (
	"errors"
	"fmt"
	"math"
)

// Part is the outcome of one scorer and its place in a weighted sum.
type Part struct {
	Name   string
	Weight float64
	// Required makes a failure of this part the failure of the sample.
	Required bool
	// Value is the score, unless Err says why there is none.
	Value float64
	Err   error
}

// Combine returns the reward of a sample, the sum of Weight*Value (a sum, not a mean)
// over the parts that have a value, in the order given. Weights must be finite with a
// positive total, all parts counted.
//
// A value that is NaN or infinite is a failure: Combine sets the Err of that part.
// Optional parts that failed are left out of the sum; after the call they are those
// whose Err is not nil. A required part that failed is an error, as is a sum of no
// parts; all such faults are joined.
func Combine(parts []Part) (reward float64, err error) {
	var total float64
	var faults []error
	for _, p := range parts {
		if math.IsNaN(p.Weight) || math.IsInf(p.Weight, 0) {
			faults = append(faults, fmt.Errorf("weight of %s: %v; must be a finite number", p.Name, p.Weight))
		}
		total += p.Weight
	}
	if len(faults) == 0 && !(total > 0) {
		faults = append(faults, fmt.Errorf("weights: total %v; must be more than 0", total))
	}
	scored := 0
	for i := range parts {
		p := &parts[i]
		if p.Err == nil && (math.IsNaN(p.Value) || math.IsInf(p.Value, 0)) {
			p.Err = fmt.Errorf("score is %v", p.Value)
		}
		switch {
		case p.Err == nil:
			scored++
			reward += float64(p.Weight * p.Value)
		case p.Required:
			faults = append(faults, fmt.Errorf("required score %s: %w", p.Name, p.Err))
		}
	}
	if len(faults) > 0 {
		return 0, errors.Join(faults...)
	}
	if scored == 0 {
		return 0, errors.New("no score succeeded")
	}
	if math.IsNaN(reward) || math.IsInf(reward, 0) {
		return 0, fmt.Errorf("weighted sum is %v", reward)
	}
	return reward, nil
}
