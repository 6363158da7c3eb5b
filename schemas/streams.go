package schemas

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Stream names.
const (
	StreamPrompts      = "MDR_PROMPTS"
	StreamGroups       = "MDR_GROUPS"
	StreamRequests     = "MDR_REQUESTS"
	StreamSteps        = "MDR_STEPS"
	StreamTrajectories = "MDR_TRAJECTORIES"
	StreamRewards      = "MDR_REWARDS"
	StreamVerdicts     = "MDR_VERDICTS"
	StreamAdvantages   = "MDR_ADVANTAGES"
	StreamPolicies     = "MDR_POLICIES"
	StreamApplied      = "MDR_APPLIED"
	StreamControl      = "MDR_CONTROL"
	StreamParked       = "MDR_PARKED"
	StreamUpdates      = "MDR_UPDATES"
	StreamDead         = "MDR_DEAD"
	StreamAdvisories   = "MDR_ADVISORIES"
)

// Buckets.
const (
	RunBucket = "mdr-runs"
	// CountBucket has the counts of each run: see package counters. Only intake's janitor and the admin write it.
	CountBucket  = "mdr-counts"
	PolicyBucket = "mdr-policy"
	// PresenceBucket has an entry for each service that runs, for PresenceTTL after it was renewed.
	PresenceBucket = "mdr-presence"
	BlobBucket     = "mdr-blobs"
	// SealBucket has the secret with which samplers seal their steps. Only samplers may read it.
	SealBucket = "mdr-seal"
	// ControlBucket has the control that holds of each run, and of groups of it: see ControlKey.
	ControlBucket = "mdr-control"
	// LeaseBucket has an entry for each lane that a trainer has to itself, for LeaseTTL after it was renewed. Only
	// trainers may write it.
	LeaseBucket = "mdr-leases"
)

// PresenceTTL is how long an entry of PresenceBucket stays. The bucket's own setting counts
// where an operator changed it; services renew four times as often.
const PresenceTTL = 20 * time.Second

// LeaseTTL is how long an entry of LeaseBucket stays. The bucket's own setting counts.
const LeaseTTL = 20 * time.Second

// RewardPartitions is the number of partitions of MDR_REWARDS, fixed for the life of the stream.
const RewardPartitions = 16

// DedupWindow is how long a stream remembers message ids. It is only a
// convenience: the guard, not the window, keeps events unique.
const DedupWindow = 2 * time.Minute

// StreamSpec is the one description of a stream: the admin role creates it from
// this, and the AsyncAPI document is written from it.
type StreamSpec struct {
	Name     string
	Purpose  string
	Subjects []string
	// Guarded: a second publish on a subject is refused for ever (Limits, DiscardNew,
	// one message per subject, DiscardNewPerSubject).
	Guarded bool
	// WorkQueue removes a message once it is acked. With it, a second publish on a
	// subject is refused as long as the first one waits.
	WorkQueue bool
	// Bound by count, bytes and age; 0: unbounded.
	MaxMsgs  int64
	MaxBytes int64
	MaxAge   time.Duration
	// DiscardNew refuses the publisher when full instead of dropping old messages.
	DiscardNew bool
	// TransformSource and TransformDest rewrite the subject on the way in.
	TransformSource string
	TransformDest   string
}

// advisoryPrefix begins the subjects of the server's notes on deliveries.
const advisoryPrefix = "$JS.EVENT.ADVISORY.CONSUMER."

// judged returns the subjects of MDR_VERDICTS.
func judged() []string {
	return []string{
		Prefix + "verdict.*.*.*.*", Prefix + "rating.*.*.*", Prefix + "step_reward.*.*.*.*", Prefix + "selection.*.*.*",
	}
}

// Streams returns every stream, in the order in which data flows.
func Streams() []StreamSpec {
	const gib = 1 << 30
	day := 24 * time.Hour
	return []StreamSpec{
		{
			Name: StreamPrompts, Purpose: "prompts as users published them; replayable",
			Subjects: []string{Prefix + "prompt.*"}, DiscardNew: true, MaxBytes: gib / 4, MaxAge: 7 * day,
		},
		{
			Name: StreamGroups, Purpose: "one record per group: its facts, the claim of its uid; a plan if it has one",
			Subjects: []string{Prefix + "group.*.*", Prefix + "plan.*.*"}, Guarded: true, MaxBytes: gib / 2,
		},
		{
			Name: StreamRequests, Purpose: "samples waiting for a sampler; full means backpressure on intake",
			Subjects: []string{Prefix + "request.*.*.*.*.*"}, WorkQueue: true, DiscardNew: true, MaxMsgs: 10_000,
			MaxBytes: gib,
		},
		{
			Name: StreamSteps, Purpose: "denoising steps and tokens as they happen, with latents, logits and log-probs",
			Subjects: []string{Prefix + "step.>", Prefix + "tokens.>"}, Guarded: true, MaxBytes: 8 * gib,
			MaxAge: 8 * day, // never before the trajectory that names them
		},
		{
			Name:     StreamTrajectories,
			Purpose:  "exactly one per stage of a sample: which attempt counts, and all needed to recompute it",
			Subjects: []string{Prefix + "trajectory.*.*.*.*"}, Guarded: true, MaxBytes: gib, MaxAge: 7 * day,
		},
		{
			Name: StreamVerdicts, Purpose: "scores from outside, one per sample and name, or per group and function; " +
				"of samples in the middle, one per sample and step, and which of a group end there",
			Subjects: judged(), Guarded: true, MaxBytes: gib / 4, MaxAge: 7 * day,
		},
		{
			Name:     StreamRewards,
			Purpose:  "the opening of each group, and exactly one reward per sample, partitioned by batch",
			Subjects: []string{Prefix + "opening.*.*.*", Prefix + "reward.*.*.*.*"}, Guarded: true, MaxBytes: gib,
			MaxAge:          7 * day,
			TransformSource: Prefix + "*.*.*.>",
			TransformDest:   Prefix + "{{wildcard(1)}}.{{partition(16,3)}}.{{wildcard(2)}}.{{wildcard(3)}}.>",
		},
		{
			Name: StreamAdvantages, Purpose: "exactly one result per group and per batch",
			Subjects: []string{Prefix + "advantage.*.*", Prefix + "batch.*.*"}, Guarded: true, MaxBytes: gib,
			MaxAge: 7 * day,
		},
		{
			Name:     StreamPolicies,
			Purpose:  "weights with their versions per lane and tenant: what it serves, and what it has served",
			Subjects: []string{Prefix + "policy.*.*"}, DiscardNew: true, MaxBytes: gib / 4,
		},
		{
			Name: StreamApplied, Purpose: "the samplers' answers to policies: applied or refused, with a canary",
			Subjects: []string{Prefix + "applied.*.*.*"}, MaxBytes: gib / 16, MaxAge: 30 * day,
		},
		{
			Name:     StreamControl,
			Purpose:  "what operators asked of runs: cancel, pause, resume; what holds is in the bucket mdr-control",
			Subjects: []string{Prefix + "control.*"}, MaxBytes: gib / 16, MaxAge: 30 * day,
		},
		{
			Name: StreamParked, Purpose: "requests of paused runs, until they are resumed",
			Subjects: []string{Prefix + "parked.*.*.*.*.*"}, Guarded: true, MaxBytes: gib,
		},
		{
			Name: StreamUpdates, Purpose: "updates that trainers made: loss, ratio, divergence; alarms of runs",
			Subjects: []string{Prefix + "update.*.*.*.*.*", Prefix + "alarm.*.*"}, Guarded: true, MaxBytes: gib / 16,
			MaxAge: 30 * day,
		},
		{
			Name: StreamDead, Purpose: "refused input: original bytes and headers, reason, service, deliveries",
			Subjects: []string{Prefix + "dead.*.*.*"}, MaxBytes: gib, MaxAge: 30 * day,
		},
		{
			Name:     StreamAdvisories,
			Purpose:  "the server's own notes on messages given up: the net behind the explicit path",
			Subjects: []string{advisoryPrefix + "MAX_DELIVERIES.>", advisoryPrefix + "MSG_TERMINATED.>"},
			MaxBytes: gib / 16, MaxAge: 7 * day,
		},
	}
}

// Streams behind the buckets, as the server names them.
const (
	StreamRunBucket      = "KV_" + RunBucket
	StreamCountBucket    = "KV_" + CountBucket
	StreamPolicyBucket   = "KV_" + PolicyBucket
	StreamPresenceBucket = "KV_" + PresenceBucket
	StreamSealBucket     = "KV_" + SealBucket
	StreamControlBucket  = "KV_" + ControlBucket
	StreamLeaseBucket    = "KV_" + LeaseBucket
	StreamBlobBucket     = "OBJ_" + BlobBucket
)

// The other services that take their work from durables; see ServiceSampler.
const (
	ServiceIntake    = "intake"
	ServiceAdvantage = "advantage"
)

// Durable describes a durable consumer of the server, from which a service receives its work. Services, the rights of
// roles and the doctor all use these descriptions.
type Durable struct {
	Stream, Name string
	// Service is the one whose processes share it: ServiceIntake ...
	Service string
	// Filters are the stored subjects that it delivers; none: all of the stream.
	Filters []string
	// Purpose says what it delivers.
	Purpose string
}

// PromptsDurable delivers prompts to intake.
func PromptsDurable() Durable {
	return Durable{Stream: StreamPrompts, Name: "intake", Service: ServiceIntake, Purpose: "prompts for intake"}
}

// ControlDurable delivers controls to intake.
func ControlDurable() Durable {
	return Durable{
		Stream: StreamControl, Name: "intake-control", Service: ServiceIntake, Purpose: "controls for intake",
	}
}

// AdvisoriesDurable delivers the server's notes on messages that it gave up to intake.
func AdvisoriesDurable() Durable {
	const filter = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"
	return Durable{
		Stream: StreamAdvisories, Name: "advisories", Service: ServiceIntake, Filters: []string{filter},
		Purpose: "the server's notes on messages that it gave up, for intake",
	}
}

// RequestsDurable delivers the requests of a lane to its samplers.
func RequestsDurable(lane Lane) Durable {
	filter := Address{Kind: KindRequest, Lane: lane}.Filter()
	return Durable{
		Stream: StreamRequests, Name: "sampler-" + string(lane), Service: ServiceSampler,
		Filters: []string{filter}, Purpose: "requests of the lane " + string(lane) + " for its samplers",
	}
}

// TrajectoriesDurable delivers trajectories to the reward service.
func TrajectoriesDurable() Durable {
	return Durable{
		Stream: StreamTrajectories, Name: "reward", Service: ServiceReward,
		Purpose: "trajectories for the reward service",
	}
}

// VerdictsDurable delivers verdicts to the reward service.
func VerdictsDurable() Durable {
	return Durable{
		Stream: StreamVerdicts, Name: "reward-verdicts", Service: ServiceReward,
		Filters: []string{Address{Kind: KindVerdict}.Filter()}, Purpose: "verdicts for the reward service",
	}
}

// RewardsDurable delivers a partition of MDR_REWARDS to the advantage service.
func RewardsDurable(partition int) Durable {
	return Durable{
		Stream: StreamRewards, Name: fmt.Sprintf("advantage-p%02d", partition), Service: ServiceAdvantage,
		Filters: []string{PartitionFilter(partition)},
		Purpose: fmt.Sprintf("rewards of partition %d for the advantage service", partition),
	}
}

// Durables returns the durable consumers of all services except the samplers: these have one for each lane, see
// RequestsDurable.
func Durables() []Durable {
	all := []Durable{PromptsDurable(), ControlDurable(), AdvisoriesDurable(), TrajectoriesDurable(), VerdictsDurable()}
	for partition := range RewardPartitions {
		all = append(all, RewardsDurable(partition))
	}
	return all
}

var specs = sync.OnceValue(Streams)

// StreamOf returns the stream that stores a subject; false if none does.
func StreamOf(subject string) (StreamSpec, bool) {
	fits := func(filter string) bool { return Matches(filter, subject) }
	return findStream(func(s StreamSpec) bool { return slices.ContainsFunc(s.Subjects, fits) })
}

// StreamNamed returns the stream with a name; false if there is none.
func StreamNamed(name string) (StreamSpec, bool) {
	return findStream(func(s StreamSpec) bool { return s.Name == name })
}

func findStream(is func(StreamSpec) bool) (StreamSpec, bool) {
	i := slices.IndexFunc(specs(), is)
	if i < 0 {
		return StreamSpec{}, false
	}
	return specs()[i], true
}

// StreamNames returns the names of all streams of a server, those behind buckets first.
func StreamNames() (names []string) {
	for _, bucket := range Buckets() {
		names = append(names, bucket.Stream())
	}
	for _, spec := range specs() {
		names = append(names, spec.Name)
	}
	return names
}

// Matches reports whether a subject fits a filter: * stands for one token, > for all that follow.
func Matches(filter, subject string) bool {
	for {
		f, filterRest, moreFilter := strings.Cut(filter, ".")
		s, subjectRest, moreSubject := strings.Cut(subject, ".")
		switch {
		case f == ">":
			return s != ""
		case f != "*" && f != s, s == "":
			return false
		case !moreFilter || !moreSubject:
			return moreFilter == moreSubject
		}
		filter, subject = filterRest, subjectRest
	}
}

// Overlap reports whether some subject fits both filters.
func Overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range x {
		switch {
		case x[i] == ">":
			return len(y) > i
		case i >= len(y):
			return false
		case y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}
