package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
)

// inEmptyDir moves to a new folder, with the shipped models in reach.
func inEmptyDir(t *testing.T) string {
	t.Helper()
	models, err := filepath.Abs("../../deploy/models")
	if err != nil {
		t.Fatal(err)
	}
	demo, err := filepath.Abs("../../deploy/demo")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("MEANDER_MODELS", models)
	t.Setenv("MEANDER_STORE", "")
	t.Setenv("MEANDER_NATS_URL", "")
	if err := os.Symlink(demo, "demo"); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestEstimate_Text(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("mixed.jsonl", []byte(`{"prompt": "a \"b\"", "group_size": 2}
{"prompt": "a \"b\"", "group_size": 3, "num_inference_steps": 4, "height": 32, "width": 32, "reward": [{"name": "ocr", "weight": 2}]}
{"prompt": "no target", "reward": [{"name": "glyph"}]}
{"prompt": "x", "group_size": 0}
{"tag": 3}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	states := writeStates(t, []string{"x"}, 2, 16, 64)
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a prompt", []string{"--model", "synthetic", "-n", "4", "--return-steps", "10", "--checkpoint-every", "4", "a red fox"}, `
estimate   1 group x 4 samples = 4 images of 64 x 64 pixels, by synthetic
prompts    1 prompt, 0 duplicates
steps      10 a sample, 40 in all, 40 stochastic; 40 model evaluations
latents    1 state of F32 [16, 64] kept, and 2 checkpoints; a sample stores 32.0 KiB
storage    80.0 KiB of steps (of 8.0 GiB); 48.0 KiB of images at most
reward     jpeg_compressibility (default)
advantage  flow_grpo, std group (sample, epsilon 0.0001)
`},
		{"a part", []string{"--model", "synthetic", "-n", "2", "--solver", "heun", "--sde-steps", "3,7", "--start-latents", states, "--start-step", "2", "--stop-step", "5", "a red fox"}, `
estimate   1 group x 2 samples = 2 samples of 64 x 64 pixels, by synthetic
prompts    1 prompt, 0 duplicates
steps      3 a sample, from 2 to 5 of 10, 6 in all, 2 stochastic; 10 model evaluations
latents    3 states of F32 [16, 64] kept; a sample stores 14.7 KiB
storage    29.4 KiB of steps (of 8.0 GiB)
reward     jpeg_compressibility (default)
advantage  flow_grpo, std group (sample, epsilon 0.0001)
warning    reward: jpeg_compressibility will fail: it looks at images, and a sample that stops at step 5 of 10 has none; stop.decode makes one
`},
		{"a table", []string{
			"--prompts", "demo/words.csv", "--template", `a {colour} sign that says "{prompt}"`, "--batch-size", "2", "--shard", "0/2", "--offset", "1",
			"--sde-window", "2:0-5", "--latents-dtype", "F16", "--true-cfg-scale", "4", "--solver", "heun", "--estimator", "diffusion_nft", "--std", "global", "--zero-std", "refill",
		}, `
estimate   3 groups x 8 samples = 24 images of 128 x 64 pixels, by signs
prompts    6 prompts in demo/words.csv (csv), 1 duplicate, 5 chosen, shard 0/2 has 3
metadata   colour
batches    2 batches of 2 groups, the last of 1
steps      10 a sample, 240 in all, 48 stochastic; 864 model evaluations (guidance, scale 4)
latents    3 states of F16 [32, 64] kept; a sample stores 44.0 KiB
storage    480.2 KiB of steps (of 8.0 GiB); 576.0 KiB of images at most
reward     glyph (default)
advantage  diffusion_nft, std global (sample, epsilon 0.0001), mode continuous, clamped to 5, zero std: refill
`},
		{"prompts that differ, and some that are refused", []string{"--prompts", "mixed.jsonl", "--skip-bad"}, `
estimate   2 groups = 5 samples, by signs
prompts    5 prompts in mixed.jsonl (json), 3 bad left out, 1 duplicate, 2 chosen
           mixed.jsonl line 3: reward[0]: ground_truth: empty, and the prompt has no text in double quotes; glyph needs one
           mixed.jsonl line 4: group_size: 0; must be between 1 and 1024
           mixed.jsonl line 5: prompt: must be a text; the record has tag; name the one with the prompt with --prompt-column
steps      32 in all, 32 stochastic; 32 model evaluations
storage    220.6 KiB of steps (of 8.0 GiB); 57.0 KiB of images at most
reward     glyph (default); or ocr x 2
advantage  flow_grpo, std group (sample, epsilon 0.0001)
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// The limit that a new store would get depends on the disk.
			stdout, stderr, err := command(t.Context(),
				append([]string{"run", "--dry-run", "--max-steps-bytes", "8GiB"}, tt.args...)...)
			if err != nil || stderr != "" {
				t.Fatalf("%v\n%s", err, stderr)
			}
			if got := "\n" + stdout; got != tt.want {
				t.Errorf("estimate%s\nwant%s", got, tt.want)
			}
		})
	}
	if _, err := os.Stat("meander-data"); err == nil {
		t.Error("an estimate has made a store")
	}
}

// Misspelt fields of a file are shown before anything is published.
func TestEstimate_UnknownFields(t *testing.T) {
	inEmptyDir(t)
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("top.jsonl", `{"prompt": "a", "gruop_size": 4, "tag": "x"}`+"\n")
	write("nested.jsonl", `{"prompt": "a", "tag": "x", "rollout": {"noise_lvel": 0.5}}`+"\n"+`{"prompt": "b"}`+"\n")
	top := "top.jsonl line 1: gruop_size: 4; must be a field of a prompt, did you mean group_size?"
	nested := "rollout.noise_lvel: unknown field; did you mean noise_level?"
	for _, c := range []struct {
		args []string
		want []string
		ok   bool
	}{
		{[]string{"run", "--dry-run", "-f", "top.jsonl"}, []string{top}, false},
		{[]string{"run", "--dry-run", "-f", "top.jsonl", "--prompts-format", "meander"}, []string{"top.jsonl line 1: gruop_size: unknown", "did you mean group_size?"}, false},
		{[]string{"run", "--dry-run", "-f", "top.jsonl", "--unknown-fields", "warn"}, []string{"metadata   gruop_size, tag"}, true},
		{[]string{"run", "--dry-run", "-f", "nested.jsonl"}, []string{"nested.jsonl line 1: " + nested}, false},
		{[]string{"run", "--dry-run", "-f", "nested.jsonl", "--skip-bad"}, []string{"1 bad left out", nested}, true},
		{[]string{"run", "--dry-run", "-f", "nested.jsonl", "--unknown-fields", "warn"}, []string{"estimate   2 groups", "warning    " + nested}, true},
	} {
		stdout, stderr, err := command(t.Context(), append(c.args, "--model", "synthetic")...)
		text := strings.Join(strings.Fields(stdout+stderr), " ")
		if err != nil {
			text += " " + err.Error()
		}
		for _, want := range c.want {
			if !strings.Contains(text, strings.Join(strings.Fields(want), " ")) {
				t.Errorf("%q: no %q in %s", c.args, want, text)
			}
		}
		if (err == nil) != c.ok {
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

func TestEstimate_JSON(t *testing.T) {
	inEmptyDir(t)
	stdout, _, err := command(t.Context(), "run", "--dry-run", "--json", "--prompts", "demo/verl-ocr.jsonl", "-n", "4",
		"--debug", "noise,std", "--height", "32", "--width", "64", "--steps", "5", "--sde-steps", "1,2", "--std",
		"global")
	if err != nil {
		t.Fatal(err)
	}
	var line struct{ Estimate map[string]any }
	if err := json.Unmarshal([]byte(stdout), &line); err != nil || strings.Count(stdout, "\n") != 1 {
		t.Fatalf("no line of JSON: %v\n%s", err, stdout)
	}
	elements := 2 * 4 * 64.0
	const event, tensor = 775, 150                                 // bytes beside the elements
	steps := 3*(4*elements+tensor) + 5*(4*elements+event+2*tensor) // 3 states, 5 noises
	images := 3 * 32 * 64.0
	for field, want := range map[string]any{
		"prompts": 3.0, "groups": 3.0, "refused": 0.0, "samples": 12.0, "batches": []any{3.0}, "model": "signs", "image_size": "64 x 32 pixels",
		"num_inference_steps": 5.0, "sde_steps": 2.0, "steps": 60.0, "stochastic_steps": 24.0, "evaluations": 60.0,
		"latents_kept": 3.0, "latents_shape": []any{8.0, 64.0},
		"bytes_per_sample": steps + images, "step_bytes": 12 * steps, "image_bytes": 12 * images,
		"reward": []any{"glyph"}, "advantage": []any{"flow_grpo, std global (sample, epsilon 0.0001)"},
	} {
		if !reflect.DeepEqual(line.Estimate[field], want) {
			t.Errorf("%s is %v, want %v", field, line.Estimate[field], want)
		}
	}
	settings := line.Estimate["settings"].(map[string]any)
	if settings["latents_dtype"] != "F32" || settings["prompt"] != "" || settings["noise_level"] != 0.7 {
		t.Errorf("what all prompts have in common: %v", settings)
	}
	data := line.Estimate["data"].(map[string]any)
	if data["file"] != "demo/verl-ocr.jsonl" || data["records"] != 3.0 || data["duplicates"] != 0.0 ||
		data["chosen"] != 3.0 {
		t.Errorf("data %v", data)
	}
}

// Of samples of several stages it says how many of each stage are made, and what they take.
func TestEstimate_Stages(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("p.jsonl", []byte(`{"prompt": "12+30=?", "group_size": 8, "stages": [{"name": "think"}, {"name": "paint", "children": 2}, {"name": "draw"}]}
{"prompt": "1+3=?", "group_size": 4, "rounds": 3, "stages": [{"name": "think"}, {"name": "paint"}]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	text, _, err := command(t.Context(), "run", "--dry-run", "--prompts", "p.jsonl")
	for _, want := range []string{
		"3 stages in at most 3 rounds: think 16 of 128 x 64 pixels (160 steps in all), paint 20 of 128 x 64 pixels (200 steps in all)", "\nstorage    ",
	} {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%v, says\n%s\nwant %q", err, text, want)
		}
	}
	stdout, _, err := command(t.Context(), "run", "--dry-run", "--json", "--prompts", "p.jsonl")
	var line struct {
		Estimate struct {
			Samples, Rounds int64
			Stages          []estimate.Stage
			Streams         []estimate.Stream
		}
	}
	if json.Unmarshal([]byte(stdout), &line) != nil || err != nil {
		t.Fatalf("%v, says %s", err, stdout)
	}
	e, bytes := line.Estimate, int64(0)
	for i, want := range []estimate.Stage{
		{Name: "think", Samples: 16}, {Name: "paint", Samples: 20}, {Name: "draw", Samples: 8},
	} {
		s := e.Stages[i]
		if bytes += s.StepBytes; s.Name != want.Name || s.Samples != want.Samples || s.Steps != 10*want.Samples {
			t.Errorf("%d of %s with %d steps, want %d of %s", s.Samples, s.Name, s.Steps, want.Samples, want.Name)
		}
	}
	if e.Rounds != 3 || e.Samples != 12 || bytes == 0 || e.Streams[1].Bytes != bytes {
		t.Errorf("%d samples in %d rounds, streams %+v; want %d bytes of steps", e.Samples, e.Rounds, e.Streams, bytes)
	}
}

// A run says what it will do, then does that: the numbers of its estimate are those of what it
// stored. Shards on different machines paint what the whole paints.
func TestEstimate_IsWhatRuns(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	digests := func(name string, args ...string) map[string]string {
		stdout, stderr, err := command(t.Context(), append([]string{
			"run", "--json", "--model", "synthetic", "--store", name, "--run", "same", "--out", "-", "-n", "2", "--prompts", "demo/words.csv", "--template", "{colour} {prompt}",
			"--sde-window", "2:0-5", "--latents-dtype", "BF16", "--batch-size", "2", "--estimator", "reinforce_plus_plus",
		}, args...)...)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, stderr)
		}
		if !strings.HasPrefix(stderr, "estimate ") {
			t.Errorf("%s: no estimate before the run:\n%s", name, stderr)
		}
		out := map[string]string{}
		dec := json.NewDecoder(strings.NewReader(stdout))
		for dec.More() {
			var g struct {
				UID     schemas.UID
				Status  string
				Members []struct {
					Seed      uint64 `json:"sample_seed,string"`
					Digest    string `json:"content_digest"`
					Advantage *float64
				}
			}
			if err := dec.Decode(&g); err != nil {
				t.Fatal(err)
			}
			for i, m := range g.Members {
				if m.Advantage == nil {
					t.Errorf("%s: %s sample %d has no advantage", name, g.UID, i)
					continue
				}
				out[fmt.Sprint(g.UID, " ", i)] = fmt.Sprint(m.Seed, " ", m.Digest, " ", *m.Advantage)
			}
		}
		return out
	}
	whole := digests("whole")
	union := map[string]string{}
	for shard := range 2 {
		for k, v := range digests(fmt.Sprint("shard", shard), "--shard", fmt.Sprintf("%d/2", shard)) {
			union[k] = v
		}
	}
	if len(whole) != 12 || !reflect.DeepEqual(union, whole) {
		t.Errorf("shards give\n%v\nthe whole\n%v", union, whole)
	}
	// The store has what the estimate said: within a tenth, for the length of names varies.
	stdout, _, err := command(t.Context(), "streams", "--store", "whole", "--json")
	estimated, _, err2 := command(t.Context(), "run", "--dry-run", "--json", "--model", "synthetic", "-n", "2",
		"--prompts", "demo/words.csv", "--sde-window", "2:0-5", "--latents-dtype", "BF16")
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	var said struct {
		Estimate struct {
			Steps     int64
			StepBytes int64 `json:"step_bytes"`
		}
	}
	if err := json.Unmarshal([]byte(estimated), &said); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(stdout) {
		var s struct {
			Name            string
			Messages, Bytes int64
		}
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		if s.Name == "MDR_STEPS" && (s.Messages != said.Estimate.Steps || s.Bytes < said.Estimate.StepBytes*9/10 ||
			s.Bytes > said.Estimate.StepBytes*11/10) {
			t.Errorf("%d steps in %d bytes are stored, estimated were %d in %d", s.Messages, s.Bytes,
				said.Estimate.Steps, said.Estimate.StepBytes)
		}
	}
}

// A dry run has the limits that the run has: those of the store, or those that a new store gets. What cannot fit is
// refused by both.
func TestEstimate_Limits(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	limit := func() (limit float64) {
		dry := linesOf(t, expect(t, exitOK, "", "run", "--dry-run", "--json", "--model", "synthetic", "a red fox"))[0]
		for _, s := range dry["estimate"].(map[string]any)["streams"].([]any) {
			if s := s.(map[string]any); s["name"] == "MDR_STEPS" {
				limit = s["limit"].(float64)
			}
		}
		return limit
	}
	before := limit()
	if _, err := os.Stat("meander-data"); err == nil {
		t.Error("a dry run has made a store")
	}
	expect(t, exitOK, "", "run", "--run", "r1", "--model", "synthetic", "-n", "1", "--out", "-", "a red fox")
	for _, s := range linesOf(t, expect(t, exitOK, "", "streams", "--json")) {
		if s["name"] == "MDR_STEPS" && s["max_bytes"] != before {
			t.Errorf("the store keeps %v bytes of steps; the dry run said %v", s["max_bytes"], before)
		}
	}
	expect(t, exitOK, "MDR_STEPS", "streams", "limit", "--max-steps-bytes", "8MiB")
	if after := limit(); after != 8<<20 {
		t.Errorf("a dry run on the store says %v bytes; must be 8 MiB", after)
	}
	large := []string{
		"run", "--model", "synthetic", "--out", "-", "-n", "64", "--height", "512", "--width", "512",
		"a red fox",
	}
	expect(t, exitUsage, " free of 8.0 MiB; raise the limit with --max-steps-bytes", large...)
	expect(t, exitUsage, " free of 8.0 MiB; raise the limit with --max-steps-bytes", append(large, "--dry-run")...)
	for _, more := range [][]string{{"--overfill"}, {"--run", "r1"}, {"--max-steps-bytes", "1GiB"}} {
		expect(t, exitOK, "images of 512 x 512", slices.Concat(large, []string{"--dry-run"}, more)...)
	}
}

// A client of a pipeline estimates with what the pipeline says, and gives answers to its
// reward functions.
func TestEstimate_OfAPipeline(t *testing.T) {
	inEmptyDir(t)
	serving(t)
	var stdout string
	bustest.Until(t, "a pipeline that has announced its model", func() (err error) {
		if stdout, _, err = command(t.Context(), "publish", "--dry-run", "--prompts",
			"demo/verl-ocr.jsonl"); err == nil && !strings.Contains(stdout, "signs") {
			err = errNotYet
		}
		return err
	})
	if !strings.Contains(stdout, "3 groups x 8 samples = 24 images of 128 x 64 pixels, by signs") ||
		!strings.Contains(stdout, "reward     glyph\n") {
		t.Errorf("estimate\n%s", stdout)
	}
	for range 2 { // the second time it is the same prompts
		stdout, stderr, err := command(t.Context(), "publish", "--run", "p", "-n", "1", "--prompts",
			"demo/verl-ocr.jsonl", "--shard", "1/2")
		if err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		if want := `accepted  0001-a-red-sign-that-says-open  1 sample x 10 steps  "a red sign that says \"OPEN\""` + "\n"; stdout != want {
			t.Errorf("published\n%swant\n%s", stdout, want)
		}
		if !strings.HasPrefix(stderr, "estimate ") {
			t.Errorf("no estimate before publishing:\n%s", stderr)
		}
	}
}

// An answer reaches the reward functions that the model chooses; where the prompt does not say which
// those are, it is not dropped.
func TestAddUp_GroundTruth(t *testing.T) {
	prompts, p, err := loadPrompts("--prompts", examples+"verl-ocr.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	each := func(yield func(*prompt, error) bool) {
		for i := range prompts {
			if !yield(&prompts[i], nil) {
				return
			}
		}
	}
	if _, err := p.addPrompts(each, &estimate.Facts{}); err == nil ||
		!strings.Contains(err.Error(), "has a ground truth, but the pipeline does not say which reward function uses "+
			"it; name one with --reward") {
		t.Errorf("without a model: %v", err)
	}
	policy := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "m", Model: "m", Height: 64, Width: 64, PixelsPerToken: 16, LatentChannels: 64, NumInferenceSteps: 10, TrueCFGScale: 1,
		Reward: []string{"glyph", "diversity"},
	}
	if _, err := p.addPrompts(each, &estimate.Facts{Policies: []*schemas.Policy{policy}}); err != nil {
		t.Fatal(err)
	}
	number, err := schemas.NewTruth(int64(42))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []schemas.Truth{"SALE 50%", number} {
		got := event(t, prompts[i]).Reward
		if !reflect.DeepEqual(got, []schemas.RewardSpec{{Name: "glyph", GroundTruth: want}, {Name: "diversity"}}) {
			t.Errorf("prompt %d: rewards %+v, want the answer %q", i, got, want)
		}
	}
}
