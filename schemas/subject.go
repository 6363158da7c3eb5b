package schemas

import (
	"cmp"
	"strconv"
	"strings"
)

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
