package verify_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rs/zerolog"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// distilled is a network with a guidance input, which is added to its output. It counts the rows that it evaluates.
type distilled struct{ model.Model }

var evaluated atomic.Int64

func distilledFamily() model.Registry {
	_, f, err := families.All().Find("synthetic")
	if err != nil {
		panic(err) // it needs no folder
	}
	return model.Registry{{
		Name: "distilled",
		Open: func(dir string, o model.Options) (model.Model, error) {
			m, err := f.Open(dir, o)
			return &distilled{m}, err
		},
		Inspect: func(dir string) (*model.Info, error) {
			info, err := f.Inspect(dir)
			if err == nil {
				info.Card = distilledCard(info.Card)
			}
			return info, err
		},
	}}
}

func distilledCard(c model.Card) model.Card {
	c.Name, c.Family, c.WeightsDigest, c.Guidance = "distilled", "distilled", strings.Repeat("d", 64), 3.5
	c.CFGRule, c.Prompts, c.BoundaryRatio = model.CFGPlainClamped, 3, 0.6
	return c
}

func (m *distilled) Card() model.Card { return distilledCard(m.Model.Card()) }

// EncodeTexts encodes texts that differ as one text of its own.
func (m *distilled) EncodeTexts(ctx context.Context, prompts []model.Texts, _ bool) ([]*model.Conditioning, error) {
	out := make([]*model.Conditioning, len(prompts))
	for i, p := range prompts {
		text := p[0]
		if slices.ContainsFunc(p, func(s string) bool { return s != p[0] }) {
			text = strings.Join(p, "|")
		}
		conds, err := m.Encode(ctx, []string{text})
		if err != nil {
			return nil, err
		}
		out[i] = &model.Conditioning{Prompt: p[0], Tensors: conds[0].Tensors}
	}
	return out, nil
}

func (m *distilled) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	evaluated.Add(int64(len(rows)))
	plain := slices.Clone(rows)
	for i := range plain {
		plain[i].Guidance = 0
	}
	if err := m.Model.Velocity(ctx, plain, size); err != nil {
		return err
	}
	for _, r := range rows {
		for i := range r.Dst {
			r.Dst[i] += r.Guidance / 16
		}
	}
	return nil
}

// serveDistilled serves prompts with the distilled model until stop is called. publish publishes one and returns the
// first trajectory of its group.
func serveDistilled(t *testing.T, plane *bustest.Plane) (
	publish func(run schemas.Run, p *schemas.Prompt) *schemas.Trajectory, stop func(),
) {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Models = "distilled", distilledFamily()
	service := plane.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return pipeline.Run(ctx, b, config,
			zerolog.Nop())
	})
	c := client.New(plane.Bus)
	return func(run schemas.Run, p *schemas.Prompt) *schemas.Trajectory {
		t.Helper()
		if r, err := c.Publish(t.Context(), run, p); err != nil || r.Error != "" {
			t.Fatalf("%+v, %v", r, err)
		}
		bustest.Await(t, plane.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, p.UID))
		trajectory, err := c.Trajectory(t.Context(), run, p.UID, 0)
		if err != nil {
			t.Fatal(err)
		}
		return trajectory
	}, func() { service.Stop() }
}

// exact fails t unless verify finds every log-prob of a run again.
func exact(t *testing.T, b *bus.Bus, run schemas.Run) {
	t.Helper()
	report, err := verify.Run(t.Context(), b, run, verify.Options{Models: distilledFamily()})
	if err != nil || !report.OK(0) || report.MaxRatio != 0 || report.Steps != samples*stochastic {
		t.Errorf("run %s: %+v, %v", run, report, err)
	}
}

// A guidance input is the model's default or the prompt's own. It decides bits, so it is in both digests, and verify
// computes with it.
func TestGuidance(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	publish, stop := serveDistilled(t, plane)
	byDefault := publish("default", prompt())
	own := prompt()
	own.Guidance = new(7.0)
	with := publish("own", own)
	if byDefault.Guidance != 3.5 || with.Guidance != 7 {
		t.Errorf("guidance %v by default and %v; want 3.5 and 7", byDefault.Guidance, with.Guidance)
	}
	if with.ScheduleDigest == byDefault.ScheduleDigest || with.ContentDigest == byDefault.ContentDigest {
		t.Error("another guidance must have other digests")
	}
	if with.Medium(schemas.KindImage).Digest == byDefault.Medium(schemas.KindImage).Digest {
		t.Error("another guidance must make another image")
	}
	exact(t, plane.Bus, "default")
	exact(t, plane.Bus, "own")
	stop() // it would put away what is forged
	for _, c := range []struct {
		run      schemas.Run
		guidance float64
		want     string
	}{{"forged", 5, "schedule_digest"}, {"without", 0, "guidance: absent; must be there"}} {
		store(t, plane.Bus, c.run, with, func(e *schemas.Trajectory) { e.Guidance = c.guidance })
		report, err := verify.Run(t.Context(), plane.Bus, c.run, verify.Options{Models: distilledFamily()})
		if err != nil || report.OK(0) || !slices.ContainsFunc(report.Mismatches, func(m verify.Mismatch) bool {
			return strings.Contains(m.What, c.want)
		}) {
			t.Errorf("guidance %v: %+v, %v; want %q", c.guidance, report, err, c.want)
		}
	}
}

// Guidance between two shares of the steps: the others evaluate the prompt alone, and verify does as the sampler did.
// Shares that say nothing give the bits of none.
func TestCFGShares(t *testing.T) {
	plane := bustest.New(t)
	publish, stop := serveDistilled(t, plane)
	whole := publish("whole", prompt())
	part := prompt()
	part.CFGFrom, part.CFGUntil = new(0.25), new(0.75)
	before := evaluated.Load()
	between := publish("part", part)
	if got, want := evaluated.Load()-before, int64(samples*(steps+steps/2)); got != want {
		t.Errorf("%d evaluations with guidance in half of the steps; want %d", got, want)
	}
	if between.CFGFrom != 0.25 || between.CFGUntil != 0.75 || !slices.Equal(between.CFGScales, []float64{1, 2, 2, 1}) ||
		between.CFGRule != schemas.CFGPlainClamped || between.ScheduleDigest == whole.ScheduleDigest ||
		between.Medium(schemas.KindImage).Digest == whole.Medium(schemas.KindImage).Digest {
		t.Errorf("%+v, with guidance in all steps %+v", between, whole)
	}
	all := prompt()
	all.CFGFrom, all.CFGUntil = new(0.0), new(1.0)
	if same := publish("all", all); same.Medium(schemas.KindImage).Digest != whole.Medium(schemas.KindImage).Digest ||
		same.ScheduleDigest != whole.ScheduleDigest ||
		!slices.Equal(same.CFGScales, []float64{2, 2, 2, 2}) {
		t.Errorf("from 0 until 1: %+v, without %+v", same, whole)
	}
	exact(t, plane.Bus, "whole")
	exact(t, plane.Bus, "part")
	stop() // it would put away what is forged
	for name, forge := range map[string]func(*schemas.Trajectory){
		"from":   func(e *schemas.Trajectory) { e.CFGFrom = 0 },
		"until":  func(e *schemas.Trajectory) { e.CFGUntil = 0.5 },
		"scales": func(e *schemas.Trajectory) { e.CFGScales = []float64{2, 2, 2, 1} },
	} {
		store(t, plane.Bus, schemas.Run(name), between, forge)
		report, err := verify.Run(t.Context(), plane.Bus, schemas.Run(name), verify.Options{Models: distilledFamily()})
		if err != nil || report.OK(0) {
			t.Errorf("other %s than the sample was made with: %+v, %v", name, report, err)
		}
	}
}

// A sample with a setting of a later version is at fault for verify, and refused by the client, by the setting's name.
func TestUnknownSetting(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	sample(t, plane, "r1", prompt())
	made, err := client.New(plane.Bus).Trajectory(t.Context(), "r1", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	later := *made
	later.Run = "later"
	var fields map[string]any
	if err := msgpack.Unmarshal(bustest.Encode(t, &later), &fields); err != nil {
		t.Fatal(err)
	}
	fields["cfg_phase"] = 0.2
	data, err := msgpack.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	plane.Forge(t, later.Subject(), data)
	const want = "setting cfg_phase=0.2 is not known to this version"
	report, err := verify.Run(t.Context(), plane.Bus, "later", verify.Options{})
	if err != nil || report.OK(0) || len(report.Mismatches) != 1 || !strings.Contains(report.Mismatches[0].What, want) {
		t.Errorf("%+v, %v; want %q", report, err, want)
	}
	stored, err := client.New(plane.Bus).Trajectory(t.Context(), "later", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.New(plane.Bus).Latents(t.Context(), stored); err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
}

// A second scale of guidance holds below the model's boundary: the states before are those of one scale, and a scale of
// 1 evaluates the prompt alone there.
func TestTrueCFGScale2(t *testing.T) {
	plane := bustest.New(t)
	publish, stop := serveDistilled(t, plane)
	scaled := func(second float64) *schemas.Prompt {
		p := prompt()
		p.TrueCFGScale2 = &second
		return p
	}
	one := publish("one", prompt())
	same := publish("same", scaled(one.TrueCFGScale))
	two := publish("two", scaled(3))
	before := evaluated.Load()
	off := publish("off", scaled(1))
	if got, want := evaluated.Load()-before, int64(samples)*(steps+off.GuidedSteps()); got != want {
		t.Errorf("%d evaluations without guidance below the boundary; want %d", got, want)
	}
	if n := off.GuidedSteps(); n == 0 || n == steps || off.Sigmas[n-1] < 0.6 || off.Sigmas[n] >= 0.6 ||
		two.GuidedSteps() != steps {
		t.Errorf("%d and %d guided steps of sigmas %v", n, two.GuidedSteps(), off.Sigmas)
	}
	if same.BoundaryRatio != 0 || same.ScheduleDigest != one.ScheduleDigest ||
		same.Medium(schemas.KindImage).Digest != one.Medium(schemas.KindImage).Digest {
		t.Errorf("an equal scale: %+v", same)
	}
	if two.TrueCFGScale2 != 3 || two.BoundaryRatio != 0.6 {
		t.Errorf("scale %g below %g; want 3 below 0.6", two.TrueCFGScale2, two.BoundaryRatio)
	}
	seen := map[string]bool{}
	for _, x := range []*schemas.Trajectory{one, two, off} {
		if seen[x.ScheduleDigest] || seen[x.ContentDigest] || seen[x.Medium(schemas.KindImage).Digest] {
			t.Errorf("scale %g: another sample has its digests", x.TrueCFGScale2)
		}
		seen[x.ScheduleDigest], seen[x.ContentDigest], seen[x.Medium(schemas.KindImage).Digest] = true, true, true
	}
	for _, run := range []schemas.Run{"one", "same", "two", "off"} {
		exact(t, plane.Bus, run)
	}
	stop() // it would put away what is forged
	for run, c := range map[schemas.Run]struct {
		change func(e *schemas.Trajectory)
		want   string
	}{
		"scale": {func(e *schemas.Trajectory) { e.TrueCFGScale2 = 4 }, "schedule_digest"},
		"boundary": {
			func(e *schemas.Trajectory) { e.BoundaryRatio = 0.5 },
			"boundary_ratio: 0.5; must be that of distilled, 0.6",
		},
	} {
		store(t, plane.Bus, run, two, c.change)
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{Models: distilledFamily()})
		if err != nil || report.OK(0) || !slices.ContainsFunc(report.Mismatches, func(m verify.Mismatch) bool {
			return strings.Contains(m.What, c.want)
		}) {
			t.Errorf("%s: %+v, %v; want %q", run, report, err, c.want)
		}
	}
}

// A velocity under guidance is rescaled as the sample says: it is in both digests, and verify does as the sampler did.
func TestGuidanceRescale(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	publish, stop := serveDistilled(t, plane)
	plain := publish("plain", prompt())
	p := prompt()
	p.GuidanceRescale = new(0.7)
	with := publish("with", p)
	if with.GuidanceRescale != 0.7 || with.ScheduleDigest == plain.ScheduleDigest ||
		with.ContentDigest == plain.ContentDigest ||
		with.Medium(schemas.KindImage).Digest == plain.Medium(schemas.KindImage).Digest {
		t.Errorf("%+v, without %+v", with, plain)
	}
	exact(t, plane.Bus, "with")
	stop() // it would put away what is forged
	store(t, plane.Bus, "forged", with, func(e *schemas.Trajectory) { e.GuidanceRescale = 0.5 })
	report, err := verify.Run(t.Context(), plane.Bus, "forged", verify.Options{Models: distilledFamily()})
	if err != nil || report.OK(0) || report.MaxRatio == 0 {
		t.Errorf("another share than the one it was made with: %+v, %v", report, err)
	}
}

// Further texts reach the text encoders of the network; they are in both digests, and what is stored of the encoded
// texts is that of all of them.
func TestTexts(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	publish, stop := serveDistilled(t, plane)
	keep := func(second, third string) *schemas.Prompt {
		p := prompt()
		p.Prompt2, p.Prompt3, p.Rollout.ReturnConditioning = second, third, true
		return p
	}
	one := publish("one", keep("", ""))
	same := publish("same", keep(one.Prompt, one.Prompt))
	third := publish("third", keep("", "oil on canvas"))
	second := publish("second", keep("oil on canvas", ""))
	if same.Prompt2 != "" || same.Prompt3 != "" || same.ScheduleDigest != one.ScheduleDigest ||
		same.Medium(schemas.KindImage).Digest != one.Medium(schemas.KindImage).Digest {
		t.Errorf("the prompt itself for all encoders: %+v", same)
	}
	if third.Prompt3 != "oil on canvas" || !slices.Equal(third.Texts(),
		[]string{third.Prompt, third.Prompt, third.Prompt3}) {
		t.Errorf("texts %q", third.Texts())
	}
	seen := map[string]bool{}
	for _, x := range []*schemas.Trajectory{one, second, third} {
		for _, digest := range []string{
			x.ScheduleDigest, x.ContentDigest, x.Medium(schemas.KindImage).Digest,
			x.Conditioning[0].Tensor.Ref.Digest,
		} {
			if seen[digest] {
				t.Errorf("%q: another sample has its %.16s", x.Texts(), digest)
			}
			seen[digest] = true
		}
	}
	for _, run := range []schemas.Run{"one", "same", "second", "third"} {
		exact(t, plane.Bus, run)
	}
	stop() // it would put away what is forged
	store(t, plane.Bus, "forged", third, func(e *schemas.Trajectory) { e.Prompt3 = "a photo" })
	report, err := verify.Run(t.Context(), plane.Bus, "forged", verify.Options{Models: distilledFamily()})
	if err != nil || report.OK(0) || report.MaxConditioning == 0 {
		t.Errorf("another text than the one it was made with: %+v, %v", report, err)
	}
}
