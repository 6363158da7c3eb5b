package command

import (
	"os"
	"strings"
	"testing"
)

// What intake answers is printed and decides the exit status.
func TestPublish(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, `accepted  p1  2 samples x 4 steps  "a red fox"`, "publish", "-n", "2", "--steps", "4", "a red fox")
	if err := os.WriteFile("again.jsonl", []byte(`{"prompt": "another fox", "uid": "p1"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	lines := linesOf(t, expect(t, exitFailed, "", "publish", "--json", "--prompts", "again.jsonl"))
	if len(lines) != 1 || lines[0]["uid"] != "p1" || lines[0]["accepted"] == true || lines[0]["error"] == "" {
		t.Errorf("another prompt of the uid: %v", lines)
	}
	expect(t, exitOK, `warning    uid: "p1" is already used in run "default" by another prompt`, "publish", "--dry-run", "--prompts", "again.jsonl")
	expect(t, exitFailed, `refused   "a fox"  model: "elsewhere" is not served here`, "publish", "--prompts", unservedPrompt(t))
	expect(t, exitUsage, "--run: ", "publish", "--run", "a b", "a red fox")
}

// A prompt that cannot be sent is named by its text where it has no uid yet.
func TestPublish_TooLarge(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "sums")
	turn := `{"role":"user","content":"` + strings.Repeat("a", 300000) + `"},`
	if err := os.WriteFile("messages.json", []byte("["+strings.Repeat(turn, 4)+`{"role":"user","content":"1+1=?"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitFailed, `meander: prompt "1+1=?": publish prompt: `, "publish", "-n", "2", "--messages", "messages.json")
}
