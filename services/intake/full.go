package intake

import (
	"time"

	"github.com/meander-rl/meander/schemas"
)

// whyStepsFull returns a wait if samples have waited for space in the stream of steps since before the given time.
// Prompts wait then: more requests would only wait behind those samples.
func (v *laneView) whyStepsFull(before time.Time) wait {
	samples := int64(0)
	first := before
	for _, r := range v.samplerSpaces {
		if since := time.Unix(0, r.Since); r.Waiting > 0 && since.Before(before) {
			samples += r.Waiting
			if since.Before(first) {
				first = since
			}
		}
	}
	if samples == 0 {
		return wait{}
	}
	return forSpace.waits("%s is full: %d samples wait for space, the first since %s; give it more with 'meander "+
		"streams limit --max-steps-bytes SIZE', or free what is not needed with 'meander gc' or 'meander runs rm RUN'",
		schemas.StreamSteps, samples, first.UTC().Format(time.RFC3339))
}
