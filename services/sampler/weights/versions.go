// Package weights loads the weights that a sampler makes samples with: first the policy of the lane or its own
// (Versions.Begin), then each policy that is announced while it runs (Versions.Follow, told by Want).
//
// A policy is a version of the weights of a lane; its change to the checkpoint is stored as blobs, or lies in a shared
// folder (Source). Samples pin a Loaded, the weights of one policy in memory, and release it. When another becomes
// current, the one before is retired, and closed when the last sample has released it: the next one loads only then, so
// two at most are in memory, and besides them Own.Resident: those that samples ask for by their number (PinVersion),
// and the newest of other tenants than main, which are loaded again when they are needed. A device that is lost is left
// out.
//
// A policy that can never be loaded here is refused (engine.Refusal) and not tried again; all other errors are retried.
// The sampler publishes a schemas.Applied for each policy that it took over or refused.
package weights

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Loaded has the weights of one policy, with an engine for each device; nil where it was lost before.
type Loaded struct {
	Policy  *schemas.Policy
	Engines []engine.Engine
	canary  *schemas.Canary
	opened  []engine.Network // the networks that close closes: those that With made

	// The lock of Versions guards both.
	users   int  // samples that have it pinned
	retired bool // no sample begins with it any more
}

// Version returns the version of the policy.
func (w *Loaded) Version() int64 { return w.Policy.PolicyVersion }

// close closes the networks that were made for the policy, when no sample uses them any more.
func (w *Loaded) close() error {
	var errs []error
	for _, m := range w.opened {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Options say for whom Versions loads weights, and whom it tells.
type Options struct {
	Source
	Lane schemas.Lane
	// Networks are the open checkpoint, one network for each device.
	Networks []engine.Network
	// IsLost reports whether a device computes no more. Lost is told that weights were not loaded for that. Both may be
	// nil.
	IsLost func(device int) bool
	Lost   func(ctx context.Context, device int, err error)
	Engine engine.Options
	Own    Own
	// EngineMix is that of schemas.Policy.
	EngineMix bool
	// Instance is the sampler's name in the schemas.Applied events that it publishes.
	Instance string
	Metrics  Metrics
	// Changed is called when what Serving returns may have changed.
	Changed func()
	// Drained is called after retired weights were closed, so that the caller can free device memory.
	Drained func()
}

// Own is what the sampler's own settings say of its weights.
type Own struct {
	Model        string  `key:"model" help:"synthetic, the name of a shipped model, a folder in the diffusers layout or of a language model, or ORG/NAME[@REVISION] of the Hugging Face Hub"`
	Adapter      string  `key:"adapter" help:"LoRA in PEFT's form to add to the model: a file, a folder, or ORG/NAME[@REVISION] of the Hugging Face Hub"`
	AdapterScale float64 `key:"adapter_scale" help:"how much of the adapter; 1 is what it was trained at"`
	WeightsDir   string  `key:"weights_dir" help:"folder that is shared with those who push whole transformers by path ('policy push --weights-dir'), maybe as another path there; default none: versions by path are refused"`
	// PolicyVersion is the lowest version that the sampler's own weights are announced with.
	PolicyVersion int64 `key:"policy_version" range:"0.." help:"version of the weights, stamped on every event"`
	Resident      int   `key:"resident_versions" range:"1..64" help:"versions of the weights that stay in memory besides the newest, for prompts that ask for one (--at-version); those that were asked for last stay"`
	// BaseDigest is the digest of the checkpoint that the sampler must have; empty: any.
	BaseDigest string `key:"-"`
}

// Metrics are the counters and gauges of Versions.
type Metrics struct {
	Version  prometheus.Gauge       `metric:"policy_version" help:"version of the weights that samples begin with"`
	Resident prometheus.Gauge       `metric:"policy_versions_resident" help:"versions of the weights in memory: one, the last while samples end on it, and those that prompts ask for"`
	Updates  *prometheus.CounterVec `metric:"policy_updates_total" labels:"state" help:"versions of the weights that the lane was given, by what became of them here"`
	Load     prometheus.Observer    `metric:"policy_load_seconds" help:"time from the news of a version to the first sample that may begin with it"`
}

// Versions has the current weights of a sampler, and the retired ones that samples still use. Two are in memory at
// most, the one that is being loaded included. All exported methods but Begin and Follow may be called concurrently.
type Versions struct {
	options    Options
	baseCanary *schemas.Canary // canary of the checkpoint without a policy; nil until the first load
	baseDevice int             // that computed it
	loads      chan struct{}   // held by the one load that there may be; guards the fields above

	mu      sync.Mutex
	main    lineage
	tenants map[schemas.Tenant]*lineage // the others
	leftOut schemas.Tenant              // the last for which there was no room among them; empty: none
	old     []*Loaded                   // of main, retired, not yet closed
	held    []*Loaded                   // of PinVersion and of tenants, those that were asked for last at the end
	crowded bool                        // a tenant waits for a place among held
	drained chan struct{}               // signals that retired weights were closed; buffered, 1
	news    chan struct{}               // signals that a policy is wanted, or may get its place; buffered, 1
}

// New returns Versions without weights: Begin loads the first.
func New(o Options) *Versions {
	return &Versions{
		options: o, loads: make(chan struct{}, 1), drained: make(chan struct{}, 1), news: make(chan struct{}, 1),
		tenants: map[schemas.Tenant]*lineage{},
	}
}

// ErrPolicyPending says that a request needs a newer version than the sampler has. The request is put back.
var ErrPolicyPending = errors.New("the sampler does not have the version yet")

// Pin returns the current weights of a tenant for a sample, until Release. ErrPolicyPending: the version is below
// least. Of other tenants than main see PinVersion, too.
func (v *Versions) Pin(ctx context.Context, tenant schemas.Tenant, least int64) (*Loaded, error) {
	newest, err := v.newestFor(tenant, least)
	if err != nil || newest.Policy.Tenant == schemas.TenantMain {
		return newest, err
	}
	return v.PinVersion(ctx, tenant, newest.Version())
}

// newestFor returns the current weights of a tenant, those of main pinned. ErrPolicyPending: see Pin.
func (v *Versions) newestFor(tenant schemas.Tenant, least int64) (*Loaded, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := v.lineage(tenant)
	if l.newest == nil {
		return nil, fmt.Errorf("%w: %d; it has none of tenant %s", ErrPolicyPending, least, tenant)
	}
	if have := l.newest.Version(); have < least {
		return nil, fmt.Errorf("%w: %d; it has %d", ErrPolicyPending, least, have)
	}
	if l == &v.main {
		l.newest.users++
	}
	return l.newest, nil
}

// PinVersion returns the weights of a version of a tenant's history for a sample, until Release, and loads them if they
// are not in memory. ErrPolicyPending: samples use all that may be held. A *engine.Refusal: the version is not there,
// or cannot be loaded.
func (v *Versions) PinVersion(ctx context.Context, tenant schemas.Tenant, version int64) (*Loaded, error) {
	of := v.options.Lane.Of(tenant)
	if w := v.pinResident(of, version); w != nil {
		return w, nil
	}
	unlock, err := v.lockLoads(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if w := v.pinResident(of, version); w != nil { // another sample has asked for it
		return w, nil
	}
	p, err := v.options.Bus.PolicyOf(ctx, of, version)
	if errors.Is(err, bus.ErrNotFound) {
		err = engine.Refuse("%w", err)
	}
	if err != nil {
		return nil, err
	}
	if !v.makePlace() {
		return nil, fmt.Errorf("%w: %d; samples use all %d besides the newest (--resident-versions)", ErrPolicyPending,
			version, v.options.Own.Resident)
	}
	w, err := v.loadPolicy(ctx, p)
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	w.users++
	v.held = append(v.held, w)
	v.options.Metrics.Resident.Inc()
	if l := v.lineage(tenant); l != &v.main && l.newest != nil && l.newest.Version() == version {
		l.newest = w // those before were closed to make place
	}
	return w, nil
}

// lockLoads waits until no version is being loaded.
func (v *Versions) lockLoads(ctx context.Context) (unlock func(), err error) {
	select {
	case v.loads <- struct{}{}:
		return func() { <-v.loads }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// pinResident pins a version that is in memory; nil: it is not.
func (v *Versions) pinResident(of schemas.Lineage, version int64) *Loaded {
	v.mu.Lock()
	defer v.mu.Unlock()
	is := func(w *Loaded) bool { return w.Version() == version && w.Policy.Lineage() == of }
	if i := slices.IndexFunc(v.held, is); i >= 0 {
		w := v.held[i]
		v.held = append(slices.Delete(v.held, i, i+1), w)
	}
	all := slices.Concat([]*Loaded{v.main.newest}, v.held, v.old)
	i := slices.IndexFunc(all, is)
	if i < 0 {
		return nil
	}
	all[i].users++
	return all[i]
}

// makePlace reports whether there is room for one more version besides the newest. It closes the one that was asked for
// the longest ago of those that no sample uses, the newest of a tenant last.
func (v *Versions) makePlace() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.held) < v.options.Own.Resident {
		return true
	}
	i := slices.IndexFunc(v.held, func(w *Loaded) bool {
		return w.users == 0 && w != v.lineage(w.Policy.Tenant).newest
	})
	if i < 0 {
		i = slices.IndexFunc(v.held, unused)
	}
	if i >= 0 {
		_ = v.held[i].close()
		v.held = slices.Delete(v.held, i, i+1)
		v.options.Metrics.Resident.Dec()
		v.options.Drained()
	}
	return i >= 0
}

// unused reports whether no sample uses weights. Lock held.
func unused(w *Loaded) bool { return w.users == 0 }

// Release ends a sample's use of weights that Pin, PinVersion or Move returned.
func (v *Versions) Release(w *Loaded) {
	v.mu.Lock()
	defer v.mu.Unlock()
	w.users--
	v.closeUnused(w)
	if v.crowded && w.users == 0 {
		signal(v.news)
	}
}

// closeUnused closes w if it is retired and no sample uses it. Lock held.
func (v *Versions) closeUnused(w *Loaded) {
	if !w.retired || w.users > 0 {
		return
	}
	v.old = slices.DeleteFunc(v.old, func(o *Loaded) bool { return o == w })
	_ = w.close() // fails where the device is lost: its samples report that
	v.options.Metrics.Resident.Dec()
	signal(v.drained)
}

// signal sends without waiting: a signal that is there already is enough.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Newest returns the current weights of main, without pinning them.
func (v *Versions) Newest() *Loaded { return v.NewestOf(schemas.TenantMain) }

// NewestOf returns the current weights of a tenant, without pinning them; nil if it has none here.
func (v *Versions) NewestOf(tenant schemas.Tenant) *Loaded {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lineage(tenant).newest
}

// Close closes all weights. It is called when no sample is being made any more.
func (v *Versions) Close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, w := range slices.Concat(v.old, v.held, []*Loaded{v.main.newest}) {
		if w != nil {
			_ = w.close()
			v.options.Metrics.Resident.Dec()
		}
	}
}

// Move lets a sample go on with the current weights of its tenant, if they are in memory and may allows them, and
// returns those that it goes on with.
func (v *Versions) Move(from *Loaded, may func(to *Loaded) bool) *Loaded {
	v.mu.Lock()
	defer v.mu.Unlock()
	to := v.lineage(from.Policy.Tenant).newest
	if to == nil || to == from || to != v.main.newest && !slices.Contains(v.held, to) || !may(to) {
		return from
	}
	from.users--
	to.users++
	v.closeUnused(from)
	return to
}

// setCurrent makes w the current weights and retires those before them.
func (v *Versions) setCurrent(w *Loaded) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.options.Metrics.Resident.Inc()
	l := v.lineage(w.Policy.Tenant)
	last := l.newest
	l.newest = w
	if l != &v.main {
		v.held = append(v.held, w)
		return
	}
	v.options.Metrics.Version.Set(float64(w.Version()))
	if last != nil {
		last.retired = true
		v.old = append(v.old, last)
		v.closeUnused(last)
	}
}

// chooseNext returns the policy to load next, nil for none. again says that another try may help one that failed.
func (v *Versions) chooseNext() (p *schemas.Policy, again bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.crowded = false
	for _, l := range v.all() {
		l.loading = nil
		if !l.wants() {
			continue
		}
		l.loading = &l.wanted.PolicyVersion
		ready := len(v.old) == 0
		if l != &v.main {
			ready = len(v.held) < v.options.Own.Resident || slices.ContainsFunc(v.held, unused)
			v.crowded = v.crowded || !ready
		}
		late := time.Since(l.failed) < loadPause
		if again = again || late; ready && !late && p == nil {
			p = l.wanted
		}
	}
	return p, again
}

// wants reports whether the newest policy is to be loaded: not one that is current, older, or was refused last.
func (l *lineage) wants() bool {
	p := l.wanted
	same := func(q *schemas.Policy) bool {
		return q != nil && p.PolicyVersion == q.PolicyVersion && p.WeightsDigest == q.WeightsDigest
	}
	if p == nil || same(l.refused) {
		return false
	}
	return l.newest == nil || p.PolicyVersion >= l.newest.Version() && !same(l.newest.Policy) &&
		(p.PolicyVersion > l.newest.Version() || !p.Continues(l.newest.Policy)) // the same weights, by another engine
}

// Serving returns the current policy of main, and the version that is being loaded, nil for none. The presence shows
// both, and those of the tenants.
func (v *Versions) Serving() (p *schemas.Policy, loading *int64, tenants []schemas.TenantServing) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(v.tenants)) {
		if l := v.tenants[name]; l.newest != nil {
			tenants = append(tenants, schemas.TenantServing{
				Tenant: name, PolicyVersion: l.newest.Version(), WeightsDigest: l.newest.Policy.WeightsDigest,
				Loading: l.loading,
			})
		}
	}
	return v.main.newest.Policy, v.main.loading, tenants
}

// loadPause is the wait before a version is tried again after an error that may pass.
const loadPause = time.Second

// Follow loads the policies of Want one after the other until ctx ends. What may pass is tried again after loadPause.
func (v *Versions) Follow(ctx context.Context) error {
	for {
		var wait <-chan time.Time
		p, again := v.chooseNext()
		v.options.Changed()
		if p != nil {
			if err := v.takeOver(ctx, p); err != nil && ctx.Err() == nil {
				zerolog.Ctx(ctx).Warn().Err(err).Stringer("lane", p.Lineage()).
					Int64("policy_version", p.PolicyVersion).Msg("version not taken over, trying again")
				v.postpone(p)
			}
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		if again {
			wait = time.After(loadPause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-v.news:
		case <-v.drained:
			v.options.Drained()
		case <-wait:
		}
	}
}

// Notes returns for /readyz that the lane has weights which this sampler refused: new prompts are not for it.
func (v *Versions) Notes() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var notes []string
	for _, l := range v.all() {
		if l.refused != nil && l.newest != nil {
			notes = append(notes, fmt.Sprintf("version %d of lane %s is refused, the sampler goes on with %d: %v",
				l.refused.PolicyVersion, l.refused.Lineage(), l.newest.Version(), l.refusal))
		}
	}
	if v.leftOut != "" {
		notes = append(notes, fmt.Sprintf("tenant %s of lane %s is left out: the sampler has %d besides main, the most",
			v.leftOut, v.options.Lane, schemas.MaxTenants))
	}
	return notes
}

// postpone notes that p could not be loaded now.
func (v *Versions) postpone(p *schemas.Policy) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lineage(p.Tenant).failed = time.Now()
}

// noteHandled notes that p needs no more work. refusal says why it was refused; nil: it was not.
func (v *Versions) noteHandled(p *schemas.Policy, refusal error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := v.lineage(p.Tenant)
	l.refused, l.refusal = nil, refusal
	if refusal != nil {
		l.refused = p
	}
	if l.wanted == p {
		l.wanted = nil
	}
}

// takeOver loads a policy, makes it current and publishes that, or that it was refused. After an error, which may pass,
// the caller tries again.
func (v *Versions) takeOver(ctx context.Context, p *schemas.Policy) error {
	unlock, err := v.lockLoads(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.forgetRemoved(ctx, p); err != nil {
		return err
	}
	if !v.knows(p.Tenant) {
		return nil // it was removed since
	}
	if p.Tenant != schemas.TenantMain && !v.makePlace() {
		return fmt.Errorf("%w: samples use all %d besides the newest (--resident-versions)", ErrPolicyPending,
			v.options.Own.Resident)
	}
	began := time.Now()
	last := v.NewestOf(p.Tenant)
	var w *Loaded
	var fault error
	if last == nil {
		w, fault, err = v.loadBest(ctx, p)
	} else if w, err = v.loadOfEpoch(ctx, p); err == nil {
		if fault = checkChanges(last, w); fault != nil {
			fault, w = errors.Join(fault, w.close()), nil
		}
	}
	if engine.Refused(err) {
		fault, err = err, nil
	}
	if err != nil {
		return err
	}
	if w != nil {
		v.setCurrent(w)
	}
	v.noteHandled(p, fault)
	if _, err := v.options.Bus.Publish(ctx, v.answerTo(ctx, p, fault, time.Since(began))); err != nil &&
		ctx.Err() == nil {
		zerolog.Ctx(ctx).Error().Err(err).Int64("policy_version", p.PolicyVersion).
			Msg("answer to the version not stored")
	}
	return nil
}

// checkChanges refuses an update whose canary is that of the weights before it. A rollback may go back to them, and
// whole weights over the checkpoint may be its own: all their names and shapes were compared.
func checkChanges(last, next *Loaded) error {
	if next.Policy.IsCheckpoint() || next.Policy.Rollback != nil {
		return nil // going back is on purpose
	}
	if last.Policy.IsCheckpoint() && len(next.Policy.Weights) > 0 {
		return nil // a trainer begins with those
	}
	a, b := last.canary, next.canary
	if a == nil || b == nil || last.Policy.WeightsDigest == next.Policy.WeightsDigest || a.Digest != b.Digest {
		return nil
	}
	return engine.Refuse("canary: what the weights give at a fixed input is that of version %d; must be another: the "+
		"update changes nothing, such as an adapter whose lora_B is zero", last.Version())
}

// answerTo returns the answer to policy p, taken over or refused for fault, and logs and counts it.
func (v *Versions) answerTo(ctx context.Context, p *schemas.Policy, fault error, took time.Duration) *schemas.Applied {
	a := &schemas.Applied{
		Lane: p.Lane, Tenant: p.Tenant, Instance: v.options.Instance, PolicyVersion: p.PolicyVersion,
		State: schemas.AppliedApplied, Backend: v.options.Networks[0].Backend(),
		LoadNS: took.Nanoseconds(), At: time.Now().UnixNano(),
	}
	if now := v.NewestOf(p.Tenant); now != nil { // else nothing of the tenant could be loaded
		a.Serving, a.WeightsDigest, a.Canary = now.Version(), now.Policy.WeightsDigest, now.canary
	}
	log := zerolog.Ctx(ctx).With().Stringer("lane", p.Lineage()).Logger()
	if fault != nil {
		a.State, a.Error = schemas.AppliedRefused, fault.Error()
		log.Error().Err(fault).Int64("policy_version", p.PolicyVersion).
			Int64("serving", a.Serving).Msg("version refused")
	} else {
		log.Info().Int64("policy_version", p.PolicyVersion).Str("weights_digest", a.WeightsDigest).
			Dur("dur_ms", took).Msg("version taken over")
		v.options.Metrics.Load.Observe(took.Seconds())
	}
	v.options.Metrics.Updates.WithLabelValues(a.State).Inc()
	v.options.Changed()
	return a
}
