package schemas

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
)

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
	// Batches are the ids of the batches that the trainer learned from, in order. BatchDigest names what it learned of
	// them: the samples with their settings, states, weights, rewards and advantages.
	Batches     []string `msgpack:"batches" size:"0..MaxListItems,unique" form:"token"`
	BatchDigest string   `msgpack:"batch_digest,omitempty" form:"digest?"`
	// PolicyVersion is the version that has the new weights, WeightsDigest names these, WeightsBefore those that the
	// update began with.
	PolicyVersion int64  `msgpack:"policy_version" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	WeightsBefore string `msgpack:"weights_before,omitempty" size:"0..MaxName" absent:"not told"`
	// AverageDigest is the sha-256 of the adapter file with the running average of the weights.
	AverageDigest string `msgpack:"average_digest,omitempty" form:"sha256?" absent:"there is none"`
	// State is a safetensors file of what the update began with: the adapter, the optimizer's moments and the running
	// average.
	State *Ref `msgpack:"state,omitempty" absent:"it is not kept"`
	// Settings are the trainer's that decide the update, a JSON object; Code names the versions of what computed it.
	Settings string `msgpack:"settings,omitempty" size:"0..MaxText" absent:"not told"`
	Code     string `msgpack:"code,omitempty" size:"0..MaxName" absent:"not told"`
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

func (e *Update) checkRules(f *faults) {
	f.checkMetricOrder("evaluation", e.Evaluation)
	var settings map[string]json.RawMessage
	if e.Settings != "" && (json.Unmarshal([]byte(e.Settings), &settings) != nil || settings == nil) {
		f.add("settings", fmt.Sprintf("%d bytes", len(e.Settings)), "must be a JSON object")
	}
}

// TrainedGroup is a group as a trainer learns from it: its result, and the trajectory of each member in order; nil
// where there is none.
type TrainedGroup struct {
	*Advantage
	Trajectories []*Trajectory
}

// BatchDigest returns what Update.BatchDigest has of a batch with these groups, sorted by uid: the SHA-256 of lines of
// text, in lower-case hex. The first is "meander batch 4". Then each group has a line with uid and estimator; one for
// each member with sample_index, stage, status, log_probs, schedule_digest, weights_digest, the digests of its media,
// reward, advantage and step_advantages; and one for each of its credits with stage, track and values. A number is the
// 16 hex digits of its IEEE 754 bits, items of a list have commas between them, and "-" stands for nothing. Of a text
// log_probs are the SHA-256 of its ids, mask, log_probs and processed_log_probs. Times, sequences and versions of the
// policy are not in it: equal seeds and weights give equal digests.
func BatchDigest(groups []TrainedGroup) string {
	h := sha256.New()
	fmt.Fprintln(h, "meander batch 4")
	for _, g := range groups {
		fmt.Fprintln(h, g.UID, g.Estimator)
		for i, m := range g.Members {
			t := g.Trajectories[i]
			if t == nil {
				t = &Trajectory{}
			}
			var media []string
			for _, x := range t.Media {
				media = append(media, x.Digest)
			}
			fmt.Fprintln(h, m.SampleIndex, orNothing(string(t.Stage)), m.Status, contentOf(t),
				orNothing(t.ScheduleDigest), orNothing(t.WeightsDigest), orNothing(strings.Join(media, ",")),
				bitsOf(m.Reward), bitsOf(m.Advantage), bitsOf(pointers(m.StepAdvantages)...))
		}
		for _, c := range g.Credits {
			fmt.Fprintln(h, c.Stage, orNothing(c.Track), bitsOf(c.Values...))
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// BatchDigests returns what Update.BatchDigest has of batches with these digests, in order: that of the only one, else
// the SHA-256 of the digests, each with a line's end.
func BatchDigests(digests []string) string {
	if len(digests) == 1 {
		return digests[0]
	}
	sum := sha256.Sum256([]byte(strings.Join(digests, "\n") + "\n"))
	return hex.EncodeToString(sum[:])
}

func orNothing(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// contentOf returns what BatchDigest has of the steps of a sample.
func contentOf(t *Trajectory) string {
	if t.Text == nil {
		return bitsOf(t.LogProbs...)
	}
	var sums []string
	for _, of := range []*Tensor{t.Text.IDs, t.Text.Mask, t.Text.LogProbs, t.Text.ProcessedLogProbs} {
		switch {
		case of != nil && of.Ref != nil:
			sums = append(sums, of.Ref.Digest)
		case of != nil:
			sums = append(sums, SHA256.Text(SHA256.Sum(of.Data)))
		}
	}
	return orNothing(strings.Join(sums, ","))
}

func pointers(values []float64) (out []*float64) {
	for i := range values {
		out = append(out, &values[i])
	}
	return out
}

// bitsOf returns the bits of numbers as BatchDigest has them.
func bitsOf(values ...*float64) string {
	var out []string
	for _, v := range values {
		bits := "-"
		if v != nil {
			bits = fmt.Sprintf("%016x", math.Float64bits(*v))
		}
		out = append(out, bits)
	}
	return orNothing(strings.Join(out, ","))
}
