package bus

import (
	"context"
	"fmt"
	"time"
)

// TakeBack makes everything that is in hand of the contract's durables come again at
// once, and returns how many deliveries that may have been. It is for a process that
// knows whoever had them to be dead, because it took their place: else they come after
// AckWait. A client that lives goes on with what it has, which at worst is done twice.
// It is the negative acknowledgement of each delivery (NATS ADR-15), so deliveries stay
// counted: a message that kills its process is still given up.
func (b *Bus) TakeBack(ctx context.Context) (int, error) {
	taken := 0
	err := b.patiently(ctx, func(ctx context.Context) error {
		taken = 0
		for _, spec := range specs() {
			s, err := b.js.Stream(ctx, spec.Name)
			if err != nil {
				return fmt.Errorf("take back work of %s: %w", spec.Name, err)
			}
			consumers, err := b.consumersOf(ctx, s)
			if err != nil {
				return fmt.Errorf("take back work of %s: %w", spec.Name, err)
			}
			for _, c := range consumers {
				if c.Config.Durable == "" || c.NumAckPending == 0 {
					continue
				}
				for seq := c.AckFloor.Stream + 1; seq <= c.Delivered.Stream; seq++ {
					// $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>;
					// those that are not in hand are passed over.
					subject := fmt.Sprintf("$JS.ACK.%s.%s.1.%d.%d.%d.0", spec.Name, c.Name, seq, c.Delivered.Consumer, time.Now().UnixNano())
					if err := b.nc.Publish(subject, []byte(ackNak)); err != nil {
						return fmt.Errorf("take back work of %s: %w", c.Name, err)
					}
				}
				taken += c.NumAckPending
			}
		}
		ctx, stop := context.WithTimeout(ctx, apiTimeout)
		defer stop()
		return b.nc.FlushWithContext(ctx)
	})
	return taken, err
}
