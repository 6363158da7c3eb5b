package integration_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Prompts of files are conversations for a language model: with what the system says, in several turns, and beside
// single messages; run, publish and a dry run read them alike.
func TestText_PromptFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "prompts.jsonl")
	records := `{"data_source":"sums","prompt":[{"role":"system","content":"be brief"},{"role":"user","content":"347+58=?"}],"reward_model":{"style":"rule","ground_truth":"405"}}
{"prompt":[{"role":"user","content":"347+58=?"},{"role":"assistant","content":"395"},{"role":"user","content":"too low"}],"reward_model":{"ground_truth":"405"}}
{"messages":[{"role":"user","content":"347+58=?"},{"role":"assistant","content":"395"},{"role":"user","content":"too low"}],"text":{"temperature":0},"ground_truth":"405","level":"two"}
{"prompt":"12+3=?","text":{"interaction":{"name":"sums","max_turns":2},"logits":{"form":"topk","k":3,"dtype":"F16"}},"reward":[{"name":"turns"}]}
`
	if err := os.WriteFile(file, []byte(records), 0o600); err != nil {
		t.Fatal(err)
	}
	plan := meander(t, dir, "run", "--model", sumsFolder(t), "--prompts", file, "--dry-run").must(t, 0).stdout
	for _, want := range []string{
		"4 groups x 8 samples", "at most 16 generated a sample, 320 in all",
		"3 of each token in F16, 18 B, of the prompts that ask for the most",
	} {
		if !strings.Contains(plan, want) || strings.Contains(plan, "system_prompt") {
			t.Errorf("want %q, and no system_prompt, in\n%s", want, plan)
		}
	}
	first := filepath.Join(dir, "first.jsonl")
	if err := os.WriteFile(first, []byte(records[:strings.IndexByte(records, '\n')]), 0o600); err != nil {
		t.Fatal(err)
	}
	templated, _ := textRun(t, dir, sumsFolder(t), "--run", "t", "--prompts", first, "--template", "now {prompt}")
	if m := templated[0].Members[0].Text.Messages; len(m) != 2 || m[0].Content != "be brief" ||
		m[1].Content != "now 347+58=?" {
		t.Errorf("with a template: %+v", m)
	}
	groups, _ := textRun(t, dir, sumsFolder(t), "--run", "r", "--prompts", file)
	want := []struct{ first, last string }{
		{"system", "347+58=?"},
		{"user", "too low"},
		{"user", "too low"},
		{"user", "12+3=?"},
	}
	if len(groups) != len(want) {
		t.Fatalf("%d groups", len(groups))
	}
	for i, g := range groups {
		m := g.Members[0].Text.Messages
		data, _ := json.Marshal(m)
		if g.Status != "complete" || m[0].Role != want[i].first || m[len(m)-1].Content != want[i].last ||
			strings.Contains(string(data), `system_`) {
			t.Errorf("group %d: %s, %s", i, g.Status, data)
		}
	}
}

// An interaction is told the ground truth, whatever the reward functions look at.
func TestText_GroundTruthOfInteraction(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for run, reward := range map[string][]string{
		"turns": {"turns"}, "confidence": {"confidence"},
		"both": {"confidence", "exact_match"},
	} {
		args := []string{
			"run", "--model", sumsFolder(t), "--run", run, "-n", "2", "--json", "--out", "-", "--interaction",
			"sums", "--ground-truth", "7",
		}
		for _, name := range reward {
			args = append(args, "--reward", name)
		}
		out := meander(t, dir, append(args, "what is it?")...).must(t, 0)
		if !strings.Contains(out.stdout, `"conversation":"`) || !strings.Contains(out.stdout, `"complete":1`) {
			t.Errorf("%s: %s", run, out.stdout)
		}
	}
}
