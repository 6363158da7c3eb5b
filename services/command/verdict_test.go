package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// People list what waits for them, look at the images and give verdicts. The group closes with the last of them.
func TestVerdict(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, "accepted  p1  3 samples x 2 steps", "publish", "--run", "r1", "-n", "3", "--steps", "2",
		"--reward", "external:human", "--reward", "external:robot", "--deadline", "1h", "a red fox")
	var lines []map[string]any
	bustest.Until(t, "six scores are waited for", func() error {
		lines = linesOf(t, expect(t, exitOK, "", "verdict", "--run", "r1", "--out", "images", "--json"))
		if len(lines) < 6 {
			return errNotYet
		}
		return nil
	})
	first, last := lines[0], lines[5]
	if first["uid"] != "p1" || first["name"] != "human" || last["name"] != "robot" || last["sample_index"] != 2.0 {
		t.Errorf("waiting %v", lines)
	}
	if img, err := os.ReadFile(last["image"].(string)); err != nil || !strings.HasPrefix(string(img), "\x89PNG") {
		t.Errorf("image %s: %v", last["image"], err)
	}
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "verdicts.jsonl")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		status int
		says   string
		args   []string
	}{
		{exitFailed, "it waits for human and robot; say which with --name", []string{"p1", "0=1"}},
		{exitFailed, `name "cat"; it waits for human and robot`, []string{"--name", "cat", "p1", "0=1"}},
		{exitFailed, "no such sample", []string{"--name", "human", "p1", "3=1"}},
		{exitFailed, "no such sample", []string{"--name", "human", "p2", "0=1"}},
		{exitUsage, `"0=NaN"; must be SAMPLE=VALUE, such as 0=0.8, and a finite value`, []string{"--name", "human", "p1", "0=NaN"}},
		{exitUsage, `"1=-Inf"; must be SAMPLE=VALUE`, []string{"--name", "human", "p1", "0=1", "1=-Inf"}},
		{exitUsage, `"0=good"; must be SAMPLE=VALUE`, []string{"--name", "human", "p1", "0=good"}},
		{exitUsage, "no values", []string{"p1"}},
		{exitUsage, "line 2: sample_index is missing", []string{
			"--file", file(`{"uid":"a","sample_index":0,"value":1}` + "\n" + `{"uid":"a"}`),
		}},
		{exitUsage, "line 2: more than 64 KiB", []string{
			"--file", file(`{"uid":"a","sample_index":0,"value":1}` + "\n" +
				`{"uid":"a","comment":"` + strings.Repeat("x", 64<<10) + `"}`),
		}},
		{exitUsage, "line 1: must be a value, or an error", []string{"--file", file(`{"uid":"a","sample_index":0}`)}},
		{exitUsage, `line 1: json: unknown field "score"`, []string{"--file", file(`{"uid":"a","score":0}`)}},
		{exitOK, "3 verdicts given", []string{"--name", "human", "p1", "0=1", "1=0.5", "2=0"}},
		{exitOK, "1 verdict given", []string{"--name", "human", "p1", "1=0.5"}}, // the same once more
		{exitFailed, "the sample has a verdict already: 0.5", []string{"--name", "human", "p1", "1=0.25"}},
		{exitOK, "3 verdicts given", []string{"--file", file(`{"uid":"p1","sample_index":0,"value":1,"name":"robot"}

{"uid":"p1","sample_index":1,"value":1,"name":"robot","comment":"fine"}
{"uid":"p1","sample_index":2,"error":"no power","name":"robot"}
`)}},
	} {
		expect(t, c.status, c.says, append([]string{"verdict", "--run", "r1"}, c.args...)...)
	}
	expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "advantage", "--count", "1", "--json")
	group := linesOf(t, expect(t, exitOK, "", "show", "--run", "r1", "--json"))[0]
	var rewards []any
	for _, m := range group["members"].([]any) {
		rewards = append(rewards, m.(map[string]any)["reward"])
	}
	if group["status"] != "partial" || len(rewards) != 3 || rewards[0] != 2.0 || rewards[1] != 1.5 ||
		rewards[2] != nil {
		t.Errorf("group %v with rewards %v; want 2, 1.5 and none", group["status"], rewards)
	}
	expect(t, exitOK, "no finished sample of run r1 waits for a verdict", "verdict", "--run", "r1")
}

// A group that has its result takes no more verdicts, and its samples wait for none.
func TestVerdict_Closed(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, "accepted  p1  2 samples x 2 steps", "publish", "--run", "r1", "-n", "2", "--steps", "2",
		"--reward", "external", "--deadline", "1h", "a red fox")
	bustest.Until(t, "two samples wait", func() error {
		if len(linesOf(t, expect(t, exitOK, "", "verdict", "--run", "r1", "--json"))) < 2 {
			return errNotYet
		}
		return nil
	})
	expect(t, exitOK, "1 verdict given", "verdict", "--run", "r1", "p1", "0=1")
	expect(t, exitOK, "run r1 is cancelled", "cancel", "r1")
	expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "advantage", "--count", "1", "--json")
	expect(t, exitOK, "no finished sample of run r1 waits for a verdict", "verdict", "--run", "r1")
	expect(t, exitOK, "1 verdict given", "verdict", "--run", "r1", "p1", "0=1") // the same once more
	expect(t, exitFailed, "p1 sample 1: too late: its group has its result, cancelled; 0 of 1 verdicts are given",
		"verdict", "--run", "r1", "p1", "1=1")
}
