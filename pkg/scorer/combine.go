package scorer

import (
	"errors"
	"fmt"
	"math"
)

// Part is the result of one scorer with its weight in the reward.
type Part struct {
	Name   string
	Weight float64
	// Required: if this part fails, the sample fails.
	Required bool
	// Value is the score, unless Err says why there is none.
	Value float64
	Err   error
}

// Combine returns the reward of a sample: the sum (not the mean) of Weight*Value over the parts with a value, in
// order. Weights must be finite, and the total over all parts positive.
//
// A value that is NaN or infinite is a failure: Combine sets the Err of that part. Failed parts that are not
// required are left out of the sum; the caller finds them by their Err. A failed part that is required is an error,
// and so is a sum without parts; all such faults are joined.
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
