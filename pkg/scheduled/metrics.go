package scheduled

// Forwards is how many evaluations of the model a plan costs beyond those of training: those of the
// rollouts and, with ReflexFlow, a clean prediction of every sample and a biased one of each that
// rolls. The metrics of a plan have it.
func (p Plan) Forwards() int {
	sampler, _ := p.Settings.Steps()
	n := 0
	if p.Settings.ReflexOn() {
		n = len(p.Samples)
	}
	for _, sample := range p.Samples {
		n += sample.Steps() * sampler.Evaluations()
		if sample.Rolls() && p.Settings.ReflexOn() {
			n++
		}
	}
	return n
}

// ExpectedForwards is the mean of Plan.Forwards over plans of a batch of that many samples at
// probability p, provided that no sample starts near the noisiest level. It tells a trainer what
// the settings will cost. With uniform offsets up to M, one evaluation per step and batch size B it
// is B p M/2, and with ReflexFlow B + B p M/2 + B p M/(M+1).
func (s Settings) ExpectedForwards(batch int, p float64) float64 {
	sampler, _ := s.Steps()
	offsets := s.Strategy.Offsets(s.MaxStepOffset)
	perSample := 0.0
	for offset, share := range offsets {
		perSample += float64(share * float64(offset))
	}
	perSample = float64(perSample * p * float64(sampler.Evaluations()))
	if s.ReflexOn() {
		perSample += 1 + float64(p*(1-offsets[0]))
	}
	return float64(float64(batch) * perSample)
}

// RolledShare is the share of samples that roll at probability p, where no base is N-1: with
// uniform offsets p M/(M+1).
func (s Settings) RolledShare(p float64) float64 {
	return float64(p * (1 - s.Strategy.Offsets(s.MaxStepOffset)[0]))
}

// Metrics returns the numbers to log of a plan, by name, and of the drifts (see Drift) of its
// rolled samples, as far as they are known; with none there is no drift_l2. offset_mean and
// offset_max are of what was drawn, before an offset is cut at the noisiest level.
func (p Plan) Metrics(drifts []float64) map[string]float64 {
	var rolled, offsets, largest int
	for _, s := range p.Samples {
		if s.Rolls() {
			rolled++
		}
		offsets += s.Offset
		largest = max(largest, s.Offset)
	}
	n := float64(max(len(p.Samples), 1))
	m := map[string]float64{
		"scheduled_sampling/probability":     p.Probability,
		"scheduled_sampling/rolled_fraction": float64(rolled) / n,
		"scheduled_sampling/offset_mean":     float64(offsets) / n,
		"scheduled_sampling/offset_max":      float64(largest),
		"scheduled_sampling/extra_forwards":  float64(p.Forwards()),
	}
	for _, drift := range drifts {
		m["scheduled_sampling/drift_l2"] += drift / float64(len(drifts))
	}
	return m
}

// Metrics returns the numbers of a loss that a trainer logs, by name: means over the batch, and the
// least and the greatest weight. adr_loss is without the factor beta1. A loss without samples has
// no metrics.
func (l Loss) Metrics() map[string]float64 {
	m := map[string]float64{}
	n := float64(len(l.Samples))
	for i, t := range l.Samples {
		if i == 0 {
			m["reflexflow/weight_min"], m["reflexflow/weight_max"] = t.WeightMin, t.WeightMax
		}
		m["reflexflow/exposure_l1"] += t.Exposure / n
		m["reflexflow/fc_loss"] += t.FC / n
		m["reflexflow/adr_loss"] += t.ADR / n
		m["reflexflow/weight_min"] = min(m["reflexflow/weight_min"], t.WeightMin)
		m["reflexflow/weight_max"] = max(m["reflexflow/weight_max"], t.WeightMax)
	}
	return m
}
