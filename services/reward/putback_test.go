package reward

import (
	"fmt"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// What waits for a verdict is in hand until the verdict comes or its group is cancelled, and not
// until it would look around again.
func TestService_NothingWaitsForWhatIsOver(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	inHand := func(want int) {
		t.Helper()
		bustest.Until(t, fmt.Sprintf("%d samples in hand", want), func() error {
			c, err := p.JetStream().Consumer(t.Context(), schemas.StreamTrajectories, "reward")
			if err != nil {
				return err
			}
			if n := c.CachedInfo().NumAckPending; n != want {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
	}
	for i := range int64(2) {
		p.put(t, trajectory(t, "r", "gone", i, 2, 7, "external"), trajectory(t, "r", "stays", i, 2, 7, "external"))
	}
	p.handled(t)
	inHand(4)
	if _, mine, err := p.PutControl(t.Context(),
		&schemas.Control{
			Run: "r", UID: "gone", Action: schemas.ControlCancel, At: 1, Seq: 1, Stored: time.Now().UnixNano(),
		}); err != nil || !mine {
		t.Fatal(mine, err)
	}
	inHand(2)
	p.put(t, verdict("stays", 0, "external", new(0.5)))
	inHand(1)
}
