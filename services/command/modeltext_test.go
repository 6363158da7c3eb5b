package command

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
)

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
		if err := (qwen2.Random{Seed: 3}).Write(dir); err != nil {
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
	if info.Name != "sums" || info.Family != "qwen2" || info.Vocabulary != 320 || info.MaxTokens != 512 || info.CacheTokenBytes != 4*2*2*32*4 || info.Parts[0].Parameters != 829568 || !info.Loads || info.Template == "" {
		t.Errorf("%+v", info)
	}
}
