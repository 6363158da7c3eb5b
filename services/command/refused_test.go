package command

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
)

// What a language model, or an interaction, could make nothing of is wrong usage, and nothing starts.
func TestRun_TextsRefused(t *testing.T) {
	inEmptyDir(t)
	model := filepath.Join(t.TempDir(), "babble")
	if err := (qwen2test.Random{Seed: 3, MaxPositions: 64}).Write(model); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"--max-new-tokens: 65; must be at most 64, the context":                {"--max-new-tokens", "65"},
		"--height: given; must be absent beside text":                          {"--height", "64"},
		"jpeg_compressibility\"; rates images: must be one of":                 {"--reward", "jpeg_compressibility"},
		"text.logits: none, 0 of a token; must be topk with k at":              {"--reward", "topk_mass"},
		"--logits: \"some\"; must be none, topk, topk:20, ids:3,7":             {"--logits", "some"},
		"must be 1 where logits are full":                                      {"--logits", "full", "--tokens-per-event", "2"},
		"--save-latents: given; must be absent: texts have no latents":         {"--save-latents", "x.safetensors"},
		"--ground-truth: \"4\"; must be absent: confidence does not use it":    {"--ground-truth", "4"},
		"text.interaction: sums: ground_truth: empty, and the prompt is no":    {"--interaction", "sums", "--reward", "confidence", "what is it?"},
		"--interaction: not given; must be the interaction":                    {"--max-turns", "2", "2+2=?"},
		"--logits: 3; must be below 3, the most answers there are":             {"--interaction", "sums", "--logits", "topk:answers=0,3", "--max-turns", "3", "2+2=?"},
		"--interaction: not given; must be there, because it scores the turns": {"--reward", "turns", "2+2=?"},
	} {
		args = slices.Concat([]string{"run", "--model", model, "--out", "-", "-n", "2"}, args)
		if !slices.Contains(args, "--reward") {
			args = append(args, "--reward", "confidence")
		}
		if !strings.HasSuffix(args[len(args)-1], "?") {
			args = append(args, "2+2=?")
		}
		expect(t, exitUsage, want, args...)
	}
}

// A file of --messages that is no conversation is refused, with what is wrong and where.
func TestRun_MessagesRefused(t *testing.T) {
	inEmptyDir(t)
	for content, want := range map[string]string{
		`[{"role":"user","content":"1+1=?"},{"role":"assistant","content":"2"}]`: `messages[1].role: "assistant"; must be another`,
		`[{"role":"wizard","content":"1+1=?"}]`:                                  `"wizard"; must be one of system, user, assistant`,
		`[{"role":"user","content":"1+1=?","name":"bob"}]`:                       `message 0.name: "bob"; must be absent`,
		`[{"role":"user","content":[{"type":"image_url"}]}]`:                     `message 0.content[0].type: "image_url"; must be text`,
		`{"messages":[{"role":"user","content":"1+1=?"}],"tools":[{}]}`:          "tools: given; must be absent",
		`[{"role":"user","content":"1+1=?","role":"user"}]`:                      "must come at most once",
		`[{"role":"user"}]`: `message 0.content: must be a text, or a list of parts of text`,
		"[{\"role\":\"user\",\"content\":\"1+1=\xff?\"}]": "byte 31; must be UTF-8",
		`[]`: "no messages; must be at least one",
		`{}`: "must be a JSON list",
		`[{"role":"user","content":"` + strings.Repeat("a", 17000) + `"}]`:                                                             "messages[0].content: 17000 bytes; must be at most 16384",
		`[` + strings.Repeat(`{"role":"user","content":"`+strings.Repeat("a", 300000)+`"},`, 4) + `{"role":"user","content":"1+1=?"}]`: "message too large for the server",
	} {
		if err := os.WriteFile("messages.json", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var errs text
		args := []string{"run", "--model", "sums", "--out", "-", "-n", "2", "--messages", "messages.json"}
		status := Execute(t.Context(), args, strings.NewReader(""), &text{}, &errs)
		if said := errs.String(); status == exitOK || !strings.Contains(said, want) {
			t.Errorf("%.80s: exit status %d, %.300s; want %q", content, status, said, want)
		}
	}
}
