package reward

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// instruments are the metrics of the service. Names of reward functions are labels; maxPools bounds how many there are.
type instruments struct {
	set              instrument.Set
	Rewards          *prometheus.CounterVec   `metric:"rewards_total" labels:"status" help:"rewards stored, by status"`
	Scores           *prometheus.CounterVec   `metric:"scores_total" labels:"scorer status" help:"scores of stored rewards, by function and status"`
	PutBack          *prometheus.CounterVec   `metric:"put_back_total" labels:"scorer reason" help:"samples put back to come again, by function and reason: busy or away"`
	Batches          *prometheus.CounterVec   `metric:"batches_total" labels:"scorer" help:"calls of functions that take several samples at once"`
	Verdicts         *prometheus.CounterVec   `metric:"verdicts_total" labels:"fate" help:"verdicts from outside, by what became of them: used, kept or dead"`
	StepRewards      *prometheus.CounterVec   `metric:"step_rewards_total" labels:"status" help:"rewards of samples in the middle, by status"`
	SavedEvaluations prometheus.Counter       `metric:"saved_evaluations_total" help:"evaluations of the model that samples do not take because rewards at a step end them"`
	Waiting          *prometheus.GaugeVec     `metric:"waiting_samples" labels:"scorer" help:"samples in the queue of a function; local is those that run in this process"`
	InFlight         *prometheus.GaugeVec     `metric:"in_flight_samples" labels:"scorer" help:"samples that a function is working on"`
	Breaker          *prometheus.GaugeVec     `metric:"breaker_open" labels:"scorer" help:"copies of the service that leave a function alone because it does not answer"`
	Seconds          *prometheus.HistogramVec `metric:"score_seconds" labels:"scorer" help:"time of a call, by function"`
}

// newInstruments registers the metrics of the reward service with r; nil: nowhere.
func newInstruments(r prometheus.Registerer) *instruments {
	i := &instruments{set: instrument.New(r, "reward")}
	i.set.Fill(i)
	instrument.Zero(i.Rewards, schemas.RewardStatuses...)
	instrument.Zero(i.StepRewards, schemas.StatusScored, schemas.StatusFailed)
	instrument.Zero(i.Verdicts, "used", "kept", "dead")
	return i
}

// pool creates the metrics of a function, so that they are there with 0 before its first call.
func (i *instruments) pool(name string) {
	i.PutBack.WithLabelValues(name, "busy")
	i.PutBack.WithLabelValues(name, "away")
	i.Batches.WithLabelValues(name)
	i.Waiting.WithLabelValues(name)
	i.InFlight.WithLabelValues(name)
	i.Breaker.WithLabelValues(name)
}
