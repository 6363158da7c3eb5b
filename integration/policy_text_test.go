package integration_test

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// An adapter is pushed to a lane of texts while a conversation waits for its reply: by the rule, the rest of it is the
// new weights', or the old ones', or all of it is made again. Each token says whose it is, and verify draws all of them
// again, exactly.
func TestPolicy_Texts(t *testing.T) {
	t.Parallel()
	const module, width, wide = "model.layers.0.mlp.down_proj", 128, 384
	model := sumsFolder(t)
	w := start(t, func(o *config) { o.sampler.Model = model })
	for i, rule := range schemas.SwapRules {
		run, version := schemas.Run(rule), int64(i+1)
		var once sync.Once
		replies(t, w, rule, func(*schemas.InteractRequest) []byte {
			once.Do(func() {
				pushed, err := w.client.PushPolicy(t.Context(),
					parsedLoRA(t, loraFile(t, module, width, wide, 4, uint64(7+i), 0)), client.Push{Rule: rule})
				if err != nil {
					t.Error(err)
					return
				}
				answers, err := w.client.AwaitPolicy(t.Context(), pushed)
				if err != nil || len(answers) != 1 || answers[0].Answer.State != schemas.AppliedApplied ||
					answers[0].Answer.Canary == nil {
					t.Errorf("%s: taken over by %+v, %v", rule, answers, err)
				}
			})
			return packed(t, &schemas.InteractReply{Content: "too low"})
		})
		_, err := w.client.Publish(t.Context(), run, &schemas.Prompt{
			UID: "g", Prompt: "347+58=?", Seed: new(int64(3)), GroupSize: new(int64(2)), Reward: []schemas.RewardSpec{{Name: "confidence"}},
			GroupPolicy: &schemas.GroupPolicy{MaxPolicySpan: new(int64(2))},
			Text:        &schemas.Text{Interaction: &schemas.Interaction{Name: rule, MaxTurns: new(int64(2))}, Logits: &schemas.Logits{Form: "topk"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if a := w.advantages(t, run, 1)["g"]; a.Status != schemas.StatusComplete {
			t.Fatalf("%s: %+v", rule, a)
		}
		seen := map[int64]map[int64]bool{1: {}, 3: {}} // versions by turn
		for sample := range int64(2) {
			own := w.addVersions(t, w.trajectory(t, run, "g", sample), seen)
			if rule == schemas.SwapFinish && len(own) != 1 {
				t.Errorf("finish: sample %d is of versions %v; must be of the one that it began with", sample, own)
			}
		}
		switch first, second := seen[1], seen[3]; {
		case rule == schemas.SwapFinish && (!first[version-1] || !second[version-1]):
			t.Errorf("finish: versions %v, then %v; the sample that was under way must end on %d", first, second,
				version-1)
		case rule == schemas.SwapSwitch && (!first[version-1] || !second[version]):
			t.Errorf("switch: versions %v, then %v; must go on with %d", first, second, version)
		case rule == schemas.SwapRestart && (len(first) != 1 || !first[version] || !second[version]):
			t.Errorf("restart: versions %v, then %v; all must be of %d", first, second, version)
		}
		// On a busy machine the second sample begins after the push, on what was pushed.
		fromFiles := rule == schemas.SwapFinish && !seen[3][version]
		r, err := verify.Run(t.Context(), w.Bus, run, verify.Options{Model: []string{model}})
		if err != nil || r.Trajectories != 2 || r.Tokens == 0 || r.Logits != r.Tokens ||
			(r.Versions == 0) != fromFiles || r.MaxTokenDifference != 0 || len(r.Mismatches) > 0 || r.Unproven != "" {
			t.Errorf("%s: %+v, %v", rule, r, err)
		}
	}
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"NaN":    {loraFile(t, module, width, wide, 4, 7, float32(math.NaN())), "not finite"},
		"module": {loraFile(t, "transformer_blocks.0.attn.to_q", width, wide, 4, 7, 0), "module transformer_blocks.0.attn.to_q"},
		"shape":  {loraFile(t, module, wide, width, 4, 7, 0), "module " + module},
	} {
		a, err := lora.Parse("test", c.file, nil)
		if err == nil {
			err = pushedLoRA(t, w.client, a)
			if _, is := errors.AsType[*client.RefusedError](err); !is {
				t.Errorf("%s: %v; must be refused", name, err)
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
	}
}

// All weights of a language model are pushed in place of the checkpoint's: answers are drawn with them, verify draws
// them again with the same bits, and the checkpoint comes back.
func TestPolicy_WholeTexts(t *testing.T) {
	t.Parallel()
	dir, model := t.TempDir(), sumsFolder(t)
	w := start(t, func(o *config) { o.sampler.Model, o.sampler.WeightsDir = model, dir })
	archive, err := safetensors.Open(filepath.Join(model, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	var tensors []safetensors.Tensor
	for _, name := range archive.Names() {
		x, err := archive.Floats(name)
		if err != nil {
			t.Fatal(err)
		}
		for i := range x {
			if strings.HasSuffix(name, "mlp.down_proj.weight") {
				x[i] /= 2
			}
		}
		info, _ := archive.Info(name)
		half, err := safetensors.FloatTensor(name, tensor.F32, info.Shape, x)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, half)
	}
	file := filepath.Join(dir, "model.safetensors")
	if err := errors.Join(archive.Close(), safetensors.WriteFile(file, tensors, nil)); err != nil {
		t.Fatal(err)
	}
	w.awaitLane(t)
	whole := pushByPath(t, w.client, dir, file)
	digests := map[string]bool{}
	for i, p := range []*schemas.Policy{whole, nil} {
		run := schemas.Run(fmt.Sprintf("whole-%d", i))
		if p == nil {
			if p, err = w.client.PushPolicy(t.Context(), nil, client.Push{}); err != nil {
				t.Fatal(err)
			}
		}
		answers, err := w.client.AwaitPolicy(t.Context(), p)
		if err != nil || len(answers) != 1 || answers[0].Answer.State != schemas.AppliedApplied {
			t.Fatalf("taken over by %+v, %v", answers, err)
		}
		digests[answers[0].Answer.Canary.Digest] = true
		if _, err := w.client.Publish(t.Context(), run, &schemas.Prompt{
			UID: "g", Prompt: "347+58=?", Seed: new(int64(3)), GroupSize: new(int64(2)), Reward: []schemas.RewardSpec{{Name: "confidence"}},
			Text: &schemas.Text{Logits: &schemas.Logits{Form: "topk"}}, Routing: schemas.Routing{MinPolicyVersion: &p.PolicyVersion},
		}); err != nil {
			t.Fatal(err)
		}
		w.advantages(t, run, 1)
		if tr := w.trajectory(t, run, "g", 0); tr.WeightsDigest != p.WeightsDigest {
			t.Errorf("made with %.12s; want %.12s", tr.WeightsDigest, p.WeightsDigest)
		}
		r, err := verify.Run(t.Context(), w.Bus, run, verify.Options{Model: []string{model}, WeightsDir: dir})
		if err != nil || r.Trajectories != 2 || r.Tokens == 0 || r.MaxTokenDifference != 0 || len(r.Mismatches) > 0 ||
			r.Unproven != "" {
			t.Errorf("%+v, %v", r, err)
		}
	}
	if len(digests) != 2 {
		t.Error("the weights draw as the checkpoint does")
	}
}

// addVersions adds the versions that drew the tokens of a sample to byTurn, and returns them.
func (w *world) addVersions(t *testing.T, tr *schemas.Trajectory, byTurn map[int64]map[int64]bool) map[int64]bool {
	t.Helper()
	own := map[int64]bool{}
	for e, err := range w.client.Tokens(t.Context(), tr) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Generated {
			byTurn[e.Turn][e.PolicyVersion], own[e.PolicyVersion] = true, true
		}
	}
	return own
}
