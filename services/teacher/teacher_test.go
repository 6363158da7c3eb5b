package teacher_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/teacher"
)

const (
	sums    = "../../deploy/models/sums"
	signs   = "../../deploy/models/signs"
	adapter = "../../deploy/demo/adapter" // of signs
)

// sample serves one prompt of the run r1 to its end, with a model and an adapter.
func sample(t *testing.T, plane *bustest.Plane, model, adapter string, p *schemas.Prompt,
	change ...func(*pipeline.Config),
) {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Adapter = model, adapter
	for _, f := range change {
		f(&config)
	}
	service := plane.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return pipeline.Run(ctx, b, config, zerolog.Nop())
	})
	if _, err := client.New(plane.Bus).Publish(t.Context(), "r1", p); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, plane.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r1", p.UID))
	service.Stop()
}

// textPrompt draws with filters, so that log-probs before and after them differ.
func textPrompt() *schemas.Prompt {
	return &schemas.Prompt{
		UID: "text", Prompt: "347+58=?", Seed: new(int64(5)), GroupSize: new(int64(2)),
		Text: &schemas.Text{Temperature: new(0.7), TopK: new(int64(6))},
	}
}

// imagePrompt has two stochastic steps of four.
func imagePrompt() *schemas.Prompt {
	return &schemas.Prompt{
		UID: "image", Prompt: "a red sign", Seed: new(int64(5)), GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(4)), Height: new(int64(64)), Width: new(int64(64)), TrueCFGScale: new(2.0),
			Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 2}},
		},
	}
}

// teach has a teacher answer under a name until the test ends, or stop is called.
func teach(t *testing.T, plane *bustest.Plane, name, model string, change func(*teacher.Config)) (stop func()) {
	t.Helper()
	config, listening := teacher.DefaultConfig(), make(chan string, 1)
	config.Model, config.Name = model, name
	config.Listening = func(name string) { listening <- name }
	if change != nil {
		change(&config)
	}
	service := plane.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		err := teacher.Run(ctx, config, b, zerolog.Nop())
		if err != nil {
			listening <- err.Error()
		}
		return err
	})
	if got := <-listening; got != name {
		t.Fatalf("teacher %s: %s", name, got)
	}
	return service.Stop
}

func ask(t *testing.T, plane *bustest.Plane, name string, uid schemas.UID, sample, topK int64) (*schemas.Trajectory,
	*schemas.TeacherReply,
) {
	t.Helper()
	c := client.New(plane.Bus)
	reply, err := c.TeacherReply(t.Context(), schemas.TeacherRequest{
		Name: name, Run: "r1", UID: uid, SampleIndex: sample, TopK: topK,
	})
	if err != nil {
		t.Fatal(err)
	}
	trajectory, err := c.Trajectory(t.Context(), "r1", uid, sample)
	if err != nil {
		t.Fatal(err)
	}
	return trajectory, reply
}

func floats(t *testing.T, x *schemas.Tensor) []float32 {
	t.Helper()
	out := make([]float32, len(x.Data)/4)
	if err := tensor.F32.DecodeFloats(out, x.Data); err != nil {
		t.Fatal(err)
	}
	return out
}

// With its own weights a text gets exactly the numbers that are stored of it, of every token.
func TestRun_TextWithItsOwnWeights(t *testing.T) {
	plane := bustest.New(t)
	sample(t, plane, sums, "", textPrompt())
	teach(t, plane, "own", sums, nil)
	const k = 3
	for i := range int64(2) {
		stored, reply := ask(t, plane, "own", "text", i, k)
		if reply.WeightsDigest != stored.WeightsDigest || reply.Model != "sums" || reply.Backend != stored.Backend {
			t.Errorf("computed by %s %.8s on %s, the sample by %.8s on %s", reply.Model, reply.WeightsDigest,
				reply.Backend,
				stored.WeightsDigest, stored.Backend)
		}
		for name, pair := range map[string][2]*schemas.Tensor{
			"log_probs":           {stored.Text.LogProbs, reply.LogProbs},
			"processed_log_probs": {stored.Text.ProcessedLogProbs, reply.ProcessedLogProbs},
			"entropies":           {stored.Text.Entropies, reply.Entropies},
		} {
			if want, got := floats(t, pair[0]), floats(t, pair[1]); !slices.Equal(got, want) {
				t.Errorf("%s: %v; stored are %v", name, got, want)
			}
		}
		checkTop(t, stored.Text, reply, k)
	}
}

// checkTop checks the k likeliest tokens: they fall, the first is that of top_log_probs, and the token itself has its
// log-prob where it is among them.
func checkTop(t *testing.T, stored *schemas.TextResult, reply *schemas.TeacherReply, k int) {
	t.Helper()
	ids, mask, lse, top := stored.IDs.Data, stored.Mask.Data, floats(t, reply.LogSumExps), floats(t, reply.TopLogits)
	logProbs, best := floats(t, reply.LogProbs), floats(t, stored.TopLogProbs)
	if want := []int64{int64(len(mask)), int64(k)}; !slices.Equal(reply.TopIDs.Shape, want) {
		t.Fatalf("top_ids: shape %v, want %v", reply.TopIDs.Shape, want)
	}
	for at := range mask {
		if mask[at] == 0 {
			continue
		}
		row := top[at*k : (at+1)*k]
		if !slices.IsSortedFunc(row, func(a, b float32) int { return int(math.Copysign(1, float64(b-a))) }) {
			t.Errorf("token %d: logits %v do not fall", at, row)
		}
		if got := float64(row[0]) - float64(lse[at]); math.Abs(got-float64(best[at])) > 1e-6 {
			t.Errorf("token %d: the likeliest has %v, stored is %v", at, got, best[at])
		}
		for j, z := range row {
			if binary.LittleEndian.Uint32(reply.TopIDs.Data[4*(at*k+j):]) == binary.LittleEndian.Uint32(ids[4*at:]) &&
				math.Abs(float64(z)-float64(lse[at])-float64(logProbs[at])) > 1e-6 {
				t.Errorf("token %d: log-prob %v, by its logit %v", at, logProbs[at], z-lse[at])
			}
		}
	}
}

// velocities asks for those of the image, and returns them by step.
func velocities(t *testing.T, c *client.Client, name string, substeps int64) (*schemas.TeacherReply, [][]float32) {
	t.Helper()
	reply, err := c.TeacherReply(t.Context(), schemas.TeacherRequest{
		Name: name, Run: "r1", UID: "image", Substeps: substeps,
	})
	if err != nil {
		t.Fatal(err)
	}
	all, steps := floats(t, reply.Velocities), len(reply.StepIndices)
	return reply, slices.Collect(slices.Chunk(all, len(all)/steps))
}

// The velocities of a teacher are those of its log-probs. That of one step is the model's at the stored state; that of
// several leads to where as many steps of euler lead, in float64.
func TestRun_VelocitiesOfFinerSteps(t *testing.T) {
	plane := bustest.New(t)
	sample(t, plane, signs, adapter, imagePrompt())
	teach(t, plane, "own", signs, func(c *teacher.Config) { c.Adapter = adapter })
	c := client.New(plane.Bus)
	stored, err := c.Trajectory(t.Context(), "r1", "image", 0)
	if err != nil {
		t.Fatal(err)
	}
	plan, states := sampling.Plan(&stored.Sampling), map[int64][]float32{}
	for i := int64(1); i <= 3; i++ {
		state, err := plane.Bus.LoadState(t.Context(), stored, i)
		if err != nil {
			t.Fatal(err)
		}
		states[i] = floats(t, state)
	}
	models, err := families.All().Open(signs, model.Options{Adapter: adapter, AdapterScale: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer models.Close()
	conds, err := images.Encode(t.Context(), models, &stored.Sampling, nil)
	if err != nil {
		t.Fatal(err)
	}
	given := images.Given{Velocities: images.NewVelocities(models), Sampling: &stored.Sampling, Conditionings: conds}
	for _, substeps := range []int{1, 5} {
		reply, found := velocities(t, c, "own", int64(substeps))
		for k, step := range reply.StepIndices {
			p, err := flow.Score(plan, int(step), states[step], found[k], states[step+1])
			if err != nil || p.Mean != reply.StepLogProbs[k] || (substeps == 1) != (p.Mean == *stored.LogProbs[step]) {
				t.Errorf("%d substeps, step %d: log-prob %v, by its velocity %v, stored %v: %v", substeps, step,
					reply.StepLogProbs[k], p.Mean, *stored.LogProbs[step], err)
			}
			want := meanVelocity(t, given, plan, step, substeps, states[step])
			for i, v := range found[k] {
				// States are rounded to float32 at each substep: five of them, 2^-24 of 4 each, over a step of 0.3.
				if off := math.Abs(float64(v) - want[i]); off > 1e-5 {
					t.Fatalf("%d substeps, step %d, element %d: %v, want %v", substeps, step, i, v, want[i])
				}
			}
		}
	}
}

// meanVelocity is the mean velocity over a step of even substeps of euler, whose states are float64.
func meanVelocity(
	t *testing.T, given images.Given, plan flow.Plan, step int64, substeps int, from []float32,
) []float64 {
	t.Helper()
	begin, length := float64(plan.Sigmas[step]), float64(plan.Sigmas[step+1])-float64(plan.Sigmas[step])
	sum, x := make([]float64, len(from)), make([]float32, len(from))
	for k := range substeps {
		for i, s := range sum {
			x[i] = float32(float64(from[i]) + s*length/float64(substeps))
		}
		sigma := float32(begin + length*float64(k)/float64(substeps))
		v, err := given.Velocity(t.Context(), images.Point{Step: step, X: x, Sigma: sigma})
		if err != nil {
			t.Fatal(err)
		}
		for i := range sum {
			sum[i] += float64(v[i])
		}
	}
	for i := range sum {
		sum[i] /= float64(substeps)
	}
	return sum
}

// With its own weights, an adapter among them, an image gets exactly the log-probs that are stored of it; with others
// it gets others.
func TestRun_ImageWithItsOwnWeights(t *testing.T) {
	plane := bustest.New(t)
	sample(t, plane, signs, adapter, imagePrompt())
	teach(t, plane, "own", signs, func(c *teacher.Config) { c.Adapter = adapter })
	teach(t, plane, "base", signs, nil)
	stored, own := ask(t, plane, "own", "image", 0, 0)
	_, base := ask(t, plane, "base", "image", 0, 0)
	for _, reply := range []*schemas.TeacherReply{own, base} {
		if !slices.Equal(reply.StepIndices, []int64{1, 2}) || reply.LogProbKind != stored.LogProbKind ||
			reply.StepsLeftOut != nil {
			t.Fatalf("steps %v of kind %s, left out %v", reply.StepIndices, reply.LogProbKind, reply.StepsLeftOut)
		}
	}
	for i, step := range own.StepIndices {
		want := *stored.LogProbs[step]
		if own.StepLogProbs[i] != want || base.StepLogProbs[i] == want || math.Abs(base.StepLogProbs[i]-want) > 1 {
			t.Errorf("step %d: %v with its own weights, %v without the adapter; stored is %v", step,
				own.StepLogProbs[i],
				base.StepLogProbs[i], want)
		}
	}
	if own.WeightsDigest != stored.WeightsDigest || base.WeightsDigest == stored.WeightsDigest {
		t.Errorf("digests %.8s and %.8s, of the sample %.8s", own.WeightsDigest, base.WeightsDigest,
			stored.WeightsDigest)
	}
}

// A teacher by a worker reads the files that a sample was conditioned on: with its own weights it gets its log-probs.
func TestRun_ConditionsByAWorker(t *testing.T) {
	plane, dir := bustest.New(t), remotetest.Folder(t, remotetest.EditClass, 1)
	_, sampling := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	w, teaching := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	file, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 64, 64)))
	if err != nil {
		t.Fatal(err)
	}
	p := imagePrompt()
	p.Conditions = []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: file}}}
	sample(t, plane, dir, "", p, func(c *pipeline.Config) { c.Sampler.Engine = "torch=" + sampling })
	teach(t, plane, "own", dir, func(c *teacher.Config) { c.Engine = "torch=" + teaching })
	before := w.Calls("condition")
	for range 2 {
		stored, own := ask(t, plane, "own", "image", 0, 0)
		for i, step := range own.StepIndices {
			if own.StepLogProbs[i] != *stored.LogProbs[step] {
				t.Errorf("step %d: %v; stored is %v", step, own.StepLogProbs[i], *stored.LogProbs[step])
			}
		}
		for substeps, says := range map[int64]string{1: "", 2: "substeps: 2; must be 1: the model is evaluated"} {
			_, err := client.New(plane.Bus).TeacherReply(t.Context(), schemas.TeacherRequest{
				Name: "own", Run: "r1", UID: "image", Substeps: substeps,
			})
			if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
				t.Errorf("%d substeps: %v", substeps, err)
			}
		}
		if len(own.StepIndices) != 2 || w.Calls("condition") != before+1 {
			t.Errorf("steps %v, %d conditions sent", own.StepIndices, w.Calls("condition")-before)
		}
	}
}

// A request that cannot be answered is refused with its reason.
func TestRun_Refuses(t *testing.T) {
	plane := bustest.New(t)
	sample(t, plane, sums, "", textPrompt())
	sample(t, plane, "synthetic", "", imagePrompt())
	few := imagePrompt()
	few.UID, few.Rollout.ReturnStepIndices = "few", []int64{2, 4}
	sample(t, plane, "synthetic", "", few)
	ode := imagePrompt()
	ode.UID, ode.Rollout.SDEStepIndices = "ode", []int64{}
	sample(t, plane, "synthetic", "", ode)
	fine := checkpoint.Dir(t, checkpoint.Config{Mult: []int{1, 2, 2}}) // fewer pixels a token
	other := t.TempDir()
	if err := (qwen2test.Random{
		Width: 48, Heads: 3, KVHeads: 1, Vocabulary: 300, MaxPositions: 64,
	}).Write(other); err != nil {
		t.Fatal(err)
	}
	for name, model := range map[string]string{"text": sums, "image": "synthetic", "fine": fine, "other": other} {
		teach(t, plane, name, model, nil)
	}
	c, substeps := client.New(plane.Bus), int64(0)
	refused := func(name string, uid schemas.UID, topK int64, code, says string) {
		t.Helper()
		_, err := c.TeacherReply(t.Context(), schemas.TeacherRequest{
			Name: name, Run: "r1", UID: uid, TopK: topK, Substeps: substeps,
		})
		var refusal *client.RefusedError
		if !errors.As(err, &refusal) || refusal.Code != code || !strings.Contains(err.Error(), says) {
			t.Errorf("%s of %s: %v; want %s: %s", uid, name, err, code, says)
		}
	}
	refused("text", "nobody", 0, schemas.CodeUnknownSample,
		"sample 0 of group nobody of run r1: no trajectory is stored")
	refused("text", "image", 0, schemas.CodeUnfit, "it is an image; the teacher's model sums makes texts")
	refused("image", "text", 0, schemas.CodeUnfit, "it is a text; the teacher's model synthetic makes images")
	refused("other", "text", 0, schemas.CodeUnfit, "must be below 300, the vocabulary of the teacher's model")
	refused("fine", "image", 0, schemas.CodeUnfit, "latents_shape")
	refused("image", "image", 2, schemas.CodeInvalid, "top_k: 2; must be absent")
	refused("image", "few", 0, schemas.CodeUnfit, "keep them with return_step_indices")
	substeps = 5
	refused("text", "text", 0, schemas.CodeInvalid, "substeps: 5; must be absent, texts have no steps")
	refused("fine", "image", 0, schemas.CodeUnfit, "latents_shape")
	refused("image", "ode", 0, schemas.CodeUnfit, "no step is stochastic, so there are no log-probs")
	for _, substeps = range []int64{-1, schemas.MaxSubsteps + 1} {
		_, err := c.TeacherReply(t.Context(), schemas.TeacherRequest{
			Name: "image", Run: "r1", UID: "image", Substeps: substeps,
		})
		if want := fmt.Sprintf("substeps: %d; must be between 0 and 100", substeps); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
	substeps = 0
	nobody, negative := schemas.TeacherRequest{Name: "nobody", Run: "r1", UID: "text"}, schemas.TeacherRequest{
		Name: "text", Run: "r1", UID: "text", SampleIndex: -1,
	}
	if _, err := c.TeacherReply(t.Context(), nobody); !errors.Is(err, client.ErrNoTeacher) {
		t.Errorf("a teacher that is not there: %v", err)
	}
	if _, err := c.TeacherReply(t.Context(), negative); err == nil {
		t.Error("sample -1: no error")
	}
	if _, err := plane.Bus.PurgeSubject(t.Context(), schemas.StreamSteps, schemas.Prefix+"step.>"); err != nil {
		t.Fatal(err)
	}
	refused("image", "image", 0, schemas.CodeGone, "removed by age or by hand")
}

// More requests than workers are all answered, those in flight when the teacher is stopped too.
func TestRun_StopsWhenAllIsAnswered(t *testing.T) {
	plane := bustest.New(t)
	sample(t, plane, sums, "", textPrompt())
	stop := teach(t, plane, "sums", sums, func(c *teacher.Config) { c.Name, c.Workers = "sums", 1 })
	c, first := client.New(plane.Bus), make(chan struct{}, 1)
	own := schemas.TeacherRequest{Name: "sums", Run: "r1", UID: "text", SampleIndex: 1}
	var asking sync.WaitGroup
	for range 32 {
		asking.Go(func() {
			if _, err := c.TeacherReply(t.Context(), own); err != nil &&
				!errors.Is(err, client.ErrNoTeacher) {
				t.Error(err)
			} else if err == nil {
				select {
				case first <- struct{}{}:
				default:
				}
			}
		})
	}
	<-first
	stop()
	asking.Wait()
	if _, err := c.TeacherReply(t.Context(), own); !errors.Is(err, client.ErrNoTeacher) {
		t.Errorf("a teacher that has stopped: %v", err)
	}
}

func TestConfig_Validate(t *testing.T) {
	for want, change := range map[string]func(*teacher.Config){
		"":                      func(*teacher.Config) {},
		"model: empty":          func(c *teacher.Config) { c.Model = "" },
		`name: "a b"`:           func(c *teacher.Config) { c.Name = "a b" },
		"adapter_scale: NaN":    func(c *teacher.Config) { c.AdapterScale = math.NaN() },
		"workers: -1":           func(c *teacher.Config) { c.Workers = -1 },
		"drain_timeout: 0s":     func(c *teacher.Config) { c.DrainTimeout = 0 },
		`engine: "vllm=http:/x`: func(c *teacher.Config) { c.Engine = "vllm=http:/x" },
		`dtype: "f8"`:           func(c *teacher.Config) { c.DType = "f8" },
	} {
		c := teacher.DefaultConfig()
		c.Model = sums
		change(&c)
		if err := c.Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
