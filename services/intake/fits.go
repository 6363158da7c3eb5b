package intake

import (
	"fmt"
	"math"
	"sort"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// resultMetrics is an upper bound on the metrics of a batch.
const resultMetrics = 256

// checkResultSize refuses a group if its result, or the result of its batch, could not be stored: an event has at
// most limit bytes and schemas.MaxElements values. It encodes the largest result that is possible. The error says how
// large the group or the batch may be.
func checkResultSize(r *schemas.Request, limit int) error {
	trained := 0
	if valueOr(r.Group.Advantage.Gamma, 1) != 1 { // otherwise one advantage stands for all steps
		trained = len(r.StochasticSteps())
		if r.Text != nil {
			trained = int(min(r.Text.Answers()*r.Text.MaxNewTokens, schemas.MaxTokens))
		}
	}
	group := func(n int) bool { return storable(largestResult(r, n, trained), limit) }
	if n := int(r.GroupSize); !group(n) {
		each := ""
		if trained > 0 {
			each = fmt.Sprintf(" where each sample has %d advantages, one per trained step, or token (gamma below 1)",
				trained)
		}
		return fmt.Errorf("group_size: %d; must be at most %d%s: the result is one event", n,
			largestFitting(n, group), each)
	}
	if r.Group.BatchGroups == 0 {
		return nil
	}
	rounds := 0
	if p := r.Group.GroupPolicy; p != nil && (p.ZeroStd == schemas.GroupRefill || p.Failed == schemas.GroupRefill) {
		rounds = int(valueOr(p.RefillRounds, 0))
	}
	batch := func(n int) bool { return storable(largestBatch(r, n*(rounds+1)), limit) }
	if n := int(r.Group.BatchGroups); !batch(n) {
		return fmt.Errorf("batch.groups: %d; must be at most %d with %d refill_rounds: the result names each group "+
			"that does not count", n, largestFitting(n, batch), rounds)
	}
	return nil
}

// largestFitting returns the largest number below n that fits.
func largestFitting(n int, fits func(int) bool) int {
	return sort.Search(n, func(k int) bool { return !fits(k + 1) })
}

// storable reports whether an event can be encoded in at most limit bytes.
func storable(e schemas.Event, limit int) bool {
	data, err := schemas.Encode(e)
	return err == nil && len(data) <= limit
}

// longest stands for any token, digest or name in a result.
var longest = strings.Repeat("x", schemas.MaxToken)

// largestResult returns an advantage event at least as large as that of any group of n samples: each number takes the
// most bytes, each text has the longest length. trained is the number of advantages of each sample, 0: one.
func largestResult(r *schemas.Request, n, trained int) *schemas.Advantage {
	x := new(math.Pi)
	steps := make([]float64, trained)
	a := &schemas.Advantage{
		Run: schemas.Run(longest), UID: schemas.UID(longest), Batch: longest, Status: longest,
		GroupSize: math.MaxInt64, Members: make([]schemas.Member, n),
		Mean: x, Std: x, Scale: longest, StdBasis: longest, Estimator: longest, Epsilon: *x,
		TrainedSteps: math.MaxInt64, ScheduleDigest: longest,
		PolicyVersionMin: math.MaxInt64, PolicyVersionMax: math.MaxInt64, Metadata: r.Group.Metadata,
		Opened: math.MaxInt64, Closed: math.MaxInt64,
		Mode: longest, AdvClipMax: x, Gamma: x, BatchSamples: math.MaxInt64,
		Refill: &schemas.Refill{Root: schemas.UID(longest), Round: math.MaxInt64}, RefilledBy: schemas.UID(longest),
		Validation: true, FreeReadSteps: true, SourceRun: schemas.Run(longest), Singleton: longest,
	}
	for i := range a.Members {
		a.Members[i] = schemas.Member{
			SampleIndex: math.MaxInt64, Reward: x, Advantage: x, Status: schemas.StatusMissing,
			TrajectorySeq: math.MaxUint64, StepAdvantages: steps,
		}
		if r.Text != nil {
			a.Members[i].Tokens = new(int64(math.MaxInt64))
		}
	}
	if r.Group.Tree != nil { // a binary tree has the most branch points, n - 1
		a.BranchScope = longest
		for range n - 1 {
			child := schemas.BranchChild{SampleIndex: math.MaxInt64, Leaves: math.MaxInt64, Reward: x, Advantage: x}
			a.Branches = append(a.Branches,
				schemas.BranchGroup{
					StepIndex: math.MaxInt64, Mean: x, Std: x, Children: []schemas.BranchChild{child, child},
				})
		}
	}
	return a
}

// largestBatch returns a batch event at least as large as that of any batch of n groups; see largestResult.
func largestBatch(r *schemas.Request, n int) *schemas.Batch {
	x := new(math.Pi)
	b := &schemas.Batch{
		Run: schemas.Run(longest), Batch: longest, Groups: math.MaxInt64, UIDs: []schemas.UID{},
		Samples: math.MaxInt64, Mean: x, Std: x, StdBasis: longest,
		Metrics: make([]schemas.Metric, resultMetrics), Closed: math.MaxInt64, Status: longest,
		Expected: math.MaxInt64, Refills: math.MaxInt64,
		Dropped: make([]schemas.UID, n), Step: r.Group.BatchStep, Epoch: r.Group.BatchEpoch,
	}
	for i := range b.Metrics {
		b.Metrics[i] = schemas.Metric{Name: longest, Value: *x}
	}
	for i := range b.Dropped {
		b.Dropped[i] = schemas.UID(longest)
	}
	return b
}
