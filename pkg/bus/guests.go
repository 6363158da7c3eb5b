package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/schemas"
)

// User returns the user of this connection, as its file of credentials says.
func (b *Bus) User() auth.Identity { return b.user }

// readable returns ErrPermission when a guest wants to read what its copy of a stream cannot have. Otherwise the
// stream would just look empty.
func (b *Bus) readable(stream string, filters ...string) error {
	if b.user.MayFind(stream, filters...) {
		return nil
	}
	return fmt.Errorf("%w: %s is limited to the runs %s, and has no copy of %q", ErrPermission, b.user, b.user.Runs(),
		filters[0])
}

// SetupGuests creates the copies of guests or brings them up to date, and removes the durables that deliver copies of
// former guests. Only the admin may do so, after Setup. The server must know the guests' accounts.
func (b *Bus) SetupGuests(ctx context.Context, guests []auth.User) error {
	for _, step := range []func(context.Context, *auth.User) error{b.setupCopies, b.checkDelivery} {
		for i := range guests {
			if err := b.retryGuestStep(ctx, &guests[i], step); err != nil {
				return err
			}
		}
	}
	return b.retryWhileAway(ctx, func(ctx context.Context) error { return b.removeFormerGuests(ctx, guests) })
}

// retryGuestStep runs a step of SetupGuests in a guest's account. When the server does not know the account yet, or
// its cluster finds no place for a copy, which passes in one that has just begun, it tries again for guestPatience; the
// error then says how to tell the server.
func (b *Bus) retryGuestStep(ctx context.Context, u *auth.User, step func(context.Context, *auth.User) error) error {
	for end := time.Now().Add(guestPatience); ; {
		err := b.retryWhileAway(ctx, func(ctx context.Context) error { return step(ctx, u) })
		unknown := errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errNotDelivered)
		api, refused := errors.AsType[*jetstream.APIError](err)
		early := refused && api.ErrorCode == codeNoPeers // the cluster may not know yet which servers have room
		switch {
		case err == nil:
			return nil
		case (unknown || early) && time.Now().Before(end) && pause(ctx, rebindPause) == nil:
			continue
		case unknown:
			err = fmt.Errorf("%w; the server must know the account %s: give it the new auth.conf and run "+
				"nats-server --signal reload, twice for a new account, which the server connects at the second", err,
				u.Account())
		case classOf(err) == classFull:
			err = fmt.Errorf("%w; the guest may take %d bytes (auth add --copy-bytes), which the server promised to "+
				"other streams: make their limits smaller with 'meander streams limit', or the store larger "+
				"(max_file_store)", err, u.CopySpace())
		}
		return fmt.Errorf("copies of the guest %s: %w", u.Name, err)
	}
}

// guestPatience bounds how long SetupGuests waits for the server to connect a guest's account.
const guestPatience = 15 * time.Second

// errNotDelivered means that the server does not deliver to a guest's copy yet.
var errNotDelivered = errors.New("the server delivers nothing to it")

// setupCopies creates or updates all streams of a guest's account, a step of SetupGuests.
func (b *Bus) setupCopies(ctx context.Context, u *auth.User) error {
	own, err := b.guestStreams(u)
	if err != nil {
		return err
	}
	origins, err := b.streamInfos(ctx)
	if err != nil {
		return err
	}
	wants, err := wantedCopies(u, origins)
	if err != nil {
		return err
	}
	// Streams that shrink come first: the others need their space.
	for _, name := range schemas.StreamNames() {
		want := wants[name]
		have, err := own.Stream(ctx, name)
		if err == nil && reservedBytes(have.CachedInfo().Config) > reservedBytes(want) {
			err = resizeStream(ctx, own, have.CachedInfo().Config, want)
		}
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	copies := u.Copies()
	for _, name := range schemas.StreamNames() {
		if err := b.setupCopy(ctx, own, u, wants[name], origins[name], copies[name]); err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	return nil
}

// streamInfos returns the state and settings of all streams of the pipeline, by name. setupCopies calls it.
func (b *Bus) streamInfos(ctx context.Context) (map[string]*jetstream.StreamInfo, error) {
	infos := map[string]*jetstream.StreamInfo{}
	for _, name := range schemas.StreamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", name, err)
		}
		infos[name] = s.CachedInfo()
	}
	return infos, nil
}

// wantedCopies returns the streams that a guest's account should have: copies, and empty streams for what the guest
// may not read. Each stream gets the least size; the copies share the rest of the guest's space in proportion to the
// originals. It fails when the guest has less space than the least sizes.
func wantedCopies(u *auth.User, origins map[string]*jetstream.StreamInfo) (map[string]jetstream.StreamConfig, error) {
	copies, total, least := u.Copies(), int64(0), int64(0)
	for name, origin := range origins {
		least += minStreamBytes * int64(origin.Config.Replicas)
		if _, copied := copies[name]; copied {
			total += max(minStreamBytes, origin.Config.MaxBytes)
		}
	}
	space := u.CopySpace() - least
	if space < 0 {
		return nil, fmt.Errorf("copy_bytes: %d; must be at least %d, for all servers that keep them: auth rm, and "+
			"auth add with as many", space+least, least)
	}
	wants := map[string]jetstream.StreamConfig{}
	for name, origin := range origins {
		want := jetstream.StreamConfig{
			Name: name, Description: "nothing of it is for guests", Storage: jetstream.FileStorage,
			Replicas: origin.Config.Replicas, MaxBytes: minStreamBytes,
		}
		if _, copied := copies[name]; copied {
			share := float64(max(minStreamBytes, origin.Config.MaxBytes)) / float64(total)
			want = copyConfig(origin.Config, u)
			want.MaxBytes += int64(share*float64(space)) / int64(want.Replicas) // the server counts each replica
		}
		wants[name] = want
	}
	return wants, nil
}

// reservedBytes returns what a stream may take of its account's storage, on all servers together.
func reservedBytes(c jetstream.StreamConfig) int64 { return c.MaxBytes * int64(c.Replicas) }

// checkDelivery returns errNotDelivered while a copy of a guest is not connected to its original, a step of
// SetupGuests.
func (b *Bus) checkDelivery(ctx context.Context, u *auth.User) error {
	own, err := b.guestStreams(u)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(u.Copies())) {
		s, err := own.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
		if m := s.CachedInfo().Mirror; m == nil || m.Active < 0 {
			return fmt.Errorf("stream %s: %w", name, errNotDelivered)
		}
	}
	return nil
}

// guestStreams returns the API of a guest's account, which the admin may use.
func (b *Bus) guestStreams(u *auth.User) (jetstream.JetStream, error) {
	return jetstream.NewWithAPIPrefix(b.nc, strings.TrimSuffix(u.API().From, ".>"))
}

// copyConfig returns the settings of a guest's copy of a stream, at its least size. wantedCopies calls it.
func copyConfig(origin jetstream.StreamConfig, u *auth.User) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: origin.Name, Description: "what the pipeline has of the runs of the guest " + u.Name,
		Storage:  jetstream.FileStorage,
		Replicas: origin.Replicas, MaxBytes: minStreamBytes, MaxMsgsPerSubject: origin.MaxMsgsPerSubject,
		MaxAge: origin.MaxAge, AllowDirect: true, AllowRollup: origin.AllowRollup,
		Mirror: &jetstream.StreamSource{
			Name: origin.Name, External: &jetstream.ExternalStream{APIPrefix: auth.PipelinePrefix},
			Consumer: &jetstream.StreamConsumerSource{
				Name:           u.CopyDurable(),
				DeliverSubject: u.CopySubject(origin.Name),
			},
		},
	}
}

// setupCopy creates one stream of a guest, and the durable that delivers it. It creates a copy again when its runs
// have changed, when the guest has changed it, or when the original was created again.
func (b *Bus) setupCopy(
	ctx context.Context, own jetstream.JetStream, u *auth.User,
	want jetstream.StreamConfig, origin *jetstream.StreamInfo, filters []string,
) error {
	have, err := own.Stream(ctx, want.Name)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return err
	}
	exists := err == nil
	if want.Mirror == nil {
		if exists {
			return resizeStream(ctx, own, have.CachedInfo().Config, want)
		}
		_, err = own.CreateStream(ctx, want)
		return err
	}
	from, err := b.js.PushConsumer(ctx, want.Name, u.CopyDurable())
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	if err == nil {
		c := from.CachedInfo().Config
		fits := exists && sameMirror(have.CachedInfo().Config.Mirror, want.Mirror) &&
			slices.Equal(slices.Sorted(slices.Values(filtersOf(c))), slices.Sorted(slices.Values(filters)))
		if fits && have.CachedInfo().State.LastSeq <= origin.State.LastSeq {
			return resizeStream(ctx, own, have.CachedInfo().Config, want)
		}
		if err := b.js.DeleteConsumer(ctx, want.Name, u.CopyDurable()); err != nil {
			return err
		}
	}
	if exists {
		if err := own.DeleteStream(ctx, want.Name); err != nil {
			return err
		}
	}
	config := jetstream.ConsumerConfig{
		Durable: u.CopyDurable(), Description: "copies for the guest " + u.Name,
		DeliverSubject: want.Mirror.Consumer.DeliverSubject,
		AckPolicy:      jetstream.AckFlowControlPolicy, FlowControl: true, IdleHeartbeat: readHeartbeat,
		FilterSubjects: filters,
	}
	if _, err := b.js.CreatePushConsumer(ctx, want.Name, config); err != nil {
		return err
	}
	_, err = own.CreateStream(ctx, want)
	return err
}

// resizeStream gives a stream of a guest the wanted size and number of replicas. own is the guest account.
func resizeStream(ctx context.Context, own jetstream.JetStream, have, want jetstream.StreamConfig) error {
	if have.MaxBytes == want.MaxBytes && have.Replicas == want.Replicas {
		return nil
	}
	have.MaxBytes, have.Replicas = want.MaxBytes, want.Replicas
	_, err := own.UpdateStream(ctx, have)
	return err
}

// sameMirror reports whether a copy gets its messages from the wanted stream and durable.
func sameMirror(have, want *jetstream.StreamSource) bool {
	return have != nil && have.Name == want.Name && have.Consumer != nil && *have.Consumer == *want.Consumer
}

// filtersOf returns the filters of a consumer, in whichever of the two fields they are.
func filtersOf(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}

// removeFormerGuests removes the durables of former guests: the janitor would wait for them. SetupGuests calls it.
func (b *Bus) removeFormerGuests(ctx context.Context, guests []auth.User) error {
	for _, name := range schemas.StreamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return err
		}
		consumers, err := b.consumersOf(ctx, s)
		if err != nil {
			return err
		}
		for _, c := range consumers {
			known := slices.ContainsFunc(guests, func(u auth.User) bool { return u.CopyDurable() == c.Name })
			if known || !auth.IsGuestName(c.Name) {
				continue
			}
			if err := b.js.DeleteConsumer(ctx, name, c.Name); err != nil &&
				!errors.Is(err, jetstream.ErrConsumerNotFound) {
				return err
			}
		}
	}
	return nil
}
