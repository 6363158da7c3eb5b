// Package auth says who may do what on the server. A [Role] has a [Grant], the list of what it may do. A [Folder] of
// credentials has the users with their roles and keys, and the certificates; it writes all of that in the form of a
// NATS server's configuration. An [Identity] is a user as its own file of credentials describes it, for a client. The
// package opens no connection.
//
// The commands 'meander auth init, add, rm, update' change a folder; pkg/natsd and nats-server take users and
// certificates from it; each program calls [ReadIdentity] before it connects.
package auth

import (
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Role is what a user of the server does.
type Role string

// The roles. The server lets in no user without one of them.
const (
	RoleIntake    Role = "intake"
	RoleSampler   Role = "sampler"
	RoleReward    Role = "reward"
	RoleAdvantage Role = "advantage"
	RoleTrainer   Role = "trainer"
	RoleViewer    Role = "viewer"
	RoleScorer    Role = "scorer"
	RoleTeacher   Role = "teacher"
	RoleAdmin     Role = "admin"
)

// Grant is what a role may do. The server refuses everything else.
type Grant struct {
	Role    Role
	Purpose string
	// Unlimited roles may do everything.
	Unlimited bool
	// Publishes are the kinds of events that the role writes.
	Publishes []string
	// Reads are the streams that it reads, those behind buckets too.
	Reads []string
	// Writes are the buckets to which it writes entries or objects.
	Writes []string
	// Acknowledges are the streams that it reads with its own durables.
	Acknowledges []string
	// Deletes are the streams from which it deletes single events: those it displaces, and those it has finished.
	// Purges are the streams from which it removes all events that a filter matches.
	Deletes, Purges []string
	// Asks are the subjects on which it sends requests to workers. Answers are those on which it answers as a worker.
	Asks, Answers []string
	// Discoverable: service discovery finds it. AnswersClients: it publishes to the inboxes of clients.
	Discoverable, AnswersClients bool
	// FoundAs are the services that workers are in service discovery; they cannot answer for any other.
	FoundAs []string
	// ListsConsumers: it sees the progress of all consumers, by name. SeesServices: it sees the progress of the
	// services' durables, and which services run.
	ListsConsumers, SeesServices bool
}

// ClockSubject is where services answer with their time.
const ClockSubject = "$SRV.CLOCK"

// Grants returns the rights of all roles. The server's permissions, the errors that name rights, and the table in
// deploy/guide/appendix.md come from this list. A role with the name of a service works on the durables of that
// service.
func Grants() []Grant {
	grants := append(serviceGrants(), clientGrants()...)
	return append(grants, Grant{
		Role: RoleAdmin, Purpose: "an operator: streams and their limits, control of runs, the janitor, dead letters",
		Unlimited: true,
	})
}

// resultStreams returns the streams with the results of runs, and the buckets that belong to them.
func resultStreams() []string {
	return []string{
		schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts,
		schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamUpdates, schemas.StreamPolicyBucket,
		schemas.StreamPresenceBucket,
		schemas.StreamRunBucket, schemas.StreamCountBucket, schemas.StreamControlBucket, schemas.StreamBlobBucket,
	}
}

// serviceGrants returns the grants of the four services: what each of their programs publishes, reads, writes and
// deletes. Grants joins them with those of clients.
func serviceGrants() []Grant {
	return []Grant{
		{
			Role:    RoleIntake,
			Purpose: "the program meander-intake: takes prompts and controls, asks for samples, frees what is old",
			Publishes: []string{
				schemas.KindGroup, schemas.KindPlan, schemas.KindOpening, schemas.KindRequest, schemas.KindParked,
				schemas.KindDead, schemas.KindAlarm, schemas.KindControl, // of rules: alarms, pauses
				schemas.KindTrajectory, schemas.KindReward, // of cancelled and refused samples
			},
			Reads: append([]string{
				schemas.StreamPrompts, schemas.StreamControl, schemas.StreamRequests, schemas.StreamParked,
				schemas.StreamDead, schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamAdvisories,
			}, resultStreams()...),
			Writes: []string{schemas.CountBucket, schemas.ControlBucket, schemas.PresenceBucket, schemas.BlobBucket},
			Deletes: []string{
				schemas.StreamGroups, schemas.StreamRequests, schemas.StreamParked, schemas.StreamTrajectories,
				schemas.StreamRewards, schemas.StreamControl, // questions, once they are answered
				// its janitor: prompts whose group is gone, entries of blobs that nothing names
				schemas.StreamPrompts, schemas.StreamBlobBucket,
			},
			Purges: []string{
				schemas.StreamRequests, schemas.StreamParked,
				// its janitor: the events of closed groups, and the chunks of blobs
				schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts,
				schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamBlobBucket,
			},
			Answers: []string{schemas.DrySubject("*")}, Discoverable: true, AnswersClients: true, ListsConsumers: true,
			SeesServices: true,
		},
		{
			Role:    RoleSampler,
			Purpose: "the program meander-sampler: makes rollouts, announces the weights that it has",
			Publishes: []string{
				schemas.KindStep, schemas.KindTokens, schemas.KindTrajectory, schemas.KindParked,
				schemas.KindPolicy, schemas.KindApplied, schemas.KindDead,
			},
			Reads: []string{
				schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamGroups, schemas.StreamRequests,
				schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamAdvantages, schemas.StreamParked,
				schemas.StreamPolicyBucket, schemas.StreamPresenceBucket, schemas.StreamControlBucket,
				schemas.StreamSealBucket, schemas.StreamBlobBucket,
			},
			Writes:  []string{schemas.PolicyBucket, schemas.PresenceBucket, schemas.SealBucket, schemas.BlobBucket},
			Deletes: []string{schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamParked},
			Purges:  []string{schemas.StreamSteps}, Discoverable: true, Answers: []string{schemas.SeenSubject("*")},
			Asks: []string{schemas.InteractSubject("*"), schemas.StepScoreSubject()},
		},
		{
			Role: RoleReward, Purpose: "the program meander-reward: scores samples, asks for their next stages",
			Publishes: []string{
				schemas.KindReward, schemas.KindRating, schemas.KindStepReward, schemas.KindSelection, schemas.KindDead,
				schemas.KindRequest, schemas.KindTrajectory,
			},
			Reads: []string{
				schemas.StreamGroups, schemas.StreamRequests, schemas.StreamSteps, schemas.StreamTrajectories,
				schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamPresenceBucket,
				schemas.StreamControlBucket, schemas.StreamBlobBucket,
			},
			Writes: []string{schemas.PresenceBucket, schemas.BlobBucket},
			Deletes: []string{
				schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamRequests, schemas.StreamTrajectories,
			},
			Asks: []string{schemas.ScoreSubject("*"), schemas.InteractSubject("*")}, Discoverable: true,
			Answers: []string{schemas.StepScoreSubject()},
		},
		{
			Role:      RoleAdvantage,
			Purpose:   "the program meander-advantage: closes groups and batches, asks for more of a prompt",
			Publishes: []string{schemas.KindAdvantage, schemas.KindBatch, schemas.KindPrompt, schemas.KindDead},
			Reads: []string{
				schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamTrajectories, schemas.StreamRewards,
				schemas.StreamAdvantages, schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamPresenceBucket,
				schemas.StreamControlBucket, schemas.StreamBlobBucket,
			},
			Writes:  []string{schemas.PresenceBucket, schemas.BlobBucket},
			Deletes: []string{schemas.StreamRewards, schemas.StreamAdvantages}, Discoverable: true,
		},
	}
}

// clientGrants returns the grants of those who use a pipeline from outside, trainers, viewers, scorers and teachers.
// Grants joins them with those of the services.
func clientGrants() []Grant {
	return []Grant{
		{
			Role:      RoleTrainer,
			Purpose:   "trains on groups: publishes prompts, reads what became of them, pushes weights",
			Publishes: []string{schemas.KindPrompt, schemas.KindPolicy, schemas.KindUpdate},
			Reads: append([]string{
				schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamDead, schemas.StreamPolicies,
				schemas.StreamApplied, schemas.StreamLeaseBucket,
			}, resultStreams()...),
			Writes: []string{
				schemas.RunBucket, schemas.PolicyBucket, schemas.LeaseBucket, schemas.BlobBucket,
			},
			Acknowledges: []string{schemas.StreamAdvantages},
			Asks: []string{
				schemas.TeacherSubject("*"), schemas.DrySubject("*"), schemas.SeenSubject("*"),
			},
			SeesServices: true,
		},
		{
			Role: RoleViewer, Purpose: "looks, and changes nothing: watch, show, streams, verify",
			Reads: append([]string{
				schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamParked, schemas.StreamPolicies,
				schemas.StreamApplied, schemas.StreamControl, schemas.StreamDead,
			}, resultStreams()...),
			Asks:         []string{schemas.SeenSubject("*")},
			SeesServices: true,
		},
		{
			Role:      RoleScorer,
			Purpose:   "answers from outside: workers of reward functions nats:NAME and of interactions, and verdicts",
			Publishes: []string{schemas.KindVerdict},
			Reads: []string{
				schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts,
				schemas.StreamPresenceBucket, schemas.StreamBlobBucket,
			},
			Answers: []string{schemas.ScoreSubject("*"), schemas.InteractSubject("*")},
			FoundAs: []string{"meander-scorer", "meander-interaction"},
		},
		{
			Role: RoleTeacher, Purpose: "meander teacher: gives the log-probs of stored samples under other weights",
			Reads: []string{
				schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamBlobBucket,
			},
			Writes:  []string{schemas.BlobBucket},
			Answers: []string{schemas.TeacherSubject("*")}, Discoverable: true,
		},
	}
}

// Describe returns what the grant allows in words, one line for each kind of right, for 'meander auth roles'.
func (g Grant) Describe() (lines []string) {
	if g.Unlimited {
		return []string{"may do everything"}
	}
	add := func(what string, of []string) {
		if len(of) > 0 {
			lines = append(lines, what+" "+strings.Join(of, ", "))
		}
	}
	add("publishes", g.Publishes)
	add("takes its work from", g.WorksOn())
	add("reads", g.Reads)
	add("keeps its place in", g.Acknowledges)
	add("writes to", g.Writes)
	add("deletes of", g.Deletes)
	add("purges of", g.Purges)
	add("asks workers on", g.Asks)
	add("answers as a worker on", g.Answers)
	for _, c := range []struct {
		has  bool
		line string
	}{
		{g.ListsConsumers, "sees how far all consumers are"},
		{g.SeesServices && !g.ListsConsumers, "sees how far the pipeline's own consumers are"},
		{g.AnswersClients, "answers clients in their inboxes"},
	} {
		if c.has {
			lines = append(lines, c.line)
		}
	}
	return lines
}

// GrantOf returns the grant of a role; false: there is no such role.
func GrantOf(role Role) (Grant, bool) {
	all := Grants()
	i := slices.IndexFunc(all, func(g Grant) bool { return g.Role == role })
	if i < 0 {
		return Grant{}, false
	}
	return all[i], true
}

// RoleNames returns the names of all roles.
func RoleNames() (names []string) {
	for _, g := range Grants() {
		names = append(names, string(g.Role))
	}
	return names
}

// durables returns the durable consumers from which the role's service takes its work; none for clients. The sampler
// works on every durable of the requests, since lanes name these.
func (g Grant) durables() (own []schemas.Durable) {
	for _, d := range append(schemas.Durables(),
		schemas.Durable{Stream: schemas.StreamRequests, Name: "*", Service: schemas.ServiceSampler}) {
		if d.Service == string(g.Role) {
			own = append(own, d)
		}
	}
	return own
}

// WorksOn returns the streams from which the role takes its work, sorted.
func (g Grant) WorksOn() (streams []string) {
	for _, d := range g.durables() {
		streams = append(streams, d.Stream)
	}
	slices.Sort(streams)
	return slices.Compact(streams)
}
