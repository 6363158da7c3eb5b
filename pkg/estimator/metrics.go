package estimator

import (
	"cmp"
	"maps"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// Metric is one number with its name in verl.
type Metric struct {
	Name  string
	Value float64
}

// SampleStats is one scored sample for the metrics of a batch.
type SampleStats struct {
	UID    string
	Reward float64
	// Advantage is nil if the sample has none. StepAdvantages [T] replace it if they
	// differ over the steps.
	Advantage      *float64
	StepAdvantages []float64
	// Returns [T] are the returns of its steps, if they are not its advantages (Config.Returns).
	Returns []float64
	// Steps is T if samples differ in it: the generated tokens of a text. 0: they do not.
	Steps int
	// Scores are the single rewards.
	Scores []Metric
	// PolicyMin and PolicyMax are the versions of the oldest and newest weights that made it.
	PolicyMin, PolicyMax int64
	// GenerateSeconds and ScoreSeconds are how long making and scoring it took; below 0: not known.
	GenerateSeconds, ScoreSeconds float64
}

// BatchStats is the input of Metrics: one batch.
type BatchStats struct {
	Samples []SampleStats
	// Columns is T, the trained steps of each Advantage. Means and extremes over B*T elements equal those over B
	// samples, so no metric depends on T. If samples have Steps of their own, each counts that often.
	Columns int
	// Step and Epoch are the trainer's; nil: not known.
	Step, Epoch *int64
	// GenerateSeconds is how long the batch was made, Seconds the time from its begin to its result,
	// AdvantageSeconds the time of the advantages alone; 0: not known. Devices is how many devices made it; 0
	// counts as one, so that perf/throughput is that of the whole pipeline.
	GenerateSeconds, Seconds, AdvantageSeconds float64
	Devices                                    int
}

// ExactMetric says whether the reward function name, one that reads text in images, read exactly the target in a
// sample. Its mean is the share of exact samples: critic/NAME/exact/mean, or in an evaluation
// val-aux/SOURCE/NAME/exact/mean@N.
func ExactMetric(name string, exact bool) Metric {
	m := Metric{Name: name + "/exact"}
	if exact {
		m.Value = 1
	}
	return m
}

// Metrics returns the metrics of verl's diffusion trainer that a rollout can know, sorted by name;
// a batch event carries them, and meander results prints them. As there, a metric without its input
// is left out; without samples there are none. Metrics of advantages are over all B*T elements.
// timing_s/reward is the sum of all scorings, which may have run in parallel.
func Metrics(b BatchStats) []Metric {
	m := metrics{}
	if len(b.Samples) == 0 {
		return m
	}
	c := newColumns(b)
	n := float64(len(b.Samples))
	m.addSpread("critic/rewards/", c.rewards)
	m.addWeighted("critic/advantages/", c.advantages)
	m.addWeighted("critic/returns/", c.returns)
	zero, std := 0, 0.0
	for _, uid := range slices.Sorted(maps.Keys(c.groups)) {
		group := momentsOf(c.groups[uid])
		std += group.std(Config{StdBasis: schemas.BasisPopulation})
		if group.constant {
			zero++
		}
	}
	g := float64(len(c.groups))
	m.add("critic/rewards/zero_std_ratio", float64(zero)/g)
	m.add("critic/rewards/std_mean", std/g)
	m.add("critic/rewards/group_size", n/g)
	for _, name := range slices.Sorted(maps.Keys(c.scores)) {
		m.add("critic/"+name+"/mean", meanOf(c.scores[name]))
	}
	m.addSpread("training/off_policy/trajectory_spans/", c.spans)
	m.addSpread("training/off_policy/trajectory_staleness/", c.staleness)
	m.addSpread("training/off_policy/staleness_worst/", c.worst)
	m.addSpread("agent_loop/generate_sequences/", c.generate)
	m.addSpread("agent_loop/compute_score/", c.score)
	if len(c.generate) == len(b.Samples) && len(c.score) == len(c.generate) {
		slowest := 0
		for i := range c.generate {
			if c.generate[i]+c.score[i] > c.generate[slowest]+c.score[slowest] {
				slowest = i
			}
		}
		m.add("agent_loop/slowest/generate_sequences", c.generate[slowest])
		m.add("agent_loop/slowest/compute_score", c.score[slowest])
	}
	if b.Step != nil {
		m.add("training/global_step", float64(*b.Step))
	}
	if b.Epoch != nil {
		m.add("training/epoch", float64(*b.Epoch))
	}
	m.add("perf/total_num_images", n)
	m.addSeconds("gen", b.GenerateSeconds, n)
	m.addSeconds("adv", b.AdvantageSeconds, n)
	if len(c.score) > 0 {
		m.add("timing_s/reward", meanOf(c.score)*float64(len(c.score)))
	}
	if b.Seconds > 0 {
		m.add("timing_s/step", b.Seconds)
		m.add("perf/time_per_step", b.Seconds)
		m.add("perf/throughput", n/(b.Seconds*float64(max(b.Devices, 1))))
	}
	slices.SortFunc(m, func(a, b Metric) int { return cmp.Compare(a.Name, b.Name) })
	return m
}

// columns are the values of all samples, one list for each metric.
type columns struct {
	rewards, spans, staleness, worst, generate, score []float64
	advantages, returns                               stepValues
	// scores are by reward function, groups the rewards by uid.
	scores, groups map[string][]float64
}

// stepValues are values and how many steps each of them counts for. If all counts are 0, all values count alike.
type stepValues struct {
	values []float64
	steps  []int
}

// add adds the values of a sample: one for each of its steps, or one for all of them.
func (w *stepValues) add(values []float64, steps int) {
	w.values = append(w.values, values...)
	for range values {
		w.steps = append(w.steps, steps/len(values))
	}
}

// newColumns collects the values of all samples of b, one list for each metric of Metrics. Unknown
// times (negative) and, without a step, staleness are left out, so these lists can be shorter.
func newColumns(b BatchStats) columns {
	c := columns{scores: map[string][]float64{}, groups: map[string][]float64{}}
	for _, s := range b.Samples {
		c.rewards = append(c.rewards, s.Reward)
		own := s.StepAdvantages
		if len(own) == 0 && s.Advantage != nil {
			own = []float64{*s.Advantage}
		}
		c.advantages.add(own, s.Steps)
		if s.Returns != nil {
			own = s.Returns
		}
		c.returns.add(own, s.Steps)
		for _, v := range s.Scores {
			c.scores[v.Name] = append(c.scores[v.Name], v.Value)
		}
		c.groups[s.UID] = append(c.groups[s.UID], s.Reward)
		c.spans = append(c.spans, float64(s.PolicyMax-s.PolicyMin+1))
		if b.Step != nil {
			c.staleness = append(c.staleness, float64(*b.Step-1-s.PolicyMax))
			c.worst = append(c.worst, float64(*b.Step-1-s.PolicyMin))
		}
		if s.GenerateSeconds >= 0 {
			c.generate = append(c.generate, s.GenerateSeconds)
		}
		if s.ScoreSeconds >= 0 {
			c.score = append(c.score, s.ScoreSeconds)
		}
	}
	return c
}

type metrics []Metric

func (m *metrics) add(name string, value float64) { *m = append(*m, Metric{name, value}) }

// addSpread adds mean, max and min of values; without values it adds nothing.
func (m *metrics) addSpread(prefix string, values []float64) {
	if len(values) == 0 {
		return
	}
	m.add(prefix+"mean", momentsOf(values).mean)
	m.add(prefix+"max", slices.Max(values))
	m.add(prefix+"min", slices.Min(values))
}

// addWeighted adds mean, max and min of values under prefix, as addSpread does, but with a mean in
// which each value counts as often as its sample has steps.
func (m *metrics) addWeighted(prefix string, w stepValues) {
	m.addSpread(prefix, w.values)
	sum, total := 0.0, 0.0
	for i, v := range w.values {
		n := float64(w.steps[i])
		sum, total = sum+float64(n*v), total+n
	}
	if total > 0 {
		(*m)[len(*m)-3].Value = sum / total
	}
}

// addSeconds adds a time, and its share of each of n images in milliseconds; 0 is not known and adds nothing.
func (m *metrics) addSeconds(name string, seconds, n float64) {
	if seconds > 0 {
		m.add("timing_s/"+name, seconds)
		m.add("timing_per_image_ms/"+name, 1000*seconds/n)
	}
}
