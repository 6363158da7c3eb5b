package pipeline_test

import (
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/services/pipeline"
)

func TestConfig_Validate(t *testing.T) {
	if err := pipeline.DefaultConfig().Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
	c := pipeline.DefaultConfig()
	c.Replicas, c.AckWait, c.Sampler.Batch = 65, -time.Second, 0
	err := c.Validate()
	for _, field := range []string{"replicas: 65", "ack_wait: -1s", "batch: 0"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v; want %q in it", err, field)
		}
	}
}
