package intake

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are the metrics of the service; all its copies in a process share them. Refused prompts are counted as
// dead letters, by code (set).
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

// newInstruments registers the metrics of intake with r; nil: nowhere.
func newInstruments(r prometheus.Registerer) *instruments {
	s := instrument.New(r, "intake")
	return &instruments{
		set: s,
		prompts: s.Counter("prompts_total", "prompts accepted; one that comes again counts again").
			WithLabelValues(),
		requests: s.Counter("requests_total", "requests published, one per sample").WithLabelValues(),
		resolving: s.Gauge("resolving_prompts",
			"prompts being resolved, including those that wait for space in a stream").
			WithLabelValues(),
		held: s.Gauge("held_prompts", "prompts in flight that wait for a sampler or a reward service").
			WithLabelValues(),
		dropped: s.Counter("dropped_requests_total", "requests removed because their group had its result").
			WithLabelValues(),
		stalled: s.Gauge("stalled_publishes", "publishes that wait now because the stream of requests is full").
			WithLabelValues(),
		stall: s.Counter("publish_stall_seconds_total",
			"time that publishes waited because the stream of requests was full").WithLabelValues(),
		probability: s.Gauge("scheduled_probability", "probability of scheduled sampling in the newest plan").
			WithLabelValues(),
		promptSeconds: s.Seconds("prompt_seconds", "time from a prompt to its published requests").WithLabelValues(),
	}
}

// stalling counts a publish that waits for space in the stream of requests; over ends its waiting.
func (i *instruments) stalling() (over func()) {
	began := time.Now()
	i.stalled.Inc()
	return func() {
		i.stalled.Dec()
		i.stall.Add(time.Since(began).Seconds())
	}
}
