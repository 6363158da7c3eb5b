package bus

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// Role is what a user of the server is for.
type Role string

// The roles. Whoever is not one of them is not let in.
const (
	RoleIntake    Role = "intake"
	RoleSampler   Role = "sampler"
	RoleReward    Role = "reward"
	RoleAdvantage Role = "advantage"
	RoleTrainer   Role = "trainer"
	RoleViewer    Role = "viewer"
	RoleScorer    Role = "scorer"
	RoleAdmin     Role = "admin"
)

// Grant is what a role may do. Everything it does not name is refused by the server.
type Grant struct {
	Role    Role
	Purpose string
	// Unlimited may do everything.
	Unlimited bool
	// Publishes are the kinds of events that it writes.
	Publishes []string
	// Takes are the durables that it works on, by stream.
	Takes map[string]string
	// Reads are streams, of events or behind a bucket, that it reads.
	Reads []string
	// Puts are buckets that it writes entries of, or objects.
	Puts []string
	// Keeps are streams of which it reads with a place that the server keeps: it acknowledges.
	Keeps []string
	// Deletes are streams of which it deletes single events: what is displaced, and what is done
	// with. Purges are those of which it removes all that match a filter.
	Deletes, Purges []string
	// Asks are the subjects of workers that it asks, Answers those that it answers on, as one.
	Asks, Answers []string
	// Serves: it is found by service discovery. Tells: it answers in the inboxes of clients.
	Serves, Tells bool
	// Lists: it sees how far all consumers are, by their names. Looks: those that services take their work from, and
	// which services run. OfRuns: it may be limited to some runs.
	Lists, Looks, OfRuns bool
}

// Streams behind the buckets.
const (
	runStream      = "KV_" + schemas.RunBucket
	policyStream   = "KV_" + schemas.PolicyBucket
	presenceStream = "KV_" + schemas.PresenceBucket
	sealStream     = "KV_" + schemas.SealBucket
	blobStream     = "OBJ_" + schemas.BlobBucket
)

// The durables that services take their work from. That of a lane is LaneConsumer, that of a
// partition of MDR_REWARDS PartitionConsumer.
const (
	IntakeConsumer   = "intake"
	ControlConsumer  = "intake-control"
	RewardConsumer   = "reward"
	VerdictConsumer  = "reward-verdicts"
	advisoryConsumer = "advisories"

	// everyLane and everyPartition stand for those of all lanes and partitions in Grant.Takes.
	everyLane      = "*"
	everyPartition = "every partition"
)

// ClockSubject is where services are asked what time it is.
const ClockSubject = "$SRV.CLOCK"

// LaneConsumer is the durable of a lane's samplers.
func LaneConsumer(lane schemas.Lane) string { return "sampler-" + string(lane) }

// PartitionConsumer is the durable of a partition's rewards.
func PartitionConsumer(partition int) string { return fmt.Sprintf("advantage-p%02d", partition) }

// Grants are the rights of all roles: the one place where they stand. The server's permissions, the
// errors that name them and the table in deploy/secure.md are made of it.
func Grants() []Grant {
	results := []string{
		schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamAdvantages,
		policyStream, presenceStream, runStream, controlStream, blobStream,
	}
	return []Grant{
		{
			Role: RoleIntake, Purpose: "the program meander-intake: takes prompts and controls, asks for samples",
			Publishes: []string{
				schemas.KindGroup, schemas.KindPlan, schemas.KindOpening, schemas.KindRequest, schemas.KindParked, schemas.KindDead,
				schemas.KindTrajectory, schemas.KindReward, // of samples that are cancelled or refused: nobody else makes them
			},
			Takes: map[string]string{schemas.StreamPrompts: IntakeConsumer, schemas.StreamControl: ControlConsumer, schemas.StreamAdvisories: advisoryConsumer},
			Reads: append([]string{schemas.StreamPrompts, schemas.StreamControl, schemas.StreamRequests, schemas.StreamParked, schemas.StreamDead, schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamAdvisories}, results...),
			Puts:  []string{schemas.ControlBucket, schemas.PresenceBucket, schemas.BlobBucket},
			Deletes: []string{
				schemas.StreamGroups, schemas.StreamRequests, schemas.StreamParked, schemas.StreamTrajectories, schemas.StreamRewards,
			},
			Purges: []string{schemas.StreamRequests, schemas.StreamParked},
			Serves: true, Tells: true, Lists: true, Looks: true,
		},
		{
			Role: RoleSampler, Purpose: "the program meander-sampler: makes rollouts, announces the weights that it has",
			Publishes: []string{schemas.KindStep, schemas.KindTokens, schemas.KindTrajectory, schemas.KindParked, schemas.KindPolicy, schemas.KindApplied, schemas.KindDead},
			Takes:     map[string]string{schemas.StreamRequests: everyLane},
			Reads:     []string{schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamGroups, schemas.StreamRequests, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamAdvantages, schemas.StreamParked, policyStream, presenceStream, controlStream, sealStream, blobStream},
			Puts:      []string{schemas.PolicyBucket, schemas.PresenceBucket, schemas.SealBucket, schemas.BlobBucket},
			Deletes:   []string{schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamParked},
			Purges:    []string{schemas.StreamSteps},
			Asks:      []string{schemas.InteractSubject("*")}, Serves: true,
		},
		{
			Role: RoleReward, Purpose: "the program meander-reward: scores images, takes verdicts in",
			Publishes: []string{schemas.KindReward, schemas.KindDead},
			Takes:     map[string]string{schemas.StreamTrajectories: RewardConsumer, schemas.StreamVerdicts: VerdictConsumer},
			Reads:     []string{schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamAdvantages, presenceStream, controlStream, blobStream},
			Puts:      []string{schemas.PresenceBucket, schemas.BlobBucket},
			Deletes:   []string{schemas.StreamVerdicts, schemas.StreamRewards},
			Asks:      []string{schemas.ScoreSubject("*")}, Serves: true,
		},
		{
			Role: RoleAdvantage, Purpose: "the program meander-advantage: closes groups and batches, asks for more of a prompt",
			Publishes: []string{schemas.KindAdvantage, schemas.KindBatch, schemas.KindPrompt, schemas.KindDead},
			Takes:     map[string]string{schemas.StreamRewards: everyPartition},
			Reads:     []string{schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamTrajectories, schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamPolicies, presenceStream, controlStream, blobStream},
			Puts:      []string{schemas.PresenceBucket, schemas.BlobBucket},
			Deletes:   []string{schemas.StreamRewards, schemas.StreamAdvantages},
			Serves:    true,
		},
		{
			Role: RoleTrainer, Purpose: "trains on groups: publishes prompts, reads what became of them, pushes weights",
			Publishes: []string{schemas.KindPrompt, schemas.KindPolicy},
			Reads:     append([]string{schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamDead, schemas.StreamPolicies, schemas.StreamApplied}, results...),
			Puts:      []string{schemas.RunBucket, schemas.PolicyBucket, schemas.BlobBucket},
			Keeps:     []string{schemas.StreamAdvantages},
			Looks:     true, OfRuns: true,
		},
		{
			Role: RoleViewer, Purpose: "looks, and changes nothing: watch, show, streams, verify",
			Reads: append([]string{schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamParked, schemas.StreamPolicies, schemas.StreamApplied, schemas.StreamControl, schemas.StreamDead}, results...),
			Looks: true, OfRuns: true,
		},
		{
			Role: RoleScorer, Purpose: "answers from outside: workers of reward functions nats:NAME and of interactions, and verdicts",
			Publishes: []string{schemas.KindVerdict},
			Reads:     []string{schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts, presenceStream, blobStream},
			Answers:   []string{schemas.ScoreSubject("*"), schemas.InteractSubject("*")},
		},
		{Role: RoleAdmin, Purpose: "an operator: streams and their limits, control of runs, the janitor, dead letters", Unlimited: true},
	}
}

// Says is what the grant allows, a line for each kind of right.
func (g Grant) Says() (lines []string) {
	if g.Unlimited {
		return []string{"may do everything"}
	}
	say := func(what string, of []string) {
		if len(of) > 0 {
			lines = append(lines, what+" "+strings.Join(of, ", "))
		}
	}
	say("publishes", g.Publishes)
	say("takes its work from", slices.Sorted(maps.Keys(g.Takes)))
	say("reads", g.Reads)
	say("keeps its place in", g.Keeps)
	say("writes to", g.Puts)
	say("deletes of", g.Deletes)
	say("purges of", g.Purges)
	say("asks workers on", g.Asks)
	say("answers as a worker on", g.Answers)
	for _, c := range []struct {
		has  bool
		says string
	}{
		{g.Lists, "sees how far all consumers are"},
		{g.Looks && !g.Lists, "sees how far the pipeline's own consumers are"},
		{g.Tells, "answers clients in their inboxes"},
		{g.OfRuns, "may be limited to some runs"},
	} {
		if c.has {
			lines = append(lines, c.says)
		}
	}
	return lines
}

// GrantOf is the grant of a role; false for none.
func GrantOf(role Role) (Grant, bool) {
	all := Grants()
	i := slices.IndexFunc(all, func(g Grant) bool { return g.Role == role })
	if i < 0 {
		return Grant{}, false
	}
	return all[i], true
}

// Rights are the server's permissions of one user, as subjects.
type Rights struct {
	Unlimited     bool
	Publish, Deny []string
	Subscribe     []string
	Answers       int
	AnswerWithin  time.Duration
}

// answerWithin is how long a worker may take to answer, longer than anybody waits.
const answerWithin = time.Hour

// Rights are those of the user with a public key. With runs he is a guest: what he may write is of
// these, and what he may read are the copies in his own account; blobs, whose names tell no run, says
// that he may read and write them all the same.
func (g Grant) Rights(key string, runs []schemas.Run, blobs bool) (Rights, error) {
	r := Rights{Unlimited: g.Unlimited}
	if len(runs) > 0 && !g.OfRuns {
		return r, fmt.Errorf("role %s: cannot be limited to runs; leave them out", g.Role)
	}
	if g.Unlimited {
		return r, nil
	}
	r.allow("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$SYS.REQ.USER.INFO")
	for _, name := range streamNames() {
		r.allow("$JS.API.STREAM.INFO." + name)
	}
	r.write(g, runs, blobs)
	for stream, durable := range g.Takes {
		r.take(stream, durables(durable))
	}
	for _, stream := range g.Reads {
		if stream != blobStream || len(runs) == 0 || blobs {
			r.read(stream, g, len(runs) > 0)
		}
	}
	for _, stream := range g.Keeps {
		r.allow("$JS.ACK." + stream + ".>")
	}
	for _, stream := range g.Deletes {
		r.allow("$JS.API.STREAM.MSG.DELETE." + stream)
	}
	for _, stream := range g.Purges {
		r.allow("$JS.API.STREAM.PURGE." + stream)
	}
	if g.Looks && len(runs) == 0 {
		r.allow("$SRV.INFO", ClockSubject)
	}
	for _, name := range streamNames() {
		spec, _ := specNamed(name)
		// Those of a guest's account are his own, and those of a work queue the samplers'. With the names of others he
		// could change their consumers.
		if g.Lists || len(runs) > 0 || g.Looks && spec.WorkQueue {
			r.allow("$JS.API.CONSUMER.LIST."+name, "$JS.API.CONSUMER.NAMES."+name)
		}
		for _, durable := range workDurables(name) {
			if g.Looks {
				r.allow("$JS.API.CONSUMER.INFO." + name + "." + durable)
			}
		}
	}
	if g.Tells {
		r.allow("_INBOX.>")
	}
	r.allow(g.Asks...)
	r.Subscribe = append(r.Subscribe, InboxOf(key)+".>")
	for _, subject := range g.Answers {
		r.Subscribe = append(r.Subscribe, subject+" *") // in a queue group: nobody listens in
	}
	if g.Serves {
		r.Subscribe = append(r.Subscribe, "$SRV.>")
	}
	if len(g.Answers) > 0 || g.Serves {
		r.Answers, r.AnswerWithin = 1, answerWithin
	}
	for _, list := range []*[]string{&r.Publish, &r.Deny, &r.Subscribe} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return r, nil
}

// write allows the events of a grant, and the entries of buckets.
func (r *Rights) write(g Grant, runs []schemas.Run, blobs bool) {
	for _, kind := range g.Publishes {
		for _, run := range orAll(runs) {
			r.allow(published(kind, run)...)
		}
	}
	for _, bucket := range g.Puts {
		if bucket != schemas.BlobBucket || len(runs) == 0 || blobs {
			r.put(bucket, runs)
		}
	}
}

func (r *Rights) allow(subjects ...string) { r.Publish = append(r.Publish, subjects...) }

func orAll(runs []schemas.Run) []schemas.Run {
	if len(runs) == 0 {
		return []schemas.Run{"*"}
	}
	return runs
}

// published are the patterns of a kind's subjects on their way to the server.
func published(kind string, run schemas.Run) []string {
	switch a := (schemas.Address{Kind: kind, Run: run}); kind {
	case schemas.KindStep:
		return []string{a.Filter(), schemas.Address{Kind: schemas.KindPart, Run: run}.Filter()}
	case schemas.KindTokens:
		return []string{a.Filter(), schemas.Address{Kind: schemas.KindTokensPart, Run: run}.Filter()}
	case schemas.KindReward, schemas.KindOpening: // the server puts the partition in
		return []string{strings.Replace(a.Filter(), kind+".*.", kind+".", 1)}
	case schemas.KindPolicy, schemas.KindApplied: // of no run: for those who are limited to none
		if run != "*" {
			return nil
		}
		return []string{a.Filter()}
	default:
		return []string{a.Filter()}
	}
}

// durables are the names of the consumers that a role takes its work from.
func durables(durable string) []string {
	if durable != everyPartition {
		return []string{durable}
	}
	var out []string
	for p := range schemas.RewardPartitions {
		out = append(out, PartitionConsumer(p))
	}
	return out
}

// workDurables are those of a stream that services take their work from, but for a work queue's, which lanes name.
func workDurables(stream string) (names []string) {
	for _, g := range Grants() {
		if durable, has := g.Takes[stream]; has && durable != everyLane {
			names = append(names, durables(durable)...)
		}
	}
	return names
}

// take allows to work on a durable, to make it and to make it anew.
func (r *Rights) take(stream string, durables []string) {
	for _, d := range durables {
		at := stream + "." + d
		r.allow("$JS.API.CONSUMER.INFO."+at, "$JS.API.CONSUMER.CREATE."+at, "$JS.API.CONSUMER.CREATE."+at+".>",
			"$JS.API.CONSUMER.DELETE."+at, "$JS.API.CONSUMER.MSG.NEXT."+at, "$JS.API.CONSUMER.UNPIN."+at, "$JS.ACK."+at+".>")
	}
}

// put allows to write entries of a bucket, or objects.
func (r *Rights) put(bucket string, runs []schemas.Run) {
	switch {
	case bucket == schemas.BlobBucket:
		r.allow("$O." + bucket + ".>")
	case bucket == schemas.RunBucket:
		for _, run := range orAll(runs) {
			r.allow(schemas.BucketSubject(bucket, string(run)))
			if len(runs) > 0 { // where the Go library writes that reads a copy of the bucket
				r.allow(pipelinePrefix + "." + schemas.BucketSubject(bucket, string(run)))
			}
		}
	case len(runs) == 0:
		r.allow(schemas.BucketSubject(bucket, ">"))
	}
}

// read allows to read a stream, through consumers of one's own and by name. The server does not know whose a consumer
// is: a user who knows its name can change it. So names of users' consumers must not be guessed (deploy/secure.md),
// and those of the durables that services work on, which everybody knows, are denied to other roles. In a
// guest's own account there are none of these.
func (r *Rights) read(stream string, g Grant, guest bool) {
	r.allow("$JS.API.DIRECT.GET."+stream, "$JS.API.DIRECT.GET."+stream+".>", "$JS.API.STREAM.MSG.GET."+stream, "$JS.API.CONSUMER.INFO."+stream+".*")
	if spec, _ := specNamed(stream); spec.WorkQueue { // a consumer would take the work away
		return
	}
	r.allow("$JS.API.CONSUMER.CREATE."+stream+".>", "$JS.API.CONSUMER.MSG.NEXT."+stream+".*",
		"$JS.API.CONSUMER.DELETE."+stream+".*", "$JS.FC."+stream+".>")
	works := workDurables(stream)
	if len(works) == 0 || guest { // in the bare form the name is in the request, where no permission sees it
		r.allow("$JS.API.CONSUMER.CREATE." + stream)
	}
	if _, own := g.Takes[stream]; own {
		return
	}
	for _, d := range works {
		at := stream + "." + d
		r.Deny = append(r.Deny, "$JS.API.CONSUMER.CREATE."+at, "$JS.API.CONSUMER.CREATE."+at+".>",
			"$JS.API.CONSUMER.MSG.NEXT."+at, "$JS.API.CONSUMER.DELETE."+at)
	}
}

// ofRuns are filters of what a stream has of some runs; false: its messages are of no run.
func ofRuns(stream string, runs []schemas.Run) (filters []string, ok bool) {
	for _, run := range runs {
		var of []string
		switch stream {
		case runStream:
			of = []string{schemas.BucketSubject(schemas.RunBucket, string(run))}
		case controlStream:
			at := schemas.BucketSubject(schemas.ControlBucket, string(run))
			of = []string{at, at + ".>"}
		case schemas.StreamDead:
			of = []string{schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()}
		default:
			of = schemas.RunFilters(run)[stream]
		}
		filters = append(filters, of...)
	}
	return filters, len(filters) > 0
}

// whoMay names the roles that have the right to publish on a subject, for the end of an error.
func whoMay(who identity, subject string) string {
	var may []string
	for _, g := range Grants() {
		r, err := g.Rights("", nil, false)
		if err != nil || r.Unlimited || string(g.Role) == who.role {
			continue
		}
		fits := func(pattern string) bool { return matches(pattern, subject) }
		if slices.ContainsFunc(r.Publish, fits) && !slices.ContainsFunc(r.Deny, fits) {
			may = append(may, string(g.Role))
		}
	}
	text := "; the roles that may are " + strings.Join(append(may, string(RoleAdmin)), ", ")
	if g, ok := GrantOf(Role(who.role)); ok && who.runs != "" && who.runs != "*" {
		if r, err := g.Rights("", nil, false); err == nil && slices.ContainsFunc(r.Publish, func(p string) bool { return matches(p, subject) }) {
			if strings.Contains(subject, "."+blobStream) {
				return fmt.Sprintf("; it is limited to the runs %s, and blobs are of no run: meander auth add --blobs lets a user fetch those of all", who.runs)
			}
			return fmt.Sprintf("; it is limited to the runs %s%s", who.runs, text)
		}
	}
	return text
}
