package schemas

import "time"

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
