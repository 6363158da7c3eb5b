package intake

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// messageBytes is what a message takes in a stream besides its data: subject, headers and the server's own part.
	messageBytes = 300
	// scoreBytes is the least that a score takes in a reward event.
	scoreBytes = 60
	// Request.StepBytes is at most a fifth more than the steps really take.
	boundOver, boundUnder = 6, 5
)

// checkLimits refuses a group that exceeds the limit of a stream by itself, or with the others of its batch, each as
// large as it: it could never end. It also refuses a group of a paused run if its requests cannot be parked: waiting
// for that would keep out the prompts of other runs. Refusals are terminal errors with the setting to change.
func (s *service) checkLimits(ctx context.Context, run schemas.Run, a *asked) error {
	first := a.requests[0]
	data, err := schemas.Encode(first)
	if err != nil {
		return err
	}
	request := int64(len(data)) + messageBytes
	for _, of := range leastSizes(a, request) {
		info, err := s.bus.StreamInfo(ctx, of.stream)
		if err != nil {
			return err
		}
		if err := of.check(first, info.Config.MaxBytes); err != nil {
			return bus.Terminal(schemas.CodeInvalid, err)
		}
	}
	switch h, err := s.bus.ControlsOf(ctx, run, first.UID); {
	case err != nil:
		return err
	case h.Paused() == nil:
		return nil
	}
	info, err := s.bus.StreamInfo(ctx, schemas.StreamParked)
	if err != nil {
		return err
	}
	if free := info.Config.MaxBytes - int64(info.State.Bytes); info.Config.MaxBytes > 0 &&
		free < request*int64(len(a.requests)) {
		return parkingFull(run)
	}
	return nil
}

// parkingFull returns the terminal error of a prompt whose run is paused while the stream of parked requests is full.
func parkingFull(run schemas.Run) error {
	return bus.Terminal(schemas.CodeExhausted, fmt.Errorf(
		"run %s is paused, and %s has no space for more of its requests; publish the prompt again when the run goes "+
			"on ('meander resume %s'), or give the stream more with 'meander streams limit --max-parked-bytes SIZE'",
		run, schemas.StreamParked, run))
}

// explainFull replaces the error of a full stream by parkingFull; other errors stay as they are.
func explainFull(run schemas.Run, err error) error {
	if errors.Is(err, bus.ErrStreamFull) {
		return parkingFull(run)
	}
	return err
}

// leastSize is the least number of bytes that a group takes in a stream, with words for the message to the client: what
// they hold, the flag that raises the stream's limit, and what else would help. most is what surely is enough.
type leastSize struct {
	stream, what, flag, fix string
	bytes, most             int64
}

// check returns the fault of a group that takes more than the limit of the stream, by itself or in its batch; nil if it
// fits. Retention frees no open batch, so all groups of it must fit at once.
func (of leastSize) check(r *schemas.Request, limit int64) error {
	groups := max(1, r.Group.BatchGroups)
	if of.stream == schemas.StreamRequests { // which samplers empty meanwhile
		groups = 1
	}
	if limit <= 0 || of.bytes <= limit/groups {
		return nil
	}
	field, unit, size := "group_size", "group", r.GroupSize
	if of.bytes <= limit {
		field, unit, size = "batch.groups", "batch", groups
		of.what += fmt.Sprintf(", %s a group,", mib(of.bytes))
		of.fix += ", or the batch: each group of it may take a part of the limit"
	} else {
		groups = 1
	}
	return fmt.Errorf("%s: %d; its %s take about %s, and %s may hold %s, so that the %s could never end; give it more "+
		"with 'meander streams limit --%s %s', or %s", field, size, of.what, mib(groups*of.bytes), of.stream,
		mib(limit), unit, of.flag, wholeMiB(groups*of.most), of.fix)
}

// leastSizes returns the least that a group takes in each stream that must hold all of it at once. request is the
// size of one request in bytes. Images are left out: their compressed size is not known.
func leastSizes(a *asked, request int64) []leastSize {
	first, sizes := a.requests[0], a.sizes()
	n := first.GroupSize
	steps, largest := int64(0), int64(0)
	for _, bytes := range sizes {
		steps, largest = steps+bytes, max(largest, bytes)
	}
	bound := steps
	// The last one begins when its bound fits beside what the others have stored.
	steps = (steps-largest)/boundOver*boundUnder + largest
	group, err := schemas.Encode(&schemas.Opening{Run: first.Run, UID: first.UID, GroupSize: n, Group: first.Group})
	if err != nil {
		group = nil // counts as empty
	}
	reward := int64(len(group)) + messageBytes + scoreBytes*int64(len(first.Group.Reward))
	trajectories := int64(len(sizes)) * (messageBytes + int64(len(first.Prompt)+len(first.Prompt2)+len(first.Prompt3)))
	smaller := "make the group smaller"
	return []leastSize{
		{
			schemas.StreamSteps, "steps", "max-steps-bytes",
			"keep fewer states (rollout.return_step_indices), or " + smaller, steps, bound,
		},
		{
			schemas.StreamRequests, "requests, one by one,", "max-requests-bytes",
			"shorten the prompt and its metadata", request, request,
		},
		{
			schemas.StreamTrajectories, "trajectories", "max-trajectories-bytes", smaller,
			trajectories, trajectories * 2,
		},
		{
			schemas.StreamRewards, "rewards", "max-rewards-bytes", "shorten the metadata, or " + smaller,
			(n + 1) * reward, (n + 1) * reward * 2,
		},
	}
}

func mib(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// wholeMiB returns a size for a limit, rounded up.
func wholeMiB(bytes int64) string { return fmt.Sprintf("%dMiB", (bytes+1<<20-1)>>20) }

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
