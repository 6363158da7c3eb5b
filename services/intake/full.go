package intake

import (
	"fmt"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// full says that samplers have waited for room in the stream of steps since before a moment; empty:
// they have not. What comes now would only wait behind them.
func (v *view) full(before time.Time) string {
	samples := int64(0)
	first := before
	for _, r := range v.rooms {
		if since := time.Unix(0, r.Since); r.Waiting > 0 && since.Before(before) {
			samples += r.Waiting
			if since.Before(first) {
				first = since
			}
		}
	}
	if samples == 0 {
		return ""
	}
	return fmt.Sprintf("%s is full: %d samples wait for room, the first since %s; give it more with 'meander streams limit --max-steps-bytes SIZE', or free what nobody needs with 'meander gc' or 'meander runs rm RUN'",
		schemas.StreamSteps, samples, first.UTC().Format(time.RFC3339))
}
