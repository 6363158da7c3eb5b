// Package auth says who may do what on the server. A [Role] has a [Grant], the list of what it may do. A [Folder] of
// credentials has the users with their roles and keys, and the certificates; it writes all of that in the form of a
// NATS server's configuration. An [Identity] is a user as its own file of credentials describes it, for a client. The
// package opens no connection.
//
// The commands 'meander auth init, add, rm, update' change a folder; pkg/natsd and nats-server take users and
// certificates from it; each program calls [ReadIdentity] before it connects.
package auth

import (
	"fmt"
	"slices"
	"strings"
	"time"

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
				schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamAdvantages,
				schemas.StreamParked, schemas.StreamPolicyBucket, schemas.StreamPresenceBucket,
				schemas.StreamControlBucket, schemas.StreamSealBucket, schemas.StreamBlobBucket,
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

// Rights are the server's permissions of one user, as subjects: what it may and may not publish on, and what it may
// subscribe to.
type Rights struct {
	Unlimited     bool
	Publish, Deny []string
	Subscribe     []string
	// Answers is how many replies the user may send to one request, within AnswerWithin.
	Answers      int
	AnswerWithin time.Duration
}

// answerWithin is how long a worker may take to answer. No client waits longer.
const answerWithin = time.Hour

// rights turns a grant into the permissions on NATS subjects of one of its users.
func (g Grant) rights(u *User) Rights {
	r := Rights{Unlimited: g.Unlimited}
	if g.Unlimited {
		return r
	}
	r.allow("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$SYS.REQ.USER.INFO")
	r.allowWrites(g)
	for _, d := range g.durables() {
		r.allowWork(d.Stream + "." + d.Name)
	}
	for _, stream := range g.Reads {
		r.allowReads(stream, g)
	}
	for _, stream := range g.Acknowledges {
		r.allow("$JS.ACK." + stream + ".>")
	}
	for _, stream := range g.Deletes {
		r.allow("$JS.API.STREAM.MSG.DELETE." + stream)
	}
	for _, stream := range g.Purges {
		r.allow("$JS.API.STREAM.PURGE." + stream)
	}
	r.allow("$SRV.INFO.meander-intake") // which version the pipeline is of
	if g.SeesServices {
		r.allow("$SRV.INFO", ClockSubject)
	}
	for _, name := range schemas.StreamNames() {
		r.allow("$JS.API.STREAM.INFO." + name)
		// A user that knows the name of another user's consumer could change it. But a work queue has only those of
		// samplers.
		if g.ListsConsumers || g.SeesServices && isWorkQueue(name) {
			r.allow("$JS.API.CONSUMER.LIST."+name, "$JS.API.CONSUMER.NAMES."+name)
		}
		for _, durable := range serviceDurables(name) {
			if g.SeesServices {
				r.allow("$JS.API.CONSUMER.INFO." + name + "." + durable)
			}
		}
	}
	if g.AnswersClients {
		r.allow("_INBOX.>")
	}
	r.allow(g.Asks...)
	r.Subscribe = append(r.Subscribe, InboxOf(u.Key)+".>")
	for _, subject := range g.Answers {
		// only in a queue group, so that no user gets copies of the requests
		r.Subscribe = append(r.Subscribe, subject+" *")
	}
	if g.Discoverable {
		r.Subscribe = append(r.Subscribe, "$SRV.>")
	}
	for _, service := range g.FoundAs {
		r.Subscribe = append(r.Subscribe, "$SRV.PING", "$SRV.INFO", "$SRV.STATS")
		r.Subscribe = append(r.Subscribe, "$SRV.*."+service, "$SRV.*."+service+".*")
	}
	if len(g.Answers) > 0 || g.Discoverable {
		r.Answers, r.AnswerWithin = 1, answerWithin
	}
	for _, list := range []*[]string{&r.Publish, &r.Deny, &r.Subscribe} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return r
}

// allow adds subjects on which the user may publish.
func (r *Rights) allow(subjects ...string) { r.Publish = append(r.Publish, subjects...) }

// mayPublish reports whether the user may publish on a subject.
func (r *Rights) mayPublish(subject string) bool {
	fits := func(filter string) bool { return schemas.Matches(filter, subject) }
	return r.Unlimited || slices.ContainsFunc(r.Publish, fits) && !slices.ContainsFunc(r.Deny, fits)
}

// allowWrites adds the permissions to publish the events of a grant and to write to its buckets.
func (r *Rights) allowWrites(g Grant) {
	for _, kind := range g.Publishes {
		r.allow(publishFilters(kind)...)
	}
	for _, bucket := range g.Writes {
		if bucket == schemas.BlobBucket {
			r.allow("$O." + bucket + ".>")
		} else {
			r.allow(schemas.BucketSubject(bucket, ">"))
		}
	}
}

// publishFilters returns the subjects on which a user publishes events of a kind, as filters for permissions.
func publishFilters(kind string) []string {
	filter := schemas.Address{Kind: kind}.Filter()
	switch kind {
	case schemas.KindStep:
		return []string{filter, schemas.Address{Kind: schemas.KindPart}.Filter()}
	case schemas.KindTokens:
		return []string{filter, schemas.Address{Kind: schemas.KindTokensPart}.Filter()}
	case schemas.KindReward, schemas.KindOpening: // the server adds the partition
		return []string{strings.Replace(filter, kind+".*.", kind+".", 1)}
	}
	return []string{filter}
}

// isWorkQueue reports whether a consumer of the stream takes its messages away.
func isWorkQueue(stream string) bool {
	spec, _ := schemas.StreamNamed(stream)
	return spec.WorkQueue
}

// serviceDurables returns the names of the durables that services work on in a stream. It has none for a work queue,
// since lanes name those.
func serviceDurables(stream string) (names []string) {
	for _, d := range schemas.Durables() {
		if d.Stream == stream {
			names = append(names, d.Name)
		}
	}
	return names
}

// allowWork allows a user to take work from a durable (STREAM.NAME), and to create it again.
func (r *Rights) allowWork(durable string) {
	for _, verb := range []string{"INFO.%s", "CREATE.%s", "CREATE.%s.>", "DELETE.%s", "MSG.NEXT.%s", "UNPIN.%s"} {
		r.allow("$JS.API.CONSUMER." + fmt.Sprintf(verb, durable))
	}
	r.allow("$JS.ACK." + durable + ".>")
}

// allowReads allows a user to read a stream by name, and through its own consumers. The server does not know who owns
// a consumer: a user that knows the name of one can change it. So the names of users' consumers cannot be guessed
// (deploy/guide/secure-it.md). The names of the services' durables are known; so other roles are denied those.
func (r *Rights) allowReads(stream string, g Grant) {
	api := "$JS.API.CONSUMER."
	r.allow("$JS.API.DIRECT.GET."+stream, "$JS.API.DIRECT.GET."+stream+".>", "$JS.API.STREAM.MSG.GET."+stream,
		api+"INFO."+stream+".*")
	if isWorkQueue(stream) { // a consumer would take the work away
		return
	}
	r.allow(api+"CREATE."+stream+".>", api+"MSG.NEXT."+stream+".*", api+"DELETE."+stream+".*", "$JS.FC."+stream+".>")
	durables := serviceDurables(stream)
	if len(durables) == 0 { // this form has the name in its body, where no permission sees it
		r.allow(api + "CREATE." + stream)
	}
	if slices.Contains(g.WorksOn(), stream) {
		return
	}
	for _, d := range durables {
		at := stream + "." + d
		r.Deny = append(r.Deny, api+"CREATE."+at, api+"CREATE."+at+".>", api+"MSG.NEXT."+at, api+"DELETE."+at)
	}
}
