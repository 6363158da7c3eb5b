package sampler

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// rollInstruments are sums: divided by the samples that rolled they give the means that plans and results have.
type rollInstruments struct {
	samples, terms          *prometheus.CounterVec
	offsets, steps, forward prometheus.Counter
	drift                   prometheus.Counter
}

// outcomeRolled is the outcome of samples that the model rolled; the others have the reason why not.
const outcomeRolled = "rolled"

const (
	termExposure = "exposure_l1"
	termFC       = "fc_loss"
	termADR      = "adr_loss"
)

func newRollInstruments(s instrument.Set) rollInstruments {
	one := func(name, help string) prometheus.Counter { return s.Counter(name, help).WithLabelValues() }
	return rollInstruments{
		samples: instrument.Zero(s.Counter("scheduled_samples_total",
			"samples of scheduled sampling stored: rolled, or why they did not roll", "outcome"),
			append([]string{outcomeRolled}, schemas.RollReasons...)...),
		terms: instrument.Zero(s.Counter("reflexflow_terms_total", "sums of the terms of reflexflow over samples",
			"term"), termExposure, termFC, termADR),
		offsets: one("scheduled_offsets_total",
			"sum of the offsets that samples of scheduled sampling drew, in timesteps"),
		steps:   one("scheduled_steps_total", "timesteps that samples of scheduled sampling were rolled down"),
		forward: one("scheduled_forwards_total", "evaluations of the model for samples of scheduled sampling"),
		drift: one("scheduled_drift_total",
			"sum of the distances of rolled latents from the teacher-forced ones, in their lengths"),
	}
}

// countRoll counts the roll of a completed trajectory; one without scheduled sampling counts nothing.
func (i *rollInstruments) countRoll(t *schemas.Trajectory) {
	r, x := t.Rolled, t.ScheduledSampling
	if r == nil || x == nil {
		return
	}
	i.offsets.Add(float64(x.Roll.Offset))
	i.forward.Add(float64(r.Forwards))
	if f := r.ReflexFlow; f != nil {
		i.terms.WithLabelValues(termExposure).Add(f.ExposureL1)
		i.terms.WithLabelValues(termFC).Add(max(0, f.FCLoss)) // negative weights can make it so
		i.terms.WithLabelValues(termADR).Add(f.ADRLoss)
	}
	if !x.Roll.IsRolled() {
		i.samples.WithLabelValues(x.Roll.Reason).Inc()
		return
	}
	i.samples.WithLabelValues(outcomeRolled).Inc()
	i.steps.Add(float64(x.Roll.Source - x.Roll.Base))
	if r.Drift != nil {
		i.drift.Add(*r.Drift)
	}
}
