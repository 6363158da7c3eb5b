package bus

import (
	"context"
	"fmt"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// RedeliverAll makes the server deliver again, at once, all messages that the contract's durables have in flight, and
// returns how many there were. A process that replaces a dead one calls it; otherwise they come after AckWait. A
// client that is alive goes on with its messages, so some work may be done twice.
//
// It sends a negative acknowledgement for each delivery (NATS ADR-15), so the deliveries count: a message that kills
// its process is still given up.
func (b *Bus) RedeliverAll(ctx context.Context) (int, error) {
	redelivered := 0
	err := b.retryWhileAway(ctx, func(ctx context.Context) error {
		redelivered = 0
		for _, spec := range schemas.Streams() {
			s, err := b.js.Stream(ctx, spec.Name)
			if err != nil {
				return fmt.Errorf("redeliver work of %s: %w", spec.Name, err)
			}
			consumers, err := b.consumersOf(ctx, s)
			if err != nil {
				return fmt.Errorf("redeliver work of %s: %w", spec.Name, err)
			}
			for _, c := range consumers {
				if c.Config.Durable == "" || c.NumAckPending == 0 {
					continue
				}
				for seq := c.AckFloor.Stream + 1; seq <= c.Delivered.Stream; seq++ {
					// $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>;
					// the server ignores messages that are not in flight.
					subject := fmt.Sprintf("$JS.ACK.%s.%s.1.%d.%d.%d.0", spec.Name, c.Name, seq, c.Delivered.Consumer,
						time.Now().UnixNano())
					if err := b.nc.Publish(subject, []byte(ackNak)); err != nil {
						return fmt.Errorf("redeliver work of %s: %w", c.Name, err)
					}
				}
				redelivered += c.NumAckPending
			}
		}
		ctx, stop := context.WithTimeout(ctx, apiTimeout)
		defer stop()
		return b.nc.FlushWithContext(ctx)
	})
	return redelivered, err
}
