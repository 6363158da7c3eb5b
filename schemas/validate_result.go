package schemas

import (
	"fmt"
	"slices"
	"strconv"
)

func (e *Reward) checkRules(f *faults) {
	f.checkSampleIndex(e.SampleIndex, e.GroupSize)
	checkOutcome(f, e.Status, e.Error, "reward", e.Reward)
	f.checkPolicySpan(e.PolicyVersionMin, e.PolicyVersionMax)
	e.Group.checkRulesAcross(f.inStruct("group"), e.UID, e.GroupSize)
}

func (s *Score) checkRules(f *faults) { checkOutcome(f, s.Status, s.Error, "value", s.Value) }

func (e *Verdict) checkRules(f *faults) {
	switch {
	case e.Value == nil:
		f.requireText("error", e.Error)
	case e.Error != "":
		f.add("error", quote(e.Error), "must be empty when there is a value")
	}
}

// checkOutcome checks that a value is there when scored, and an error when failed.
func checkOutcome(f *faults, status, message, field string, value *float64) {
	switch status {
	case StatusScored:
		if value == nil {
			f.add(field, "null", "must be a number when scored")
		}
		if message != "" {
			f.add("error", quote(message), "must be empty when scored")
		}
	case StatusFailed, StatusPruned:
		if value != nil {
			f.add(field, formatFloat(*value), "must be null when "+status)
		}
		f.requireText("error", message)
	}
}

// checkRules checks the members, and that children of branch points have rewards exactly if they have scored leaves.
func (e *Advantage) checkRules(f *faults) {
	if len(e.Members) <= MaxGroupSize && e.GroupSize >= 1 {
		if int64(len(e.Members)) > e.GroupSize {
			f.add("members", strconv.Itoa(len(e.Members))+" items",
				fmt.Sprintf("must be at most group_size, %d", e.GroupSize))
		}
		for i := range e.Members {
			e.checkMember(f.inItem("members", i), i)
		}
	}
	for i := range e.Branches {
		for k, c := range e.Branches[i].Children {
			g := f.inItem("branches", i).inItem("children", k)
			g.checkSampleIndex(c.SampleIndex, e.GroupSize)
			if (c.Reward == nil) != (c.Leaves == 0) {
				g.add("reward", nullOr(c.Reward), "must be a number exactly where there are scored leaves")
			}
			if c.Reward == nil && c.Advantage != nil {
				g.add("advantage", formatFloat(*c.Advantage), "must be null without a reward")
			}
		}
	}
	e.checkCredits(f)
	f.checkPolicySpan(e.PolicyVersionMin, e.PolicyVersionMax)
}

// checkCredits checks that each stage and track comes once, with a value for each member that has an advantage and ran
// the stage.
func (e *Advantage) checkCredits(f *faults) {
	if len(e.Credits) > MaxCredits || len(e.Members) > MaxGroupSize {
		return
	}
	for i := range e.Credits {
		c, g := &e.Credits[i], f.inItem("credits", i)
		for _, o := range e.Credits[:i] {
			switch {
			case o.Stage != c.Stage:
			case o.Track == c.Track:
				g.add("track", quote(c.Track), "must come at most once in a stage")
			case o.Track == "" || c.Track == "":
				g.add("track", quote(c.Track), "must be a track in each credit of a stage that has several")
			}
		}
		every := int(max(c.Every, 1))
		if !g.requireLength("values", len(c.Values)*every, len(e.Members), "one per member, or every few of them") {
			continue
		}
		for k, v := range c.Values {
			leads := slices.ContainsFunc(e.Members[k*every:(k+1)*every],
				func(m Member) bool { return m.Advantage != nil && m.ran(c.Stage) })
			if (v == nil) == leads {
				g.add("values["+strconv.Itoa(k)+"]", nullOr(v),
					"must be a number exactly where a member that ran the stage has an advantage")
			}
		}
		for k, x := range c.Steps {
			if at := x.SampleIndex / int64(every); x.Stage.Name() != c.Stage || at < 0 || at >= int64(len(c.Values)) ||
				x.SampleIndex%int64(every) != 0 || c.Values[at] == nil {
				g.inItem("steps", k).add("sample_index", strconv.FormatInt(x.SampleIndex, 10),
					"must be a sample of the stage that has a value")
			}
		}
	}
}

// ran reports whether a stage ran for the member, in any round; one without stages is all of one.
func (m *Member) ran(stage Stage) bool {
	return len(m.Stages) == 0 ||
		slices.ContainsFunc(m.Stages, func(r StageResult) bool { return r.Stage.Name() == stage })
}

// checkMember checks member i: its order, and that reward and advantages are there exactly if its status says so.
func (e *Advantage) checkMember(f *faults, i int) {
	m := &e.Members[i]
	f.checkSampleIndex(m.SampleIndex, e.GroupSize)
	if i > 0 && m.SampleIndex <= e.Members[i-1].SampleIndex {
		f.add("sample_index", strconv.FormatInt(m.SampleIndex, 10), "must be above the one before it")
	}
	if m.Status == StatusScored && m.Reward == nil {
		f.add("reward", "null", "must be a number when scored")
	}
	if m.Status != StatusScored && m.Reward != nil {
		f.add("reward", formatFloat(*m.Reward), "must be null unless scored")
	}
	if m.Status != StatusScored && m.Advantage != nil {
		f.add("advantage", formatFloat(*m.Advantage), "must be null unless scored")
	}
	steps, unit := e.TrainedSteps, "trained step"
	if m.Tokens != nil {
		steps, unit = *m.Tokens, "token that was generated"
	}
	if len(m.StepAdvantages) > 0 && (m.Advantage == nil || int64(len(m.StepAdvantages)) != steps) {
		f.add("step_advantages", strconv.Itoa(len(m.StepAdvantages))+" items",
			fmt.Sprintf("must be one per %s, %d, beside an advantage", unit, steps))
	}
}

// checkSorted checks that a list of uids is in order. The check of the tag reports one that comes twice.
func (f *faults) checkSorted(field string, list []UID) {
	for i := 1; i < len(list); i++ {
		if list[i] < list[i-1] {
			f.add(field+"["+strconv.Itoa(i)+"]", quote(string(list[i])), "must be above the one before it")
			return
		}
	}
}

// checkRules checks that uids and metrics are sorted.
func (e *Batch) checkRules(f *faults) {
	f.checkSorted("uids", e.UIDs)
	f.checkSorted("dropped", e.Dropped)
	f.checkMetricOrder("metrics", e.Metrics)
}

func (f *faults) checkMetricOrder(field string, list []Metric) {
	for i := 1; i < len(list); i++ {
		if name := list[i].Name; name <= list[i-1].Name {
			f.inItem(field, i).add("name", quote(name), "must be above the one before it")
		}
	}
}
