package schemas

import "reflect"

// Update is one update of the weights of a lane, as the trainer that made it tells it, for those who look on: curves
// beside the rewards of the run. Numbers that the trainer has not are absent.
type Update struct {
	V int64 `msgpack:"v"`
	// Run is the one whose samples the trainer learned from.
	Run    Run    `msgpack:"run" form:"token"`
	Lane   Lane   `msgpack:"lane" form:"token"`
	Tenant Tenant `msgpack:"tenant" form:"token"`
	// Trainer names the one that made the update, where several learn from the run.
	Trainer string `msgpack:"trainer" form:"token"`
	// Step is the count of the trainer's updates, from 1; 0: it begins with these weights. A trainer that restarts and
	// makes an update again has it once: the first counts.
	Step int64 `msgpack:"step" range:"0.."`
	// Batches are the ids of the batches that the trainer learned from, BatchDigest is a digest of the events it read.
	Batches     []string `msgpack:"batches" size:"0..MaxListItems,unique" form:"token"`
	BatchDigest string   `msgpack:"batch_digest,omitempty" form:"digest?"`
	// PolicyVersion is the version that has the new weights, WeightsDigest names these.
	PolicyVersion int64  `msgpack:"policy_version" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	// Loss is what the update made smaller: a mean over its samples.
	Loss *float64 `msgpack:"loss,omitempty"`
	// Ratio is the mean ratio of probabilities under new and old weights.
	Ratio *float64 `msgpack:"ratio,omitempty" range:"0.."`
	// RatioMax is the largest ratio of probabilities under new and old weights.
	RatioMax *float64 `msgpack:"ratio_max,omitempty" range:"0.."`
	// ClipShare is the share of ratios that were clipped.
	ClipShare *float64 `msgpack:"clip_share,omitempty" range:"0..1"`
	// KL is the divergence from the reference, in nats.
	KL *float64 `msgpack:"kl,omitempty"`
	// LearningRate is the size of the optimizer's step.
	LearningRate *float64 `msgpack:"lr,omitempty" range:"0.."`
	// GradNorm is the length of the gradient before it was clipped.
	GradNorm *float64 `msgpack:"grad_norm,omitempty" range:"0.."`
	// Staleness is how many versions the samples were behind.
	Staleness *int64 `msgpack:"staleness,omitempty" range:"0.."`
	// Groups is how many groups the update learned from.
	Groups *int64 `msgpack:"groups,omitempty" range:"0.."`
	// Samples is how many samples the update learned from.
	Samples *int64 `msgpack:"samples,omitempty" range:"0.."`
	// Evaluation are the numbers of an evaluation after the update, sorted by name.
	Evaluation []Metric `msgpack:"evaluation,omitempty" size:"0..MaxMetrics"`
	// At is when the update was done, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// Type returns the type name of the event.
func (*Update) Type() string { return TypeUpdate }

// Numbers returns the numbers that the update has, in the order of its fields, then those of its evaluation as
// evaluation/NAME.
func (e *Update) Numbers() (out []Metric) {
	v := reflect.ValueOf(e).Elem()
	for _, f := range Fields(v.Type()) {
		switch x := f.In(v).Interface().(type) {
		case *float64:
			if x != nil {
				out = append(out, Metric{f.Name, *x})
			}
		case *int64:
			if x != nil {
				out = append(out, Metric{f.Name, float64(*x)})
			}
		}
	}
	for _, m := range e.Evaluation {
		out = append(out, Metric{"evaluation/" + m.Name, m.Value})
	}
	return out
}

func (e *Update) Subject() string { return UpdateSubject(e.Run, e.Lane, e.Tenant, e.Trainer, e.Step) }

// UpdateSubject returns the subject of a trainer's update of a lane's weights.
func UpdateSubject(run Run, lane Lane, tenant Tenant, trainer string, step int64) string {
	return Prefix + KindUpdate + "." + string(run) + "." + PolicyKey(lane, tenant) + "." + trainer + "." + itoa(step)
}

func (e *Update) checkRules(f *faults) { f.checkMetricOrder("evaluation", e.Evaluation) }
