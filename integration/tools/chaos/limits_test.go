package chaos_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// On a cluster the stream of steps follows the storage of its servers, and all that is promised fits on each.
func TestCluster_LimitsFollowStorage(t *testing.T) {
	t.Parallel()
	b, _ := streamsOnCluster(t)
	const terabyte = int64(1e12)
	sum := int64(0)
	stats, err := b.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stats {
		sum += max(0, s.MaxBytes)
		if s.Name == schemas.StreamSteps && s.MaxBytes < terabyte/4 {
			t.Errorf("%s has %d of %d", s.Name, s.MaxBytes, terabyte)
		}
	}
	if sum > terabyte {
		t.Errorf("promised: %d of %d", sum, terabyte)
	}
	if err := b.Setup(t.Context(), bus.Replicas(clusterSize)); err != nil {
		t.Error(err)
	}
}
