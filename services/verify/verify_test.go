package verify_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// The samples of each run here: steps of one sample, the stochastic among them, of which each
// has both latents.
const steps, stochastic, samples = 4, 2, 2

// sampled is a bus that holds the run r1.
func sampled(t *testing.T) *bus.Bus {
	t.Helper()
	return sampledPlane(t).Bus
}

func sampledPlane(t *testing.T) *bustest.Plane {
	t.Helper()
	plane := bustest.New(t)
	sample(t, plane, "r1", prompt())
	return plane
}

// prompt asks for a group whose samples have their states around the steps 1 and 2.
func prompt() *schemas.Prompt {
	return &schemas.Prompt{
		UID: "p1", Prompt: "a red fox", Seed: new(int64(5)), GroupSize: new(int64(samples)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(steps)),
			Height:            new(int64(64)), Width: new(int64(64)), TrueCFGScale: new(2.0),
			NegativePrompt: new("a fox"),
			Rollout:        schemas.Rollout{SDEStepIndices: []int64{1, 2}},
		},
	}
}

// sample serves one prompt to its end, with the model that it names, else with synthetic.
func sample(t *testing.T, plane *bustest.Plane, run schemas.Run, prompt *schemas.Prompt) {
	t.Helper()
	sampleWith(t, plane, string(cmp.Or(prompt.Model, "synthetic")), run, prompt)
}

// sampleWith serves one prompt to its end, with a model.
func sampleWith(t *testing.T, plane *bustest.Plane, model string, run schemas.Run, prompt *schemas.Prompt) {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model = model
	service := plane.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return pipeline.Run(ctx, b, config,
			zerolog.Nop())
	})
	if _, err := client.New(plane.Bus).Publish(t.Context(), run, prompt); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, plane.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, prompt.UID))
	service.Stop() // it would put away what is forged
}

// forge stores the first trajectory of r1 once more, changed, in a run of its own.
func forge(t *testing.T, b *bus.Bus, run schemas.Run, change func(*schemas.Trajectory)) {
	t.Helper()
	trajectory, err := client.New(b).Trajectory(t.Context(), "r1", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	store(t, b, run, trajectory, change)
}

// store stores a trajectory once more, changed, in a run of its own.
func store(t *testing.T, b *bus.Bus, run schemas.Run, trajectory *schemas.Trajectory,
	change func(*schemas.Trajectory),
) {
	t.Helper()
	data, err := schemas.Encode(trajectory)
	if err != nil {
		t.Fatal(err)
	}
	var e schemas.Trajectory
	if err := schemas.Decode(data, &e); err != nil {
		t.Fatal(err)
	}
	e.Run = run
	change(&e)
	p := b.NewPublisher(1, 1<<20)
	defer p.Close()
	if _, err := p.Publish(t.Context(), &e); err != nil {
		t.Fatal(err)
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	b := sampled(t)
	var seen []int
	report, err := verify.Run(t.Context(), b, "r1", verify.Options{Progress: func(n int) { seen = append(seen, n) }})
	if err != nil {
		t.Fatal(err)
	}
	if !report.OK(0) || report.Trajectories != samples || report.Steps != samples*stochastic || report.MaxRatio != 0 {
		t.Errorf("a run as it was made: %+v", report)
	}
	if !slices.Equal(seen, []int{1, 2}) {
		t.Errorf("progress %v, want each trajectory", seen)
	}

	forge(t, b, "moved", func(t *schemas.Trajectory) { t.LogProbs[1] = new(*t.LogProbs[1] + 0.25) })
	forge(t, b, "scaled", func(t *schemas.Trajectory) { t.TrueCFGScale = 3 })
	forge(t, b, "swapped", func(t *schemas.Trajectory) { t.Steps[1], t.Steps[2] = t.Steps[2], t.Steps[1] })
	forge(t, b, "reworded", func(t *schemas.Trajectory) { t.Prompt = "a blue fox" })
	forge(t, b, "weights", func(t *schemas.Trajectory) { t.WeightsDigest = strings.Repeat("0", 64) })
	for _, c := range []struct {
		run   schemas.Run
		want  string
		ratio bool
	}{
		{"moved", "log_prob: the event has", true},
		{"scaled", "schedule_digest: stored", true},
		{"swapped", "holds step 2 of p1", false},
		{"reworded", "", true},
		{"weights", "weights_digest: trajectory has", false},
	} {
		report, err := verify.Run(t.Context(), b, c.run, verify.Options{})
		if err != nil {
			t.Errorf("%s: %v", c.run, err)
			continue
		}
		said := fmt.Sprint(report.Mismatches)
		if report.OK(0) || !strings.Contains(said, c.want) || c.ratio != (report.MaxRatio > 0) {
			t.Errorf("%s: %+v; want it found, %q said, a ratio other than 1: %v", c.run, report, c.want, c.ratio)
		}
	}
}

// What is gone is counted, and keeps the run from being verified.
func TestRun_Unproven(t *testing.T) {
	t.Parallel()
	b := sampled(t)
	trajectory, err := client.New(b).Trajectory(t.Context(), "r1", "p1", 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(t.Context(), schemas.StreamSteps, trajectory.Steps[3].Seq); err != nil {
		t.Fatal(err)
	}
	report, err := verify.Run(t.Context(), b, "r1", verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if report.OK(0) || report.StepsGone != 1 || len(report.Mismatches) != 0 ||
		!strings.Contains(report.Unproven, "1 step event gone") {
		t.Errorf("without one step: %+v", report)
	}
	if _, err := b.PurgeSubject(t.Context(), schemas.StreamSteps, schemas.Prefix+"step.>"); err != nil {
		t.Fatal(err)
	}
	report, err = verify.Run(t.Context(), b, "r1", verify.Options{})
	if err != nil || report.OK(0) || report.Steps != 0 || report.StepsGone != samples*steps || report.Unproven == "" {
		t.Errorf("without any step: %+v, %v", report, err)
	}
}

// A check of nothing is no proof, and says what a run must keep; garbage among trajectories is one mismatch.
func TestRun_NothingChecked(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	for run, c := range map[schemas.Run]struct {
		rollout schemas.Rollout
		want    string
	}{
		"ode":  {schemas.Rollout{SDEType: schemas.TransitionODE, ReturnStepIndices: []int64{}}, "no state is stored"},
		"bare": {schemas.Rollout{SDEStepIndices: []int64{1}, ReturnStepIndices: []int64{4}}, "--return-steps"},
	} {
		p := prompt()
		p.Rollout = c.rollout
		sample(t, plane, run, p)
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{})
		if err != nil || report.OK(0) || report.Steps != 0 || !strings.Contains(report.Unproven, c.want) {
			t.Errorf("%s: %+v, %v; want %q", run, report, err, c.want)
		}
	}
	sample(t, plane, "kept", prompt())
	plane.Forge(t, schemas.TrajectorySubject("kept", "zz", 0, schemas.StageMain), []byte("junk"))
	report, err := verify.Run(t.Context(), plane.Bus, "kept", verify.Options{})
	if err != nil || report.Trajectories != samples+1 || report.Steps != samples*stochastic ||
		len(report.Mismatches) != 1 {
		t.Errorf("with garbage: %+v, %v", report, err)
	}
}

// A sample without a stochastic step is made again from its start, whatever integrates it, and of which dtype; one of
// other noise or another text is not what is stored.
func TestRun_MadeAgain(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	for i, solver := range []string{"euler", "heun", "rk4", "dpm", "unipc"} {
		run, p := schemas.Run("ode-"+solver), prompt()
		p.Rollout = schemas.Rollout{
			SDEType: schemas.TransitionODE, Solver: solver, ReturnStepIndices: []int64{steps},
			LatentsDType: []string{"F32", "BF16"}[i%2],
		}
		sample(t, plane, run, p)
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{})
		if err != nil || !report.OK(0) || report.Rolled != samples || report.MaxRolled != 0 || report.Steps != 0 {
			t.Errorf("%s: %+v, %v", solver, report, err)
		}
	}
	trajectory, err := client.New(plane.Bus).Trajectory(t.Context(), "ode-unipc", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	store(t, plane.Bus, "reseeded", trajectory, func(e *schemas.Trajectory) { e.NoiseSeed++ })
	store(t, plane.Bus, "reworded", trajectory, func(e *schemas.Trajectory) { e.Prompt = "a blue fox" })
	for _, run := range []schemas.Run{"reseeded", "reworded"} {
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{})
		if err != nil || report.OK(1e-6) || report.Rolled != 1 || report.MaxRolled < 1e-3 {
			t.Errorf("%s: %+v, %v", run, report, err)
		}
	}
}

// Every log-prob is recomputed exactly, whatever latents are stored as and whichever way a rollout takes.
func TestRun_RatioIsOne(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	for i, rollout := range []schemas.Rollout{
		{LatentsDType: "F32"},
		{LatentsDType: "F16", SDEType: "cps", SDEStepIndices: []int64{0, 1, 2}, Solver: "heun"},
		{
			LatentsDType: "BF16", SDEType: "dance_sde", Solver: "unipc", LogProbKind: "scaled",
			SDEWindow: &schemas.SDEWindow{Size: 2, Range: []int64{0, 3}, Strategy: "noncontiguous"},
		},
		{SDEType: "cps", LogProbKind: "squared", SDEStepIndices: []int64{0, 1}},
	} {
		run, p := schemas.Run(fmt.Sprint("exact-", i)), prompt()
		p.Rollout, p.Height, p.Width = rollout, new(int64(96)), new(int64(32))
		sample(t, plane, run, p)
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{})
		if err != nil || !report.OK(0) || report.MaxRatio != 0 || report.Steps < samples*stochastic ||
			report.StepsSkipped != 0 {
			t.Errorf("%+v: %+v, %v", rollout, report, err)
		}
	}
}

// A sample that a server drew, and that no model here can compute again, is held to its digests alone.
func TestRun_NotComputed(t *testing.T) {
	t.Parallel()
	b := sampled(t)
	by := &schemas.Drawn{Engine: schemas.Engine{Name: schemas.EngineVLLM, Verify: schemas.VerifyNone}}
	forge(t, b, "served", func(t *schemas.Trajectory) {
		t.Drawn = by
	})
	forge(t, b, "spoiled", func(t *schemas.Trajectory) {
		t.Drawn, t.ContentDigest = by, strings.Repeat("0", 64)
	})
	for run, mismatches := range map[schemas.Run]int{"served": 0, "spoiled": 1} {
		report, err := verify.Run(t.Context(), b, run, verify.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if report.OK(0) || report.NotComputed != 1 || report.Steps != 0 || len(report.Mismatches) != mismatches {
			t.Errorf("%s: %+v", run, report)
		}
	}
}

// Each trajectory is judged by its own model. One whose model is not given is said by name: it is neither wrong nor
// right.
func TestRun_Lanes(t *testing.T) {
	t.Setenv("MEANDER_MODELS", "../../deploy/models")
	plane := sampledPlane(t)
	b := plane.Bus
	text := &schemas.Prompt{
		UID: "p2", Routing: schemas.Routing{Model: "sums"}, Prompt: "1+2=?", Seed: new(int64(5)),
		GroupSize: new(int64(samples)),
	}
	sample(t, plane, "r1", text)
	forge(t, b, "r1", func(t *schemas.Trajectory) {
		t.UID, t.Group.Batch, t.Lane, t.WeightsDigest = "p3", "p3", "elsewhere", strings.Repeat("0", 64)
	})
	gone := func(lane schemas.Lane, n int) verify.Missing {
		return verify.Missing{Lane: lane, Model: string(lane), Trajectories: n}
	}
	for _, c := range []struct {
		name    string
		options verify.Options
		images  int // of the samples that are verified
		texts   int
		missing []verify.Missing // without digests
	}{
		{"those that are found", verify.Options{}, samples, samples, []verify.Missing{gone("elsewhere", 1)}},
		{
			"those given",
			verify.Options{Model: []string{"sums", "synthetic"}},
			samples, samples,
			[]verify.Missing{gone("elsewhere", 1)},
		},
		{
			"one given",
			verify.Options{Model: []string{"synthetic"}},
			samples, 0,
			[]verify.Missing{gone("sums", samples), gone("elsewhere", 1)},
		},
		{"a lane", verify.Options{Model: []string{"synthetic"}, Lane: "synthetic"}, samples, 0, nil},
		{"a group", verify.Options{UIDs: []schemas.UID{"p2"}}, 0, samples, nil},
		{
			"another model",
			verify.Options{Model: []string{"sums"}, UIDs: []schemas.UID{"p1"}},
			0, 0,
			[]verify.Missing{gone("synthetic", samples)},
		},
	} {
		r, err := verify.Run(t.Context(), b, "r1", c.options)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for i := range r.Missing {
			if len(r.Missing[i].WeightsDigest) != 64 {
				t.Errorf("%s: %+v; must name the weights", c.name, r.Missing[i])
			}
			r.Missing[i].WeightsDigest = ""
		}
		if len(r.Mismatches) > 0 || r.Steps != c.images*stochastic || (r.Tokens > 0) != (c.texts > 0) ||
			r.OK(0) != (c.missing == nil) || !slices.Equal(r.Missing, c.missing) {
			t.Errorf("%s: %+v; want %d steps, tokens %v, missing %+v", c.name, r, c.images*stochastic, c.texts > 0,
				c.missing)
		}
	}
	for name, c := range map[string]struct {
		options verify.Options
		want    string
	}{
		"a lane that is not there": {
			verify.Options{Lane: "signs"},
			`lane "signs": run "r1" has none of it; must be one of ["elsewhere" "sums" "synthetic"]`,
		},
		"a group that is not there": {verify.Options{UIDs: []schemas.UID{"p9"}}, `has no stored trajectories of a group "p9"`},
		"an adapter of which": {verify.Options{
			Open:  model.Options{Adapter: "x"},
			Model: []string{"synthetic", "sums"},
		}, "adapter"},
	} {
		if _, err := verify.Run(t.Context(), b, "r1", c.options); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q said", name, err, c.want)
		}
	}
}

func TestRun_Errors(t *testing.T) {
	t.Parallel()
	b := sampled(t)
	if _, err := verify.Run(t.Context(), b, "r1", verify.Options{Model: []string{"/does/not/exist"}}); err == nil {
		t.Error("a model that is not there: no error")
	} else if _, ok := errors.AsType[*verify.ModelError](err); !ok {
		t.Errorf("a model that is not there: %v, want a ModelError", err)
	}
	if _, err := verify.Run(t.Context(), b, "nobody", verify.Options{}); err == nil ||
		!strings.Contains(err.Error(), `run "nobody" has no stored trajectories`) {
		t.Errorf("a run that is not there: %v", err)
	}
}

func TestReport_OK(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		report    verify.Report
		tolerance float64
		want      bool
	}{
		{"all right", verify.Report{Steps: 1}, 0, true},
		{"off", verify.Report{Steps: 1, MaxRatio: 1e-6}, 0, false},
		{"off within the tolerance", verify.Report{Steps: 1, MaxRatio: 1e-6}, 1e-5, true},
		{"off within the card's tolerance", verify.Report{Steps: 1, MaxRatio: 1e-6, Tolerance: 1e-5}, 0, true},
		{"a mismatch", verify.Report{Steps: 1, Mismatches: []verify.Mismatch{{}}}, 1, false},
		{"no number", verify.Report{Steps: 1, MaxRatio: verify.Difference(math.NaN())}, 1, false},
		{"not given", verify.Report{Steps: 1, Missing: []verify.Missing{{}}}, 1, false},
		{"unproven", verify.Report{Unproven: "nothing was checked"}, 1, false},
	} {
		if got := c.report.OK(c.tolerance); got != c.want || got != (len(c.report.Faults(c.tolerance)) == 0) {
			t.Errorf("%s: %v, want %v; it says %q", c.name, got, c.want, c.report.Faults(c.tolerance))
		}
	}
}

// serveAgain stores a sample once more, with its events, in a run of its own, as one that a server drew with weights
// that it does not name.
func serveAgain(t *testing.T, b *bus.Bus, run schemas.Run, sample *schemas.Trajectory, by schemas.Engine) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	store(t, b, run, sample, func(e *schemas.Trajectory) {
		e.Drawn, e.WeightsDigest = &schemas.Drawn{Engine: by}, "served by "+by.Name
		var content [][32]byte
		for i, ref := range e.Steps {
			m, err := b.Get(t.Context(), schemas.StreamSteps, ref.Seq)
			must(err)
			var event schemas.StepEvent
			if e.Text == nil {
				step, err := b.LoadStep(t.Context(), m)
				must(err)
				step.Run, step.WeightsDigest, step.Seal = run, e.WeightsDigest, ""
				event = step
			} else {
				tokens, err := b.LoadTokens(t.Context(), m)
				must(err)
				if tokens.Run, tokens.WeightsDigest = run, e.WeightsDigest; tokens.Generated {
					tokens.Engine = by.String()
				}
				event = tokens
			}
			data, err := schemas.Encode(event)
			must(err)
			payload, err := schemas.PayloadDigest(data)
			must(err)
			digest, err := schemas.ContentDigest(event)
			must(err)
			ack, err := b.Publish(t.Context(), event)
			must(err)
			e.Steps[i], content = schemas.StepRef{Seq: ack.Seq, Digest: payload}, append(content, digest)
		}
		e.ContentDigest = schemas.StepsDigest(content)
	})
}

// Tokens of a server that gives the same bits are drawn again, those of another are not.
func TestRun_DrawnTokens(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	const sums = "../../deploy/models/sums"
	sampleWith(t, plane, sums, "r1", &schemas.Prompt{UID: "p1", Prompt: "2+2=?", GroupSize: new(int64(1))})
	made, err := client.New(plane.Bus).Trajectory(t.Context(), "r1", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	for run, mode := range map[schemas.Run]string{"tolerant": schemas.VerifyTolerance, "exact": schemas.VerifyExact} {
		serveAgain(t, plane.Bus, run, made, schemas.Engine{
			Name: schemas.EngineSGLang, Values: schemas.EngineLogits, Filters: schemas.FiltersMinPLast, Verify: mode,
		})
		report, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{Model: []string{sums}})
		if err != nil {
			t.Fatal(err)
		}
		if exact := mode == schemas.VerifyExact; !report.OK(0) || (report.Tokens > 0) != exact ||
			(report.Drawn > 0) == exact {
			t.Errorf("%s: %+v, %v", run, report, err)
		}
	}
}

// What a server says of a step is held to a tolerance of its own, with the weights of the model here, unless the server
// gives the same bits.
func TestRun_DrawnSteps(t *testing.T) {
	t.Parallel()
	b := sampled(t)
	forge(t, b, "served", func(t *schemas.Trajectory) { t.Prompt = "a blue fox" }) // its log-probs are others
	served, err := client.New(b).Trajectory(t.Context(), "served", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	serveAgain(t, b, "tolerant", served, schemas.Engine{Name: schemas.EngineVLLM, Verify: schemas.VerifyTolerance})
	serveAgain(t, b, "exact", served, schemas.Engine{Name: schemas.EngineVLLM, Verify: schemas.VerifyExact})
	for _, c := range []struct {
		run       schemas.Run
		tolerance float64
		fault     string
	}{{"tolerant", 0, "--engine-tolerance"}, {"tolerant", 1e9, ""}, {"exact", 1e9, "--tolerance"}} {
		report, err := verify.Run(t.Context(), b, c.run, verify.Options{EngineTolerance: c.tolerance})
		if err != nil {
			t.Fatal(err)
		}
		faults := strings.Join(report.Faults(0), "; ")
		if len(report.Mismatches) > 0 || report.Steps != stochastic || (faults == "") != (c.fault == "") ||
			!strings.Contains(faults, c.fault) || (report.MaxRatio > 0) != (c.run == "exact") ||
			(report.MaxDrawnDifference > 0) != (c.run == "tolerant") {
			t.Errorf("%s with a tolerance of %g: %+v, faults %q; want %q", c.run, c.tolerance, report, faults, c.fault)
		}
	}
}
