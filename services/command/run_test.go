package command

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/results"
)

// A run that is started again goes on with what it has; another one does not take its name.
func TestRun_Again(t *testing.T) {
	inStore(t)
	again := append([]string{"run", "--run", "r1"}, small...)
	expect(t, exitOK, "run r1: 1 of 1 groups are done already, resuming", again...)
	expect(t, exitOK, "run r1: 0/0 steps  0 rewards  1/1 groups", again...) // nothing is left to do
	expect(t, exitUsage, `--run: "r1" was started with other prompts or settings`, append(again, "--seed", "9")...)
	lines := linesOf(t, expect(t, exitOK, "", append(again, "--json")...))
	if len(lines) != 2 || lines[0]["uid"] != "p" || lines[1]["summary"].(map[string]any)["complete"] != 1.0 {
		t.Errorf("JSON %v", lines)
	}
}

// A warning of the estimate is not repeated by intake's answer.
func TestRun_WarnsOnce(t *testing.T) {
	inEmptyDir(t)
	_, stderr, err := command(t.Context(), "run", "--model", "synthetic", "-n", "1", "--steps", "3", "--stop-step", "2",
		"--out", "-", "a red fox")
	if n := strings.Count(stderr, "jpeg_compressibility will fail"); err == nil || n != 1 {
		t.Errorf("%v; %d warnings, want 1:\n%s", err, n, stderr)
	}
}

// What an estimate knows to be refused is not started: there is one message, and nothing is stored.
func TestRun_Refused(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("p.jsonl", []byte(`{"prompt": "no text to read", "uid": "p", "reward": [{"name": "glyph"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{append([]string{"run"}, small...), append([]string{"run", "--json"}, small...)} {
		var out, errs text
		const want = "meander: --prompts: p.jsonl line 1: reward[0]: ground_truth: empty, "
		status := Execute(t.Context(), args, strings.NewReader(""), &out, &errs)
		if said := errs.String(); status != exitUsage || out.String() != "" || !strings.HasPrefix(said, want) ||
			strings.Count(said, "ground_truth") != 1 {
			t.Errorf("%q: exit status %d, and it said:\n%s%s", args, status, &out, said)
		}
	}
	expect(t, exitUsage, `1 prompt refused: model: "elsewhere" is not served here; must be synthetic`, "run", "--model",
		"synthetic", "-f", unservedPrompt(t))
	if _, err := os.Stat("meander-data"); err == nil {
		t.Error("a run that is refused has made a store")
	}
	for _, flag := range [][]string{
		{"--group-size", "0"}, {"--group-size", "1000000"}, {"--reward", "beauty"}, {"--estimator", "guess"}, {"--noise-level", "NaN"},
	} {
		var errs text
		args := append([]string{"run", "--model", "synthetic", "a fox", "two owls"}, flag...)
		status := Execute(t.Context(), args, strings.NewReader(""), &text{}, &errs)
		if said := errs.String(); status != exitUsage || strings.Count(said, flag[0]+": ") != 1 ||
			strings.Contains(said, "estimate") {
			t.Errorf("%v: exit status %d; must say why, once: %s", flag, status, said)
		}
	}
	expect(t, exitUsage, "2 prompts refused: --sde-steps: ", "run", "--model", "synthetic", "--sde-steps", "99",
		"a fox", "two owls")
	expect(t, exitUsage, "--sde-steps", "run", "--sde-steps", "two", "a fox")
	expect(t, exitUsage, "nowhere/at/all", "run", "--model", "nowhere/at/all", "a fox")
	expect(t, exitUsage, "--replicas: 0; must be", "run", "--replicas", "0", "a fox")
	expect(t, exitUsage, `--logits, --top-k: given; must be absent: model "synthetic" makes images, which have no tokens and no logits; --return-steps keeps`,
		"run", "--dry-run", "--model", "synthetic", "--logits", "full", "--top-k", "3", "a fox")
	for flag, value := range map[string]string{
		"--device": "gpu", "--adapter": "none", "--scorers": "none",
		"--metrics-addr": "none", "--run": "a b", "--log-level": "all",
	} {
		expect(t, exitUsage, "meander: "+flag+": ", "run", "--dry-run", flag, value, "a fox")
	}
	expect(t, exitUsage, `prompt 1: ""; must be a text`, "run", "")
	expect(t, exitUsage, `prompt 2: " "; must be a text`, "publish", "a fox", " ")
	expect(t, exitUsage, `--run: "a b"`, "run", "--run", "a b", "a fox")
	inStore(t)
	expect(t, exitUsage, "1 prompt refused: --height: 100; must be a multiple of 16", "publish", "--run", "q",
		"--height", "100", "a fox")
	expect(t, exitUsage, `RUN: "q"; nothing is stored of it`, "status", "q")
}

// unservedPrompt is a file with a prompt for a lane without a sampler.
func unservedPrompt(t *testing.T) string {
	t.Helper()
	if err := os.WriteFile("elsewhere.jsonl", []byte(`{"prompt": "a fox", "model": "elsewhere"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	return "elsewhere.jsonl"
}

// A run is of one model: of another one, or of another checkpoint of the same name, it takes nothing, and the other
// says which it is.
func TestRun_OtherModel(t *testing.T) {
	inStore(t)
	again := append([]string{"run", "--run", "r1"}, small...)
	expect(t, exitUsage,
		`--model: "signs"; run "r1" was started with "synthetic"; use that again, or choose another --run`, append(again,
			"--model", "signs")...)
	expect(t, exitOK, "1 of 1 groups are done already", again...)
	if err := os.CopyFS("other/signs", os.DirFS(os.Getenv("MEANDER_MODELS")+"/signs")); err != nil {
		t.Fatal(err)
	}
	weights, err := filepath.Glob("other/signs/transformer/*.safetensors")
	if err != nil || len(weights) == 0 {
		t.Fatalf("weights %v, %v", weights, err)
	}
	data, err := os.ReadFile(weights[0])
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1] ^= 1
	if err := os.WriteFile(weights[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	signs := []string{
		"run", "--run", "s", "-n", "1", "--steps", "1", "--sde-type", "ode", "--out", "-",
		`a red sign that says "OPEN"`,
	}
	expect(t, exitOK, "1 of 1 groups complete", signs...)
	base := linesOf(t, expect(t, exitOK, "", "policy", "show", "--lane", "signs", "--json"))[0]["base_digest"].(string)
	said := expect(t, exitUsage,
		fmt.Sprintf(`; run "s" was started with %.16s; use that again, or choose another --run`, base), append(signs,
			"--model", "other/signs")...)
	if said != "" {
		t.Errorf("it printed %s", said)
	}
	expect(t, exitOK, "1 of 1 groups are done already", signs...)
	if n := len(linesOf(t, expect(t, exitOK, "", "policy", "ls", "--lane", "signs", "--json"))); n != 1 {
		t.Errorf("lane signs has %d versions; want that the refused checkpoint is none", n)
	}
}

// Prompts that wait for a model are not taken by a run of another one.
func TestRun_LeavesOthersPrompts(t *testing.T) {
	inStore(t) // of the model synthetic
	expect(t, exitFailed, "no intake answered", "publish", "--run", "q", "-n", "1", "--steps", "2", "--wait", "1s",
		"a fox")
	expect(t, exitOK, "1 of 1 groups complete", "run", "--model", "sums", "-n", "1", "--out", "-", "3+4=?")
	if dead := expect(t, exitOK, "", "dead", "ls", "--json"); dead != "" {
		t.Errorf("dead letters %s", dead)
	}
	serving(t, "--model", "synthetic")
	bustest.Until(t, "the group has its result", func() error {
		if said := expect(t, exitOK, "", "status", "q"); !strings.Contains(said, "1 of 1 have their result") {
			return errNotYet
		}
		return nil
	})
	if group := expect(t, exitOK, "", "show", "--run", "q"); !strings.Contains(group, "complete") {
		t.Errorf("it is\n%s", group)
	}
}

// Groups that a run has from prompts published otherwise are not taken for those of another model.
func TestRun_GroupsOfAnotherModel(t *testing.T) {
	inStore(t)
	t.Run("published", func(t *testing.T) {
		serving(t, "--model", "synthetic")
		expect(t, exitOK, "accepted", "publish", "--run", "q", "--prompts", "p.jsonl", "-n", "2", "--steps", "3")
		bustest.Until(t, "the group has its result", func() error {
			if said := expect(t, exitOK, "", "status", "q"); !strings.Contains(said, "1 of 1 have their result") {
				return errNotYet
			}
			return nil
		})
	})
	expect(t, exitUsage, `--model: "signs"; group "p" of run "q" is of "synthetic"; choose another --run`,
		append(append([]string{"run", "--run", "q"}, small...), "--model", "signs")...)
}

// Why a sample failed is said where its status is.
func TestRun_FailuresAreExplained(t *testing.T) {
	inEmptyDir(t)
	if err := os.WriteFile("scorers.yaml", []byte("http:\n  gone:\n    url: http://127.0.0.1:9/score\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	run := expect(t, exitFailed, "", "run", "--model", "synthetic", "--run", "r", "-n", "3", "--steps", "2", "--out",
		"-",
		"--scorers", "scorers.yaml", "--score-patience", "1s", "--reward", "http:gone", "--seed", "1", "a red fox")
	show := expect(t, exitOK, "", "show", "--run", "r", "0000-a-red-fox")
	for name, text := range map[string]string{"run": run, "show": show} {
		said := map[string]bool{}
		for line := range strings.Lines(text) {
			samples, reason, ok := strings.Cut(line, " failed: ")
			if !ok || !strings.Contains(reason, "http:gone") || !strings.Contains(reason, "connection refused") {
				continue
			}
			for _, sample := range strings.Fields(samples) {
				said[sample] = true
			}
		}
		if !said["#0"] || !said["#1"] || !said["#2"] {
			t.Errorf("%s does not say why:\n%s", name, text)
		}
	}
}

// The progress of a run that is cancelled ends with the steps that it has, and says why.
func TestProgress_Cancelled(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		prompts := []results.Prompt{{UID: "p"}}
		var out text
		p := newProgress(&out, false, "r", prompts, results.NewOutcomes(prompts), &loading{})
		p.expect(6)
		p.countStep("mdr.v1.step.r.p.0.main.a1.0")
		// the last steps are counted after their group's end is known
		want := "run r: 6/6 steps  0 rewards  1/1 groups\n"
		if cancelled {
			p.cancelled()
			want = "run r: 1/6 steps  0 rewards  1/1 groups  cancelled\n"
		}
		p.groups(1, 0)
		p.end()
		if !strings.HasSuffix(out.String(), want) {
			t.Errorf("cancelled %v: %q, want %q", cancelled, &out, want)
		}
	}
}
