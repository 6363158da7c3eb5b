package advantage

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// plane is an event plane of a test.
type plane struct{ *bustest.Plane }

func newPlane(t testing.TB) *plane {
	t.Helper()
	return &plane{bustest.New(t)}
}

func testConfig() Config {
	c := DefaultConfig()
	c.AckWait = time.Second
	return c
}

// serve runs the service until it is stopped or killed.
func (p *plane) serve(t testing.TB, cfg Config) *bustest.Service {
	t.Helper()
	return p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
}

// put stores rewards in the order given, each group opened with the first of them.
func (p *plane) put(t testing.TB, rewards ...*schemas.Reward) {
	t.Helper()
	publisher := p.NewPublisher(512, 32<<20)
	defer publisher.Close()
	opened := map[schemas.UID]bool{}
	for _, r := range rewards {
		if !opened[r.UID] {
			opened[r.UID] = true
			if _, err := publisher.Publish(t.Context(), openingOf(r)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := publisher.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if err := publisher.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// results waits until a run has n stored advantages and batches, and returns all bytes
// that there are then, by subject.
func (p *plane) results(t testing.TB, run schemas.Run, n int) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for subject, m := range bustest.Await(t, p.Bus, n, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"),
		schemas.BatchSubject(run, "*")) {
		out[subject] = m.Data
	}
	return out
}

func advantageOf(t testing.TB, results map[string][]byte, run schemas.Run, uid schemas.UID) *schemas.Advantage {
	t.Helper()
	var a schemas.Advantage
	data, ok := results[schemas.AdvantageSubject(run, uid)]
	if !ok {
		t.Fatalf("group %s has no advantage: %v", uid, slices.Sorted(maps.Keys(results)))
	}
	if err := schemas.DecodeValid(data, &a); err != nil {
		t.Fatal(err)
	}
	return &a
}

func batchOf(t testing.TB, results map[string][]byte, run schemas.Run, id string) *schemas.Batch {
	t.Helper()
	var b schemas.Batch
	data, ok := results[schemas.BatchSubject(run, id)]
	if !ok {
		t.Fatalf("no batch %s: %v", id, slices.Sorted(maps.Keys(results)))
	}
	if err := schemas.DecodeValid(data, &b); err != nil {
		t.Fatal(err)
	}
	return &b
}

// made is the reward of one sample; a NaN value is a failure.
func made(run schemas.Run, uid schemas.UID, i, n int64, value float64, change func(g *schemas.Group)) *schemas.Reward {
	r := rewardOf(i, n, &value)
	if value != value {
		r = rewardOf(i, n, nil)
	}
	r.Run, r.UID, r.Group.Batch = run, uid, string(uid)
	r.Scores = []schemas.Score{{
		Name: "synthetic", Version: "1", Weight: 1, Status: r.Status, Value: r.Reward, Error: r.Error,
	}}
	r.SampleStarted, r.SampleFinished = 1_000_000_000, 3_000_000_000
	if change != nil {
		change(&r.Group)
	}
	return r
}

// Whatever the order in which rewards are stored, and with three in ten of them
// delivered twice, the stored advantages of 1000 groups (300 under the race detector) have the same bytes.
func TestService_OrderAndRedelivery(t *testing.T) {
	const size = 4
	groups := 1_000
	if bustest.Race {
		groups = 300
	}
	rng := rand.New(rand.NewPCG(3, 4))
	var rewards []*schemas.Reward
	for g := range groups {
		for i := range int64(size) {
			value := float64(rng.IntN(5)) / 4
			if rng.IntN(20) == 0 {
				value = missing
			}
			rewards = append(rewards, made("r", schemas.UID(fmt.Sprintf("u%05d", g)), i, size, value,
				func(s *schemas.Group) {
					if g%3 == 0 { // one group in three is in a batch with one scale
						s.Batch, s.BatchGroups, s.Advantage.Std = fmt.Sprintf("b%d", g/300), 100, schemas.StdGlobal
					}
				}))
		}
	}
	// Of each 300 groups the 100 of a batch close together; the last batch may stay open.
	batches, open := groups/300, (groups%300+2)/3
	closed := groups - open + batches
	calm := newPlane(t)
	calm.put(t, rewards...)
	calm.serve(t, testConfig())
	want := calm.results(t, "r", closed)

	rng.Shuffle(len(rewards), func(i, j int) { rewards[i], rewards[j] = rewards[j], rewards[i] })
	rough := newPlane(t)
	rough.put(t, rewards...)
	// Another worker receives three in ten first and dies with them.
	taken := 0
	for partition := range schemas.RewardPartitions {
		config := testConfig().consumer(partition)
		config.AckWait = time.Hour // what is taken does not come again while the rest is
		sub, err := rough.Subscription(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		consumer, err := rough.JetStream().Consumer(t.Context(), config.Stream, config.Name)
		if err != nil {
			t.Fatal(err)
		}
		info := consumer.CachedInfo()
		for range (int(info.NumPending) + info.NumAckPending) * 3 / 10 {
			if _, err := sub.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			taken++
		}
		if err := sub.Close(); err != nil {
			t.Fatal(err)
		}
	}
	registry := prometheus.NewRegistry()
	cfg := testConfig()
	cfg.Metrics = registry
	rough.serve(t, cfg)
	got := rough.results(t, "r", closed)
	for subject, data := range want {
		if strings.HasPrefix(subject, schemas.Prefix+"batch.") {
			continue // it says how long things took
		}
		if !bytes.Equal(got[subject], data) {
			t.Fatalf("%s: another order gives other bytes", subject)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d results, want %d", len(got), len(want))
	}
	if n := counted(t, registry, "meander_advantage_deliveries_total", "again"); n < float64(taken) {
		t.Errorf("%v rewards were delivered again, want %d", n, taken)
	}
}

// counted is the value of a counter with a label.
func counted(t testing.TB, r *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetValue() == label {
					return m.GetCounter().GetValue()
				}
			}
		}
	}
	return 0
}

// version has the lane serve a version, after another.
func (p *plane) version(t *testing.T, version int64, after *schemas.Policy) *schemas.Policy {
	t.Helper()
	next := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "synthetic", Model: "synthetic", PolicyVersion: version, WeightsDigest: fmt.Sprint(version), Announced: 1,
		LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 64, NumInferenceSteps: 4, TrueCFGScale: 1,
		MaxPixels: 1 << 20,
	}
	if err := p.SetPolicy(t.Context(), next, after); err != nil {
		t.Fatal(err)
	}
	return next
}

// What counts of a lane is the version that it had when the last sample was scored, by the server's clock: not one that
// came since, whenever the group is closed.
func TestService_StaleByThen(t *testing.T) {
	p := newPlane(t)
	lag := func(g *schemas.Group) {
		g.GroupPolicy = &schemas.GroupPolicy{
			ZeroStd: "keep", Failed: "keep", RefillRounds: new(int64(3)), MaxPolicySpan: new(int64(9)),
			MaxPolicyLag: new(int64(1)),
		}
	}
	put := func(uid schemas.UID, versions ...int64) {
		for i, v := range versions {
			r := made("r", uid, int64(i), 2, float64(i), lag)
			r.PolicyVersionMin, r.PolicyVersionMax = v, v
			p.put(t, r)
		}
	}
	now := p.version(t, 4, nil)
	put("young", 3, 4)
	now = p.version(t, 5, now)
	put("old", 3, 5)
	p.version(t, 9, now)
	p.serve(t, testConfig()) // long after
	results := p.results(t, "r", 2)
	for uid, want := range map[schemas.UID]string{"young": schemas.StatusComplete, "old": schemas.StatusStale} {
		if a := advantageOf(t, results, "r", uid); a.Status != want {
			t.Errorf("%s: %s %q, want %s", uid, a.Status, a.Error, want)
		}
	}
}

// Versions that samplers refused were never served, and do not make a group stale.
func TestService_RefusedIsNotServed(t *testing.T) {
	p := newPlane(t)
	now := p.version(t, 4, nil)
	for v := int64(5); v <= 7; v++ {
		now = p.version(t, v, now)
		answer := &schemas.Applied{
			Tenant: schemas.TenantMain,
			Lane:   "synthetic", Instance: "s", PolicyVersion: v, State: schemas.AppliedRefused, Error: "does not fit", Serving: 4,
		}
		if v == 6 {
			answer.State, answer.Error, answer.Serving = schemas.AppliedApplied, "", v
		}
		if _, err := p.Publish(t.Context(), answer); err != nil {
			t.Fatal(err)
		}
	}
	put := func(uid schemas.UID, lag, version int64) {
		for i := range int64(2) {
			r := made("r", uid, i, 2, float64(i), func(g *schemas.Group) {
				g.GroupPolicy = &schemas.GroupPolicy{
					ZeroStd: "keep", Failed: "keep", RefillRounds: new(int64(0)), MaxPolicySpan: new(int64(9)),
					MaxPolicyLag: &lag,
				}
			})
			r.PolicyVersionMin, r.PolicyVersionMax = version, version
			p.put(t, r)
		}
	}
	put("served", 0, 6) // 7 was refused
	put("one-behind", 1, 4)
	put("stale", 0, 4)
	p.serve(t, testConfig())
	results := p.results(t, "r", 3)
	for uid, want := range map[schemas.UID]string{
		"served": "", "one-behind": "", "stale": "policy version 4 is 1 behind version 6",
	} {
		a := advantageOf(t, results, "r", uid)
		if (a.Error == "") != (want == "") || !strings.Contains(a.Error, want) {
			t.Errorf("%s: %s %q, want %q", uid, a.Status, a.Error, want)
		}
	}
}

// gdpo asks for two reward functions that are normalised each by itself.
func gdpo(g *schemas.Group) {
	g.Advantage = schemas.AdvantageSpec{
		Estimator: "gdpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-6), Singleton: "reward",
	}
	g.Reward = []schemas.RewardSpec{{Name: "synthetic", Weight: new(1.0)}, {Name: "ocr", Weight: new(0.5)}}
}

func TestService_States(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	p.version(t, 6, nil)
	policy := func(change func(p *schemas.GroupPolicy)) func(g *schemas.Group) {
		return func(g *schemas.Group) {
			g.GroupPolicy = &schemas.GroupPolicy{
				ZeroStd: "keep", Failed: "keep", RefillRounds: new(int64(3)), MaxPolicySpan: new(int64(1)),
			}
			change(g.GroupPolicy)
		}
	}
	versions := func(rs []*schemas.Reward, v ...int64) []*schemas.Reward {
		for i, r := range rs {
			r.PolicyVersionMin, r.PolicyVersionMax = v[i], v[i]
		}
		return rs
	}
	pair := func(uid schemas.UID, a, b float64, change func(g *schemas.Group)) []*schemas.Reward {
		return []*schemas.Reward{made("r", uid, 0, 2, a, change), made("r", uid, 1, 2, b, change)}
	}
	mixed := func(uid schemas.UID, change func(g *schemas.Group)) []*schemas.Reward {
		rs := pair(uid, 1, 2, change)
		rs[1].ScheduleDigest = "f" + schedule[1:]
		return rs
	}
	alone := func(uid schemas.UID) []*schemas.Reward {
		return []*schemas.Reward{made("r", uid, 0, 1, 5, func(g *schemas.Group) {
			g.Batch, g.BatchGroups, g.Advantage.Std = string(uid+"-batch"), 1, schemas.StdGlobal
		})}
	}
	tests := []struct {
		rewards []*schemas.Reward
		status  string
		fault   string
		trained bool // there are advantages
	}{
		{pair("complete", 1, 2, nil), "complete", "", true},
		{pair("partial", 1, missing, nil), "partial", "", true},
		{pair("failed", missing, missing, nil), "failed", "no sample was scored; sample 0: ", false},
		{pair("kept", 1, 1, nil), "complete", "", true},
		{pair("dropped", 1, 1, policy(func(p *schemas.GroupPolicy) { p.ZeroStd = "drop" })), "filtered", "", false},
		{
			versions(pair("two-policies", 1, 2, nil), 4, 5), "mixed",
			"policy versions 4 to 5 are a span of 2; max_policy_span is 1", false,
		},
		{versions(pair("two-allowed", 1, 2, policy(func(p *schemas.GroupPolicy) { p.MaxPolicySpan = new(int64(2)) })),
			4, 5), "complete", "", true},
		{mixed("two-schedules", nil), "mixed", "different schedules", false},
		{
			versions(pair("old", 1, 2, policy(func(p *schemas.GroupPolicy) { p.MaxPolicyLag = new(int64(1)) })), 4, 4),
			"stale", `policy version 4 is 2 behind version 6, which lane "synthetic" served by then; max_policy_lag is 1`, false,
		},
		{versions(pair("old-allowed", 1, 2, policy(func(p *schemas.GroupPolicy) { p.MaxPolicyLag = new(int64(2)) })),
			4, 4), "complete", "", true},
		{
			mixed("schedules-allowed", policy(func(p *schemas.GroupPolicy) { p.MixedSchedules = true })), "complete",
			"", true,
		},
		{pair("gdpo-lacks-a-score", 1, 2, gdpo), "failed", "score 1 of sample 0 is NaN", false},
		{alone("one-in-all"), "failed", "one reward in all", false},
	}
	for _, tt := range tests {
		p.put(t, tt.rewards...)
	}
	results := p.results(t, "r", len(tests)+1) // and one batch
	for _, tt := range tests {
		uid := tt.rewards[0].UID
		a := advantageOf(t, results, "r", uid)
		if a.Status != tt.status || !strings.Contains(a.Error, tt.fault) || (a.Error == "") != (tt.fault == "") {
			t.Errorf("%s: %s %q, want %s %q", uid, a.Status, a.Error, tt.status, tt.fault)
		}
		for _, m := range a.Members {
			if (m.Advantage != nil) != (tt.trained && m.Reward != nil) {
				t.Errorf("%s: member %+v", uid, m)
			}
		}
	}
}

// Every estimator closes a batch, with its own numbers.
func TestService_Estimators(t *testing.T) {
	p := newPlane(t)
	p.serve(t, testConfig())
	values := [][]float64{{1, 3}, {0, 2}}
	for _, name := range estimator.Names() {
		def, err := estimator.Default(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == estimator.ReinforcePlusPlus { // with returns that differ over the steps
			def.Gamma = 0.5
		}
		for g, group := range values {
			for i, v := range group {
				p.put(t, made(schemas.Run(name), schemas.UID(fmt.Sprint("g", g)), int64(i), 2, v,
					func(s *schemas.Group) {
						s.Batch, s.BatchGroups = "b", 2
						s.Advantage = schemas.AdvantageSpec{
							Estimator: name, Std: def.Std, StdBasis: def.StdBasis, Epsilon: &def.Epsilon,
							Mode:       def.Mode,
							AdvClipMax: &def.AdvClipMax, Gamma: &def.Gamma, Singleton: def.Singleton,
						}
					}))
			}
		}
		results := p.results(t, schemas.Run(name), 3)
		cfg := def
		cfg.Columns = 2 // trained steps of the rewards
		rewards := []estimator.Rewards{{Values: values[0]}, {Values: values[1]}}
		if name == estimator.GDPO {
			cfg.Weights = []float64{1}
			for g := range rewards {
				rewards[g].Scores = [][]float64{{values[g][0]}, {values[g][1]}}
			}
		}
		want, err := estimator.Estimate(cfg, rewards)
		if err != nil {
			t.Fatal(err)
		}
		for g := range values {
			a := advantageOf(t, results, schemas.Run(name), schemas.UID(fmt.Sprint("g", g)))
			for i, m := range a.Members {
				if m.Advantage == nil || *m.Advantage != want[g].Advantages[i] {
					t.Errorf("%s: member %+v, want advantage %v", name, m, want[g].Advantages[i])
				}
				if want[g].StepAdvantages != nil && !slices.Equal(m.StepAdvantages, want[g].StepAdvantages[i]) {
					t.Errorf("%s: step advantages %v, want %v", name, m.StepAdvantages, want[g].StepAdvantages[i])
				}
			}
			if a.Singleton != cfg.Singleton {
				t.Errorf("%s: singleton %q, want %q", name, a.Singleton, cfg.Singleton)
			}
			if wide := cfg.NeedsBatch(); wide != (a.BatchSamples == 4) {
				t.Errorf("%s: batch_samples %d", name, a.BatchSamples)
			}
		}
		metrics := map[string]float64{}
		for _, m := range batchOf(t, results, schemas.Run(name), "b").Metrics {
			metrics[m.Name] = m.Value
		}
		for _, part := range []string{"mean", "max", "min"} {
			want := metrics["critic/advantages/"+part]
			if name == estimator.ReinforcePlusPlus { // of r/2 and r at the two steps, before they are whitened
				want = map[string]float64{"mean": 1.125, "max": 3, "min": 0}[part]
			}
			if got, ok := metrics["critic/returns/"+part]; !ok || got != want {
				t.Errorf("%s: critic/returns/%s = %v, %v; want %v", name, part, got, ok, want)
			}
		}
	}
}

func TestService_BatchMetrics(t *testing.T) {
	p := newPlane(t)
	registry := prometheus.NewRegistry()
	cfg := testConfig()
	cfg.Metrics = registry
	p.serve(t, cfg)
	source, err := schemas.MetadataFrom(map[string]any{"data_source": "signs"})
	if err != nil {
		t.Fatal(err)
	}
	for g, values := range [][]float64{{.2, .4, .6, .8}, {1, 1, 1, 1}, {0, .5, .5, 1}, {.5, .5, 1, 1}} {
		for i, v := range values {
			r := made("r", schemas.UID(fmt.Sprint("g", g)), int64(i), 4, v, func(s *schemas.Group) {
				s.Batch, s.BatchGroups, s.BatchStep, s.BatchEpoch = "b", 4, new(int64(12)), new(int64(1))
				s.Validation, s.Metadata = g == 3, source
			})
			r.Scores[0].Exact = new(v == 1)
			p.put(t, r)
		}
	}
	b := batchOf(t, p.results(t, "r", 5), "r", "b")
	got := map[string]float64{}
	for _, m := range b.Metrics {
		got[m.Name] = m.Value
	}
	for name, want := range map[string]float64{
		"critic/rewards/zero_std_ratio": 1. / 3, "critic/rewards/std_mean": .192386729448,
		"critic/rewards/group_size": 4,
		"critic/rewards/mean":       .666666666667, "critic/synthetic/mean": .666666666667, "training/global_step": 12,
		"training/epoch": 1,
		"timing_s/gen":   2, "agent_loop/generate_sequences/max": 2, "perf/total_num_images": 12,
		"training/off_policy/trajectory_staleness/max": 11, "val-core/signs/reward/mean@4": .75,
		"critic/synthetic/exact/mean": 5. / 12, "val-aux/signs/synthetic/exact/mean@4": .5,
	} {
		if d := got[name] - want; d > 1e-9 || d < -1e-9 {
			t.Errorf("%s = %v, want %v", name, got[name], want)
		}
	}
	if b.Status != "complete" || b.Expected != 4 || *b.Step != 12 || b.Samples != 16 {
		t.Errorf("batch %+v", b)
	}
	// The same numbers for Prometheus, once the event is stored.
	bustest.Until(t, "all gauges", func() error {
		families, err := registry.Gather()
		if err != nil {
			return err
		}
		shown := 0
		for _, f := range families {
			if f.GetName() == "meander_advantage_batch_metric" {
				for _, m := range f.GetMetric() {
					if shown++; m.GetGauge().GetValue() != got[m.GetLabel()[0].GetValue()] {
						return fmt.Errorf("gauge %v", m)
					}
				}
			}
		}
		if shown != len(got) {
			return fmt.Errorf("%d of %d", shown, len(got))
		}
		return nil
	})
}

func TestRefillUID(t *testing.T) {
	long := schemas.UID(strings.Repeat("u", schemas.MaxToken))
	for root, want := range map[schemas.UID]schemas.UID{"p7": "p7-r2", long[:61]: long[:61] + "-r2"} {
		if got := refillUID(root, 2); got != want {
			t.Errorf("%s: %s, want %s", root, got, want)
		}
	}
	a, b := refillUID(long, 1), refillUID(long[:63]+"v", 1)
	if a == b || len(a) != schemas.MaxToken || schemas.CheckToken("uid", a) != nil {
		t.Errorf("%s and %s", a, b)
	}
}
