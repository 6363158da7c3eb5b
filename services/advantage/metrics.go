package advantage

import (
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

type instruments struct {
	set            instrument.Set
	Groups         *prometheus.CounterVec `metric:"groups_total" labels:"status" help:"groups closed, by status"`
	Batches        *prometheus.CounterVec `metric:"batches_total" labels:"status" help:"batches closed, by status"`
	Refilled       prometheus.Counter     `metric:"refills_total" help:"groups asked for in place of others"`
	RefillsGivenUp *prometheus.CounterVec `metric:"refills_given_up_total" labels:"reason" help:"groups that were not replaced, by reason: rounds, deadline or prompt"`
	OpenGroups     prometheus.Gauge       `metric:"open_groups" help:"groups that wait for rewards"`
	Held           prometheus.Gauge       `metric:"held_rewards" help:"rewards and records of open groups and batches"`
	Latency        prometheus.Observer    `metric:"latency_seconds" help:"from the last reward of a group to its stored advantage"`
	Estimate       prometheus.Observer    `metric:"estimate_seconds" help:"time of the estimator"`
	BatchMetric    *prometheus.GaugeVec   `metric:"batch_metric" labels:"name" help:"metrics of the last batch, by the names that verl has"`
	GroupReward    *prometheus.GaugeVec   `metric:"group_reward" labels:"lane" help:"mean reward of the group that closed last, by lane"`
}

// newInstruments registers the metrics of the advantage service with r; nil: nowhere.
func newInstruments(r prometheus.Registerer) *instruments {
	i := &instruments{set: instrument.New(r, "advantage")}
	i.set.Fill(i)
	instrument.Zero(i.Groups, schemas.GroupStatuses...)
	instrument.Zero(i.Batches, schemas.BatchStatuses...)
	instrument.Zero(i.RefillsGivenUp, "rounds", "deadline", "prompt")
	return i
}

// group counts a closed group of a lane. Only lanes that made samples become labels, so their number is bounded.
func (i *instruments) group(lane schemas.Lane, a *schemas.Advantage) {
	i.Groups.WithLabelValues(a.Status).Inc()
	if a.Mean != nil {
		i.GroupReward.WithLabelValues(string(lane)).Set(*a.Mean)
	}
}

func (i *instruments) gaveUp(reason string) { i.RefillsGivenUp.WithLabelValues(reason).Inc() }

// batch counts a closed batch and shows its metrics in place of those of the last one.
func (i *instruments) batch(e *schemas.Batch) {
	i.Batches.WithLabelValues(e.Status).Inc()
	i.BatchMetric.Reset()
	for _, m := range e.Metrics {
		i.BatchMetric.WithLabelValues(m.Name).Set(m.Value)
	}
}

// summary returns the Batch event of closed groups: which count, mean and standard deviation of their rewards, and the
// metrics with the names that verl uses. estimateSeconds is how long the estimator took.
func summary(b *batch, groups []*group, now time.Time, estimateSeconds float64) *schemas.Batch {
	e := &schemas.Batch{
		Run: b.run, Batch: b.id, StdBasis: schemas.BasisPopulation, Status: schemas.StatusComplete,
		UIDs:     []schemas.UID{},
		Expected: b.expected, Step: b.step, Epoch: b.epoch,
	}
	stats := estimator.BatchStats{Step: b.step, Epoch: b.epoch, AdvantageSeconds: estimateSeconds}
	var evaluation []estimator.ValidationGroup
	var began, finished int64 = math.MaxInt64, 0
	filled := map[schemas.UID]bool{}
	var rewards []float64
	for _, g := range groups {
		a := g.result
		e.Closed = max(e.Closed, a.Closed)
		if a.RefilledBy != "" {
			e.Refills++
		}
		if !counts(a) {
			e.Dropped = append(e.Dropped, g.uid)
			continue
		}
		filled[g.root()] = true
		e.UIDs = append(e.UIDs, g.uid)
		e.Groups++
		for _, m := range a.Members {
			if m.Reward != nil {
				rewards = append(rewards, *m.Reward)
			}
		}
		if g.spec.Validation {
			evaluation = append(evaluation, validationOf(g))
			continue
		}
		stats.Columns = max(stats.Columns, int(a.TrainedSteps))
		stats.Samples = append(stats.Samples, g.sampleStats(a)...)
		for _, s := range g.samples {
			if s.finished > 0 {
				began, finished = min(began, s.started), max(finished, s.finished)
			}
		}
	}
	if int64(len(filled)) < b.expected {
		e.Status = schemas.StatusShort
	}
	if finished > 0 {
		stats.GenerateSeconds, stats.Seconds = float64(finished-began)/1e9, float64(now.UnixNano()-began)/1e9
	}
	slices.Sort(e.Dropped)
	e.Dropped = e.Dropped[:min(len(e.Dropped), schemas.MaxListItems)] // Expected, Groups and Refills count all
	e.Samples = int64(len(rewards))
	if len(rewards) > 0 {
		mean, std := moments(rewards)
		e.Mean, e.Std = &mean, &std
	}
	for _, m := range slices.Concat(estimator.Metrics(stats), estimator.Validation(evaluation)) {
		if len(m.Name) <= schemas.MaxName && len(e.Metrics) < schemas.MaxMetrics {
			e.Metrics = append(e.Metrics, schemas.Metric(m))
		}
	}
	if e.Metrics == nil {
		e.Metrics = []schemas.Metric{}
	}
	return e
}

// sampleStats returns what the batch's metrics need of each scored member of a group, whose result is a.
func (g *group) sampleStats(a *schemas.Advantage) []estimator.SampleStats {
	var out []estimator.SampleStats
	cfg := g.config()
	for i := range a.Members {
		m := &a.Members[i]
		s := g.find(m.SampleIndex)
		if m.Reward == nil || s == nil {
			continue
		}
		x := estimator.SampleStats{
			UID: string(g.uid), Reward: *m.Reward, Advantage: m.Advantage, StepAdvantages: m.StepAdvantages,
			PolicyMin: s.policyMin, PolicyMax: s.policyMax,
			Returns:         cfg.Returns(*m.Reward, cfg.Columns),
			GenerateSeconds: -1, ScoreSeconds: float64(s.scoreNS) / 1e9,
		}
		if s.tokens != nil {
			x.Steps = s.steps()
			x.Returns = cfg.Returns(*m.Reward, max(1, len(m.StepAdvantages)))
		}
		if s.finished > 0 {
			x.GenerateSeconds = float64(s.finished-s.started) / 1e9
		}
		for k, v := range s.scores {
			if !math.IsNaN(v) {
				x.Scores = append(x.Scores, estimator.Metric{Name: g.spec.Reward[k].Name, Value: v})
			}
		}
		x.Scores = append(x.Scores, s.exactMetrics(g.spec.Reward)...)
		out = append(out, x)
	}
	return out
}

// validationOf returns the rewards and scores of a validation group by name, for the metrics.
func validationOf(g *group) estimator.ValidationGroup {
	v := estimator.ValidationGroup{Source: sourceOf(g.spec.Metadata), Variables: []estimator.Variable{{Name: "reward"}}}
	for _, spec := range g.spec.Reward {
		v.Variables = append(v.Variables, estimator.Variable{Name: spec.Name})
	}
	for _, s := range g.members() {
		if !s.scored {
			continue
		}
		v.Variables[0].Values = append(v.Variables[0].Values, s.reward)
		for k, score := range s.scores {
			if !math.IsNaN(score) {
				v.Variables[k+1].Values = append(v.Variables[k+1].Values, score)
			}
		}
		for _, m := range s.exactMetrics(g.spec.Reward) {
			v.Add(m.Name, m.Value)
		}
	}
	return v
}

// sourceOf returns the dataset that a prompt is from, by which validation metrics are kept apart: data_source of its
// metadata, as in verl; "unknown" without it.
func sourceOf(m schemas.Metadata) string {
	fields, err := m.Map()
	if err != nil {
		return "unknown" // intake has checked it
	}
	if s, ok := fields["data_source"].(string); ok && s != "" {
		return s
	}
	return "unknown"
}

// moments returns the mean and population standard deviation of x, which is not empty.
func moments(x []float64) (mean, std float64) {
	for _, v := range x {
		mean += v
	}
	mean /= float64(len(x))
	for _, v := range x {
		std += (v - mean) * (v - mean)
	}
	return mean, math.Sqrt(std / float64(len(x)))
}
