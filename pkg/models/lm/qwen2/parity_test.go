package qwen2_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
)

// sums is the checkpoint that comes with the project.
const sums = "../../../../deploy/models/sums"

var folders = flag.String("folders", "", "folder to write the random checkpoints of TestParity_Random to, for "+
	"testdata/record.py")

// maxL2 bounds |got - want| / |want| of logits against transformers, both in float32.
const maxL2 = 1e-5

func readJSON[T any](t *testing.T, name string) (v T) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// recorded is the logits of transformers after the last positions of sequences, by name.
func recorded(t *testing.T) *safetensors.Archive {
	t.Helper()
	a, err := safetensors.Open("testdata/logits.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// compareLogits feeds a recorded sequence and compares what comes after its last positions.
func compareLogits(t *testing.T, m lm.Model, a *safetensors.Archive, name string) {
	t.Helper()
	want, err := a.Floats(name)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := a.Bytes(name + ".ids")
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]int32, len(raw)/4)
	for i := range ids {
		ids[i] = int32(raw[4*i]) | int32(raw[4*i+1])<<8 // small ids
	}
	v := m.Card().Vocabulary
	last := len(want) / v
	s := m.NewSequence()
	defer s.Close()
	got := make([]float32, v)
	for i := range last {
		to := len(ids) - last + i + 1
		forward(t, m, lm.Row{Sequence: s, IDs: ids[s.Len():to], Logits: got})
		diff, norm := 0.0, 0.0
		for j, w := range want[i*v : (i+1)*v] {
			diff += math.Pow(float64(got[j])-float64(w), 2)
			norm += math.Pow(float64(w), 2)
		}
		if l2 := math.Sqrt(diff / norm); !(l2 < maxL2) {
			t.Errorf("%s, position %d: relative L2 %.3g, want below %g", name, to, l2, maxL2)
		}
	}
}

// Greedy answers of the shipped checkpoint are those of transformers, on 500 prompts.
func TestParity_Sums(t *testing.T) {
	t.Parallel()
	m := open(t, sums, lm.Options{})
	answers := readJSON[[]struct {
		Question       string
		Prompt, Answer []int32
	}](t, "sums.json")
	if len(answers) != 500 {
		t.Fatalf("%d answers, want 500", len(answers))
	}
	var rows []lm.Row
	for _, a := range answers {
		ids, err := m.Prompt([]lm.Message{{Role: "user", Content: a.Question}})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids, a.Prompt) {
			t.Fatalf("%s: prompt %v, want %v", a.Question, ids, a.Prompt)
		}
		rows = append(rows, lm.Row{Sequence: m.NewSequence(), IDs: ids, Logits: make([]float32, m.Card().Vocabulary)})
	}
	got := make([][]int32, len(rows))
	var d decoding.Distribution
	for step := range 8 {
		var live []lm.Row
		for i, a := range answers {
			if step < len(a.Answer) {
				live = append(live, rows[i])
			}
		}
		if len(live) == 0 {
			break
		}
		forward(t, m, live...)
		for i, a := range answers {
			if step < len(a.Answer) {
				if err := d.Reset(rows[i].Logits, decoding.Params{}); err != nil {
					t.Fatal(err)
				}
				got[i] = append(got[i], d.Draw(0, 0))
				rows[i].IDs = got[i][step:]
			}
		}
	}
	for i, a := range answers {
		if !slices.Equal(got[i], a.Answer) {
			t.Errorf("%s: %v, want %v", a.Question, got[i], a.Answer)
		}
	}
	a := recorded(t)
	for i := range 16 {
		compareLogits(t, m, a, fmt.Sprintf("sums.%d", i))
	}
}

// randoms are checkpoints of other shapes and types than the shipped one.
func randoms() map[string]qwen2test.Random {
	return map[string]qwen2test.Random{
		"f32":  {Seed: 1, Width: 48, Heads: 6, KVHeads: 3, Untied: true, Shards: 3},
		"f16":  {Seed: 2, Width: 40, Heads: 5, KVHeads: 5, Layers: 3, DType: tensor.F16},
		"bf16": {Seed: 3, Width: 64, Heads: 4, KVHeads: 1, Vocabulary: 300, DType: tensor.BF16, Shards: 2},
	}
}

func TestParity_Random(t *testing.T) {
	t.Parallel()
	if *folders != "" {
		for name, r := range randoms() {
			if err := r.Write(filepath.Join(*folders, name)); err != nil {
				t.Fatal(err)
			}
		}
		t.Skip("wrote the folders")
	}
	a := recorded(t)
	for name, r := range randoms() {
		dir := folder(t, r)
		devices := map[string]tensor.Device{"cpu": nil}
		if name == "bf16" {
			devices["reference"] = reference.Device{}
		}
		for on, d := range devices {
			m := open(t, dir, lm.Options{Options: model.Options{Device: d}})
			for i := range 2 {
				t.Run(on, func(t *testing.T) { compareLogits(t, m, a, fmt.Sprintf("%s.%d", name, i)) })
			}
		}
	}
}

// Conversations in chat templates are those of transformers, in text and ids.
func TestParity_Templates(t *testing.T) {
	t.Parallel()
	cases := readJSON[[]struct {
		Template, Text string
		Messages       []lm.Message
		IDs            []int32
	}](t, "templates.json")
	models := map[string]*qwen2.Model{}
	for _, c := range cases {
		if models[c.Template] == nil {
			models[c.Template] = openWith(t, c.Template)
		}
		m := models[c.Template]
		ids, err := m.Prompt(c.Messages)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids, c.IDs) {
			t.Errorf("%s: %q: %v, want %v", c.Template, c.Text, ids, c.IDs)
		}
		// A conversation that grows has the ids of the whole one.
		if n := len(c.Messages); n == 4 {
			first, _ := m.Prompt(c.Messages[:2])
			answer, _ := m.Prompt([]lm.Message{{Role: "assistant", Content: c.Messages[2].Content}})
			content := answer[len(answer)-6 : len(answer)-5] // one token, before the end of its turn
			reply, err := m.Reply(c.Messages[:2], c.Messages[2].Content, false, c.Messages[3:])
			if err != nil {
				t.Fatal(err)
			}
			if whole := slices.Concat(first, content, reply); !slices.Equal(whole, c.IDs) {
				t.Errorf("%s: turn by turn %v, want %v", c.Template, whole, c.IDs)
			}
			ended, _ := m.Reply(c.Messages[:2], c.Messages[2].Content, true, c.Messages[3:])
			if !slices.Equal(ended, reply[1:]) {
				t.Errorf("%s: after the end of a turn %v, want %v", c.Template, ended, reply[1:])
			}
		}
	}
	if len(models) != 3 {
		t.Errorf("%d templates, want 3", len(models))
	}
}

// openWith opens the shipped checkpoint with another chat template.
func openWith(t *testing.T, template string) *qwen2.Model {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(sums)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join("testdata", template))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	return open(t, dir, lm.Options{Options: model.Options{Threads: 1}})
}

// What a template of the family says differently from the others stands in the ids: between its marks, and
// before endfor.
func TestTemplate_IsRunAndNotRecognised(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("testdata/qwen2_5.jinja")
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(b), "{%- endfor %}\n{%- if add_generation_prompt",
		"    {{- '#' }}\n{%- endfor %}\n{%- if add_generation_prompt", 1)
	text, err := qwen2.RenderTemplate(changed, nil,
		[]lm.Message{{Role: "system", Content: "S"}, {Role: "user", Content: "Q"}})
	want := "<|im_start|>system\nS<|im_end|>\n#<|im_start|>user\nQ<|im_end|>\n#<|im_start|>assistant\n"
	if err != nil || text != want {
		t.Errorf("%q, %v, want %q", text, err, want)
	}
}

// A template that would not be run as it is meant is refused when it is read, by the name of what is not there.
func TestTemplate_Refuses(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                                   "writes nothing",
		"{{ messages | pprint }}":            `filter "pprint"`,
		"{% include 'x' %}":                  `tag "include"`,
		"{{ messages":                        "has no end",
		"{{ messages[0].content.encode() }}": "method encode()",
		"{{ strftime_now('%d %b %Y') }}":     "strftime_now",
		"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}": "takes too much",
		"{{ raise_exception('never') }}": "refuses: never",
	} {
		if _, err := qwen2.RenderTemplate(text, nil, nil); err == nil ||
			!strings.Contains(err.Error(), "chat_template: ") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want an error that names chat_template and %s", text, err, want)
		}
	}
	m := open(t, folder(t, qwen2test.Random{}), lm.Options{Options: model.Options{Threads: 1}})
	for _, messages := range [][]lm.Message{nil, {{Role: "tool", Content: "1"}}, {{Role: "user", Content: "\xff"}}} {
		_, err := m.Prompt(messages)
		checkRefused(t, fmt.Sprint(messages), err, lm.ErrPrompt)
	}
}

// The tokens that a template can name are those of transformers for the folder's tokenizer_config.json.
func TestTemplate_SpecialTokens(t *testing.T) {
	t.Parallel()
	const template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token is defined }}"
	for config, want := range map[string]string{
		`{}`: "|<|endoftext|>|<|endoftext|>|<|endoftext|>|False",
		`{"tokenizer_class": "Qwen2TokenizerFast", "bos_token": null, "eos_token": null, "sep_token": "S"}`:                              "||<|endoftext|>|<|endoftext|>|True",
		`{"bos_token": {"__type": "AddedToken", "content": "B", "lstrip": false}, "eos_token": "E", "unk_token": "U", "pad_token": "P"}`: "B|E|U|P|False",
		`{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "E"}`:                                                               "|E|||False",
		`{"tokenizer_class": "LlamaTokenizerFast", "eos_token": "E"}`:                                                                    "bos_token: none; must be there",
		`{"bos_token": 1}`: "bos_token: 1; must be a token",
	} {
		text, err := qwen2.RenderTemplate(template, []byte(config), []lm.Message{{Role: "user"}})
		if text != want && !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %q, %v, want %q", config, text, err, want)
		}
	}
}

// A conversation of several answers goes on only where the template writes the answers before as they were generated.
func TestReply_ContinuesWhatWasThere(t *testing.T) {
	t.Parallel()
	before, more := []lm.Message{{Role: "user", Content: "Q"}}, []lm.Message{{Role: "user", Content: "R"}}
	for _, tt := range []struct{ template, answer, want string }{
		{"qwen3", "A", "<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"},
		{"qwen3", "<think>\nT\n</think>\n\nA", "in another way than it was generated"},
		{"qwq", "T\n</think>\n\nA", "in another way than it was generated"},
		{"deepseek_r1", "A", "in another way than it was generated"},
		{"llama3", " A\n", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
		{"mistral", "A", "E[INST] R [/INST]"},
		{"gemma", "A", "<end_of_turn>\n<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n"},
	} {
		b, err := os.ReadFile("../../jinja/testdata/templates/" + tt.template + ".jinja")
		if err != nil {
			t.Fatal(err)
		}
		text, err := qwen2.ReplyTemplate(string(b), []byte(`{"bos_token": "B", "eos_token": "E"}`), before, tt.answer, more)
		if text != tt.want && !strings.Contains(fmt.Sprint(err), tt.want) {
			t.Errorf("%s, %q: %q, %v, want %q", tt.template, tt.answer, text, err, tt.want)
		}
	}
}
