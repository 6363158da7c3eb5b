package reward

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are the metrics of the service. Names of reward functions are labels; maxPools bounds how many there are.
type instruments struct {
	set                                         instrument.Set
	rewards, scores, putBack, batches, verdicts *prometheus.CounterVec
	waiting, inFlight, breaker                  *prometheus.GaugeVec
	seconds                                     *prometheus.HistogramVec
}

// newInstruments registers the metrics of the reward service with r; nil: nowhere.
func newInstruments(r prometheus.Registerer) *instruments {
	s := instrument.New(r, "reward")
	return &instruments{
		set: s,
		rewards: instrument.Zero(s.Counter("rewards_total", "rewards stored, by status", "status"),
			schemas.RewardStatuses...),
		scores: s.Counter("scores_total", "scores of stored rewards, by function and status", "scorer", "status"),
		putBack: s.Counter("put_back_total", "samples put back to come again, by function and reason: busy or away",
			"scorer", "reason"),
		batches: s.Counter("batches_total", "calls of functions that take several samples at once", "scorer"),
		verdicts: instrument.Zero(s.Counter("verdicts_total",
			"verdicts from outside, by what became of them: used, kept or dead", "fate"), "used", "kept", "dead"),
		waiting: s.Gauge("waiting_samples",
			"samples in the queue of a function; local is those that run in this process", "scorer"),
		inFlight: s.Gauge("in_flight_samples", "samples that a function is working on", "scorer"),
		breaker: s.Gauge("breaker_open",
			"copies of the service that leave a function alone because it does not answer", "scorer"),
		seconds: s.Seconds("score_seconds", "time of a call, by function", "scorer"),
	}
}

// pool creates the metrics of a function, so that they are there with 0 before its first call.
func (i *instruments) pool(name string) {
	i.putBack.WithLabelValues(name, "busy")
	i.putBack.WithLabelValues(name, "away")
	i.batches.WithLabelValues(name)
	i.waiting.WithLabelValues(name)
	i.inFlight.WithLabelValues(name)
	i.breaker.WithLabelValues(name)
}
