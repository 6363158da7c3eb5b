package weights_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// network is the synthetic model, whose weights are their digest alone.
type network struct {
	engine.Network
	digest string
	script *script
	states string // Policy.LatentsDType
}

func (n *network) Policy() *schemas.Policy {
	p := n.Network.Policy()
	p.LatentsDType = n.states
	return p
}

// script says what networks do, and counts those that are open besides the checkpoint.
type script struct {
	mu     sync.Mutex
	with   func() error                    // before a change; nil: nothing
	canary func(digest string) string      // of weights; nil: their own
	wrong  func(digest string) (is string) // the digest of loaded weights; nil: what is asked for
	failed error                           // of a canary; nil: none
	opened atomic.Int64
}

func (n *network) Digest() string { return n.digest }

func (n *network) Engine(engine.Options) engine.Engine { return nil }

func (n *network) With(_ context.Context, c engine.Change) (engine.Network, error) {
	if c.Empty() {
		return n, nil
	}
	n.script.mu.Lock()
	defer n.script.mu.Unlock()
	if n.script.with != nil {
		if err := n.script.with(); err != nil {
			return nil, err
		}
	}
	for name := range c.Full.Shapes() { // as a model does that loads it
		if _, err := c.Full.Archive().Floats(name); err != nil {
			return nil, err
		}
	}
	digest := c.Digest
	if n.script.wrong != nil {
		digest = n.script.wrong(digest)
	}
	n.script.opened.Add(1)
	return &network{n.Network, digest, n.script, n.states}, nil
}

func (n *network) Canary(context.Context) (*schemas.Canary, error) {
	n.script.mu.Lock()
	defer n.script.mu.Unlock()
	if n.script.failed != nil {
		return nil, n.script.failed
	}
	of := n.digest
	if n.script.canary != nil {
		of = n.script.canary(of)
	}
	return &schemas.Canary{Digest: of, Norm: 1}, nil
}

func (n *network) Close() error {
	n.script.opened.Add(-1)
	return nil
}

// set changes the script between two policies.
func (s *script) set(change func(s *script)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// lane is a lane of an event plane with scripted samplers.
type lane struct {
	*bustest.Plane
	t      *testing.T
	script *script
	base   *network
	// instance is the name of its samplers.
	instance string
	dir      string // which they share; empty: none
	log      logged
}

// logged is what samplers of a lane log.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *logged) count(message string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), message)
}

func newLane(t *testing.T) *lane {
	t.Helper()
	m, err := families.All().Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := &images.Network{Model: m}
	s := &script{}
	return &lane{Plane: bustest.New(t), t: t, script: s, base: &network{n, n.Digest(), s, ""}, instance: "s"}
}

// synthetic is main on the lane of the tests.
var synthetic = schemas.Lane("synthetic").Of("")

// sampler has weights of the lane that Begin has not loaded yet.
type sampler struct {
	*weights.Versions
	resident prometheus.Gauge
	updates  *prometheus.CounterVec
	drained  atomic.Int64
}

func (l *lane) sampler(own weights.Own) *sampler {
	s := &sampler{
		resident: prometheus.NewGauge(prometheus.GaugeOpts{Name: "resident"}),
		updates:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "updates"}, []string{"state"}),
	}
	s.Versions = weights.New(weights.Options{
		Source: weights.Source{Bus: l.Bus, Dir: l.dir}, Lane: "synthetic", Networks: []engine.Network{l.base}, Own: own, Instance: l.instance,
		Metrics: weights.Metrics{
			Version: prometheus.NewGauge(prometheus.GaugeOpts{Name: "version"}), Resident: s.resident, Updates: s.updates,
			Load: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "load"}),
		},
		Changed: func() {}, Drained: func() { s.drained.Add(1) },
	})
	return s
}

// serve begins, and follows the lane until the test ends.
func (l *lane) serve(own weights.Own) *sampler {
	l.t.Helper()
	s := l.sampler(own)
	if err := s.Begin(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	l.Serve(l.t, func(ctx context.Context, b *bus.Bus) error {
		follows := make(chan error, 1)
		go func() { follows <- s.Follow(zerolog.New(&l.log).WithContext(ctx)) }()
		err := b.FollowPolicy(ctx, "synthetic", s.Want, func(t schemas.Tenant) { s.Forget(ctx, t) })
		return errors.Join(err, <-follows)
	})
	return s
}

// push announces the next version with weights of their own, changed.
func (l *lane) push(change func(p *schemas.Policy)) *schemas.Policy { return l.pushFor("", change) }

// pushFor is push for a tenant.
func (l *lane) pushFor(tenant schemas.Tenant, change func(p *schemas.Policy)) *schemas.Policy {
	l.t.Helper()
	current, err := l.Bus.Policy(l.t.Context(), synthetic.Lane.Of(tenant))
	if err != nil {
		l.t.Fatal(err)
	}
	next := *current
	next.PolicyVersion, next.Parent, next.By = current.PolicyVersion+1, &current.PolicyVersion, "test"
	ref, err := l.Bus.PutBlob(l.t.Context(), safetensors(float32(next.PolicyVersion)))
	if err != nil {
		l.t.Fatal(err)
	}
	next.Weights, next.WeightsDigest = []schemas.WeightsFile{schemas.FileOfBlob(ref)},
		lora.FullDigest(current.BaseDigest, ref.Digest)
	if change != nil {
		change(&next)
	}
	if err := l.Bus.SetPolicy(l.t.Context(), &next, current); err != nil {
		l.t.Fatal(err)
	}
	return &next
}

// safetensors is a file with one tensor of one element.
func safetensors(x float32) []byte {
	header := fmt.Sprintf(`{"v%g":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, x)
	header += strings.Repeat(" ", -len(header)&7)
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(file, header...), 0, 0, 128, 63)
}

// value reads a metric.
func value(c prometheus.Collector) float64 {
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil || len(families) == 0 {
		return 0
	}
	m := families[0].GetMetric()[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue()
}

// applied waits for what a sampler says of a version.
func (l *lane) applied(version int64, state string) *schemas.Applied {
	return l.appliedFor("", version, state)
}

// appliedFor is applied for a tenant.
func (l *lane) appliedFor(tenant schemas.Tenant, version int64, state string) (found *schemas.Applied) {
	l.t.Helper()
	bustest.Until(l.t, fmt.Sprintf("version %d %s", version, state), func() error {
		all, err := l.Bus.Applied(l.t.Context(), synthetic.Lane.Of(tenant))
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all,
			func(a *schemas.Applied) bool { return a.PolicyVersion == version && a.State == state })
		if i < 0 {
			return fmt.Errorf("not among %d answers", len(all))
		}
		found = all[i]
		return nil
	})
	return found
}

// A sampler announces its own weights, goes on with what the lane has, and raises the version only where it is told to.
func TestVersions_Begin(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	for i, want := range []struct{ asks, version int64 }{{2, 2}, {0, 2}, {5, 5}} {
		s := l.sampler(weights.Own{Model: "m", PolicyVersion: want.asks})
		if err := s.Begin(t.Context()); err != nil || s.Newest().Version() != want.version {
			t.Fatalf("sampler %d: version %d, %v; want %d", i, s.Newest().Version(), err, want.version)
		}
		s.Close()
		if n := value(s.resident); n != 0 {
			t.Errorf("sampler %d: %v versions resident after Close", i, n)
		}
	}
	other := l.sampler(weights.Own{Model: "m", BaseDigest: strings.Repeat("0", 64)}).Begin(t.Context())
	if e, ok := errors.AsType[*weights.OtherCheckpointError](other); !ok || e.Has != l.base.digest || !strings.Contains(other.Error(), `"m"`) {
		t.Errorf("another checkpoint: %v", other)
	}
	if err := l.sampler(weights.Own{Adapter: "a.safetensors"}).Begin(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "takes none") {
		t.Errorf("an adapter that the model cannot have: %v", err)
	}
}

// A sampler that computes in another type stays in the lane, with its weights; that prompts get other states is said.
func TestVersions_OtherStates(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	ctx := zerolog.New(&l.log).WithContext(t.Context())
	for _, states := range []string{"", "", "BF16", "BF16"} {
		l.base.states = states
		s := l.sampler(weights.Own{Model: "m"})
		if err := s.Begin(ctx); err != nil || s.Newest().Version() != 0 || s.Newest().Policy.LatentsDType != states {
			t.Fatalf("states %q: %+v, %v", states, s.Newest(), err)
		}
		s.Close()
	}
	if n := l.log.count(`"was":"F32","now":"BF16"`); n != 1 {
		t.Errorf("said %d times:\n%s", n, l.log.text.String())
	}
}

// A sample keeps its weights until it releases them or moves on; the next version waits for that memory.
func TestVersions_Follow(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{})
	if _, err := s.Pin(t.Context(), "", 1); !errors.Is(err, weights.ErrPolicyPending) {
		t.Errorf("version 1 before it is there: %v", err)
	}
	zero, err := s.Pin(t.Context(), "", 0)
	if err != nil {
		t.Fatal(err)
	}
	l.push(nil)
	if a := l.applied(1, schemas.AppliedApplied); a.Serving != 1 || a.Instance != "s" || a.Canary == nil {
		t.Errorf("%+v", a)
	}
	one, err := s.Pin(t.Context(), "", 1)
	if err != nil || one.Version() != 1 || zero.Version() != 0 {
		t.Fatalf("%v", err)
	}
	l.push(nil)
	bustest.Until(t, "version 2 to wait", func() error {
		if p, loading, _ := s.Serving(); p.PolicyVersion != 1 || loading == nil || *loading != 2 {
			return errors.New("not yet")
		}
		return nil
	})
	if n := l.script.opened.Load(); n != 1 || value(s.resident) != 2 {
		t.Errorf("%d opened, %v resident; want 1 and 2: the next waits", n, value(s.resident))
	}
	if to := s.Move(zero, func(*weights.Loaded) bool { return false }); to != zero {
		t.Error("moved where it may not")
	}
	if to := s.Move(zero, func(to *weights.Loaded) bool { return to.Version() == 1 }); to != one {
		t.Error("did not move to version 1")
	}
	l.applied(2, schemas.AppliedApplied)
	if s.drained.Load() == 0 {
		t.Error("Drained was not called")
	}
	s.Release(one)
	if n := l.script.opened.Load(); n != 2 {
		t.Errorf("%d opened; version 1 has a user and must be open", n)
	}
	s.Release(one)
	if n := l.script.opened.Load(); n != 1 || s.Newest().Version() != 2 {
		t.Errorf("%d opened, version %d; want version 2 alone", n, s.Newest().Version())
	}
}

// What can never be loaded is refused with the reason, and not loaded by samplers that start; the weights before it
// stay.
func TestVersions_Refused(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{})
	version := int64(0)
	refuses := func(why string, change func(p *schemas.Policy)) {
		t.Helper()
		version++
		l.push(change)
		if a := l.applied(version, schemas.AppliedRefused); !strings.Contains(a.Error, why) || a.Serving != 0 {
			t.Errorf("version %d: %q, serving %d; want %q, serving 0", version, a.Error, a.Serving, why)
		}
		if notes := s.Notes(); len(notes) != 1 || !strings.Contains(notes[0], why) {
			t.Errorf("notes of readiness %q; want %q", notes, why)
		}
	}
	refuses("weights[0]", func(p *schemas.Policy) { p.Weights[0].Digest = strings.Repeat("2", 64) })
	refuses("weights: ", func(p *schemas.Policy) {
		ref, err := l.Bus.PutBlob(t.Context(), []byte("no file of weights"))
		if err != nil {
			t.Fatal(err)
		}
		p.Weights = []schemas.WeightsFile{schemas.FileOfBlob(ref)}
	})
	l.script.set(func(s *script) { s.wrong = func(string) string { return "other" } })
	refuses("weights_digest", nil)
	l.script.set(func(s *script) { s.wrong = nil })
	if n := l.script.opened.Load(); n != 0 {
		t.Errorf("%d networks of refused versions are open", n)
	}
	if n := value(s.updates.WithLabelValues(schemas.AppliedRefused)); n != float64(version) {
		t.Errorf("%v refusals counted; want %d", n, version)
	}
	late := l.sampler(weights.Own{})
	if err := late.Begin(t.Context()); err != nil || late.Newest().Version() != 0 {
		t.Errorf("a sampler that starts: %v, version %d; want 0, the newest that is not refused", err,
			late.Newest().Version())
	}
}

// A trainer of whole weights begins with those of the checkpoint; pushed over others, weights that change nothing are a
// fault.
func TestVersions_Unchanged(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	l.serve(weights.Own{})
	l.script.set(func(s *script) { s.canary = func(string) string { return l.base.digest } })
	l.push(nil)
	l.applied(1, schemas.AppliedApplied)
	l.push(nil)
	if a := l.applied(2, schemas.AppliedRefused); !strings.Contains(a.Error, "changes nothing") || a.Serving != 1 {
		t.Errorf("version 2: %q, serving %d; want it refused", a.Error, a.Serving)
	}
}

// Weights by path are read from the folder that the sampler was given. A file that changes while it is loaded, is cut
// off even, is refused; the sampler goes on, and takes the next.
func TestVersions_ByPath(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	none := l.serve(weights.Own{})
	l.instance, l.dir = "shared", t.TempDir()
	s := l.serve(weights.Own{})
	file := filepath.Join(l.dir, "model.safetensors")
	byPath := func(p *schemas.Policy) {
		data := safetensors(float32(p.PolicyVersion))
		sum := sha256.Sum256(data)
		p.Weights = []schemas.WeightsFile{{
			Path: "model.safetensors", Digest: hex.EncodeToString(sum[:]), Size: int64(len(data)),
		}}
		p.WeightsDigest = lora.FullDigest(p.BaseDigest, p.Weights[0].Digest)
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	answer := func(instance string, version int64) (a *schemas.Applied) {
		t.Helper()
		bustest.Until(t, fmt.Sprintf("%s to answer version %d", instance, version), func() error {
			all, err := l.Bus.Applied(t.Context(), synthetic)
			if i := slices.IndexFunc(all, func(a *schemas.Applied) bool {
				return a.PolicyVersion == version && a.Instance == instance
			}); err == nil && i >= 0 {
				a = all[i]
				return nil
			}
			return errors.Join(errors.New("not yet"), err)
		})
		return a
	}
	l.push(byPath)
	if a := answer("s", 1); a.State != schemas.AppliedRefused ||
		!strings.Contains(a.Error, "start with --weights-dir") ||
		none.Newest().Version() != 0 {
		t.Errorf("without a folder: %+v", a)
	}
	if a := answer("shared", 1); a.State != schemas.AppliedApplied || s.Newest().Version() != 1 {
		t.Errorf("with the folder: %+v", a)
	}
	for i, c := range []struct {
		change func() error
		want   string
	}{
		{func() error { return os.Truncate(file, 0) }, "was changed while it was loaded"},
		{func() error { return os.Chtimes(file, time.Time{}, time.Now().Add(time.Hour)) }, "was changed while it was loaded"},
		{func() error { return rewrite(file, -1) }, "was changed while it was loaded"},
		{func() error { return rewrite(file, 9) }, "was changed while it was loaded"},
	} {
		l.script.set(func(s *script) { s.with = c.change })
		p := l.push(byPath)
		if a := answer("shared", p.PolicyVersion); a.State != schemas.AppliedRefused ||
			!strings.Contains(a.Error, c.want) || a.Serving != 1 {
			t.Errorf("change %d: %+v; want %q", i, a, c.want)
		}
	}
	l.script.set(func(s *script) { s.with = nil })
	p := l.push(byPath)
	if a := answer("shared", p.PolicyVersion); a.State != schemas.AppliedApplied {
		t.Errorf("the next: %+v", a)
	}
	if n := l.script.opened.Load(); n != 1 {
		t.Errorf("%d networks are open, want one", n)
	}
}

// rewrite changes a byte of a file in place, -1 its last, and sets its time back.
func rewrite(file string, at int) error {
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	data[(at+len(data))%len(data)] ^= 1
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close(), os.Chtimes(file, info.ModTime(), info.ModTime()))
}

// An error that may pass is no refusal: the version is tried again.
func TestVersions_Retried(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{})
	var tries atomic.Int64
	l.script.set(func(s *script) {
		s.with = func() error {
			if tries.Add(1) == 1 {
				return errors.New("no memory now")
			}
			return nil
		}
	})
	l.push(nil)
	l.applied(1, schemas.AppliedApplied)
	if tries.Load() != 2 || value(s.updates.WithLabelValues(schemas.AppliedRefused)) != 0 {
		t.Errorf("%d tries; want 2 and no refusal", tries.Load())
	}
}

// Apply gives the network of a policy, and the checkpoint itself where the policy changes nothing.
func TestApply(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	if err := l.sampler(weights.Own{}).Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	bare, err := l.Bus.Policy(t.Context(), synthetic)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := weights.Apply(t.Context(), weights.Source{Bus: l.Bus}, l.base, bare); err != nil ||
		n != engine.Network(l.base) {
		t.Errorf("the checkpoint: %v, %v", n, err)
	}
	p := l.push(nil)
	if n, err := weights.Apply(t.Context(), weights.Source{Bus: l.Bus}, l.base, p); err != nil ||
		n.Digest() != p.WeightsDigest {
		t.Errorf("a policy: %v, %v", n, err)
	}
	p.Weights[0].Digest = strings.Repeat("2", 64)
	if _, err := weights.Apply(t.Context(), weights.Source{Bus: l.Bus}, l.base, p); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a missing file: %v", err)
	}
}

// A server that answers late is asked again for a minute, other errors are returned at once.
func TestRetryLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		_, err := weights.RetryLate(t.Context(), func(context.Context) (int, error) {
			asked++
			time.Sleep(25 * time.Second) // on the clock of the bubble
			return 0, context.DeadlineExceeded
		})
		if asked != 3 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("asked %d times, %v; want 3 times in a minute", asked, err)
		}
		asked = 0
		x, err := weights.RetryLate(t.Context(), func(context.Context) (int, error) {
			if asked++; asked == 1 {
				return 0, context.DeadlineExceeded
			}
			return 7, nil
		})
		if x != 7 || err != nil || asked != 2 {
			t.Errorf("%d, %v after %d", x, err, asked)
		}
		if _, err := weights.RetryLate(t.Context(), func(context.Context) (int,
			error,
		) {
			return 0, bus.ErrNotFound
		}); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("%v", err)
		}
	})
}

// An answer that can never be stored is said, and the version is taken over all the same.
func TestVersions_NoAnswer(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	l.instance = "no token"
	s := l.serve(weights.Own{})
	l.push(nil)
	bustest.Until(t, "the answer is not stored", func() error {
		said := l.log.count("answer to the version not stored") == 1 && l.log.count("not taken over") == 0
		if !said || s.Newest().Version() != 1 {
			return fmt.Errorf("version %d; %d answers not stored", s.Newest().Version(), l.log.count("not stored"))
		}
		return nil
	})
}
