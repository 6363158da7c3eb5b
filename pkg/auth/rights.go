package auth

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/schemas"
)

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

// rights turns a grant into the permissions on NATS subjects of one of its users. A guest writes events of its own
// runs only, and reads copies in its own account. The names of blobs do not tell their run: with User.Blobs a guest
// may read and write those of all runs. It fails for a guest of a role that cannot be limited to runs.
func (g Grant) rights(u *User) (Rights, error) {
	r := Rights{Unlimited: g.Unlimited}
	guest := u.IsGuest()
	if guest && !g.MayBeGuest {
		return r, fmt.Errorf("role %s: cannot be limited to runs; leave them out", g.Role)
	}
	if g.Unlimited {
		return r, nil
	}
	r.allow("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$SYS.REQ.USER.INFO")
	r.allowWrites(g, u)
	for _, d := range g.durables() {
		r.allowWork(d.Stream + "." + d.Name)
	}
	for _, stream := range g.Reads {
		if stream != schemas.StreamBlobBucket || !guest || u.Blobs {
			r.allowReads(stream, g, guest)
		}
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
	if g.SeesServices && !guest {
		r.allow("$SRV.INFO", ClockSubject)
	}
	for _, name := range schemas.StreamNames() {
		r.allow("$JS.API.STREAM.INFO." + name)
		// A user that knows the name of another user's consumer could change it. But a guest's account has only its own
		// consumers, and a work queue only those of samplers.
		if g.ListsConsumers || guest || g.SeesServices && isWorkQueue(name) {
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
	if !guest { // workers answer in the pipeline's account
		r.allow(g.Asks...)
	}
	r.Subscribe = append(r.Subscribe, InboxOf(u.Key)+".>")
	for _, subject := range g.Answers {
		// only in a queue group, so that no user gets copies of the requests
		r.Subscribe = append(r.Subscribe, subject+" *")
	}
	if g.Discoverable {
		r.Subscribe = append(r.Subscribe, "$SRV.>")
	}
	if len(g.Answers) > 0 || g.Discoverable {
		r.Answers, r.AnswerWithin = 1, answerWithin
	}
	for _, list := range []*[]string{&r.Publish, &r.Deny, &r.Subscribe} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return r, nil
}

// allow adds subjects on which the user may publish.
func (r *Rights) allow(subjects ...string) { r.Publish = append(r.Publish, subjects...) }

// mayPublish reports whether the user may publish on a subject.
func (r *Rights) mayPublish(subject string) bool {
	fits := func(filter string) bool { return schemas.Matches(filter, subject) }
	return r.Unlimited || slices.ContainsFunc(r.Publish, fits) && !slices.ContainsFunc(r.Deny, fits)
}

// allowWrites adds the permissions to publish the events of a grant and to write to its buckets; for a guest, those
// of its runs only.
func (r *Rights) allowWrites(g Grant, u *User) {
	runs := u.Runs
	if !u.IsGuest() {
		runs = []schemas.Run{"*"}
	}
	for _, run := range runs {
		for _, kind := range g.Publishes {
			r.allow(publishFilters(kind, run)...)
		}
	}
	for _, bucket := range g.Writes {
		switch {
		case bucket == schemas.BlobBucket:
			if !u.IsGuest() || u.Blobs {
				r.allow("$O." + bucket + ".>")
			}
		case bucket == schemas.RunBucket:
			for _, run := range runs {
				entry := schemas.BucketSubject(bucket, string(run))
				r.allow(entry)
				if u.IsGuest() { // the Go library writes there when it reads a copy of the bucket
					r.allow(PipelinePrefix + "." + entry)
				}
			}
		case !u.IsGuest():
			r.allow(schemas.BucketSubject(bucket, ">"))
		}
	}
}

// publishFilters returns the subjects on which a user publishes events of a kind, of a run or of all ("*"), as
// filters for permissions; none for events that belong to no run, if a run is given.
func publishFilters(kind string, run schemas.Run) []string {
	filter := schemas.Address{Kind: kind, Run: run}.Filter()
	switch kind {
	case schemas.KindStep:
		return []string{filter, schemas.Address{Kind: schemas.KindPart, Run: run}.Filter()}
	case schemas.KindTokens:
		return []string{filter, schemas.Address{Kind: schemas.KindTokensPart, Run: run}.Filter()}
	case schemas.KindReward, schemas.KindOpening: // the server adds the partition
		return []string{strings.Replace(filter, kind+".*.", kind+".", 1)}
	case schemas.KindPolicy, schemas.KindApplied: // they belong to no run
		if run != "*" {
			return nil
		}
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
// (deploy/guide/secure-it.md). The names of the services' durables are known; so other roles are denied those. A
// guest's account has none of them.
func (r *Rights) allowReads(stream string, g Grant, guest bool) {
	api := "$JS.API.CONSUMER."
	r.allow("$JS.API.DIRECT.GET."+stream, "$JS.API.DIRECT.GET."+stream+".>", "$JS.API.STREAM.MSG.GET."+stream,
		api+"INFO."+stream+".*")
	if isWorkQueue(stream) { // a consumer would take the work away
		return
	}
	r.allow(api+"CREATE."+stream+".>", api+"MSG.NEXT."+stream+".*", api+"DELETE."+stream+".*", "$JS.FC."+stream+".>")
	durables := serviceDurables(stream)
	if len(durables) == 0 || guest { // this form has the name in its body, where no permission sees it
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

// runFilters returns filters for the messages of some runs in a stream; none if its messages belong to no run.
func runFilters(stream string, runs []schemas.Run) (filters []string) {
	for _, run := range runs {
		switch stream {
		case schemas.StreamRunBucket:
			filters = append(filters, schemas.BucketSubject(schemas.RunBucket, string(run)))
		case schemas.StreamControlBucket:
			entry := schemas.BucketSubject(schemas.ControlBucket, string(run))
			filters = append(filters, entry, entry+".>")
		case schemas.StreamDead:
			filters = append(filters, schemas.Address{Kind: schemas.KindDead, Run: run}.Filter())
		default:
			filters = append(filters, schemas.RunFilters(run)[stream]...)
		}
	}
	return filters
}
