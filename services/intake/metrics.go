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
	Prompts       prometheus.Counter  `metric:"prompts_total" help:"prompts accepted; one that comes again counts again"`
	Requests      prometheus.Counter  `metric:"requests_total" help:"requests published, one per sample"`
	Resolving     prometheus.Gauge    `metric:"resolving_prompts" help:"prompts being resolved, including those that wait for space in a stream"`
	Held          prometheus.Gauge    `metric:"held_prompts" help:"prompts in flight that wait for a sampler or a reward service"`
	Dropped       prometheus.Counter  `metric:"dropped_requests_total" help:"requests removed because their group had its result"`
	Stalled       prometheus.Gauge    `metric:"stalled_publishes" help:"publishes that wait now because the stream of requests is full"`
	Stall         prometheus.Counter  `metric:"publish_stall_seconds_total" help:"time that publishes waited because the stream of requests was full"`
	Probability   prometheus.Gauge    `metric:"scheduled_probability" help:"probability of scheduled sampling in the newest plan"`
	PromptSeconds prometheus.Observer `metric:"prompt_seconds" help:"time from a prompt to its published requests"`
}

// newInstruments registers the metrics of intake with r; nil: nowhere.
func newInstruments(r prometheus.Registerer) *instruments {
	i := &instruments{set: instrument.New(r, "intake")}
	i.set.Fill(i)
	return i
}

// stalling counts a publish that waits for space in the stream of requests; over ends its waiting.
func (i *instruments) stalling() (over func()) {
	began := time.Now()
	i.Stalled.Inc()
	return func() {
		i.Stalled.Dec()
		i.Stall.Add(time.Since(began).Seconds())
	}
}
