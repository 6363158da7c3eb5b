package doctor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

const (
	// Messages may wait for idleBacklog while a consumer asks and has nothing in flight, and for busyBacklog while
	// it is busy. Waiting longer is a warning.
	idleBacklog, busyBacklog = time.Minute, 30 * time.Minute
)

// expectedDurables returns the durable consumers that the running services and the samplers of these lanes should have.
// running counts the programs of each service.
func expectedDurables(running map[string]int, lanes []schemas.Lane) []schemas.Durable {
	all := slices.DeleteFunc(schemas.Durables(), func(d schemas.Durable) bool {
		// The server's advisories are a safety net: a missing reader of them is not urgent.
		return running[d.Service] == 0 || d.Stream == schemas.StreamAdvisories
	})
	for _, lane := range lanes {
		all = append(all, schemas.RequestsDurable(lane))
	}
	return all
}

// checkConsumersTwice checks how far the consumers of the streams are, and whether they are set up as the services do
// it. A problem is checked again after a while, and counts only then: starting services make their consumers, and new
// messages get read.
func checkConsumersTwice(ctx context.Context, o *Options, say *notes) {
	checkConsumers(ctx, o, say)
	if !slices.ContainsFunc(say.found, func(f Finding) bool { return f.State == Warning || f.State == Fault }) {
		return
	}
	if bus.Pause(ctx, min(lagPatience, o.Timeout/2)) == nil {
		say.found = nil
		checkConsumers(ctx, o, say)
	}
}

// checkConsumers checks all consumers once: what waits at each, and whether those of running services are as they
// must be.
func checkConsumers(ctx context.Context, o *Options, say *notes) {
	all, err := o.Bus.Examine(ctx, true)
	if err != nil {
		say.addFailure("consumers", err)
		return
	}
	n := 0
	for _, s := range all {
		for _, c := range s.Consumers {
			n++
			checkBacklog(o, &s, &c, say)
		}
	}
	reportNeverRan(o, all, say)
	compareDurables(ctx, o, all, say)
	reportLost(ctx, o, say)
	switch {
	case len(say.found) > 0:
	case n == 0:
		say.add(Unchecked, "", "there are none yet: services make them when they start")
	default:
		say.ok("%s, none of them behind without a worker", present.Count(n, "consumer"))
	}
}

// reportNeverRan reports messages that wait for a service that has no consumer yet: none is behind, and nothing moves.
func reportNeverRan(o *Options, all []bus.Examined, say *notes) {
	var stats []bus.StreamStats
	consumers := map[string]bool{}
	for _, s := range all {
		stats = append(stats, s.StreamStats)
		for _, c := range s.Consumers {
			consumers[c.Name] = true
		}
	}
	waiting := bus.UnservedBacklog(stats)
	for _, d := range schemas.Durables() {
		if n := waiting[d.Service]; n > 0 && !consumers[d.Name] && !o.Own {
			delete(waiting, d.Service) // once
			say.add(Fault, "start 'meander up', or meander-"+d.Service,
				"%d messages wait for the %s service, and none runs", n, d.Service)
		}
	}
}

// reportLost reports samples that are neither made nor asked for: no consumer has them, so none is behind.
func reportLost(ctx context.Context, o *Options, say *notes) {
	open, err := o.Bus.OpenGroups(ctx, "*")
	lost, lostErr := o.Bus.LostSamples(ctx, open)
	if err := errors.Join(err, lostErr); err != nil {
		say.addFailure("lost requests", err)
		return
	}
	runs, samples := map[schemas.Run]bool{}, int64(0)
	for _, l := range lost {
		runs[l.Group.Run] = true
		samples += int64(len(l.Samples))
	}
	if samples > 0 {
		lost := outcomes.Lost(samples)
		say.add(Fault, lost.Fix, "%s, of %s", lost.Says, present.Count(len(runs), "run"))
	}
}

// checkBacklog reports messages of a stream that wait at a durable consumer and do not move: a fault if no service
// takes them.
func checkBacklog(o *Options, s *bus.Examined, c *bus.ConsumerStats, say *notes) {
	still := o.Now().Sub(c.Delivered).Round(time.Second)
	which := c.Name + " of " + s.Name
	logs := "see the logs of " + c.Stage
	switch {
	case c.Pending > 0 && o.Own:
		say.ok("%s: %d wait for 'meander up'", which, c.Pending)
	case c.Pending > 0 && c.Pulls == 0 && c.AckPending == 0:
		const fix = "start the service, or see its /readyz for what it waits for"
		say.add(Fault, fix, "%s: %d wait, and no worker takes them", which, c.Pending)
	case c.Pending > 0 && c.AckPending == 0 && still > idleBacklog, c.Pending > 0 && still > busyBacklog:
		say.add(Warning, logs+", and its /readyz", "%s: %d wait, and none was handed out for %v", which, c.Pending,
			still)
	case c.Redelivered > 10 && c.Redelivered*2 > c.AckPending:
		const says = "%s: %d of %d in flight came more than once"
		say.add(Warning, logs+", and 'meander dead ls'", says, which, c.Redelivered, c.AckPending)
	}
}

// compareDurables reports durable consumers that running services need and that are missing or changed. all has the
// streams with their consumers.
func compareDurables(ctx context.Context, o *Options, all []bus.Examined, say *notes) {
	found, err := discover(ctx, o.Bus.Conn())
	present, lanesErr := o.Bus.Present(ctx)
	if err != nil || lanesErr != nil {
		return // the area "services" reports it
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
	for _, d := range expectedDurables(running, lanes) {
		fix := "start " + d.Service + " again, which makes it as it must be; then find out who changed it"
		at := slices.IndexFunc(all, func(s bus.Examined) bool { return s.Name == d.Stream })
		if at < 0 || all[at].Missing || all[at].Err != nil {
			continue // the area "streams" reports it
		}
		i := slices.IndexFunc(all[at].Consumers, func(c bus.ConsumerStats) bool { return c.Name == d.Name })
		if i < 0 {
			say.add(Fault, fix, "%s of %s is not there, and %s runs: it gets nothing", d.Name, d.Stream, d.Service)
			continue
		}
		if c := all[at].Consumers[i]; !c.Takes || !slices.Equal(c.Filters, d.Filters) {
			say.add(Fault, fix, "%s of %s is not as %s makes it: it takes %s", d.Name, d.Stream, d.Service,
				whatItTakes(c))
		}
	}
}

// whatItTakes describes which messages a durable consumer takes, for a finding.
func whatItTakes(c bus.ConsumerStats) string {
	what := "everything"
	if len(c.Filters) > 0 {
		what = strings.Join(c.Filters, ", ")
	}
	if !c.Takes {
		what += ", and does not wait for acknowledgements"
	}
	return what
}
