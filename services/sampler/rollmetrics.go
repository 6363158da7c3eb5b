package sampler

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/schemas"
)

// rollInstruments are sums: divided by the samples that rolled they give the means that plans and results have.
type rollInstruments struct {
	Samples *prometheus.CounterVec `metric:"scheduled_samples_total" labels:"outcome" help:"samples of scheduled sampling stored: rolled, or why they did not roll"`
	Terms   *prometheus.CounterVec `metric:"reflexflow_terms_total" labels:"term" help:"sums of the terms of reflexflow over samples"`
	Offsets prometheus.Counter     `metric:"scheduled_offsets_total" help:"sum of the offsets that samples of scheduled sampling drew, in timesteps"`
	Steps   prometheus.Counter     `metric:"scheduled_steps_total" help:"timesteps that samples of scheduled sampling were rolled down"`
	Forward prometheus.Counter     `metric:"scheduled_forwards_total" help:"evaluations of the model for samples of scheduled sampling"`
	Drift   prometheus.Counter     `metric:"scheduled_drift_total" help:"sum of the distances of rolled latents from the teacher-forced ones, in their lengths"`
}

// outcomeRolled is the outcome of samples that the model rolled; the others have the reason why not.
const outcomeRolled = "rolled"

const (
	termExposure = "exposure_l1"
	termFC       = "fc_loss"
	termADR      = "adr_loss"
)

// countRoll counts the roll of a completed trajectory; one without scheduled sampling counts nothing.
func (i *rollInstruments) countRoll(t *schemas.Trajectory) {
	r, x := t.Rolled, t.ScheduledSampling
	if r == nil || x == nil {
		return
	}
	i.Offsets.Add(float64(x.Roll.Offset))
	i.Forward.Add(float64(r.Forwards))
	if f := r.ReflexFlow; f != nil {
		i.Terms.WithLabelValues(termExposure).Add(f.ExposureL1)
		i.Terms.WithLabelValues(termFC).Add(max(0, f.FCLoss)) // negative weights can make it so
		i.Terms.WithLabelValues(termADR).Add(f.ADRLoss)
	}
	if !x.Roll.IsRolled() {
		i.Samples.WithLabelValues(x.Roll.Reason).Inc()
		return
	}
	i.Samples.WithLabelValues(outcomeRolled).Inc()
	i.Steps.Add(float64(x.Roll.Source - x.Roll.Base))
	if r.Drift != nil {
		i.Drift.Add(*r.Drift)
	}
}
