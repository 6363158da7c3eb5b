package schemas

// Update is one update of the weights of a lane, as the trainer that made it tells it, for those who look on: curves
// beside the rewards of the run. Numbers that the trainer has not are absent.
type Update struct {
	V int64 `msgpack:"v"`
	// Run is the one whose samples the trainer learned from.
	Run    Run    `msgpack:"run" form:"token"`
	Lane   Lane   `msgpack:"lane" form:"token"`
	Tenant Tenant `msgpack:"tenant" form:"token"`
	// Step is the count of the trainer's updates, from 1.
	Step int64 `msgpack:"step" range:"1.."`
	// Batches are the ids of the batches that the trainer learned from, BatchDigest is a digest of the events it read.
	Batches     []string `msgpack:"batches" size:"0..MaxListItems,unique" form:"token"`
	BatchDigest string   `msgpack:"batch_digest,omitempty" form:"digest?"`
	// PolicyVersion is the version that has the new weights, WeightsDigest names these.
	PolicyVersion int64  `msgpack:"policy_version" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	// Loss is what the update made smaller: a mean over its samples.
	Loss *float64 `msgpack:"loss,omitempty"`
	// Ratio is the mean ratio of probabilities under new and old weights, ClipShare the share of ratios that were
	// clipped.
	Ratio     *float64 `msgpack:"ratio,omitempty" range:"0.."`
	ClipShare *float64 `msgpack:"clip_share,omitempty" range:"0..1"`
	// KL is the divergence from the reference, in nats.
	KL *float64 `msgpack:"kl,omitempty"`
	// LearningRate is the size of the step, GradNorm the length of its gradient before it was clipped.
	LearningRate *float64 `msgpack:"lr,omitempty" range:"0.."`
	GradNorm     *float64 `msgpack:"grad_norm,omitempty" range:"0.."`
	// Staleness is how many versions the samples were behind.
	Staleness *int64 `msgpack:"staleness,omitempty" range:"0.."`
	// Evaluation are the numbers of an evaluation after the update, sorted by name.
	Evaluation []Metric `msgpack:"evaluation,omitempty" size:"0..MaxMetrics"`
	// By is the trainer, for people.
	By string `msgpack:"by,omitempty" size:"0..MaxName,cut"`
	// At is when the update was done, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// Type returns the type name of the event.
func (*Update) Type() string { return TypeUpdate }

func (e *Update) Subject() string { return UpdateSubject(e.Run, e.Lane, e.Tenant, e.Step) }

// UpdateSubject returns the subject of an update of a lane's weights.
func UpdateSubject(run Run, lane Lane, tenant Tenant, step int64) string {
	return Prefix + KindUpdate + "." + string(run) + "." + PolicyKey(lane, tenant) + "." + itoa(step)
}

func (e *Update) checkRules(f *faults) { f.checkMetricOrder("evaluation", e.Evaluation) }
