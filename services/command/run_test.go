package command

import (
	"os"
	"testing"
)

// A run that is started again goes on with what it has; another one does not take its name.
func TestRun_Again(t *testing.T) {
	inStore(t)
	again := append([]string{"run", "--run", "r1"}, small...)
	expect(t, exitOK, "run r1: 1 of 1 groups are done already, resuming", again...)
	expect(t, exitUsage, `--run: "r1" was started with other prompts or settings`, append(again, "--seed", "9")...)
	lines := linesOf(t, expect(t, exitOK, "", append(again, "--json")...))
	if len(lines) != 2 || lines[0]["uid"] != "p" || lines[1]["summary"].(map[string]any)["complete"] != 1.0 {
		t.Errorf("JSON %v", lines)
	}
}

func TestRun_Refused(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("p.jsonl", []byte(`{"prompt": "no text to read", "uid": "p", "reward": [{"name": "glyph"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitUsage, "1 prompt refused: ", append([]string{"run"}, small...)...)
	expect(t, exitUsage, "--replicas: 0; must be", "run", "--replicas", "0", "a fox")
	expect(t, exitUsage, `--logits, --top-k: given; must be absent: model "synthetic" makes images, which have no tokens and no logits; --return-steps keeps`,
		"run", "--dry-run", "--model", "synthetic", "--logits", "full", "--top-k", "3", "a fox")
	for flag, value := range map[string]string{"--device": "gpu", "--adapter": "none", "--scorers": "none", "--metrics-addr": "none", "--run": "a b", "--log-level": "all"} {
		expect(t, exitUsage, "meander: "+flag+": ", "run", "--dry-run", flag, value, "a fox")
	}
	expect(t, exitUsage, `--run: "a b"`, "run", "--run", "a b", "a fox")
}
