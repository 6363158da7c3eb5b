package trace

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// stored is an event as the server has it.
type stored[E any] struct {
	event  E
	at     time.Time // when it was stored
	header nats.Header
}

// group is what is stored of a closed group.
type group struct {
	result  stored[schemas.Advantage]
	record  *stored[schemas.GroupRecord] // nil: it is no longer stored
	made    map[schemas.Place]stored[schemas.Trajectory]
	rewards map[int64]stored[schemas.Reward]
	// steps are when the steps, or tokens, of an attempt were stored, by its name.
	steps map[string][]step
}

// step is a stored step of an attempt.
type step struct {
	index string
	at    time.Time
}

// readGroup reads what is stored of a group that has closed.
func readGroup(ctx context.Context, b *bus.Bus, result stored[schemas.Advantage]) (*group, error) {
	run, uid := result.event.Run, result.event.UID
	made := cmp.Or(result.event.SourceRun, run) // the run of the samples, where they were scored again
	g := &group{
		result: result, made: map[schemas.Place]stored[schemas.Trajectory]{},
		rewards: map[int64]stored[schemas.Reward]{}, steps: map[string][]step{},
	}
	err := each(ctx, b, schemas.StreamGroups, schemas.GroupSubject(run, uid), func(e stored[schemas.GroupRecord]) {
		g.record = &e
	})
	if err != nil {
		return nil, err
	}
	err = each(ctx, b, schemas.StreamTrajectories, schemas.TrajectoryFilter(made, uid),
		func(e stored[schemas.Trajectory]) {
			g.made[e.event.Place()] = e
		})
	if err != nil {
		return nil, err
	}
	err = each(ctx, b, schemas.StreamRewards, schemas.RewardFilter(run, "*", uid), func(e stored[schemas.Reward]) {
		g.rewards[e.event.SampleIndex] = e
	})
	if err != nil {
		return nil, err
	}
	steps := []string{schemas.StepsFilter(made, uid, "*", "*")}
	for m, err := range b.Read(ctx, schemas.StreamSteps, steps, bus.ReadOptions{HeadersOnly: true}) {
		if err != nil {
			return nil, err
		}
		if a, ok := schemas.ParseSubject(m.Subject); ok &&
			(a.Kind == schemas.KindStep || a.Kind == schemas.KindTokens) {
			g.steps[a.Attempt] = append(g.steps[a.Attempt], step{a.Step, m.Time})
		}
	}
	return g, nil
}

// each calls do with the events that are stored under a subject. What is not such an event is left out.
func each[E any, P interface {
	*E
	schemas.Keyed
}](ctx context.Context, b *bus.Bus, stream, subject string, do func(stored[E])) error {
	for m, err := range b.Read(ctx, stream, []string{subject}, bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		var e E
		if bus.Fits(m, P(&e)) == nil {
			do(stored[E]{e, m.Time, m.Header})
		}
	}
	return nil
}

// client returns the trace context that the prompt's client gave, if any. Every message of the group has it.
func (g *group) client() tracing.Context {
	headers := []nats.Header{g.result.header}
	if g.record != nil {
		headers = append(headers, g.record.header)
	}
	for _, s := range g.made {
		headers = append(headers, s.header)
	}
	for _, h := range headers {
		if t, _ := tracing.Of(h); t.Parent != "" {
			return t
		}
	}
	return tracing.Context{}
}

// created returns when the prompt was stored, as far as an event says it.
func (g *group) created() time.Time {
	of := int64(0)
	if g.record != nil {
		of = g.record.event.Group.Created
	}
	for _, s := range g.made {
		of = cmp.Or(of, s.event.Group.Created)
	}
	return moment(cmp.Or(of, g.result.event.Opened, g.result.at.UnixNano()))
}

// add records the spans of the group.
func (g *group) add(r *recorder) {
	a := &g.result.event
	created := g.created()
	// The time tells groups of one name apart, of two stores.
	names := []string{string(a.Run), string(a.UID), strconv.FormatInt(created.UnixNano(), 10)}
	of := []attribute.KeyValue{
		attribute.String("meander.run", string(a.Run)), attribute.String("meander.uid", string(a.UID)),
		attribute.String("meander.status", a.Status), attribute.Int64("meander.group_size", a.GroupSize),
		attribute.Int64("meander.policy_version", a.PolicyVersionMax),
	}
	if a.Mean != nil {
		of = append(of, attribute.Float64("meander.reward.mean", *a.Mean))
	}
	if g.record != nil {
		of = append(of, attribute.String("meander.lane", string(g.record.event.Lane)))
	}
	fault := ""
	if !slices.Contains([]string{schemas.StatusComplete, schemas.StatusPartial, schemas.StatusFiltered}, a.Status) {
		fault = cmp.Or(a.Error, a.Status)
	}
	ctx := r.add(root(g.client(), names...), span{
		name: "group", service: "advantage", begin: created, end: g.result.at, attributes: of, fault: fault,
	}, names...)
	accepted := created
	if g.record != nil {
		accepted = g.record.at
		r.add(ctx, span{name: "intake", service: "intake", begin: created, end: accepted, fault: g.record.event.Error})
	}
	last := accepted
	for _, m := range a.Members {
		if ran := g.ranFor(m.SampleIndex); len(ran) > 0 {
			last = later(last, g.addSample(ctx, r, m.SampleIndex, ran, accepted))
		}
	}
	r.add(ctx, span{name: "advantage", service: "advantage", begin: last, end: g.result.at})
}

// ranFor returns the trajectories that led to a sample, in the order of its stages; one without stages.
func (g *group) ranFor(sample int64) (ran []stored[schemas.Trajectory]) {
	path := []schemas.Place{{Stage: schemas.StageMain, SampleIndex: sample}}
	for _, one := range g.made { // all have the same group
		if len(one.event.Group.Stages) > 0 {
			path = stages.Path(&one.event.Group, sample, "")
		}
		break
	}
	for _, at := range path {
		t, made := g.made[at]
		if !made {
			break
		}
		ran = append(ran, t)
	}
	return ran
}

// addSample records the spans of a sample and of its stages, and returns when it was scored. A stage that several
// samples share is in the first of them.
func (g *group) addSample(
	ctx context.Context, r *recorder, index int64, ran []stored[schemas.Trajectory], accepted time.Time,
) (scored time.Time) {
	t := ran[len(ran)-1]
	e := &t.event
	reward, rated := g.rewards[index]
	scored = t.at
	if rated {
		scored = moment(reward.event.Scored)
	}
	of := []attribute.KeyValue{
		attribute.Int64("meander.sample_index", index), attribute.String("meander.stop_reason", e.StopReason),
	}
	staged := len(e.Group.Stages) > 0
	if !staged {
		of = append(of, attributesOf(e)...)
	}
	if rated && reward.event.Reward != nil {
		of = append(of, attribute.Float64("meander.reward", *reward.event.Reward))
	}
	ctx = r.add(ctx, span{
		name: "sample", service: "sampler", instance: e.Sampler, begin: accepted, end: later(scored, t.at),
		attributes: of,
		fault:      e.Error,
	}, strconv.FormatInt(index, 10))
	begin := accepted
	for i := range ran {
		one, under, by := &ran[i], ctx, "sampler"
		if said(&one.event) {
			by = "reward"
		}
		if staged && one.event.SampleIndex == index {
			under = r.add(ctx, span{
				name: "stage " + string(one.event.Stage), service: by, instance: one.event.Sampler, begin: begin,
				end: one.at, fault: one.event.Error,
				attributes: append(attributesOf(&one.event), attribute.String("meander.stage", string(one.event.Stage)),
					attribute.String("meander.stage_lane", string(one.event.Lane))),
			})
		}
		if one.event.SampleIndex == index {
			g.addMaking(under, r, &one.event, begin)
		}
		begin = one.at
	}
	if rated {
		addScoring(ctx, r, &reward.event, t.at, scored)
	}
	return scored
}

// attributesOf returns what says who made a trajectory.
func attributesOf(e *schemas.Trajectory) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("meander.backend", e.Backend), attribute.Int64("meander.policy_version", e.PolicyVersionMax),
		attribute.Int("meander.attempts", len(e.Attempts())),
	}
}

// said reports whether an interaction said a trajectory: the reward service asked it.
func said(e *schemas.Trajectory) bool { return e.Text != nil && e.Text.SaidBy != "" }

// addMaking records the spans of how a trajectory was made, asked for at a time.
func (g *group) addMaking(ctx context.Context, r *recorder, e *schemas.Trajectory, asked time.Time) {
	times := e.Timings
	if said(e) {
		return // its stage says it
	}
	sampler := func(name string, begin, end time.Time, events ...event) {
		r.add(ctx, span{name: name, service: "sampler", instance: e.Sampler, begin: begin, end: end, events: events})
	}
	received, started, finished := moment(times.Received), moment(times.Started), moment(times.Finished)
	encoded := received.Add(time.Duration(times.EncodeNS))
	denoised := started.Add(time.Duration(times.DenoiseNS))
	sampler("queue", asked, received)
	sampler("encode", received, encoded)
	sampler("wait for a slot", encoded, started)
	if e.Text != nil {
		sampler("generate", started, denoised, g.stepEvents(e)...)
	} else {
		sampler("denoise", started, denoised, g.stepEvents(e)...)
	}
	if times.DecodeNS > 0 {
		sampler("decode", finished.Add(-time.Duration(times.DecodeNS)), finished)
	}
}

// addScoring records the spans of how a sample was scored that was stored at a time.
func addScoring(ctx context.Context, r *recorder, reward *schemas.Reward, stored, scored time.Time) {
	first := scored
	for _, s := range reward.Scores {
		if begin := scored.Add(-time.Duration(s.DurationNS)); begin.Before(first) {
			first = begin
		}
	}
	r.add(ctx, span{name: "wait for scoring", service: "reward", begin: stored, end: first})
	for _, s := range reward.Scores {
		r.add(ctx, span{
			name: "score " + s.Name, service: "reward", begin: scored.Add(-time.Duration(s.DurationNS)), end: scored,
			fault: s.Error,
		})
	}
}

// stepEvents returns an event for each stored step that counts, in the order of the steps.
func (g *group) stepEvents(t *schemas.Trajectory) (events []event) {
	for _, attempt := range t.Attempts() {
		for _, s := range g.steps[attempt] {
			events = append(events, event{"step", s.at, []attribute.KeyValue{attribute.String("meander.step_index",
				s.index)}})
		}
	}
	return events
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
