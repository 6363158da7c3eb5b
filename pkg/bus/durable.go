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
)

// durable is the durable consumer that a Consume or a Subscription works on. It is looked at now and then: others can
// change or remove it by mistake, and the server does not tell us. With another filter messages would be stored and
// never taken.
type durable struct {
	bus    *Bus
	config ConsumerConfig

	mu sync.Mutex
	// Up to floor all was acknowledged in the consumer that was made at that time, while it was as it should be.
	made  time.Time
	floor uint64
}

// settings are the fields that a replica with other settings changes: what was stored is not passed over.
var settings = []string{
	"ack_wait", "max_deliver", "max_ack_pending", "priority_policy", "priority_groups", "priority_timeout",
}

// bindPatiently is bind, again while the server is away or the stream not yet there.
func (d *durable) bindPatiently(ctx context.Context) error {
	return d.bus.insist(ctx, d.config.Stream, "consumer not ready", d.bind)
}

// bind makes the durable or brings it up to date. A durable that is as wanted is left
// alone, so that a service without the permission to make one can use it.
func (d *durable) bind(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.mend(ctx)
	if _, refused := errors.AsType[*jetstream.APIError](err); refused {
		err = d.mend(ctx) // another replica may have made it at the same moment, from another place on
	}
	if err != nil {
		return fmt.Errorf("bind consumer %q of %s: %w", d.config.Durable, d.config.Stream, closedError(err))
	}
	return nil
}

// mend is bind. Lock held.
func (d *durable) mend(ctx context.Context) error {
	js, want := d.bus.js, d.config.native()
	have, err := js.Consumer(ctx, d.config.Stream, d.config.Durable)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		if !d.made.IsZero() {
			d.found("it has vanished")
		}
		return d.adopt(js.CreateOrUpdateConsumer(ctx, d.config.Stream, want))
	case errors.Is(err, jetstream.ErrNotPullConsumer):
		return d.remake(ctx, want, time.Time{}, "deliver_subject is set, must not be")
	case err != nil:
		return err
	}
	info := have.CachedInfo()
	set, other := differences(info.Config, want)
	switch {
	case len(other) > 0:
		return d.remake(ctx, want, info.Created, strings.Join(slices.Concat(other, set), "; "))
	case len(set) > 0:
		if !d.made.IsZero() {
			d.bus.log.Warn().Str("consumer", d.config.Durable).Str("stream", d.config.Stream).Strs("changed", set).
				Msg("the settings of a consumer were changed, or another replica has others; set back")
		}
		want.MaxWaiting = info.Config.MaxWaiting // which cannot be changed
		want.DeliverPolicy, want.OptStartSeq = info.Config.DeliverPolicy, info.Config.OptStartSeq
		return d.adopt(js.UpdateConsumer(ctx, d.config.Stream, want))
	}
	d.made, d.floor = info.Created, info.AckFloor.Stream
	d.bus.changed.set(d.key(), nil)
	return nil
}

// remake makes the durable anew. What it has passed over while it was another comes again, from the floor on, and
// where that is not known from the beginning: to do it twice changes nothing.
func (d *durable) remake(ctx context.Context, want jetstream.ConsumerConfig, made time.Time, why string) error {
	d.found(why)
	if spec, _ := specNamed(d.config.Stream); !spec.WorkQueue && !d.made.IsZero() && d.made.Equal(made) {
		want.DeliverPolicy, want.OptStartSeq = jetstream.DeliverByStartSequencePolicy, d.floor+1
	}
	err := d.bus.js.DeleteConsumer(ctx, d.config.Stream, d.config.Durable)
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	return d.adopt(d.bus.js.CreateOrUpdateConsumer(ctx, d.config.Stream, want))
}

// adopt takes a consumer that was just made or updated.
func (d *durable) adopt(c jetstream.Consumer, err error) error {
	if err == nil {
		d.made, d.floor = c.CachedInfo().Created, c.CachedInfo().AckFloor.Stream
	}
	return err
}

// found says that the durable is not what it was: in the log, and in Changed until a look finds it as it should be.
func (d *durable) found(what string) {
	const way = "it is made anew, and what it passed over comes again"
	name, stream := d.config.Durable, d.config.Stream
	d.bus.changed.set(d.key(), fmt.Errorf("consumer %q of %s was changed: %s; %s", name, stream, what, way))
	d.bus.log.Error().Str("consumer", name).Str("stream", stream).Str("changed", what).
		Msg("a consumer was changed; " + way)
}

func (d *durable) key() string { return d.config.Stream + "." + d.config.Durable }

// watch looks at the durable until ctx ends.
func (d *durable) watch(ctx context.Context) {
	defer d.bus.changed.set(d.key(), nil)
	for pause(ctx, d.config.Look) == nil {
		if err := d.bus.patiently(ctx, d.bind); err != nil && ctx.Err() == nil && d.bus.waitLog.allow() {
			d.bus.log.Warn().Err(err).Msg("the consumer is not as it should be, trying again")
		}
	}
}

// differences are the fields in which a durable is not as wanted: those of a service's settings, and others.
func differences(have, want jetstream.ConsumerConfig) (set, other []string) {
	is, must := fieldsOf(have), fieldsOf(want)
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

// fieldsOf are the fields of a consumer in the server's words, without those that say nothing about what it delivers.
func fieldsOf(c jetstream.ConsumerConfig) map[string]string {
	if c.FilterSubject != "" {
		c.FilterSubjects, c.FilterSubject = []string{c.FilterSubject}, ""
	}
	if c.DeliverPolicy == jetstream.DeliverByStartSequencePolicy { // made anew, by us or another replica
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

// changed are the durables that somebody has changed.
type changed struct {
	mu sync.Mutex
	by map[string]error
}

// set notes that a durable is not as it should be; nil: it is.
func (c *changed) set(key string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string]error{}
	}
	if c.by[key] = err; err == nil {
		delete(c.by, key)
	}
}

// Changed says which durables that this bus works on were changed or removed by somebody, until a look finds them as
// they should be; nil: none.
func (b *Bus) Changed() error {
	b.changed.mu.Lock()
	defer b.changed.mu.Unlock()
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(b.changed.by)) {
		errs = append(errs, b.changed.by[key])
	}
	return errors.Join(errs...)
}
