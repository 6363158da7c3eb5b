package command

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// A folder whose scheduler no rollout can follow does not load, and info says why.
func TestModelInfo_Scheduler(t *testing.T) {
	bustest.Sequential(t, others)
	for _, tt := range []struct{ config, want string }{
		{`{}`, "loads: yes"},
		{`{"shift": 3, "use_dynamic_shifting": false}`, "loads: yes"},
		{`{"use_karras_sigmas": true}`, "use_karras_sigmas: true"},
		{`{"use_exponential_sigmas": true}`, "use_exponential_sigmas: true"},
		{`{"use_beta_sigmas": true}`, "use_beta_sigmas: true"},
		{`{"invert_sigmas": true}`, "invert_sigmas: true"},
		{`{"stochastic_sampling": true, "num_train_timesteps": 500}`, "loads: no, 2 problems"},
		{`{"shift": "3"}`, "shift"},
		{"version https://git-lfs.github.com/spec/v1\n", "read scheduler/scheduler_config.json: a pointer of Git LFS; fetch"},
		{`{`, "loads: no, 1 problem\n  read scheduler/scheduler_config.json: not JSON"},
	} {
		dir := checkpoint.Dir(t, checkpoint.Config{})
		if err := os.WriteFile(filepath.Join(dir, "scheduler", "scheduler_config.json"), []byte(tt.config),
			0o600); err != nil {
			t.Fatal(err)
		}
		out, _, err := command(t.Context(), "model", "info", dir)
		var exit *exitError
		if refused := errors.As(err, &exit) && exit.status == exitFailed; refused == strings.Contains(out,
			"loads: yes") || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %v, want %q in\n%s", tt.config, err, tt.want, out)
		}
	}
}

// A name that is no model's is answered with those there are, of images and of texts.
func TestModel_Misspelt(t *testing.T) {
	t.Setenv("MEANDER_MODELS", "../../deploy/models")
	for _, args := range [][]string{{"model", "info", "sign"}, {"run", "--dry-run", "--model", "sign", "a fox"}} {
		expect(t, exitUsage, `must be one of signs, sums, synthetic, synthetic-epsilon, synthetic-v, or a folder with a model_index.json or a config.json`, args...)
		expect(t, exitUsage, "did you mean signs?", args...)
	}
}

// Whatever of a card decides samples is shown: each field changes what is printed for people and for programs.
func TestModelInfo_ShowsTheWholeCard(t *testing.T) {
	made := func() *model.Info {
		return &model.Info{Card: model.Card{
			Name: "m", Family: "f", Grid: "linspace", Mu: model.MuConstant, ConstantMu: 0.5, LatentChannels: 16,
			PixelsPerToken: 16, Size: media.Size{Frames: 9, Height: 64, Width: 64}, MaxFrames: 33, FramesPerToken: 4, FPS: 8,
			Prompts: 2, Guidance: 3.5, Conditioning: []string{"prompt_embeds"}, Masks: map[string]string{"prompt_embeds": "a"},
			SchedulerConfig: []byte(`{"shift": 3}`), Reward: []string{"r"}, Prediction: "epsilon",
		}}
	}
	show := func(i *model.Info) (string, string) {
		var b strings.Builder
		printInfo(&b, "dir", i)
		fields, err := json.Marshal(infoJSON(i))
		if err != nil {
			t.Fatal(err)
		}
		return b.String(), string(fields)
	}
	text, fields := show(made())
	for _, f := range reflect.VisibleFields(reflect.TypeFor[model.Card]()) {
		if f.Name == "WeightsDigest" || f.Anonymous { // the weights are not read; the parts of Size come by themselves
			continue
		}
		info := made()
		v := reflect.ValueOf(&info.Card).Elem().FieldByIndex(f.Index)
		switch x := v.Addr().Interface().(type) {
		case *string:
			*x += "x"
		case *int:
			*x += 48
		case *int64:
			*x += 1 << 30
		case *float32:
			*x++
		case *float64:
			*x++
		case *bool:
			*x = !*x
		case *[]string:
			*x = append(*x, "more")
		case *json.RawMessage:
			*x = []byte(`{"shift": 4}`)
		case **model.Pipeline:
			*x = &model.Pipeline{
				Class: "EditPipeline", Conditions: []model.Input{{Name: "image", Type: "image", Required: true}},
			}
		case *[]model.Told:
			*x = []model.Told{{Steps: 2, Why: "no such scheduler"}}
		case *map[string]string:
			*x = map[string]string{"prompt_embeds": "b"}
		default:
			if v.Kind() == reflect.String {
				v.SetString("BF16")
				break
			}
			t.Fatalf("%s: a field of type %s", f.Name, f.Type)
		}
		if f.Name == "Mu" {
			info.Mu = model.MuNone
		}
		asText, asFields := show(info)
		if asFields == fields {
			t.Errorf("%s is not in --json", f.Name)
		}
		if asText == text && f.Name != "SchedulerConfig" { // it is long
			t.Errorf("%s is not printed", f.Name)
		}
	}
}

// A card that JSON cannot have is still an answer, which says why.
func TestModelInfo_WhatJSONHasNot(t *testing.T) {
	for _, card := range []model.Card{{Name: "m", FPS: math.Inf(1)}, {Name: "m", SchedulerConfig: []byte("{")}} {
		data, err := json.Marshal(infoJSON(&model.Info{Card: card}))
		if err != nil || !strings.Contains(string(data), `"name":"m"`) || !strings.Contains(string(data), `["card: json: `) {
			t.Errorf("%s %v; want the name, and a problem of the card", data, err)
		}
	}
}

// A folder of a language model is described without its weights, and what keeps it from being opened is named.
func TestModelInfo_Language(t *testing.T) {
	for _, tt := range []struct{ file, content, want string }{
		{"", "", "loads: yes"},
		{"config.json", `{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 0}`, "loads: no"},
		{"config.json", "{", "config.json"},
		{"config.json", `{"architectures": ["LlamaForCausalLM"]}`, "must be one of Qwen2ForCausalLM"},
		{"tokenizer_config.json", `{"chat_template": "{{ messages | pprint }}"}`, `the filter "pprint": not supported in chat templates here`},
		{"generation_config.json", `{"eos_token_id": 1, "repetition_penalty": 1.1}`, "note: generation_config.json: repetition_penalty: 1.1 is not supported and is ignored"},
		{"generation_config.json", `{"eos_token_id": 1, "num_beams": 4, "typical_p": 1.0, "min_length": null}`, "note: generation_config.json: num_beams: 4 is not supported and is ignored"},
		{"generation_config.json", `{"eos_token_id": 999999}`, "eos_token_id: 999999; must be below"},
		{"model.safetensors", "", "loads: no"},
	} {
		dir := filepath.Join(t.TempDir(), "babble")
		if err := (qwen2test.Random{Seed: 3}).Write(dir); err != nil {
			t.Fatal(err)
		}
		if tt.file != "" {
			if err := os.WriteFile(filepath.Join(dir, tt.file), []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		out, _, err := command(t.Context(), "model", "info", dir)
		said := out
		if err != nil {
			said += err.Error()
		}
		var exit *exitError
		if refused := err != nil; refused == strings.Contains(out, "loads: yes") || !strings.Contains(said, tt.want) ||
			refused && strings.Contains(out, "loads: no") != (errors.As(err, &exit) && exit.status == exitFailed) {
			t.Errorf("%s %s: %v, want %q in\n%s", tt.file, tt.content, err, tt.want, said)
		}
	}
}

// What is printed of the model that ships is what its folder has.
func TestModelInfo_Sums(t *testing.T) {
	out, _, err := command(t.Context(), "model", "info", "../../deploy/models/sums", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		Name, Family, Template string
		Vocabulary             int
		MaxTokens              int `json:"max_tokens"`
		CacheTokenBytes        int `json:"cache_token_bytes"`
		Parts                  []struct{ Parameters int }
		Loads                  bool
	}
	if err := json.Unmarshal([]byte(out), &info); err != nil {
		t.Fatal(err)
	}
	// 4 layers of keys and values of 2 heads of 32 in F32.
	if info.Name != "sums" || info.Family != "qwen2" || info.Vocabulary != 320 || info.MaxTokens != 512 ||
		info.CacheTokenBytes != 4*2*2*32*4 || info.Parts[0].Parameters != 829568 || !info.Loads || info.Template == "" {
		t.Errorf("%+v", info)
	}
}
