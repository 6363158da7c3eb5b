package integration_test

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// People list what waits for them, look at the images, and give verdicts; the group
// closes with the last of them.
func TestVerdict_FromTheCommandLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	serve(t, dir)
	meander(t, dir, "publish", "--run", "demo", "-n", "3", "--steps", "2", "--reward", "external:human", "--reward", "external:robot", "a red fox").must(t, 0)
	var uid string
	bustest.Until(t, "six scores are waited for", func() error {
		out := meander(t, dir, "verdict", "--run", "demo", "--out", "images", "--json").must(t, 0)
		lines := strings.Split(strings.TrimSpace(out.stdout), "\n")
		if len(lines) == 6 {
			var first, last struct{ UID, Name, Image string }
			if err := json.Unmarshal([]byte(lines[0]), &first); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal([]byte(lines[5]), &last); err != nil {
				t.Fatal(err)
			}
			if uid = first.UID; first.Name != "human" || last.Name != "robot" {
				t.Errorf("%s\n%s", lines[0], lines[5])
			}
			if img, err := os.ReadFile(filepath.Join(dir, last.Image)); err != nil || !strings.HasPrefix(string(img), "\x89PNG") {
				t.Errorf("image %s: %v", last.Image, err)
			}
			return nil
		}
		return errors.New(out.stdout)
	})
	for _, c := range []struct {
		code int
		says string
		args []string
	}{
		{1, "it waits for human and robot; say which with --name", []string{uid, "0=1"}},
		{1, `name "cat"; it waits for human and robot`, []string{"--name", "cat", uid, "0=1"}},
		{1, "no such sample", []string{"--name", "human", uid, "3=1"}},
		{1, "no such sample", []string{"--name", "human", "nobody", "0=1"}},
		{2, `"0=NaN"; must be SAMPLE=VALUE, such as 0=0.8, and a finite value`, []string{"--name", "human", uid, "0=NaN"}},
		{2, `"1=-Inf"; must be SAMPLE=VALUE`, []string{"--name", "human", uid, "0=1", "1=-Inf"}},
		{2, `"0=good"; must be SAMPLE=VALUE`, []string{"--name", "human", uid, "0=good"}},
		{2, "no values", []string{uid}},
		{2, "line 2: sample_index is missing", []string{"--file", write(t, "{\"uid\":\"a\",\"sample_index\":0,\"value\":1}\n{\"uid\":\"a\"}\n")}},
		{2, "line 1: must be a value, or an error", []string{"--file", write(t, "{\"uid\":\"a\",\"sample_index\":0}\n")}},
		{2, `line 1: json: unknown field "score"`, []string{"--file", write(t, "{\"uid\":\"a\",\"score\":0}\n")}},
		{0, "3 verdicts given", []string{"--name", "human", uid, "0=1", "1=0.5", "2=0"}},
		{0, "1 verdict given", []string{"--name", "human", uid, "1=0.5"}}, // the same once more
		{1, "the sample has a verdict already: 0.5", []string{"--name", "human", uid, "1=0.25"}},
		{0, "3 verdicts given", []string{"--file", write(t, `{"uid":"`+uid+`","sample_index":0,"value":1,"name":"robot"}

{"uid":"`+uid+`","sample_index":1,"value":1,"name":"robot","comment":"fine"}
{"uid":"`+uid+`","sample_index":2,"error":"no power","name":"robot"}
`)}},
	} {
		out := meander(t, dir, append([]string{"verdict", "--run", "demo"}, c.args...)...).must(t, c.code)
		if !strings.Contains(out.stderr, c.says) {
			t.Errorf("%q: no %q in %s", c.args, c.says, out.stderr)
		}
	}
	bustest.Until(t, "the group is closed", func() error {
		out := meander(t, dir, "show", "--run", "demo", "--json")
		if out.code == 0 {
			var g group
			if err := json.Unmarshal([]byte(out.stdout), &g); err != nil {
				t.Fatal(err)
			}
			if g.Status != "partial" || *g.Members[0].Reward != 2 || math.Abs(*g.Members[1].Reward-1.5) > 1e-12 || g.Members[2].Status != "failed" {
				t.Errorf("%s", out.stdout)
			}
			return nil
		}
		return errors.New(out.stderr)
	})
	if out := meander(t, dir, "verdict", "--run", "demo").must(t, 0); !strings.Contains(out.stderr, "no finished sample of run demo waits") {
		t.Errorf("%+v", out)
	}
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "verdicts.jsonl")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
