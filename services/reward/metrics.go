package reward

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are what the service counts. Names of reward functions are labels: they
// are few, and bounded by maxLanes.
type instruments struct {
	rewards, scores, putBack *prometheus.CounterVec
	inFlight                 *prometheus.GaugeVec
	seconds                  *prometheus.HistogramVec
}

func newInstruments(r prometheus.Registerer) *instruments {
	s := instrument.New(r, "reward")
	return &instruments{
		rewards:  s.Counter("rewards_total", "rewards stored, by status", "status"),
		scores:   s.Counter("scores_total", "scores, by function and status", "scorer", "status"),
		putBack:  s.Counter("put_back_total", "samples that have to come again, by function and reason: busy or away", "scorer", "reason"),
		inFlight: s.Gauge("in_flight", "calls of a function under way or waiting for their turn", "scorer"),
		seconds:  s.Seconds("score_seconds", "time of a call, by function", "scorer"),
	}
}
