package results_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// serve starts a pipeline that takes so many samples at once.
func serve(t *testing.T, batch int) *bus.Bus {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Batch = "synthetic", batch
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	return plane.Bus
}

// publish sends a small prompt of two samples.
func publish(t *testing.T, b *bus.Bus, run schemas.Run, uid schemas.UID, change func(*schemas.Prompt)) {
	t.Helper()
	p := &schemas.Prompt{
		UID: uid, Prompt: "a fox, " + string(uid), Seed: new(int64(5)), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(3)),
			Height:            new(int64(64)), Width: new(int64(64)), Rollout: schemas.Rollout{SDEStepIndices: []int64{1}},
		},
	}
	if change != nil {
		change(p)
	}
	if _, err := client.New(b).Publish(t.Context(), run, p); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	digests := map[string]bool{}
	for _, batch := range []int{1, 4} {
		b := serve(t, batch)
		publish(t, b, "r1", "b", nil)
		publish(t, b, "r1", "a", nil)
		publish(t, b, "r1", "waits", func(p *schemas.Prompt) {
			p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
		})
		bustest.Await(t, b, 2, schemas.StreamAdvantages)
		bustest.Await(t, b, 6, schemas.StreamTrajectories)
		run, err := results.Read(t.Context(), b, "r1")
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, g := range run.Groups {
			got = append(got, fmt.Sprintf("%s %s %d", g.UID, g.Status, len(g.Members)))
		}
		if want := []string{"a complete 2", "b complete 2", "waits open 0"}; !slices.Equal(got, want) {
			t.Fatalf("groups %q, want %q", got, want)
		}
		s := run.Summary
		if s.Groups != 3 || s.Complete != 2 || s.Refused != 0 || s.Samples != 4 || s.Trajectories != 6 ||
			s.StepsStored != 18 {
			t.Errorf("summary %+v", s)
		}
		g := run.Groups[0]
		for i, m := range g.Members {
			if m.SampleIndex != int64(i) || m.Reward == nil || m.Advantage == nil || len(m.Scores) != 1 ||
				len(m.LogProbs) != 3 || m.LogProbs[1] == nil || m.LogProbs[0] != nil {
				t.Errorf("member %d: %+v", i, m)
			}
		}
		if mean := (*g.Members[0].Reward + *g.Members[1].Reward) / 2; mean != *g.Mean {
			t.Errorf("mean %g, that of the members is %g", *g.Mean, mean)
		}
		if best := g.Best(); *best[0].Reward < *best[1].Reward {
			t.Errorf("the best is not first: %g, %g", *best[0].Reward, *best[1].Reward)
		}
		if got := s.Metrics["critic/rewards/max"]; got < s.Metrics["critic/rewards/mean"] || got == 0 {
			t.Errorf("metrics %v", s.Metrics)
		}
		digests[s.Digest] = true
	}
	if len(digests) != 1 {
		t.Errorf("digests %v of the same prompts in other batches; want one", digests)
	}
}

// Steps behind cfg_until take one evaluation, those before it two, and members repeat how guidance was combined.
func TestRead_Guidance(t *testing.T) {
	b := serve(t, 4)
	publish(t, b, "r1", "p", func(p *schemas.Prompt) {
		p.TrueCFGScale, p.CFGUntil, p.GuidanceRescale = new(2.0), new(0.34), new(0.7)
	})
	bustest.Await(t, b, 1, schemas.StreamAdvantages)
	run, err := results.Read(t.Context(), b, "r1")
	if err != nil {
		t.Fatal(err)
	}
	if s := run.Summary; s.Evaluations != 2*(3+1) || s.FlatEvaluations != s.Evaluations {
		t.Errorf("%d and %d evaluations of 2 samples with guidance in 1 of 3 steps", s.Evaluations, s.FlatEvaluations)
	}
	for _, m := range run.Groups[0].Members {
		if r := m.Rollout.Settings; r.TrueCFGScale != 2 || r.GuidanceRescale != 0.7 || r.TrueCFGScale2 != 0 {
			t.Errorf("rollout %+v", r)
		}
	}
}

// Files hold what the run has.
func TestRun_Write(t *testing.T) {
	b := serve(t, 4)
	publish(t, b, "r1", "p", nil)
	bustest.Await(t, b, 1, schemas.StreamAdvantages)
	run, err := results.Read(t.Context(), b, "r1")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "out")
	if err := run.Write(t.Context(), b, dir); err != nil {
		t.Fatal(err)
	}
	for _, m := range run.Groups[0].Members {
		data, err := os.ReadFile(m.Image)
		if err != nil {
			t.Fatal(err)
		}
		if im, err := png.Decode(bytes.NewReader(data)); err != nil || im.Bounds().Dx() != 64 {
			t.Errorf("image of sample %d: %v, %v", m.SampleIndex, im, err)
		}
	}
	if run.Summary.Sheet != filepath.Join(dir, "p-sheet.png") {
		t.Errorf("sheet %q", run.Summary.Sheet)
	}
	data, err := os.ReadFile(filepath.Join(dir, "results.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	var group results.Group
	var last struct{ Summary results.Summary }
	if err := json.Unmarshal([]byte(lines[0]), &group); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		t.Fatal(err)
	}
	if len(lines) != 2 || group.UID != "p" || last.Summary.Digest != run.Summary.Digest {
		t.Errorf("results.jsonl has\n%s", data)
	}

	path := filepath.Join(t.TempDir(), "latents.safetensors")
	if left, err := run.WriteLatents(t.Context(), b, path); err != nil || left != 0 {
		t.Fatal(left, err)
	}
	file, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if names := file.Names(); !slices.Equal(names, []string{"p.latents.1", "p.latents.2", "p.sample_index"}) {
		t.Errorf("tensors %q, want the states before and after the stochastic step", names)
	}
	if info, _ := file.Info("p.latents.1"); len(info.Shape) != 3 || info.Shape[0] != 2 {
		t.Errorf("shape %v, want both samples", info.Shape)
	}
}

// Samples that did not complete are left out of the latents, and said to be.
func TestRun_WriteLatents(t *testing.T) {
	b := serve(t, 4)
	publish(t, b, "r1", "p", nil)
	publish(t, b, "r1", "pruned",
		func(p *schemas.Prompt) { p.Prune = &schemas.Prune{StepIndex: 2, LogProbBelow: new(1e9)} })
	bustest.Await(t, b, 2, schemas.StreamAdvantages)
	run, err := results.Read(t.Context(), b, "r1")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "latents.safetensors")
	if left, err := run.WriteLatents(t.Context(), b, path); err != nil || left != 2 {
		t.Fatalf("%d samples left out, want those of the pruned group; %v", left, err)
	}
	file, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if data, err := file.Bytes("p.sample_index"); err != nil || len(file.Names()) != 3 || data[0] != 0 || data[8] != 1 {
		t.Errorf("tensors %q, samples %v; %v", file.Names(), data, err)
	}
	for _, m := range run.Groups[0].Members {
		if r := m.Rollout; r == nil || len(r.Settings.Sigmas) != 4 || len(r.NoiseStd) != 3 || !(r.NoiseStd[1] > 0) ||
			r.NoiseStd[0] != 0 || r.Settings.NoiseLevel != 0.7 || r.WeightsDigest == "" {
			t.Errorf("member %d: rollout %+v", m.SampleIndex, r)
		}
	}
}

// The outcome of a prompt is that of the last group that stood in for it; what is foreign,
// false or repeated changes nothing.
func TestOutcomes(t *testing.T) {
	b := serve(t, 4)
	publish(t, b, "r1", "a", nil)
	var stored schemas.Advantage
	for _, m := range bustest.Await(t, b, 1, schemas.StreamAdvantages) {
		if err := bus.Fits(m, &stored); err != nil {
			t.Fatal(err)
		}
	}
	message := func(uid schemas.UID, change func(a *schemas.Advantage)) *bus.Message {
		a := stored
		a.UID = uid
		change(&a)
		return &bus.Message{Stream: schemas.StreamAdvantages, Subject: a.Subject(), Data: bustest.Encode(t, &a)}
	}
	o := results.NewOutcomes([]results.Prompt{{UID: "a"}, {UID: "b"}, {UID: "c"}})
	given := message("a", func(a *schemas.Advantage) { a.RefilledBy = "a-1" })
	o.Add(given)
	o.Add(given)
	if !o.Open("a") || o.Refills() != 1 {
		t.Errorf("a group given up, told twice: open %v, %d refills; want open, 1", o.Open("a"), o.Refills())
	}
	last := message("a-1", func(a *schemas.Advantage) { a.Refill = &schemas.Refill{Root: "a", Round: 1} })
	o.Add(last)
	if a := o.Advantage("a"); o.Open("a") || a == nil || a.UID != "a-1" {
		t.Errorf("the group that stood in: open %v, result %+v", o.Open("a"), a)
	}
	o.Refuse("a", "too late")
	if _, refused := o.Refused("a"); refused {
		t.Error("a prompt with a result is refused")
	}
	o.Add(message("stranger", func(*schemas.Advantage) {}))
	forged := message("b", func(*schemas.Advantage) {})
	forged.Subject = schemas.AdvantageSubject("r1", "c")
	o.Add(forged)
	o.Add(&bus.Message{Subject: schemas.AdvantageSubject("r1", "b"), Data: []byte("no event")})
	if o.Left() != 2 {
		t.Errorf("%d prompts left after nonsense, want 2", o.Left())
	}
	o.Refuse("b", "no such model")
	if reason, refused := o.Refused("b"); !refused || reason != "no such model" || o.Left() != 1 {
		t.Errorf("refused %v: %q, %d left", refused, reason, o.Left())
	}
}

// A pass shows each sample before and after.
func TestCollectPass(t *testing.T) {
	b := serve(t, 4)
	publish(t, b, "r1", "a", nil)
	bustest.Await(t, b, 1, schemas.StreamAdvantages)
	o := results.NewOutcomes([]results.Prompt{{UID: "a"}})
	if err := o.Read(t.Context(), b, "r1"); err != nil {
		t.Fatal(err)
	}
	after := o.Advantage("a")
	before := *after
	before.Members = []schemas.Member{{SampleIndex: 1, Status: schemas.StatusScored, Reward: new(9.0)}}
	pass, err := results.CollectPass(t.Context(), b, "r1", "r0", []results.ScoredAgain{
		{UID: "a", Prompt: "a fox", Before: &before, After: after},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := pass.Summary
	if s.Run != "r1" || s.Source != "r0" || s.Groups != 1 || s.Complete != 1 || s.Samples != 2 || s.Scored != 2 {
		t.Errorf("summary %+v", s)
	}
	members := pass.Groups[0].Members
	if members[0].SourceReward != nil || *members[1].SourceReward != 9 ||
		*members[1].Reward != *after.Members[1].Reward || len(members[1].Scores) != 1 {
		t.Errorf("members %+v", members)
	}
	dir := t.TempDir()
	if err := pass.Write(dir); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "results.jsonl")); err != nil ||
		strings.Count(string(data), "\n") != 2 {
		t.Errorf("results.jsonl: %v\n%s", err, data)
	}
}

// A store that cannot be read is not one without runs.
func TestLatestRun(t *testing.T) {
	t.Parallel()
	b := bustest.New(t).Bus
	if _, err := view.LatestRun(t.Context(), b); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("an empty store: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if _, err := view.LatestRun(ctx, b); !errors.Is(err, context.Canceled) || errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a read that is stopped: %v; want its end", err)
	}
}

// A result whose group has no record is of no group that is counted, and closes no other.
func TestRuns_Open(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	for _, uid := range []schemas.UID{"open", "closed"} {
		p.Forge(t, schemas.GroupSubject("r", uid), []byte("x"))
	}
	for _, uid := range []schemas.UID{"closed", "without-a-record"} {
		_, err := p.Publish(t.Context(), &schemas.Advantage{
			Run: "r", UID: uid, Batch: string(uid), Status: schemas.StatusFailed, Error: "so it is", GroupSize: 1,
			Members: []schemas.Member{{Status: schemas.StatusMissing}}, Scale: schemas.StdNone,
			StdBasis: schemas.BasisPopulation, Estimator: "rloo",
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	runs, err := view.Count(t.Context(), p.Bus, "r")
	if err != nil || runs["r"].Groups != 2 || runs["r"].Open != 1 {
		t.Errorf("%+v, %v; want 2 groups, 1 of them open", runs["r"], err)
	}
}

// The bytes of a run are estimated by its own events, whatever other runs there are.
func TestRuns_Bytes(t *testing.T) {
	t.Parallel()
	b := serve(t, 4)
	bytes := func() map[schemas.Run]*view.Run {
		t.Helper()
		runs, err := view.Count(t.Context(), b, "*")
		if err == nil {
			err = view.AddSizes(t.Context(), b, runs)
		}
		if err != nil {
			t.Fatal(err)
		}
		return runs
	}
	publish(t, b, "small", "a", nil)
	publish(t, b, "small", "b", nil)
	bustest.Await(t, b, 2, schemas.StreamAdvantages)
	stats, err := b.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stored := uint64(0)
	for _, s := range stats {
		if schemas.RunFilters("small")[s.Name] != nil {
			stored += s.Bytes
		}
	}
	small := bytes()["small"]
	if small.Bytes < stored*9/10 || small.Bytes > stored*11/10 {
		t.Errorf("estimated %d bytes, stored are %d", small.Bytes, stored)
	}
	publish(t, b, "large", "a", func(p *schemas.Prompt) { p.Height, p.Width = new(int64(512)), new(int64(512)) })
	bustest.Await(t, b, 3, schemas.StreamAdvantages)
	both := bytes()
	if both["small"].Bytes != small.Bytes || both["large"].Bytes < 10*small.Bytes {
		t.Errorf("beside a large run: %d bytes, before %d; the large one has %d", both["small"].Bytes, small.Bytes,
			both["large"].Bytes)
	}
	if err := counters.Advance(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if _, err := b.PurgeSubject(t.Context(), schemas.StreamSteps,
		schemas.RunFilters("small")[schemas.StreamSteps][0]); err != nil {
		t.Fatal(err)
	}
	again := bytes()["small"]
	if again.Bytes != small.Bytes || again.Steps != small.Steps {
		t.Errorf("a run that has ended was measured again: %+v", again)
	}
	if err := counters.MeasureAgain(t.Context(), b, "small"); err != nil {
		t.Fatal(err)
	}
	if again := bytes()["small"]; again.Steps != 0 || again.Bytes >= small.Bytes {
		t.Errorf("the steps of a run went, and its sizes are %+v", again)
	}
	runs, err := view.Count(t.Context(), b, "small")
	if err == nil {
		err = runs["small"].Measure(t.Context(), b)
	}
	if err != nil || runs["small"].Steps != 0 {
		t.Errorf("a run without steps is measured as %+v, %v", runs["small"], err)
	}
	publish(t, b, "small", "c", nil)
	bustest.Await(t, b, 4, schemas.StreamAdvantages)
	if again := bytes()["small"]; again.Steps == 0 || again.Steps >= small.Steps {
		t.Errorf("after another group %d steps; want those of it alone, and %d were there before", again.Steps,
			small.Steps)
	}
}
