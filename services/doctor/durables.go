package doctor

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// idleBacklog is how long what waits may wait while somebody asks for it and has nothing in hand, and
	// busyBacklog while all hands are full.
	idleBacklog, busyBacklog = time.Minute, 30 * time.Minute
)

// durable is one that a service takes its work from.
type durable struct {
	stream, name, service string
	filters               []string
}

// durables are those of the services that run; lanes are those that have samplers.
func durables(running map[string]int, lanes []schemas.Lane) (out []durable) {
	of := func(i int) durable {
		return durable{schemas.StreamRewards, bus.PartitionConsumer(i), "advantage", []string{schemas.PartitionFilter(i)}}
	}
	all := []durable{
		{schemas.StreamPrompts, bus.IntakeConsumer, "intake", nil},
		{schemas.StreamControl, bus.ControlConsumer, "intake", nil},
		{schemas.StreamTrajectories, bus.RewardConsumer, "reward", nil},
		{schemas.StreamVerdicts, bus.VerdictConsumer, "reward", nil},
	}
	for i := range schemas.RewardPartitions {
		all = append(all, of(i))
	}
	for _, d := range all {
		if running[d.service] > 0 {
			out = append(out, d)
		}
	}
	for _, lane := range lanes {
		filter := schemas.Address{Kind: schemas.KindRequest, Lane: lane}.Filter()
		out = append(out, durable{schemas.StreamRequests, bus.LaneConsumer(lane), "sampler", []string{filter}})
	}
	return out
}

// consumers are how far those who work on the streams are, and whether they are as services make them. What
// is found is looked at again after a while: services that start make them, and messages that come are taken.
func consumers(ctx context.Context, o *Options, say *notes) {
	oneLook(ctx, o, say)
	if !slices.ContainsFunc(say.found, func(f Finding) bool { return f.State == Warning || f.State == Fault }) {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(min(lagPatience, o.Timeout/2)):
		say.found = nil
		oneLook(ctx, o, say)
	}
}

func oneLook(ctx context.Context, o *Options, say *notes) {
	all, err := o.Bus.Examine(ctx, true)
	if err != nil {
		say.failed("consumers", err)
		return
	}
	n := 0
	for _, s := range all {
		for _, c := range s.Consumers {
			n++
			backlog(o, &s, &c, say)
		}
	}
	expected(ctx, o, all, say)
	switch {
	case len(say.found) > 0:
	case n == 0:
		say.add(Unchecked, "", "there are none yet: services make them when they start")
	default:
		say.ok("%s, none of them behind without a worker", plural(n, "consumer"))
	}
}

// backlog is what waits at a durable and does not move.
func backlog(o *Options, s *bus.Examined, c *bus.ConsumerStats, say *notes) {
	still := o.Now().Sub(c.Delivered).Round(time.Second)
	which := c.Name + " of " + s.Name
	logs := "see the logs of " + c.Stage
	switch {
	case c.Pending > 0 && o.Own:
		say.ok("%s: %d wait for 'meander up'", which, c.Pending)
	case c.Pending > 0 && c.Pulls == 0 && c.AckPending == 0:
		const fix = "start the service, or see its /readyz for what it waits for"
		say.add(Warning, fix, "%s: %d wait, and nobody takes them", which, c.Pending)
	case c.Pending > 0 && c.AckPending == 0 && still > idleBacklog, c.Pending > 0 && still > busyBacklog:
		say.add(Warning, logs+", and its /readyz", "%s: %d wait, and none was handed out for %v", which, c.Pending, still)
	case c.Redelivered > 10 && c.Redelivered*2 > c.AckPending:
		const says = "%s: %d of %d in hand came more than once"
		say.add(Warning, logs+", and 'meander dead'", says, which, c.Redelivered, c.AckPending)
	}
}

// expected says which durables services that run need, and are not there or not as they make them.
func expected(ctx context.Context, o *Options, all []bus.Examined, say *notes) {
	found, err := discover(ctx, o.Bus.Conn())
	present, lanesErr := o.Bus.Present(ctx)
	if err != nil || lanesErr != nil {
		return // which "services" says
	}
	running := map[string]int{}
	for _, s := range found {
		running[strings.TrimPrefix(s.Name, "meander-")]++
	}
	var lanes []schemas.Lane
	for _, p := range present {
		if p.Service == schemas.ServiceSampler && !slices.Contains(lanes, p.Lane) {
			lanes = append(lanes, p.Lane)
		}
	}
	for _, d := range durables(running, lanes) {
		fix := "start " + d.service + " again, which makes it as it must be; then find out who changed it"
		at := slices.IndexFunc(all, func(s bus.Examined) bool { return s.Name == d.stream })
		if at < 0 || all[at].Missing || all[at].Err != nil {
			continue // which "streams" says
		}
		i := slices.IndexFunc(all[at].Consumers, func(c bus.ConsumerStats) bool { return c.Name == d.name })
		if i < 0 {
			say.add(Fault, fix, "%s of %s is not there, and %s runs: it gets nothing", d.name, d.stream, d.service)
			continue
		}
		if c := all[at].Consumers[i]; !c.Takes || !slices.Equal(c.Filters, d.filters) {
			say.add(Fault, fix, "%s of %s is not as %s makes it: it takes %s", d.name, d.stream, d.service, taken(c))
		}
	}
}

// taken is what a durable takes, in words.
func taken(c bus.ConsumerStats) string {
	what := "everything"
	if len(c.Filters) > 0 {
		what = strings.Join(c.Filters, ", ")
	}
	if !c.Takes {
		what += ", and waits for no acknowledgement of who pulls"
	}
	return what
}
