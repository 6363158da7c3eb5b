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
