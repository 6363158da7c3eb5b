package schemas

import (
	"hash/fnv"
	"strconv"
	"strings"
)

// Kinds of subjects: the first token behind Prefix, but for a part of a step, whose
// subject is that of the step and one token more, and so of tokens.
const (
	KindPrompt     = "prompt"
	KindGroup      = "group"
	KindPlan       = "plan"
	KindOpening    = "opening"
	KindRequest    = "request"
	KindStep       = "step"
	KindPart       = "part"
	KindTokens     = "tokens"
	KindTokensPart = "tokens_part"
	KindTrajectory = "trajectory"
	KindVerdict    = "verdict"
	KindRating     = "rating"
	KindStepReward = "step_reward"
	KindSelection  = "selection"
	KindReward     = "reward"
	KindAdvantage  = "advantage"
	KindBatch      = "batch"
	KindPolicy     = "policy"
	KindApplied    = "applied"
	KindDead       = "dead"
	KindControl    = "control"
	KindParked     = "parked"
	KindUpdate     = "update"
	KindAlarm      = "alarm"
)

// partKinds are the kinds of the parts of events that have some.
var partKinds = map[string]string{KindStep: KindPart, KindTokens: KindTokensPart}

// AllSubjects matches every subject of the contract.
const AllSubjects = Prefix + ">"

// Address is a subject by its tokens. Those that its kind does not have are empty, and so
// is the partition of a reward or an opening that was not stored yet.
type Address struct {
	Kind                                                                   string
	Run                                                                    Run
	UID                                                                    UID
	Lane                                                                   Lane
	Tenant                                                                 Tenant
	Stage                                                                  Stage
	Partition, Batch, Sample, Attempt, Step, Part, Name, Instance, Trainer string
	Service                                                                string
}

// tokens returns pointers to the fields that follow the kind in a subject, in its order; nil for an unknown kind.
func (a *Address) tokens() []*string {
	switch a.Kind {
	case KindPrompt, KindControl:
		return []*string{(*string)(&a.Run)}
	case KindGroup, KindPlan, KindAdvantage:
		return []*string{(*string)(&a.Run), (*string)(&a.UID)}
	case KindOpening:
		return []*string{&a.Partition, (*string)(&a.Run), &a.Batch, (*string)(&a.UID)}
	case KindRequest, KindParked:
		return []*string{(*string)(&a.Run), (*string)(&a.Lane), (*string)(&a.UID), &a.Sample, (*string)(&a.Stage)}
	case KindStep, KindTokens:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Sample, (*string)(&a.Stage), &a.Attempt, &a.Step}
	case KindPart, KindTokensPart:
		return []*string{
			(*string)(&a.Run), (*string)(&a.UID), &a.Sample, (*string)(&a.Stage), &a.Attempt, &a.Step, &a.Part,
		}
	case KindTrajectory:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Sample, (*string)(&a.Stage)}
	case KindVerdict:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Sample, &a.Name}
	case KindRating:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Name}
	case KindStepReward:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Sample, &a.Step}
	case KindSelection:
		return []*string{(*string)(&a.Run), (*string)(&a.UID), &a.Step}
	case KindReward:
		return []*string{&a.Partition, (*string)(&a.Run), &a.Batch, (*string)(&a.UID), &a.Sample}
	case KindBatch:
		return []*string{(*string)(&a.Run), &a.Batch}
	case KindPolicy:
		return []*string{(*string)(&a.Lane), (*string)(&a.Tenant)}
	case KindApplied:
		return []*string{(*string)(&a.Lane), (*string)(&a.Tenant), &a.Instance}
	case KindUpdate:
		return []*string{(*string)(&a.Run), (*string)(&a.Lane), (*string)(&a.Tenant), &a.Trainer, &a.Step}
	case KindAlarm:
		return []*string{(*string)(&a.Run), &a.Name}
	case KindDead:
		return []*string{&a.Service, (*string)(&a.Run), (*string)(&a.UID)}
	}
	return nil
}

// ParseSubject parses the subject of an event, as published or as stored; false for any other subject.
func ParseSubject(subject string) (Address, bool) {
	rest, ok := strings.CutPrefix(subject, Prefix)
	t := strings.Split(rest, ".")
	a := Address{Kind: t[0]}
	places := a.tokens()
	switch missing := len(places) - (len(t) - 1); {
	case partKinds[a.Kind] != "" && missing == -1:
		a.Kind = partKinds[a.Kind]
		places = a.tokens()
	case missing == 1 && a.partitioned():
		places = places[1:]
	case missing != 0:
		return Address{}, false
	}
	for i, place := range places {
		*place = t[i+1]
		ok = ok && t[i+1] != ""
	}
	if !ok || len(places) == 0 {
		return Address{}, false
	}
	return a, true
}

func (a *Address) partitioned() bool { return a.Kind == KindReward || a.Kind == KindOpening }

// Filter returns the subject under which events are stored, with * for each token that is empty. If
// the batch is known, so is its partition.
func (a Address) Filter() string {
	if a.partitioned() && a.Partition == "" && a.Batch != "" && a.Batch != "*" {
		a.Partition = strconv.Itoa(Partition(a.Batch))
	}
	places := a.tokens()
	for kind, part := range partKinds {
		if a.Kind == part {
			a.Kind = kind
		}
	}
	s := Prefix + a.Kind
	for _, place := range places {
		if *place == "" {
			s += ".*"
		} else {
			s += "." + *place
		}
	}
	return s
}

// StoredSubject returns the subject under which the server stores an event that is published on
// subject: rewards and openings get a partition token.
func StoredSubject(subject string) string {
	if a, ok := ParseSubject(subject); ok && a.partitioned() && a.Partition == "" {
		return a.Filter()
	}
	return subject
}

// SubjectTail returns a subject without the prefix that all subjects of this contract have; false: it has another.
func SubjectTail(subject string) (string, bool) { return strings.CutPrefix(subject, Prefix) }

// KindPrefix returns what all subjects of a kind begin with.
func KindPrefix(kind string) string { return Prefix + kind + "." }

// PublishedSubject takes from a stored subject the partition that the stream added to it. What remains is the subject
// on which the event was published. One without the partition of its batch is returned as it is.
func PublishedSubject(subject string) string {
	a, ok := ParseSubject(subject)
	if !ok || a.Partition == "" || a.Partition != strconv.Itoa(Partition(a.Batch)) {
		return subject
	}
	return strings.Replace(subject, a.Kind+"."+a.Partition+".", a.Kind+".", 1)
}

// Partition returns the partition of MDR_REWARDS that holds a batch: the server's own hash
// (FNV-1a, 32 bits) modulo RewardPartitions.
func Partition(batch string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(batch)) // never fails
	return int(h.Sum32() % RewardPartitions)
}

// PartitionFilter matches what is stored in a partition of MDR_REWARDS.
func PartitionFilter(partition int) string { return Prefix + "*." + strconv.Itoa(partition) + ".>" }

// RewardFilter matches the stored rewards of a run, a batch and a uid, each of which
// may be "*".
func RewardFilter(run Run, batch string, uid UID) string {
	return Address{Kind: KindReward, Run: run, Batch: batch, UID: uid}.Filter()
}

// TrajectoryFilter matches the trajectories of a run and a uid, which may be "*".
func TrajectoryFilter(run Run, uid UID) string {
	return Address{Kind: KindTrajectory, Run: run, UID: uid}.Filter()
}

// StepsFilter matches the steps of a stage of a sample, or its tokens, of all of its attempts, with their parts, in
// MDR_STEPS. Stage, sample and uid may be "*".
func StepsFilter(run Run, uid UID, sample string, stage Stage) string {
	return Prefix + "*." + string(run) + "." + string(uid) + "." + sample + "." + string(stage) + ".>"
}

// AttemptFilter matches the steps of one attempt at a stage of a sample, or its tokens, with their parts, in MDR_STEPS.
func AttemptFilter(run Run, uid UID, sample int64, stage Stage, attempt string) string {
	return strings.TrimSuffix(StepsFilter(run, uid, itoa(sample), stage), ">") + attempt + ".>"
}

// filtersOf returns a function that makes filters of an address, one for each kind.
func filtersOf(a Address) func(kinds ...string) []string {
	return func(kinds ...string) (filters []string) {
		for _, kind := range kinds {
			a.Kind = kind
			filters = append(filters, a.Filter())
		}
		return filters
	}
}

// GroupFilters match what is stored of one group and has its uid in the subject, by stream; the batch
// with it where the group is all of it.
func GroupFilters(run Run, uid UID, batch string) map[string][]string {
	all := filtersOf(Address{Run: run, UID: uid, Batch: batch})
	out := map[string][]string{
		StreamGroups:       all(KindGroup, KindPlan),
		StreamSteps:        {StepsFilter(run, uid, "*", "*")},
		StreamTrajectories: all(KindTrajectory),
		StreamVerdicts:     all(KindVerdict, KindRating, KindStepReward, KindSelection),
		StreamRewards:      all(KindReward, KindOpening),
		StreamAdvantages:   all(KindAdvantage),
	}
	if batch == string(uid) {
		out[StreamAdvantages] = append(out[StreamAdvantages], all(KindBatch)...)
	}
	return out
}

// RunFilters match all that is stored of a run, by stream, but for dead letters.
func RunFilters(run Run) map[string][]string {
	all := filtersOf(Address{Run: run})
	return map[string][]string{
		StreamPrompts:      all(KindPrompt),
		StreamGroups:       all(KindGroup, KindPlan),
		StreamRequests:     all(KindRequest),
		StreamSteps:        all(KindStep, KindPart, KindTokens, KindTokensPart),
		StreamTrajectories: all(KindTrajectory),
		StreamVerdicts:     all(KindVerdict, KindRating, KindStepReward, KindSelection),
		StreamRewards:      all(KindReward, KindOpening),
		StreamAdvantages:   all(KindAdvantage, KindBatch),
		StreamControl:      all(KindControl),
		StreamParked:       all(KindParked),
		StreamUpdates:      all(KindUpdate, KindAlarm),
	}
}

// StoredUnder reports whether a stored subject is that of the reward. It is called for every reward, so
// it allocates nothing.
func (e *Reward) StoredUnder(subject string) bool {
	s, ok := strings.CutPrefix(subject, Prefix+KindReward+".")
	_, s, _ = strings.Cut(s, ".") // the partition, which is the server's
	for _, token := range [...]string{string(e.Run), e.Group.Batch, string(e.UID)} {
		head, rest, more := strings.Cut(s, ".")
		ok, s = ok && more && head == token, rest
	}
	var digits [20]byte
	return ok && s == string(strconv.AppendInt(digits[:0], e.SampleIndex, 10))
}
