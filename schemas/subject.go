package schemas

import (
	"strconv"
	"strings"
)

// Prefix starts every subject: the project and the contract's major version.
const Prefix = "mdr.v1."

// Headers of every stored message.
const (
	HeaderType        = "Mdr-Type"     // e.g. "step/1"
	HeaderContentType = "Content-Type" // ContentType
	HeaderTraceparent = "traceparent"  // W3C trace context, handed through
	HeaderReply       = "Mdr-Reply"    // on a prompt: the inbox that wants a Receipt
	ContentType       = "application/msgpack"
)

// Subjects. Each event of a guarded stream has a subject of its own: the subject
// is the idempotency key, and the message id is the subject without Prefix.

// PromptSubject is where users publish prompts of a run.
func PromptSubject(run string) string { return Prefix + "prompt." + run }

// GroupSubject is the record of one group, the claim of its uid.
func GroupSubject(run, uid string) string { return Prefix + "group." + run + "." + uid }

// OpeningSubject is the record of one group on the way that its rewards take. It is stored
// with a partition token, as they are.
func OpeningSubject(run, batch, uid string) string {
	return Prefix + "opening." + run + "." + batch + "." + uid
}

// RequestSubject is the request of one sample.
func RequestSubject(run, lane, uid string, sample int64) string {
	return Prefix + "request." + run + "." + lane + "." + uid + "." + itoa(sample)
}

// StepSubject is one step of one attempt.
func StepSubject(run, uid string, sample int64, attempt string, step int64) string {
	return Prefix + "step." + run + "." + uid + "." + itoa(sample) + "." + attempt + "." + itoa(step)
}

// PartSubject is one part of a step's large tensors.
func PartSubject(step string, part int64) string { return step + "." + itoa(part) }

// TrajectorySubject is the trajectory of one sample.
func TrajectorySubject(run, uid string, sample int64) string {
	return Prefix + "trajectory." + run + "." + uid + "." + itoa(sample)
}

// RewardSubject is the reward of one sample. The stream stores it with a partition
// token, a hash of the batch, after "reward." (see RewardPartitions): every reward
// of a batch lands in one partition. A group without a batch has its uid there.
func RewardSubject(run, batch, uid string, sample int64) string {
	return Prefix + "reward." + run + "." + batch + "." + uid + "." + itoa(sample)
}

// VerdictSubject is one reward from outside of one sample.
func VerdictSubject(run, uid string, sample int64, name string) string {
	return Prefix + "verdict." + run + "." + uid + "." + itoa(sample) + "." + name
}

// ScoreSubject is where workers of the reward function nats:NAME answer requests (core
// NATS, queue group NAME).
func ScoreSubject(name string) string { return Prefix + "score." + name }

// AdvantageSubject is the result of one group.
func AdvantageSubject(run, uid string) string { return Prefix + "advantage." + run + "." + uid }

// BatchSubject is the result of one batch.
func BatchSubject(run, batch string) string { return Prefix + "batch." + run + "." + batch }

// PolicySubject is the weight announcements of a lane.
func PolicySubject(lane string) string { return Prefix + "policy." + lane }

// DeadSubject is refused input. What is not a legal token becomes "_".
func DeadSubject(stage, run, uid string) string {
	return Prefix + "dead." + safeToken(stage) + "." + safeToken(run) + "." + safeToken(uid)
}

// BucketSubject is the subject that a key-value bucket keeps a key under.
func BucketSubject(bucket, key string) string { return "$KV." + bucket + "." + key }

// MessageID is the deduplication id of the event on subject.
func MessageID(subject string) string { return strings.TrimPrefix(subject, Prefix) }

// RunOf returns the run token of the subject of a stored event.
func RunOf(subject string) (run string, ok bool) {
	a, _ := ParseSubject(subject)
	return a.Run, a.Run != ""
}

// IsPart says whether the subject is that of a part of a step's tensors, not of a step.
func IsPart(subject string) bool {
	return strings.HasPrefix(subject, Prefix+KindStep+".") && strings.Count(subject, ".") == 8
}

// IsOpening says whether the subject is that of a group's record among its rewards.
func IsOpening(subject string) bool { return strings.HasPrefix(subject, Prefix+KindOpening+".") }

// MaxToken is the longest run id, uid, lane or batch id.
const MaxToken = 64

// CheckToken says whether s may become a token of a subject: 1 to MaxToken of
// A-Z a-z 0-9 _ -. Dots, spaces and wildcards would change the routing.
func CheckToken(field, s string) error {
	var f faults
	f.token(field, s)
	return f.err()
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
