package integration_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each of these must be refused with a reason that names the field.
var badPrompts = []struct{ name, line, want string }{
	{"group size 0", `{"prompt": "a", "group_size": 0}`, "group_size"},
	{"group size 10^6", `{"prompt": "a", "group_size": 1000000}`, "group_size"},
	{"negative group size", `{"prompt": "a", "group_size": -1}`, "group_size"},
	{"negative steps", `{"prompt": "a", "num_inference_steps": -4}`, "num_inference_steps"},
	{"too many steps", `{"prompt": "a", "num_inference_steps": 100000}`, "num_inference_steps"},
	{"negative seed", `{"prompt": "a", "seed": -1}`, "seed"},
	{"uid with a dot", `{"prompt": "a", "uid": "x.y"}`, "uid"},
	{"uid with a wildcard", `{"prompt": "a", "uid": "x*"}`, "uid"},
	{"uid too long", `{"prompt": "a", "uid": "` + strings.Repeat("u", 65) + `"}`, "uid"},
	{"huge prompt", `{"prompt": "` + strings.Repeat("long ", 20000) + `"}`, "prompt"},
	{"unknown sde_type", `{"prompt": "a", "rollout": {"sde_type": "brownian"}}`, "sde_type"},
	{"negative noise level", `{"prompt": "a", "rollout": {"noise_level": -0.5}}`, "noise_level"},
	{"cps noise level above 1", `{"prompt": "a", "rollout": {"sde_type": "cps", "sde_step_indices": [1], "noise_level": 1.5}}`, "noise_level"},
	{"density of a step without noise", `{"prompt": "a", "rollout": {"sde_type": "cps"}}`, "sde_step_indices"},
	{
		"sde step out of range", `{"prompt": "a", "num_inference_steps": 4, "rollout": {"sde_step_indices": [4]}}`,
		"sde_step_indices",
	},
	{"sde step out of the default range", `{"prompt": "a", "rollout": {"sde_step_indices": [10]}}`, "sde_step_indices"},
	{"negative sde step", `{"prompt": "a", "rollout": {"sde_step_indices": [-1]}}`, "sde_step_indices"},
	{"sde step twice", `{"prompt": "a", "rollout": {"sde_step_indices": [1, 1]}}`, "sde_step_indices"},
	{"return step out of range", `{"prompt": "a", "rollout": {"return_step_indices": [11]}}`, "return_step_indices"},
	{"window that does not fit", `{"prompt": "a", "rollout": {"sde_window": {"size": 4, "range": [0, 3]}}}`, "sde_window"},
	{"list and window", `{"prompt": "a", "rollout": {"sde_step_indices": [1], "sde_window": {"size": 1}}}`, "sde_window"},
	{"unknown log_prob_kind", `{"prompt": "a", "rollout": {"log_prob_kind": "sum"}}`, "log_prob_kind"},
	{"unknown solver", `{"prompt": "a", "rollout": {"solver": "leapfrog"}}`, "solver"},
	{"unknown dtype", `{"prompt": "a", "rollout": {"latents_dtype": "F8"}}`, "latents_dtype"},
	{"unknown debug tensor", `{"prompt": "a", "rollout": {"debug": ["gradient"]}}`, "debug"},
	{"unknown reward", `{"prompt": "a", "reward": [{"name": "beauty"}]}`, "beauty"},
	{"weights without a positive sum", `{"prompt": "a", "reward": [{"name": "synthetic", "weight": 0}]}`, "weight"},
	{"unknown estimator", `{"prompt": "a", "advantage": {"estimator": "guess"}}`, "guess"},
	{"global std without a batch", `{"prompt": "a", "advantage": {"std": "global"}}`, "batch"},
	{"unknown model", `{"prompt": "a", "model": "dream"}`, "model"},
	{"height not divisible", `{"prompt": "a", "height": 65}`, "height"},
	{"negative width", `{"prompt": "a", "width": -64}`, "width"},
	{"huge image", `{"prompt": "a", "height": 8192, "width": 8192}`, "height"},
	{"sigmas not decreasing", `{"prompt": "a", "sigmas": [1, 0.5, 0.7]}`, "sigmas"},
	{"sigma above 1", `{"prompt": "a", "sigmas": [1.5, 0.5]}`, "sigmas"},
	{"empty sigmas", `{"prompt": "a", "sigmas": []}`, "sigmas"},
}

// These are no prompts at all: they are found while the file is read.
var badRecords = []struct{ name, line, want string }{
	{"no prompt", `{"negative_prompt": "x"}`, "prompt"},
	{"prompt of another type", `{"prompt": 7}`, "prompt"},
	{"group size 2.5", `{"prompt": "a", "group_size": 2.5}`, "group_size"},
	{"metadata that is no map", `{"prompt": "a", "metadata": [1]}`, "metadata"},
	{"no JSON", `{"prompt": "a"`, "JSON"},
}

// A record that is no prompt ends the command before anything is published; with --skip-bad it is left out and said.
func TestRun_BadRecordsAreFoundFirst(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good := `{"prompt": "a red fox", "uid": "good", "group_size": 2}` + "\n"
	run := func(records string, flags ...string) output {
		file := filepath.Join(dir, "prompts.jsonl")
		if err := os.WriteFile(file, []byte(records), 0o600); err != nil {
			t.Fatal(err)
		}
		return meander(t, dir, append([]string{"run", "--run", "r", "--model", "synthetic", "--prompts", file},
			flags...)...)
	}
	if out := run(`{"prompt": "a", "rollout": {"noise_level": 1e999}}`).must(t, 2); !strings.Contains(out.stderr, "line 1: rollout.noise_level: 1e999") {
		t.Errorf("a number that no float holds: %s", out.stderr)
	}
	all := good
	for _, bad := range badRecords {
		out := run(good+bad.line+"\n").must(t, 2)
		if !strings.Contains(out.stderr, "line 2: ") || !strings.Contains(out.stderr, bad.want) {
			t.Errorf("%s: %s; want line 2 and %q", bad.name, out.stderr, bad.want)
		}
		all += bad.line + "\n"
	}
	out := run(all, "--skip-bad").must(t, 0)
	for i, bad := range badRecords {
		if line := fmt.Sprintf("prompts.jsonl line %d: ", i+2); !strings.Contains(out.stderr, line) {
			t.Errorf("%s: %s; want %q", bad.name, out.stderr, line)
		}
	}
	if !strings.Contains(out.stdout, "1 of 1 groups complete") {
		t.Errorf("%s; want the good one complete", out.stdout)
	}
	if dead := meander(t, dir, "dead", "ls").must(t, 0); !strings.Contains(dead.stdout+dead.stderr, "no dead letters") {
		t.Errorf("%s; want none: nothing bad is published", dead.stdout)
	}
}

func TestRun_BadInputIsRefusedWithAReason(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var lines strings.Builder
	for _, bad := range badPrompts {
		lines.WriteString(bad.line + "\n")
	}
	lines.WriteString(`{"prompt": "a red fox", "uid": "good", "group_size": 2}` + "\n")
	file := filepath.Join(dir, "prompts.jsonl")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out := meander(t, dir, "run", "--run", "bad", "--model", "synthetic", "--skip-bad", "--json", "--prompts",
		file).must(t, 1)
	groups, sum := out.parse(t)
	refused := 0
	for i, bad := range badPrompts {
		place := fmt.Sprintf("%04d-", i)
		if at := slices.IndexFunc(groups, func(g group) bool { return strings.HasPrefix(g.UID, place) }); at >= 0 {
			refused++
			if g := groups[at]; g.Status != "refused" || !strings.Contains(g.Error, bad.want) {
				t.Errorf("%s: %s %q; want refused, naming %q", bad.name, g.Status, g.Error, bad.want)
			}
			continue
		}
		// What needs no model to be refused is found while the file is read, and ends the command.
		one := filepath.Join(dir, "one.jsonl")
		if err := os.WriteFile(one, []byte(bad.line+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		read := meander(t, dir, "run", "--run", "bad", "--model", "synthetic", "--prompts", one).must(t, 2)
		if !strings.Contains(read.stderr, "line 1: ") || !strings.Contains(read.stderr, bad.want) {
			t.Errorf("%s: %q; want line 1, naming %q", bad.name, read.stderr, bad.want)
		}
	}
	if len(groups) != refused+1 || refused == 0 || sum.Refused != refused || sum.Complete != 1 {
		t.Errorf("%d groups, summary %+v; want %d refused and the good one complete", len(groups), sum, refused)
	}
	dead := meander(t, dir, "dead", "ls", "--json").must(t, 0)
	seen := 0
	for s := bufio.NewScanner(strings.NewReader(dead.stdout)); s.Scan(); {
		var d struct{ Service, Code, Reason string }
		if err := json.Unmarshal(s.Bytes(), &d); err != nil {
			t.Fatalf("dead letter: %v\n%s", err, s.Text())
		}
		if d.Service != "intake" || d.Code == "" || d.Reason == "" {
			t.Errorf("dead letter %+v lacks service, code or reason", d)
		}
		seen++
	}
	if seen != refused {
		t.Errorf("%d dead letters, want %d", seen, refused)
	}
}
