package command

import (
	"fmt"
	"os"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// A data set is gone over pass by pass, and groups without variance make room for other prompts of it.
func TestRun_BatchesAndFreshRefills(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("p.txt", []byte("a\nb\nc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{
		"--prompts", "p.txt", "--model", "synthetic", "-n", "2", "--steps", "2", "--initial-noise", "shared", "--sde-type", "ode", "--out", "-", "--json",
		"--batch-size", "2", "--batches", "2", "--epoch", "5", "--zero-std", "refill", "--refill-rounds", "1", "--refill-fresh",
	}
	out, said, err := command(t.Context(), append([]string{"run", "--run", "r"}, flags...)...)
	t.Log(said, err)
	var got []string
	for _, line := range linesOf(t, out) {
		if line["uid"] != nil {
			got = append(got, fmt.Sprint(line["uid"], " ", line["group"], " ", line["prompt"]))
		}
	}
	// Of a, b, c, a come next b, c, a, b; none stands in for itself.
	want := []string{"0000-a 0000-a-r1 b", "0001-b 0001-b-r1 c", "0002-c 0002-c-r1 a", "0000-a-e1 0000-a-e1-r1 b"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("groups %q, want %q", got, want)
	}
	expect(t, exitOK, "", "runs", "export", "r", "--out", "r.tar")
	epochs := map[string]int{}
	for _, e := range linesOf(t, expect(t, exitOK, "", "runs", "read", "r.tar", "--json")) {
		if e["stream"] == schemas.StreamPrompts {
			epochs[fmt.Sprint(e["event"].(map[string]any)["batch"].(map[string]any)["epoch"])]++
		}
	}
	if len(epochs) != 1 || epochs["5"] != 8 { // the second batch begins in the first pass, too
		t.Errorf("epochs %v", epochs)
	}
	for _, bad := range [][]string{
		{"--refill-fresh"},
		{"--batches", "2"},
		{"--batches", "-1", "--batch-size", "2"},
		{"--zero-std", "refill", "--refill-fresh", "--limit", "1"},
	} {
		expect(t, exitUsage, "", append([]string{"run", "--prompts", "p.txt", "--model", "synthetic", "--dry-run"}, bad...)...)
	}
}
