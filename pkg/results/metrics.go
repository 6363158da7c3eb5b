package results

import (
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// metricSums gathers the metrics of a run over all of its groups, as Batch events have them for each batch.
type metricSums struct {
	stats                      estimator.BatchStats
	firstStarted, lastFinished int64
	evaluation                 []estimator.ValidationGroup
}

// addSample adds a scored sample to the sums of the run's training metrics. Samples of validation, and of groups
// without advantages, do not count.
func (x *metricSums) addSample(a *schemas.Advantage, m *schemas.Member, r *schemas.Reward) {
	if r.Reward == nil || a.Validation || a.Status != schemas.StatusComplete && a.Status != schemas.StatusPartial {
		return
	}
	s := estimator.SampleStats{
		UID: string(a.UID), Reward: *r.Reward, Advantage: m.Advantage, StepAdvantages: m.StepAdvantages,
		PolicyMin: r.PolicyVersionMin, PolicyMax: r.PolicyVersionMax, GenerateSeconds: -1,
	}
	for _, score := range r.Scores {
		s.ScoreSeconds += float64(score.DurationNS) / 1e9
		if score.Value != nil {
			s.Scores = append(s.Scores, estimator.Metric{Name: score.Name, Value: *score.Value})
		}
		if score.Exact != nil {
			s.Scores = append(s.Scores, estimator.ExactMetric(score.Name, *score.Exact))
		}
	}
	if r.SampleFinished > 0 {
		s.GenerateSeconds = float64(r.SampleFinished-r.SampleStarted) / 1e9
		if x.firstStarted == 0 || r.SampleStarted < x.firstStarted {
			x.firstStarted = r.SampleStarted
		}
		x.lastFinished = max(x.lastFinished, r.SampleFinished)
	}
	x.stats.Samples = append(x.stats.Samples, s)
}

// addValidation adds a validation group to the sums of the run's validation metrics; groups to train on do nothing.
func (x *metricSums) addValidation(a *schemas.Advantage, rewards map[view.Key]*schemas.Reward) {
	if !a.Validation {
		return
	}
	g := estimator.ValidationGroup{Source: "unknown", Variables: []estimator.Variable{{Name: "reward"}}}
	if fields, err := a.Metadata.Map(); err == nil {
		if s, ok := fields["data_source"].(string); ok && s != "" {
			g.Source = s
		}
	}
	reader := "" // the reward function whose readings are the answers of the vote
	for i := range a.Members {
		r := rewards[view.Key{UID: a.UID, Index: a.Members[i].SampleIndex}]
		if r == nil || r.Reward == nil {
			continue
		}
		g.Variables[0].Values = append(g.Variables[0].Values, *r.Reward)
		g.Answers = append(g.Answers, "")
		for _, s := range r.Scores {
			if s.Value == nil {
				continue
			}
			if reader == "" && s.Detail != "" {
				reader = s.Name
			}
			if s.Name == reader {
				g.Answers[len(g.Answers)-1] = s.Detail
			}
			g.Add(s.Name, *s.Value)
			if s.Exact != nil {
				exact := estimator.ExactMetric(s.Name, *s.Exact)
				g.Add(exact.Name, exact.Value)
			}
		}
	}
	if reader == "" {
		g.Answers = nil
	}
	x.evaluation = append(x.evaluation, g)
}

// metrics returns all metrics by name, once every sample and group is added.
func (x *metricSums) metrics() map[string]float64 {
	if x.lastFinished > 0 {
		x.stats.GenerateSeconds = float64(x.lastFinished-x.firstStarted) / 1e9
	}
	out := map[string]float64{}
	for _, m := range append(estimator.Metrics(x.stats), estimator.Validation(x.evaluation)...) {
		out[m.Name] = m.Value
	}
	return out
}
