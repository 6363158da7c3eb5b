package boot

import (
	"encoding/json"
	"fmt"
	"regexp"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Clock is the answer of a service on auth.ClockSubject: the time of its machine, in Unix nanoseconds.
type Clock struct {
	Service  string `json:"service"`
	Instance string `json:"instance"`
	At       int64  `json:"at"`
}

// TellTime answers with the time of this machine, for a service; meander doctor compares clocks.
func TellTime(nc *nats.Conn, service, instance string) (*nats.Subscription, error) {
	return respond(nc, auth.ClockSubject, func() any { return Clock{service, instance, time.Now().UnixNano()} })
}

// respond answers each message on a subject with a value as JSON. It needs no queue: all who listen answer.
func respond(nc *nats.Conn, subject string, answer func() any) (*nats.Subscription, error) {
	return nc.Subscribe(subject, func(m *nats.Msg) {
		if data, err := json.Marshal(answer()); err == nil {
			_ = m.Respond(data) // an error means that the asker has gone
		}
	})
}

// shown has the names of the services whose work a discovery of this process shows: its copies share their counts.
var shown sync.Map

// Announce shows a service in NATS's service discovery (nats micro ls, info, stats) as meander-<name>, until leave is
// called. It fails if the server takes no subscription. The library's own discovery counts requests alone; what
// services take from streams is most of their work.
func Announce(b *bus.Bus, name, summary, instance string, log zerolog.Logger) (leave func(), err error) {
	started := time.Now().UTC()
	id := b.Conn().NewInbox()
	self := micro.ServiceIdentity{
		Name: "meander-" + name, ID: id[strings.LastIndexByte(id, '.')+1:], Version: semver(Version()),
		Metadata: map[string]string{"instance": instance, "version": Version()},
	}
	_, others := shown.LoadOrStore(name, self.ID)
	work := func() []*micro.EndpointStats {
		if others {
			return []*micro.EndpointStats{}
		}
		return instrument.WorkOf(name)
	}
	answers := map[micro.Verb]func() any{
		micro.PingVerb: func() any { return micro.Ping{ServiceIdentity: self, Type: micro.PingResponseType} },
		micro.StatsVerb: func() any {
			return micro.Stats{
				ServiceIdentity: self, Type: micro.StatsResponseType, Started: started, Endpoints: work(),
			}
		},
		micro.InfoVerb: func() any {
			info := micro.Info{ServiceIdentity: self, Type: micro.InfoResponseType, Description: summary}
			for _, w := range work() {
				info.Endpoints = append(info.Endpoints, micro.EndpointInfo{
					Name: w.Name, Subject: w.Subject, QueueGroup: w.QueueGroup,
				})
			}
			return info
		},
	}
	clock, err := TellTime(b.Conn(), name, instance)
	listening := []*nats.Subscription{clock}
	for verb, answer := range answers {
		for _, of := range [][2]string{{}, {self.Name}, {self.Name, self.ID}} {
			if err != nil {
				break
			}
			var subject string
			var sub *nats.Subscription
			if subject, err = micro.ControlSubject(verb, of[0], of[1]); err == nil {
				sub, err = respond(b.Conn(), subject, answer)
			}
			listening = append(listening, sub)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("service discovery: %w", err)
	}
	return func() {
		shown.CompareAndDelete(name, self.ID)
		for _, sub := range listening {
			if err := sub.Drain(); err != nil {
				log.Warn().Err(err).Msg("not removed from service discovery") // the server is gone
				return
			}
		}
	}, nil
}

// version is stamped by the linker (-X); see the Makefile.
var version string

// Version returns the version of this build: what the linker stamped, else that of a tagged module, else
// schemas.Release and the revision that the build recorded, as in 0.1.0+g81f3900a52e0.dirty.
func Version() string {
	if version != "" && version != "devel" { // which images are built with where no version is given
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return schemas.Release + "+devel"
	}
	if v := strings.TrimPrefix(info.Main.Version, "v"); semantic.MatchString(v) && !pseudo.MatchString(v) {
		return v
	}
	if m := pseudo.FindStringSubmatch(info.Main.Version); m != nil { // 'go install ...@main', and builds in a checkout
		return schemas.Release + "+g" + m[1] + strings.ReplaceAll(m[2], "+", ".")
	}
	return schemas.Release + "+devel"
}

// pseudo matches what Go calls a commit without a tag: the revision, and whether files differed from it.
var pseudo = regexp.MustCompile(`[.-]\d{14}-([0-9a-f]{12})(\+dirty)?$`)

var (
	semantic  = regexp.MustCompile(`^\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?$`)
	notInTags = regexp.MustCompile(`[^0-9A-Za-z-]+`)
)

// semver puts a version into the form that the NATS micro-service protocol requires. What is not a semantic version
// becomes the build tag of 0.0.0.
func semver(v string) string {
	if s := strings.TrimPrefix(v, "v"); semantic.MatchString(s) {
		return s
	}
	return "0.0.0+" + strings.Trim(notInTags.ReplaceAllString(v, "-"), "-")
}
