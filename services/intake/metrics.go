package intake

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are what the service counts, for all copies of a process. Prompts that are
// refused are dead letters, by code.
type instruments struct {
	set           instrument.Set
	prompts       prometheus.Counter
	requests      prometheus.Counter
	resolving     prometheus.Gauge
	held          prometheus.Gauge
	dropped       prometheus.Counter
	stalled       prometheus.Gauge
	stall         prometheus.Counter
	promptSeconds prometheus.Observer
	probability   prometheus.Gauge
}

func newInstruments(r prometheus.Registerer) *instruments {
	s := instrument.New(r, "intake")
	return &instruments{
		set:           s,
		prompts:       s.Counter("prompts_total", "prompts accepted; one that comes again counts again").WithLabelValues(),
		requests:      s.Counter("requests_total", "requests published, one per sample").WithLabelValues(),
		resolving:     s.Gauge("resolving_prompts", "prompts that are worked on, those that wait for room included").WithLabelValues(),
		held:          s.Gauge("held_prompts", "prompts in hand that wait for a sampler or a reward service").WithLabelValues(),
		dropped:       s.Counter("dropped_requests_total", "requests removed because their group had its result").WithLabelValues(),
		stalled:       s.Gauge("stalled_publishes", "publishes that wait now because the stream of requests is full").WithLabelValues(),
		stall:         s.Counter("publish_stall_seconds_total", "time that publishes waited because the stream of requests was full").WithLabelValues(),
		probability:   s.Gauge("scheduled_probability", "probability of scheduled sampling in the newest plan").WithLabelValues(),
		promptSeconds: s.Seconds("prompt_seconds", "time from a prompt to its published requests").WithLabelValues(),
	}
}

// stalling counts a publish that waits, until over.
func (i *instruments) stalling() (over func()) {
	began := time.Now()
	i.stalled.Inc()
	return func() {
		i.stalled.Dec()
		i.stall.Add(time.Since(began).Seconds())
	}
}
