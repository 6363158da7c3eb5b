package schemas

import (
	"cmp"
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

// Prefix starts every subject: the project and the contract's major version.
const Prefix = "mdr.v1."

// Headers of every stored message.
const (
	HeaderType        = "Mdr-Type"     // e.g. "step/1"
	HeaderContentType = "Content-Type" // ContentType
	HeaderTraceparent = "traceparent"  // W3C trace context, handed through, as are the next two
	HeaderTraceState  = "tracestate"
	HeaderBaggage     = "baggage"
	HeaderReply       = "Mdr-Reply"   // on a prompt: the inbox that wants a Receipt
	HeaderOutcome     = "Mdr-Outcome" // of a trajectory, reward or advantage, for those who only look: its outcome
	HeaderLane        = "Mdr-Lane"    // of a trajectory, in the same way: its lane
	HeaderSamples     = "Mdr-Samples" // of a stage's trajectory, in the same way: how many samples end with it
	HeaderMean        = "Mdr-Mean"    // of an advantage, in the same way: its mean reward, if any
	HeaderSaved       = "Mdr-Saved"   // of a selection, in the same way: its saved evaluations
	ContentType       = "application/msgpack"
)

// Subjects. Each event of a guarded stream has a subject of its own: the subject
// is the idempotency key, and the message id is the subject without Prefix.

// The functions below return the subject of an event. In the subject of a group without a
// batch, the uid takes the place of the batch.

// PromptSubject returns the subject on which users publish the prompts of a run.
func PromptSubject(run Run) string { return Prefix + "prompt." + string(run) }

// GroupSubject returns the subject of the record of one group, which is the claim of its uid.
func GroupSubject(run Run, uid UID) string {
	return Prefix + "group." + string(run) + "." + string(uid)
}

// OpeningSubject returns the subject of the record's copy in the stream of rewards. It is stored
// with a partition token, as rewards are.
func OpeningSubject(run Run, batch string, uid UID) string {
	return Prefix + "opening." + string(run) + "." + batch + "." + string(uid)
}

// PlanSubject returns the subject of the plan of one group with scheduled sampling.
func PlanSubject(run Run, uid UID) string { return Prefix + "plan." + string(run) + "." + string(uid) }

// RequestSubject returns the subject of the request of one stage of a sample.
func RequestSubject(run Run, lane Lane, uid UID, sample int64, stage Stage) string {
	return Prefix + "request." + string(run) + "." + string(lane) + "." + sampleTail(uid, sample, stage)
}

// StepSubject returns the subject of one step of one attempt.
func StepSubject(run Run, uid UID, sample int64, stage Stage, attempt string, step int64) string {
	return Prefix + "step." + string(run) + "." + sampleTail(uid, sample, stage) + "." + attempt + "." + itoa(step)
}

// TokensSubject returns the subject of event n of the tokens of one attempt.
func TokensSubject(run Run, uid UID, sample int64, stage Stage, attempt string, n int64) string {
	return Prefix + "tokens." + string(run) + "." + sampleTail(uid, sample, stage) + "." + attempt + "." + itoa(n)
}

// sampleTail returns the tokens that name a stage of a sample of a run.
func sampleTail(uid UID, sample int64, stage Stage) string {
	return string(uid) + "." + itoa(sample) + "." + string(stage)
}

// PartSubject returns the subject of one part of a step's large tensors; step is the subject of the step.
func PartSubject(step string, part int64) string { return step + "." + itoa(part) }

// TrajectorySubject returns the subject of the trajectory of one stage of a sample.
func TrajectorySubject(run Run, uid UID, sample int64, stage Stage) string {
	return Prefix + "trajectory." + string(run) + "." + sampleTail(uid, sample, stage)
}

// RewardSubject returns the subject of the reward of one sample. The stream stores it with a
// partition token, a hash of the batch, after "reward." (see RewardPartitions), so all rewards of a
// batch are in one partition.
func RewardSubject(run Run, batch string, uid UID, sample int64) string {
	return Prefix + "reward." + string(run) + "." + batch + "." + string(uid) + "." + itoa(sample)
}

// VerdictSubject returns the subject of one score from outside of one sample.
func VerdictSubject(run Run, uid UID, sample int64, name string) string {
	return Prefix + "verdict." + string(run) + "." + string(uid) + "." + itoa(sample) + "." + name
}

// RatingSubject returns the subject of what a reward function, by its place in the list, said of a whole group.
func RatingSubject(run Run, uid UID, function int64) string {
	return Prefix + "rating." + string(run) + "." + string(uid) + "." + itoa(function)
}

// ScoreSubject returns the subject on which workers of the reward function nats:NAME answer requests
// (core NATS, queue group NAME).
func ScoreSubject(name string) string { return Prefix + "score." + name }

// InteractSubject returns the subject on which workers of an interaction answer requests (core NATS, queue group name).
func InteractSubject(name string) string { return Prefix + "interact." + name }

// TeacherSubject returns the subject on which the replicas of a teacher answer requests (core NATS, queue group name).
func TeacherSubject(name string) string { return Prefix + "teacher." + name }

// SeenSubject returns the subject on which the samplers of a lane say what the network takes a state for (core NATS,
// queue group lane): see Seen.
func SeenSubject(lane Lane) string { return Prefix + "seen." + string(lane) }

// DrySubject returns the subject on which intake says what would become of a prompt of the run (core NATS, queue group
// intake). It stores nothing.
func DrySubject(run Run) string { return Prefix + "dry." + string(run) }

// AdvantageSubject returns the subject of the result of one group.
func AdvantageSubject(run Run, uid UID) string {
	return Prefix + "advantage." + string(run) + "." + string(uid)
}

// BatchSubject returns the subject of the result of one batch.
func BatchSubject(run Run, batch string) string {
	return Prefix + "batch." + string(run) + "." + batch
}

// Lineage is the versions that one tenant of a lane has.
type Lineage struct {
	Lane   Lane
	Tenant Tenant
}

// Of returns the lineage of a tenant of the lane; empty: of main.
func (l Lane) Of(tenant Tenant) Lineage { return Lineage{l, cmp.Or(tenant, TenantMain)} }

// Lineage returns that which the version belongs to.
func (e *Policy) Lineage() Lineage { return e.Lane.Of(e.Tenant) }

// Lineage returns that whose weights make the sample.
func (e *Identity) Lineage() Lineage { return e.Lane.Of(e.Tenant) }

// Lineage returns that whose weights make the samples.
func (e *GroupRecord) Lineage() Lineage { return e.Lane.Of(e.Tenant) }

// Lineage returns that which has the new weights.
func (e *Update) Lineage() Lineage { return e.Lane.Of(e.Tenant) }

// Lineage returns that of the policy.
func (e *Applied) Lineage() Lineage { return e.Lane.Of(e.Tenant) }

// Lineage returns that whose weights make the stage.
func (s *GroupStage) Lineage() Lineage { return s.Lane.Of(s.Tenant) }

// String is for people: the lane, and a tenant that is not main.
func (l Lineage) String() string { return strings.TrimSuffix(l.Key(), "."+string(TenantMain)) }

// Key returns the key of PolicyBucket and of LeaseBucket.
func (l Lineage) Key() string { return PolicyKey(l.Lane, l.Tenant) }

// PolicySubject returns the subject of the weights that are announced for a tenant of a lane.
func PolicySubject(lane Lane, tenant Tenant) string {
	return Prefix + "policy." + PolicyKey(lane, tenant)
}

// PolicyKey returns the key of a tenant of a lane in PolicyBucket and in LeaseBucket.
func PolicyKey(lane Lane, tenant Tenant) string { return string(lane) + "." + string(tenant) }

// AppliedSubject returns the subject of a sampler's answers to the policies of a tenant of its lane.
func AppliedSubject(lane Lane, tenant Tenant, instance string) string {
	return Prefix + "applied." + PolicyKey(lane, tenant) + "." + instance
}

// DeadSubject returns the subject of a dead letter. A value that is not a legal token becomes "_".
func DeadSubject(service string, run Run, uid UID) string {
	return Prefix + "dead." + safeToken(service) + "." + safeToken(string(run)) + "." + safeToken(string(uid))
}

// BucketSubject returns the subject under which a key-value bucket keeps a key.
func BucketSubject(bucket, key string) string { return bucketPrefix + bucket + "." + key }

// InBucket reports whether a subject is that of a key in a key-value bucket.
func InBucket(subject string) bool { return strings.HasPrefix(subject, bucketPrefix) }

const bucketPrefix = "$KV."

// MessageID returns the deduplication id of the event on a subject.
func MessageID(subject string) string { return strings.TrimPrefix(subject, Prefix) }

// RunOf returns the run token of the subject of a stored event.
func RunOf(subject string) (run Run, ok bool) {
	a, _ := ParseSubject(subject)
	return a.Run, a.Run != ""
}

// IsPart reports whether the subject is that of a part of the tensors of a step or of tokens, not of the event.
func IsPart(subject string) bool {
	return (strings.HasPrefix(subject, Prefix+KindStep+".") || strings.HasPrefix(subject, Prefix+KindTokens+".")) &&
		strings.Count(subject, ".") == 9
}

// IsOpening reports whether the subject is that of a group's record among its rewards.
func IsOpening(subject string) bool { return strings.HasPrefix(subject, Prefix+KindOpening+".") }

// MaxToken is the longest run id, uid, lane or batch id.
const MaxToken = 64

// The ids of events, each a token of subjects: 1 to MaxToken characters of A-Z a-z 0-9 _ -.
// A type does not prove that; Validate and CheckToken do, where an id comes from outside.
type (
	// Run is the id of a run.
	Run string
	// UID is the id of a group, unique in its run.
	UID string
	// Lane is the id of a queue of requests, and of what the samplers serve that take from it.
	Lane string
	// Tenant is one of those who have weights of their own on a lane.
	Tenant string
	// Stage is a part of a sample that is made on one lane: each stage has a request, events and a trajectory.
	Stage string
)

const (
	// StageMain is the stage of samples whose prompt names none.
	StageMain Stage = "main"
	// TenantMain is the tenant of a lane that has one.
	TenantMain Tenant = "main"
)

// CheckToken returns an error unless s may become a token of a subject: 1 to MaxToken characters of
// A-Z a-z 0-9 _ -. Dots, spaces and wildcards would change the routing. field is for the error.
func CheckToken[S ~string](field string, s S) error {
	var f faults
	f.checkToken(field, string(s))
	return f.joined()
}

func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

func safeToken(s string) string {
	if legalToken(s) {
		return s
	}
	return "_"
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
