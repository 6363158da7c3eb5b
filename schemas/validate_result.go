package schemas

import (
	"fmt"
	"strconv"
)

// Validate joins every fault of the reward.
func (e *Reward) Validate() error {
	var f faults
	f.version(e.V)
	f.sample(e.Run, e.UID, e.SampleIndex, e.GroupSize)
	f.enum("status", e.Status, RewardStatuses)
	outcome(&f, e.Status, e.Error, "reward", e.Reward)
	if f.length("scores", len(e.Scores), 0, MaxRewards) {
		for i := range e.Scores {
			s, g := &e.Scores[i], f.item("scores", i)
			g.rewardName("name", s.Name)
			g.text("version", s.Version, 0, MaxName)
			g.text("detail", s.Detail, 0, MaxDetail)
			g.number("weight", s.Weight, -MaxWeight, MaxWeight)
			g.enum("status", s.Status, RewardStatuses)
			outcome(g, s.Status, s.Error, "value", s.Value)
			g.notNegative("duration_ns", s.DurationNS)
		}
	}
	f.within("trained_steps", e.TrainedSteps, 0, MaxSteps)
	f.optionalDigest("schedule_digest", e.ScheduleDigest)
	f.policies(e.PolicyVersionMin, e.PolicyVersionMax)
	e.Group.validate(f.in("group"), e.UID)
	f.notNegative("scored", e.Scored)
	f.notNegative("sample_started", e.SampleStarted)
	f.notNegative("sample_finished", e.SampleFinished)
	return f.err()
}

// Validate joins every fault of the verdict.
func (e *Verdict) Validate() error {
	var f faults
	f.version(e.V)
	f.sample(e.Run, e.UID, e.SampleIndex, MaxGroupSize)
	f.token("name", e.Name)
	f.finiteOrNull("value", e.Value)
	switch {
	case e.Value == nil:
		f.text("error", e.Error, 1, MaxText)
	case e.Error != "":
		f.add("error", quote(e.Error), "must be empty when there is a value")
	}
	f.text("comment", e.Comment, 0, MaxText)
	f.text("author", e.Author, 0, MaxName)
	f.notNegative("at", e.At)
	return f.err()
}

// outcome checks that a value is there when scored, and an error when failed.
func outcome(f *faults, status, message, field string, value *float64) {
	f.finiteOrNull(field, value)
	switch status {
	case StatusScored:
		if value == nil {
			f.add(field, "null", "must be a number when scored")
		}
		if message != "" {
			f.add("error", quote(message), "must be empty when scored")
		}
	case StatusFailed:
		if value != nil {
			f.add(field, formatFloat(*value), "must be null when failed")
		}
		f.text("error", message, 1, MaxText)
	}
}

// Validate joins every fault of the advantage.
func (e *Advantage) Validate() error {
	var f faults
	f.version(e.V)
	f.token("run", e.Run)
	f.token("uid", e.UID)
	f.token("batch", e.Batch)
	f.enum("status", e.Status, GroupStatuses)
	f.text("error", e.Error, 0, MaxText)
	f.within("group_size", e.GroupSize, 1, MaxGroupSize)
	if f.length("members", len(e.Members), 0, MaxGroupSize) && e.GroupSize >= 1 {
		if int64(len(e.Members)) > e.GroupSize {
			f.add("members", strconv.Itoa(len(e.Members))+" items", fmt.Sprintf("must be at most group_size, %d", e.GroupSize))
		}
		for i := range e.Members {
			e.member(f.item("members", i), i)
		}
	}
	f.finiteOrNull("mean", e.Mean)
	f.finiteOrNull("std", e.Std)
	f.enum("scale", e.Scale, StdScales)
	f.enum("std_basis", e.StdBasis, StdBases)
	f.token("estimator", e.Estimator)
	f.number("epsilon", e.Epsilon, 0, MaxEpsilon)
	f.within("trained_steps", e.TrainedSteps, 0, MaxSteps)
	f.optionalDigest("schedule_digest", e.ScheduleDigest)
	f.policies(e.PolicyVersionMin, e.PolicyVersionMax)
	f.metadata(e.Metadata)
	f.notNegative("opened", e.Opened)
	f.notNegative("closed", e.Closed)
	if e.Mode != "" {
		f.token("mode", e.Mode)
	}
	optional(e.AdvClipMax, func(x float64) { f.number("adv_clip_max", x, 0, MaxAdvClip) })
	optional(e.Gamma, func(x float64) { f.number("gamma", x, 0, 1) })
	f.optionalEnum("singleton", e.Singleton, Singletons)
	f.within("batch_samples", e.BatchSamples, 0, MaxBatchGroups*MaxGroupSize)
	e.Refill.validate(f.in("refill"))
	if e.RefilledBy != "" {
		f.token("refilled_by", e.RefilledBy)
	}
	if e.SourceRun != "" {
		f.token("source_run", e.SourceRun)
	}
	return f.err()
}

func (e *Advantage) member(f *faults, i int) {
	m := &e.Members[i]
	f.within("sample_index", m.SampleIndex, 0, e.GroupSize-1)
	if i > 0 && m.SampleIndex <= e.Members[i-1].SampleIndex {
		f.add("sample_index", strconv.FormatInt(m.SampleIndex, 10), "must be above the one before it")
	}
	f.enum("status", m.Status, MemberStatuses)
	f.finiteOrNull("reward", m.Reward)
	f.finiteOrNull("advantage", m.Advantage)
	if m.Status == StatusScored && m.Reward == nil {
		f.add("reward", "null", "must be a number when scored")
	}
	if m.Status != StatusScored && m.Reward != nil {
		f.add("reward", formatFloat(*m.Reward), "must be null unless scored")
	}
	if m.Status != StatusScored && m.Advantage != nil {
		f.add("advantage", formatFloat(*m.Advantage), "must be null unless scored")
	}
	if len(m.StepAdvantages) > 0 && (m.Advantage == nil || int64(len(m.StepAdvantages)) != e.TrainedSteps) {
		f.add("step_advantages", strconv.Itoa(len(m.StepAdvantages))+" items", fmt.Sprintf("must be one per trained step, %d, beside an advantage", e.TrainedSteps))
	}
	for i, a := range m.StepAdvantages {
		f.finite("step_advantages["+strconv.Itoa(i)+"]", a)
	}
}

// uids checks a sorted list of uids.
func (f *faults) uids(field string, list []string, most int) {
	if !f.length(field, len(list), 0, most) {
		return
	}
	for i, uid := range list {
		at := field + "[" + strconv.Itoa(i) + "]"
		f.token(at, uid)
		if i > 0 && uid <= list[i-1] {
			f.add(at, quote(uid), "must be above the one before it")
		}
	}
}

// Validate joins every fault of the batch.
func (e *Batch) Validate() error {
	var f faults
	f.version(e.V)
	f.token("run", e.Run)
	f.token("batch", e.Batch)
	f.within("groups", e.Groups, 0, MaxBatchGroups)
	f.uids("uids", e.UIDs, MaxBatchGroups)
	if e.Status != "" {
		f.enum("status", e.Status, BatchStatuses)
	}
	f.within("expected", e.Expected, 0, MaxBatchGroups)
	f.within("refills", e.Refills, 0, MaxBatchGroups*MaxRefillRounds)
	f.uids("dropped", e.Dropped, MaxListItems)
	optional(e.Step, func(n int64) { f.notNegative("step", n) })
	optional(e.Epoch, func(n int64) { f.notNegative("epoch", n) })
	f.within("samples", e.Samples, 0, MaxBatchGroups*MaxGroupSize)
	f.finiteOrNull("mean", e.Mean)
	f.finiteOrNull("std", e.Std)
	f.enum("std_basis", e.StdBasis, StdBases)
	if f.length("metrics", len(e.Metrics), 0, MaxMetrics) {
		for i, m := range e.Metrics {
			g := f.item("metrics", i)
			g.text("name", m.Name, 1, MaxName)
			g.finite("value", m.Value)
			if i > 0 && m.Name <= e.Metrics[i-1].Name {
				g.add("name", quote(m.Name), "must be above the one before it")
			}
		}
	}
	f.notNegative("closed", e.Closed)
	return f.err()
}
