package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// Guest is a user who is limited to runs, in an account of the server that is his alone. Within an
// account the server sends an answer, and what a consumer reads, to whatever subject the request
// names, and acts on it there as on a request of its own (nats-server issue 8274). Out of a guest's account
// go the subjects that he may write and nothing else; in it are copies of the streams that he may read, with what
// is of his runs, so that his requests for them, and the answers, stay where he can only harm himself.
type Guest struct {
	Name  string
	Key   string // the public one
	Role  Role
	Runs  []schemas.Run
	Blobs bool
	// Mark ends the name of the durables that his copies are delivered by, so that other users cannot guess it: with the
	// name of a consumer they could change it.
	Mark string
	// CopyBytes bounds what the copies take of the storage of all servers that keep them, together; 0: DefaultCopyBytes.
	CopyBytes int64
}

// DefaultCopyBytes is what the copies of a guest may take where nobody says.
const DefaultCopyBytes = 512 << 20

const (
	guestPrefix = "guest-"
	// pipelinePrefix stands in a guest's account before what he calls in the pipeline's, where a
	// subject of its own says the same.
	pipelinePrefix = "pipeline.API"
)

// Crossing is a subject of a guest's account that leads to one of the pipeline's.
type Crossing struct{ From, To string }

// Account is the guest's account of the server.
func (g Guest) Account() string { return guestPrefix + g.Name }

// durable is the name of the consumers that his copies are delivered by.
func (g Guest) durable() string {
	if g.Mark == "" {
		return g.Account()
	}
	return g.Account() + "-" + g.Mark
}

// IsGuest says whether an account of the server is a guest's.
func IsGuest(account string) bool { return strings.HasPrefix(account, guestPrefix) }

// GuestOf are the runs that our credentials are limited to, as the file of them says; empty: all.
func (b *Bus) GuestOf() string {
	if b.who.runs == "*" {
		return ""
	}
	return b.who.runs
}

func (g Guest) copied(stream string) string { return "guest." + g.Name + ".copy." + stream }

// Hears are all subjects of the pipeline's account that come into his: what his copies are made of, and receipts.
func (g Guest) Hears() []string { return []string{g.copied("*"), InboxOf(g.Key) + ".>"} }

// API leads from the pipeline's account to the streams of the guest's: what the operator makes the copies by.
func (g Guest) API() Crossing {
	return Crossing{From: "guest." + g.Name + ".API.>", To: "$JS.API.>"}
}

// Crossings are the requests that leave the guest's account, and all that do: events of his runs,
// and for each copy the two by which the server has it delivered.
func (g Guest) Crossings() ([]Crossing, error) {
	grant, ok := GrantOf(g.Role)
	if !ok || !grant.OfRuns || len(g.Runs) == 0 {
		return nil, fmt.Errorf("guest %s: role %q, runs %v; must be a role that may be limited to runs, and runs", g.Name, g.Role, g.Runs)
	}
	var out []Crossing
	var writes Rights
	writes.write(grant, g.Runs, g.Blobs)
	for _, subject := range writes.Publish {
		out = append(out, Crossing{From: subject, To: strings.TrimPrefix(subject, pipelinePrefix+".")})
	}
	copies := g.copies()
	for _, stream := range slices.Sorted(maps.Keys(copies)) {
		reset, flow := "CONSUMER.RESET."+stream+"."+g.durable(), "$JS.FC."+stream+"."+g.durable()+".*"
		out = append(out, Crossing{From: pipelinePrefix + "." + reset, To: "$JS.API." + reset}, Crossing{From: flow, To: flow})
	}
	return out, nil
}

// copies are the streams that he has copies of, with the filters of what is in them; none: all.
func (g Guest) copies() map[string][]string {
	grant, _ := GrantOf(g.Role)
	out := map[string][]string{}
	for _, stream := range grant.Reads {
		filters, of := ofRuns(stream, g.Runs)
		spec, _ := specNamed(stream)
		switch {
		case spec.WorkQueue: // a consumer would take the work away
		case of:
			out[stream] = filters
		case stream != blobStream || g.Blobs:
			out[stream] = nil
		}
	}
	return out
}

// SetupGuests makes the copies of guests, or brings them up to date, and removes what delivers those of
// guests that are no more: it is the admin role's, after Setup. The server must know the guests' accounts.
func (b *Bus) SetupGuests(ctx context.Context, guests []Guest) error {
	for _, step := range []func(context.Context, Guest) error{b.setUpGuest, b.connected} {
		for _, g := range guests {
			if err := b.withGuest(ctx, g, step); err != nil {
				return err
			}
		}
	}
	return b.patiently(ctx, func(ctx context.Context) error { return b.dismiss(ctx, guests) })
}

// withGuest does something in a guest's account, and waits a while for the server to know it.
func (b *Bus) withGuest(ctx context.Context, g Guest, do func(context.Context, Guest) error) error {
	for end := time.Now().Add(guestPatience); ; {
		err := b.patiently(ctx, func(ctx context.Context) error { return do(ctx, g) })
		waits := errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errNothingComes)
		switch {
		case err == nil:
			return nil
		case waits && time.Now().Before(end) && pause(ctx, rebindPause) == nil:
			continue
		case waits:
			err = fmt.Errorf("%w; the server must know the account %s: give it the auth.conf of now, with nats-server --signal reload, and again, because it connects an account that is new to it at the second", err, g.Account())
		}
		return fmt.Errorf("copies of the guest %s: %w", g.Name, err)
	}
}

// guestPatience bounds how long SetupGuests waits for the server to connect a guest's account.
const guestPatience = 15 * time.Second

// errNothingComes: a copy is there, and is not delivered to.
var errNothingComes = errors.New("nothing comes to it")

func (b *Bus) setUpGuest(ctx context.Context, g Guest) error {
	own, err := g.streams(b)
	if err != nil {
		return err
	}
	copies, origins, total, least := g.copies(), map[string]*jetstream.StreamInfo{}, int64(0), int64(0)
	for _, name := range streamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
		origins[name] = s.CachedInfo()
		least += minStreamBytes * int64(s.CachedInfo().Config.Replicas)
		if _, copied := copies[name]; copied {
			total += max(minStreamBytes, s.CachedInfo().Config.MaxBytes)
		}
	}
	room := cmp.Or(g.CopyBytes, DefaultCopyBytes) - least
	if room < 0 {
		return fmt.Errorf("copy_bytes: %d; must be at least %d, for all servers that keep them: auth rm, and auth add with as many", room+least, least)
	}
	wants := map[string]jetstream.StreamConfig{}
	for name, origin := range origins {
		want := jetstream.StreamConfig{
			Name: name, Description: "nothing of it is for guests", Storage: jetstream.FileStorage, Replicas: origin.Config.Replicas, MaxBytes: minStreamBytes,
		}
		if _, copied := copies[name]; copied {
			// Small ones have their least, and the rest is shared as that of the pipeline is. An account's storage is
			// counted on each server of a stream.
			share := float64(max(minStreamBytes, origin.Config.MaxBytes)) / float64(total)
			want = copyOf(origin.Config, g)
			want.MaxBytes += int64(share*float64(room)) / int64(want.Replicas)
		}
		wants[name] = want
	}
	// First what is to be smaller: the rest needs its room.
	for name, want := range wants {
		have, err := own.Stream(ctx, name)
		if err == nil && taken(have.CachedInfo().Config) > taken(want) {
			err = resized(ctx, own, have.CachedInfo().Config, want)
		}
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	for _, name := range streamNames() {
		if err := b.copyStream(ctx, own, g, wants[name], origins[name], copies[name]); err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	return nil
}

// taken is what a stream takes of an account's storage.
func taken(c jetstream.StreamConfig) int64 { return c.MaxBytes * int64(c.Replicas) }

// connected says that a guest's copies hear from the pipeline's account, be it that there is nothing for them.
func (b *Bus) connected(ctx context.Context, g Guest) error {
	own, err := g.streams(b)
	if err != nil {
		return err
	}
	for name := range g.copies() {
		s, err := own.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
		if m := s.CachedInfo().Mirror; m == nil || m.Active < 0 {
			return fmt.Errorf("stream %s: %w", name, errNothingComes)
		}
	}
	return nil
}

// streams are those of the guest's account, for the admin.
func (g Guest) streams(b *Bus) (jetstream.JetStream, error) {
	return jetstream.NewWithAPIPrefix(b.nc, strings.TrimSuffix(g.API().From, ".>"))
}

// copyOf is the copy of a stream.
func copyOf(origin jetstream.StreamConfig, g Guest) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: origin.Name, Description: "what the pipeline has of the runs of the guest " + g.Name, Storage: jetstream.FileStorage,
		Replicas: origin.Replicas, MaxBytes: minStreamBytes, MaxMsgsPerSubject: origin.MaxMsgsPerSubject,
		MaxAge: origin.MaxAge, AllowDirect: true, AllowRollup: origin.AllowRollup,
		Mirror: &jetstream.StreamSource{
			Name: origin.Name, External: &jetstream.ExternalStream{APIPrefix: pipelinePrefix},
			Consumer: &jetstream.StreamConsumerSource{Name: g.durable(), DeliverSubject: g.copied(origin.Name)},
		},
	}
}

// copyStream makes a stream of a guest, and what delivers it. One that is of other runs, of a stream
// that was made anew, or that the guest has broken is made again.
func (b *Bus) copyStream(ctx context.Context, own jetstream.JetStream, g Guest, want jetstream.StreamConfig, origin *jetstream.StreamInfo, filters []string) error {
	have, err := own.Stream(ctx, want.Name)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return err
	}
	there := err == nil
	if want.Mirror == nil {
		if there {
			return resized(ctx, own, have.CachedInfo().Config, want)
		}
		_, err = own.CreateStream(ctx, want)
		return err
	}
	from, err := b.js.PushConsumer(ctx, want.Name, g.durable())
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	if err == nil {
		c := from.CachedInfo().Config
		fits := there && sameMirror(have.CachedInfo().Config.Mirror, want.Mirror) && slices.Equal(slices.Sorted(slices.Values(filtersOf(c))), slices.Sorted(slices.Values(filters)))
		if fits && have.CachedInfo().State.LastSeq <= origin.State.LastSeq {
			return resized(ctx, own, have.CachedInfo().Config, want)
		}
		if err := b.js.DeleteConsumer(ctx, want.Name, g.durable()); err != nil {
			return err
		}
	}
	if there {
		if err := own.DeleteStream(ctx, want.Name); err != nil {
			return err
		}
	}
	config := jetstream.ConsumerConfig{
		Durable: g.durable(), Description: "copies for the guest " + g.Name, DeliverSubject: want.Mirror.Consumer.DeliverSubject,
		AckPolicy: jetstream.AckFlowControlPolicy, FlowControl: true, IdleHeartbeat: readBeat, FilterSubjects: filters,
	}
	if _, err := b.js.CreatePushConsumer(ctx, want.Name, config); err != nil {
		return err
	}
	_, err = own.CreateStream(ctx, want)
	return err
}

// resized gives a copy the size of now, on the servers of now.
func resized(ctx context.Context, own jetstream.JetStream, have, want jetstream.StreamConfig) error {
	if have.MaxBytes == want.MaxBytes && have.Replicas == want.Replicas {
		return nil
	}
	have.MaxBytes, have.Replicas = want.MaxBytes, want.Replicas
	_, err := own.UpdateStream(ctx, have)
	return err
}

func sameMirror(have, want *jetstream.StreamSource) bool {
	return have != nil && have.Name == want.Name && have.Consumer != nil && *have.Consumer == *want.Consumer
}

func filtersOf(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}

// dismiss removes what delivers copies of guests who are none any more: the janitor would wait for them.
func (b *Bus) dismiss(ctx context.Context, guests []Guest) error {
	for _, name := range streamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return err
		}
		consumers, err := b.consumersOf(ctx, s)
		if err != nil {
			return err
		}
		for _, c := range consumers {
			known := slices.ContainsFunc(guests, func(g Guest) bool { return g.durable() == c.Name })
			if known || !strings.HasPrefix(c.Name, guestPrefix) {
				continue
			}
			if err := b.js.DeleteConsumer(ctx, name, c.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
				return err
			}
		}
	}
	return nil
}

// has says that a guest has no copy of what filters match, because it is of runs that are none of his:
// he would find nothing there.
func (id identity) has(stream string, filters ...string) error {
	if id.runs == "" || id.runs == "*" || len(filters) == 0 {
		return nil
	}
	var runs []schemas.Run
	for name := range strings.SplitSeq(id.runs, ",") {
		runs = append(runs, schemas.Run(name))
	}
	own, of := ofRuns(stream, runs)
	for _, f := range filters {
		if !of || slices.ContainsFunc(own, func(o string) bool { return overlap(o, f) }) {
			return nil
		}
	}
	return fmt.Errorf("%w: %s is limited to the runs %s, and has no copy of %q", ErrPermission, id.says(), id.runs, filters[0])
}
