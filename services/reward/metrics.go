package reward

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are what the service counts. Names of reward functions are labels: they
// are few, and bounded by maxLanes.
type instruments struct {
	rewards, scores, putBack, batches, verdicts *prometheus.CounterVec
	waiting, inFlight, breaker                  *prometheus.GaugeVec
	seconds                                     *prometheus.HistogramVec
}

func newInstruments(r prometheus.Registerer) *instruments {
	s := instrument.New(r, "reward")
	return &instruments{
		rewards:  s.Counter("rewards_total", "rewards stored, by status", "status"),
		scores:   s.Counter("scores_total", "scores of stored rewards, by function and status", "scorer", "status"),
		putBack:  s.Counter("put_back_total", "samples put back to come again, by function and reason: busy or away", "scorer", "reason"),
		batches:  s.Counter("batches_total", "calls of functions that take several samples at once", "scorer"),
		verdicts: s.Counter("verdicts_total", "verdicts from outside, by what became of them: used, kept or dead", "fate"),
		waiting:  s.Gauge("waiting", "samples in the line of a function; local is those that run in this process", "scorer"),
		inFlight: s.Gauge("in_flight", "samples that a function is working on", "scorer"),
		breaker:  s.Gauge("breaker_open", "1 while a function that does not answer is left alone", "scorer"),
		seconds:  s.Seconds("score_seconds", "time of a call, by function", "scorer"),
	}
}
