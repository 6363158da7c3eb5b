package trace

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Options say what Export exports.
type Options struct {
	// Run is the run whose groups are exported; "*": those of all runs.
	Run schemas.Run
	// Live goes on with what is stored later, until the context ends. Since leaves out what was stored before.
	Live  bool
	Since time.Time
	// Exported is called after each trace with the number of its spans. Failed is called with the error of a trace that
	// could not be exported, and decides whether to go on (nil) or to end with an error.
	Exported func(name string, spans int)
	Failed   func(err error) error
}

// Export exports a trace for each group that has closed and, for all runs, for each policy that was pushed. It ends
// with an error when a stream cannot be read, or Failed says so.
func Export(ctx context.Context, b *bus.Bus, to Exporter, o Options) error {
	var mu sync.Mutex // held for Exported and Failed
	read := bus.ReadOptions{Live: o.Live, FromTime: o.Since}
	send := func(ctx context.Context, name string, r *recorder) error {
		n := len(r.ended)
		err := r.export(ctx, to)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil: // it may have been sent, or not
		case err != nil:
			return o.Failed(fmt.Errorf("%s: %w", name, err))
		case n > 0: // else its client does not record the trace
			o.Exported(name, n)
		}
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		r := newRecorder()
		for m, err := range b.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(o.Run, "*")},
			read) {
			if err != nil {
				return err
			}
			result := stored[schemas.Advantage]{at: m.Time, header: m.Header}
			if bus.Fits(m, &result.event) != nil {
				continue // not a result; the group's true one will replace it
			}
			closed, err := readGroup(ctx, b, result)
			if err != nil {
				return err
			}
			closed.add(r)
			if err := send(ctx, fmt.Sprintf("group %s of %s", result.event.UID, result.event.Run), r); err != nil {
				return err
			}
		}
		return nil
	})
	if o.Run == "*" {
		g.Go(func() error { return exportPolicies(ctx, b, read, send) })
	}
	return g.Wait()
}

// exportPolicies exports a trace for each answer of a sampler to a policy: the push, and the answer. The spans of a
// push have the same ids each time.
func exportPolicies(
	ctx context.Context, b *bus.Bus, read bus.ReadOptions,
	send func(ctx context.Context, name string, r *recorder) error,
) error {
	r, history := newRecorder(), map[schemas.Lineage][]*schemas.Policy{}
	for m, err := range b.Read(ctx, schemas.StreamApplied, []string{schemas.AppliedSubject("*", "*", "*")}, read) {
		if err != nil {
			return err
		}
		var a schemas.Applied
		if bus.Fits(m, &a) != nil {
			continue
		}
		answered := func(p *schemas.Policy) bool { return p.PolicyVersion == a.PolicyVersion }
		if !slices.ContainsFunc(history[a.Lineage()], answered) {
			if history[a.Lineage()], err = b.PolicyHistory(ctx, a.Lineage()); err != nil {
				return err
			}
		}
		for _, p := range history[a.Lineage()] {
			if answered(p) {
				addPolicy(r, p, &a)
			}
		}
		name := fmt.Sprintf("version %d of lane %s on %s", a.PolicyVersion, a.Lineage(), a.Instance)
		if err := send(ctx, name, r); err != nil {
			return err
		}
	}
	return nil
}

// addPolicy records the push of a policy and how a sampler answered it.
func addPolicy(r *recorder, p *schemas.Policy, a *schemas.Applied) {
	lane, version := p.Lineage().String(), fmt.Sprint(p.PolicyVersion)
	of := []attribute.KeyValue{
		attribute.String("meander.lane", lane), attribute.Int64("meander.policy_version", p.PolicyVersion),
		attribute.String("meander.weights_digest", p.WeightsDigest), attribute.String("meander.pushed_by", p.By),
	}
	pushed := moment(p.Announced)
	ctx := r.add(root(tracing.Context{}, "policy", lane, version), span{
		name: "policy", service: "client", begin: pushed, end: pushed,
		attributes: of,
	}, lane, version)
	r.add(ctx, span{
		name: "apply", service: "sampler", instance: a.Instance, begin: moment(a.At - a.LoadNS), end: moment(a.At),
		attributes: []attribute.KeyValue{attribute.String("meander.state", a.State)}, fault: a.Error,
	}, a.Instance)
}
