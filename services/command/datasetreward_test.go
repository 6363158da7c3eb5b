package command

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// The value of a field of its record chooses a prompt's functions, whatever signs the value has.
func TestLoad_RewardBy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.jsonl")
	lines := `{"prompt": [{"role": "user", "content": "a"}], "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7", "style": "s"}, "extra_info": {"kind": {"of": "k"}}}
{"prompt": [{"role": "user", "content": "b"}], "data_source": "x=y"}
{"prompt": "c", "data_source": 3}
{"prompt": "d", "reward": [{"name": "turns"}], "data_source": "other"}
`
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	by := []string{"--prompts", file, "--reward-by", "data_source"}
	prompts := mustLoad(t, append(by, "--reward",
		"openai/gsm8k=numeric_match=2,x=y=nats:judge,3=nats:judge,confidence=0.5",
		"--optional-reward", "x=y=entropy_mean", "--reward-param", "nats:judge.k=v")...)
	var got [][]string
	for _, p := range prompts {
		var names []string
		for _, r := range event(t, p).Reward {
			name := r.Name + r.GroundTruth.Text() + r.Params["k"]
			if r.Weight != nil && *r.Weight == 2 {
				name += "=2"
			}
			names = append(names, name)
		}
		got = append(got, names)
	}
	want := [][]string{
		{"confidence", "numeric_match7=2"},
		{"confidence", "nats:judgev", "entropy_mean"},
		{"confidence", "nats:judgev"},
		{"turns"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("functions %q, want %q", got, want)
	}
	for field, value := range map[string]string{"extra_info.kind.of": "k", "kind.of": "k", "reward_model.style": "s"} {
		p := mustLoad(t, "--prompts", file, "--limit", "1", "--reward-by", field, "--reward", value+"=turns")
		if r := event(t, p[0]).Reward; len(r) != 1 || r[0].Name != "turns" {
			t.Errorf("by %s: %v", field, r)
		}
	}
	for _, tt := range []struct {
		args  []string
		fault string
	}{
		{append(by, "--reward", "3=turns"), `line 1: data_source: "openai/gsm8k"; must be one of 3,`},
		{[]string{"--prompts", file, "--reward-by", "split", "--reward", "test=turns"}, "line 1: split: absent; must be one of test"},
		{append(by, "--reward", "turns"), "must be with functions of values"},
		{append(by, "--reward", "3=tunrs"), `"tunrs"`},
		{[]string{"--reward-by", "x", "--reward", "3=turns", "a"}, "must be with --prompts"},
		{append(by, "--reward", "3=turns", "--zero-std", "refill", "--refill-fresh"), "--refill-fresh: given; must be absent"},
	} {
		if _, _, err := loadPrompts(tt.args...); err == nil || !strings.Contains(err.Error(), tt.fault) {
			t.Errorf("%q: %v, want %q", tt.args, err, tt.fault)
		}
	}
}

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
		expect(t, exitUsage, "", append([]string{"run", "--prompts", "p.txt", "--model", "synthetic", "--dry-run"},
			bad...)...)
	}
}
