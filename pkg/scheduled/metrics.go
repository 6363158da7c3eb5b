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
