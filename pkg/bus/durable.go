package bus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// durable is the durable consumer of a Consume or a Subscription. It is checked now and then: others can change or
// remove it by mistake, and the server does not tell us. With another filter, for example, messages would be stored
// and never delivered.
type durable struct {
	bus    *Bus
	config ConsumerConfig

	mu sync.Mutex
	// made is when the consumer was created, floor the sequence up to which all was acknowledged when it was last as
	// it should be.
	made  time.Time
	floor uint64
	pin   string // that of the client that was pinned then
}

// settings are the fields that a service's settings decide. A replica with other settings may change them without a
// loss: no stored message is passed over.
var settings = []string{
	"ack_wait", "max_deliver", "max_ack_pending", "priority_policy", "priority_groups", "priority_timeout",
}

// createOrUpdate creates the durable on the server, or brings it up to date; services call it at the start, and again
// when they do not hear from it. It leaves a durable alone that is as it should be, so that a service without the
// permission to create one can use it.
func (d *durable) createOrUpdate(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.tryCreateOrUpdate(ctx)
	if _, refused := errors.AsType[*jetstream.APIError](err); refused {
		err = d.tryCreateOrUpdate(ctx) // another replica may have just created it, with another start position
	}
	if err != nil {
		return fmt.Errorf("bind consumer %q of %s: %w", d.config.Name, d.config.Stream, closedError(err))
	}
	return nil
}

// tryCreateOrUpdate is one try of createOrUpdate. The caller holds the lock.
func (d *durable) tryCreateOrUpdate(ctx context.Context) error {
	js, want := d.bus.js, d.config.natsConfig()
	have, err := js.Consumer(ctx, d.config.Stream, d.config.Name)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		if !d.made.IsZero() {
			d.reportChange("it has vanished")
		}
		return d.noteCreated(js.CreateOrUpdateConsumer(ctx, d.config.Stream, want))
	case errors.Is(err, jetstream.ErrNotPullConsumer):
		return d.recreate(ctx, want, time.Time{}, "deliver_subject is set, must not be")
	case err != nil:
		return err
	}
	info := have.CachedInfo()
	set, other := configDifferences(info.Config, want)
	switch {
	case len(other) > 0:
		return d.recreate(ctx, want, info.Created, strings.Join(slices.Concat(other, set), "; "))
	case len(set) > 0, d.made.IsZero() && !describes(info.Config, want):
		if !d.made.IsZero() {
			d.bus.log.Warn().Str("consumer", d.config.Name).Str("stream", d.config.Stream).Strs("changed", set).
				Msg("the settings of a consumer were changed, or another replica has others; set back")
		}
		want.MaxWaiting = info.Config.MaxWaiting // it cannot be changed
		want.Metadata = withKeys(info.Config.Metadata, want.Metadata)
		want.DeliverPolicy, want.OptStartSeq = info.Config.DeliverPolicy, info.Config.OptStartSeq
		updated, err := js.UpdateConsumer(ctx, d.config.Stream, want)
		if err != nil && len(set) == 0 {
			d.bus.log.Debug().Err(err).Str("consumer", d.config.Name).Msg("not described")
			updated, err = have, nil
		}
		return d.noteCreated(updated, err)
	}
	d.note(info)
	d.bus.changed.Delete(d.key())
	return nil
}

// recreate deletes the durable and creates it again. It then delivers from the floor on, or from the beginning when
// the floor is not known, so that messages it passed over while it was changed come again. Some come twice, which is
// harmless.
func (d *durable) recreate(ctx context.Context, want jetstream.ConsumerConfig, made time.Time, why string) error {
	d.reportChange(why)
	if spec, _ := schemas.StreamNamed(d.config.Stream); !spec.WorkQueue && !d.made.IsZero() && d.made.Equal(made) {
		want.DeliverPolicy, want.OptStartSeq = jetstream.DeliverByStartSequencePolicy, d.floor+1
	}
	err := d.bus.js.DeleteConsumer(ctx, d.config.Stream, d.config.Name)
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	return d.noteCreated(d.bus.js.CreateOrUpdateConsumer(ctx, d.config.Stream, want))
}

func (d *durable) noteCreated(c jetstream.Consumer, err error) error {
	if err == nil {
		d.note(c.CachedInfo())
	}
	return err
}

func (d *durable) note(info *jetstream.ConsumerInfo) {
	d.made, d.floor, d.pin = info.Created, info.AckFloor.Stream, pinOf(info)
}

// pinned returns the pin that the server had given out when it was asked last.
func (d *durable) pinned() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pin
}

// pinOf returns the pin that the server has given out; "" when there is none.
func pinOf(info *jetstream.ConsumerInfo) string {
	for _, g := range info.PriorityGroups {
		return g.PinnedClientID // a durable has one group
	}
	return ""
}

func (d *durable) reportChange(what string) {
	const way = "it is created again, and what it passed over comes again"
	name, stream := d.config.Name, d.config.Stream
	d.bus.changed.Store(d.key(), fmt.Errorf("consumer %q of %s was changed: %s; %s", name, stream, what, way))
	d.bus.log.Error().Str("consumer", name).Str("stream", stream).Str("changed", what).
		Msg("a consumer was changed; " + way)
}

func (d *durable) key() string { return d.config.Stream + "." + d.config.Name }

// checkRegularly calls check, which is createOrUpdate and what depends on it, every Look until ctx ends.
func (d *durable) checkRegularly(ctx context.Context, check func(ctx context.Context) error) {
	defer d.bus.changed.Delete(d.key())
	for Pause(ctx, d.config.Look) == nil {
		err := d.bus.retryWhileAway(ctx, check)
		if err != nil && ctx.Err() == nil && d.bus.waitLog.allow(logEvery) {
			d.bus.log.Warn().Err(err).Msg("the consumer is not as it should be, trying again")
		}
	}
}

// configDifferences returns the fields in which a durable is not as wanted: those that an update can change in set,
// the rest in other, for which it must be created again.
func configDifferences(have, want jetstream.ConsumerConfig) (set, other []string) {
	is, must := configFields(have), configFields(want)
	names := slices.AppendSeq(slices.Collect(maps.Keys(is)), maps.Keys(must))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if is[name] == must[name] {
			continue
		}
		text := fmt.Sprintf("%s is %s, must be %s", name, cmp.Or(is[name], "absent"), cmp.Or(must[name], "absent"))
		if slices.Contains(settings, name) {
			set = append(set, text)
		} else {
			other = append(other, text)
		}
	}
	return set, other
}

// describes reports whether a durable has the description and the metadata that are wanted. Only who binds it anew
// looks at that: replicas of two releases would take turns.
func describes(have, want jetstream.ConsumerConfig) bool {
	return have.Description == want.Description &&
		maps.Equal(have.Metadata, withKeys(have.Metadata, want.Metadata))
}

// configFields returns the fields of a consumer's configuration by the server's names, without those that do not affect
// what it delivers.
func configFields(c jetstream.ConsumerConfig) map[string]string {
	if c.FilterSubject != "" {
		c.FilterSubjects, c.FilterSubject = []string{c.FilterSubject}, ""
	}
	if c.DeliverPolicy == jetstream.DeliverByStartSequencePolicy { // created again, by us or another replica
		c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverAllPolicy, 0
	}
	c.Name, c.Description, c.Metadata, c.Replicas, c.MaxWaiting = "", "", nil, 0, 0
	var fields map[string]json.RawMessage
	text, err := json.Marshal(c)
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	out := map[string]string{}
	if err != nil {
		out["config"] = err.Error()
	}
	for name, value := range fields {
		out[name] = string(value)
	}
	return out
}

// Changed returns an error for each durable of this bus that others have changed or removed, nil if there is none. The
// services show it in their health. Each consumer checks its durable every few seconds, and clears the error when the
// durable is as it should be.
func (b *Bus) Changed() error {
	faults := map[string]error{}
	b.changed.Range(func(key, fault any) bool {
		faults[key.(string)] = fault.(error)
		return true
	})
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(faults)) {
		errs = append(errs, faults[key])
	}
	return errors.Join(errs...)
}

// ConsumerFloor is how far a durable has read a stream.
type ConsumerFloor struct {
	Name string
	// Filters are the stored subjects that it reads; none: all.
	Filters []string
	// Seq is the sequence up to which it has acknowledged all that it reads.
	Seq uint64
	// Own means that the durable belongs to a service of the pipeline.
	Own bool
}

// Floors returns how far each durable of a stream has acknowledged it, for the janitor. Those that are not Own belong
// to trainers and other readers who want the stream to keep messages until they have read them.
func (b *Bus) Floors(ctx context.Context, stream string) (out []ConsumerFloor, err error) {
	err = b.withStream(ctx, stream, func(ctx context.Context, s jetstream.Stream, _ *jetstream.StreamInfo) error {
		out = nil
		// Read this before the consumers: then messages that are stored later count as unread.
		info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		last := info.State.LastSeq
		consumers, err := b.consumersOf(ctx, s)
		for _, c := range consumers {
			if c.Config.Durable == "" {
				continue
			}
			f := ConsumerFloor{
				Name: c.Name, Filters: filtersOf(c.Config), Seq: c.AckFloor.Stream,
				Own: slices.Contains(schemas.Services, serviceOf(c.Name)),
			}
			if err == nil && c.NumPending == 0 && c.NumAckPending == 0 {
				var all bool
				if all, err = b.hasReadAll(ctx, stream, &f); all { // the last message it reads may be far back
					f.Seq = max(f.Seq, last)
				}
			}
			out = append(out, f)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("consumers of %s: %w", stream, err)
	}
	return out, nil
}

// hasReadAll reports whether a durable to which nothing is pending has read all that is stored for it. In a cluster the
// server that leads it may be behind that of the stream, and not know yet what is to come.
func (b *Bus) hasReadAll(ctx context.Context, stream string, f *ConsumerFloor) (bool, error) {
	if f.Own || !b.clustered() {
		return true, nil
	}
	filters := f.Filters
	if len(filters) == 0 {
		filters = []string{">"}
	}
	for _, filter := range filters {
		m, err := b.Last(ctx, stream, filter)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil || m.Seq > f.Seq {
			return false, err
		}
	}
	return true, nil
}

// Matches reports whether the durable reads some of the subjects that a filter matches.
func (f *ConsumerFloor) Matches(filter string) bool {
	return len(f.Filters) == 0 || slices.ContainsFunc(f.Filters,
		func(own string) bool { return schemas.Overlap(own, filter) })
}

func filtersOf(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}
