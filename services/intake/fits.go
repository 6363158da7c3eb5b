package intake

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// resultMetrics is an upper bound on the metrics of a batch.
const resultMetrics = 256

// checkResultSize refuses a group if its result, or the result of its batch, could not be stored: an event has at
// most limit bytes and schemas.MaxElements values. It encodes the largest result that is possible. The error says how
// large the group or the batch may be. plan has the requests of sample 0: one, or one for each stage.
func checkResultSize(plan []schemas.Request, limit int) error {
	r := &plan[0]
	group := func(n int) bool { return storable(largestResult(plan, n), limit) }
	if n := int(r.GroupSize); !group(n) {
		each := ""
		if steps := trainedSteps(r); len(r.Group.Stages) > 0 {
			each = " with these stages"
		} else if steps > 0 {
			each = fmt.Sprintf(" where each sample has %d advantages, one per trained step, or token (gamma below 1)",
				steps)
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

// trainedSteps returns how many advantages a sample of a request has at most, one for each trained step or token; 0:
// one stands for all.
func trainedSteps(r *schemas.Request) int {
	switch {
	case valueOr(r.Group.Advantage.Gamma, 1) == 1 && !inTree(r):
		return 0
	case r.Text != nil:
		return int(min(r.Text.Answers()*r.Text.MaxNewTokens, schemas.MaxTokens))
	default:
		return len(r.StochasticSteps())
	}
}

// inTree reports whether the request is of a stage with branch trees.
func inTree(r *schemas.Request) bool {
	return slices.ContainsFunc(r.Group.Stages, func(s schemas.GroupStage) bool {
		return s.Name == r.Stage && s.Tree != nil
	})
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
// most bytes, each text has the longest length. plan is that of checkResultSize.
func largestResult(plan []schemas.Request, n int) *schemas.Advantage {
	x, r := new(math.Pi), &plan[0]
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
			TrajectorySeq: math.MaxUint64,
		}
		if slices.ContainsFunc(plan, func(r schemas.Request) bool { return r.Text != nil }) {
			a.Members[i].Tokens = new(int64(math.MaxInt64))
		}
		if len(r.Group.Stages) == 0 {
			a.Members[i].StepAdvantages = make([]float64, trainedSteps(r))
		}
	}
	for i, s := range r.Group.Stages {
		for round := range max(r.Group.Rounds, 1) {
			ran := schemas.StageResult{
				Stage: s.Name.Token(round + 1), SampleIndex: math.MaxInt64, TrajectorySeq: math.MaxUint64,
			}
			for k := range a.Members {
				a.Members[k].Stages = append(a.Members[k].Stages, ran)
			}
		}
		if s.Trains() {
			a.Credits = append(a.Credits, largestCredits(s, &plan[i], n)...)
		}
	}
	if len(r.Group.Credit) > 0 {
		s := schemas.GroupStage{Name: schemas.StageMain, Every: 1, Credit: r.Group.Credit}
		a.Credits = largestCredits(s, r, n)
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

// largestCredits returns the largest credits of the tracks of a stage, in a group of n samples; see largestResult.
func largestCredits(s schemas.GroupStage, r *schemas.Request, n int) []schemas.Credit {
	tracks := map[string]bool{}
	for _, share := range s.Credit {
		tracks[share.Track] = true
	}
	c := schemas.Credit{
		Stage: s.Name, Track: longest, Every: math.MaxInt64,
		Values: slices.Repeat([]*float64{new(math.Pi)}, n/int(s.Every)),
	}
	if steps, rounds := trainedSteps(r), max(r.Group.Rounds, 1); steps > 0 {
		of := schemas.CreditSteps{
			Stage: s.Name.Token(rounds), SampleIndex: math.MaxInt64, Advantages: make([]float64, steps),
		}
		c.Steps = slices.Repeat([]schemas.CreditSteps{of}, len(c.Values)*int(rounds))
	}
	return slices.Repeat([]schemas.Credit{c}, max(len(tracks), 1))
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
