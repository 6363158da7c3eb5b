package integration_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// signs is the model that comes with the project.
func signs(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(root, "deploy/models/signs"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReward_OCR(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("tesseract"); err != nil {
		t.Skip("no tesseract on PATH: apt-get install tesseract-ocr")
	}
	dir := t.TempDir()
	args := []string{
		"run", "--json", "--model", signs(t), "-n", "4", "--sde-steps", "0-4", "--reward", "ocr", "--out",
		"o", `a blue sign that says "4071"`,
	}
	groups, _ := meander(t, dir, args...).must(t, 0).parse(t)
	for _, m := range groups[0].Members {
		if m.Reward == nil || *m.Reward < 0 || *m.Reward > 1 {
			t.Errorf("sample %d: %s %v", m.SampleIndex, m.Status, m.Reward)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "o", "results.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(data), "\n")
	var g struct {
		Members []struct {
			Scores []struct {
				Name, Version, Status, Detail string
				Seconds                       float64
			}
		}
	}
	if err := json.Unmarshal([]byte(line), &g); err != nil {
		t.Fatal(err)
	}
	for i, m := range g.Members {
		if len(m.Scores) != 1 || m.Scores[0].Name != "ocr" || !strings.Contains(m.Scores[0].Version, "tesseract") ||
			m.Scores[0].Seconds <= 0 || m.Scores[0].Detail == "" {
			t.Errorf("sample %d: scores %+v, want what tesseract read", i, m.Scores)
		}
	}
}

// Without the program, the error comes before any sample is made and says what to install.
func TestReward_OCRWithoutTesseract(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--model", "synthetic", "-n", "2", "--run", "r", "--out", "-", `"A"`).must(t, 0)
	for _, args := range [][]string{
		{"run", "--model", "synthetic", "--reward", "ocr", `a sign that says "A"`},
		{"rescore", "--run", "r", "--reward", "ocr"},
	} {
		cmd := exec.Command(program(t, "meander"), args...)
		cmd.Dir, cmd.Env = dir, []string{"PATH=" + t.TempDir(), "HOME=" + dir}
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != 2 || !strings.Contains(string(out), "apt-get install tesseract-ocr") {
			t.Errorf("%v: %v\n%s\nwant exit status 2 and what to install", args, err, out)
		}
	}
	cmd := exec.Command(program(t, "meander-reward"), "--require", "ocr", "--setup", "--nats-url", natsServer(t),
		"--health-addr", "")
	cmd.Env = []string{"PATH=" + t.TempDir()}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "apt-get install tesseract-ocr") {
		t.Errorf("meander-reward --require ocr: %v\n%s", err, out)
	}
}

// passGroup is one group of a pass, as rescore prints it.
type passGroup struct {
	UID     string `json:"uid"`
	Status  string `json:"status"`
	Members []struct {
		SampleIndex  int64    `json:"sample_index"`
		Status       string   `json:"status"`
		Reward       *float64 `json:"reward"`
		Advantage    *float64 `json:"advantage"`
		SourceReward *float64 `json:"source_reward"`
	} `json:"members"`
}

type pass struct {
	groups  []passGroup
	summary struct {
		Complete int    `json:"complete"`
		Scored   int    `json:"scored"`
		Digest   string `json:"digest"`
	}
}

func (o output) pass(t *testing.T) pass {
	t.Helper()
	var p pass
	for line := range strings.Lines(o.stdout) {
		var g passGroup
		last := struct {
			Summary any `json:"summary"`
		}{&p.summary}
		into := any(&g)
		if strings.HasPrefix(line, `{"summary"`) {
			into = &last
		}
		if err := json.Unmarshal([]byte(line), into); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if g.UID != "" {
			p.groups = append(p.groups, g)
		}
	}
	return p
}

// A pass over a batch of a run, with another reward and estimator, leaves the run as it
// is, repeats itself, and is found by show.
func TestRescore_Run(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--model", "synthetic", "--run", "r", "-n", "4", "--steps", "3", "--out", "-",
		"--batch-size",
		"2", "--batch-id", "b",
		"--reward", "jpeg_compressibility", "a red fox", "two owls").must(t, 0)
	before := meander(t, dir, "show", "--run", "r", "--json").must(t, 0).stdout
	args := []string{
		"rescore", "--reward", "jpeg_incompressibility=2", "--reward", "diversity", "--std", "global",
		"--json",
	}
	first := meander(t, dir, args...).must(t, 0).pass(t)
	if len(first.groups) != 2 || first.summary.Complete != 2 || first.summary.Scored != 8 {
		t.Fatalf("pass %+v", first)
	}
	for _, g := range first.groups {
		for _, m := range g.Members {
			// The new reward is the old one turned round, twice, and what diversity adds.
			if m.Reward == nil || m.Advantage == nil || m.SourceReward == nil || *m.Reward < -2**m.SourceReward ||
				*m.Reward > -2**m.SourceReward+1 {
				t.Errorf("%s: %+v", g.UID, m)
			}
		}
	}
	again := meander(t, dir, args...).must(t, 0)
	if p := again.pass(t); p.summary.Digest != first.summary.Digest ||
		!strings.Contains(again.stderr, "8 of 8 samples are scored already") {
		t.Errorf("digest %s then %s; %s", first.summary.Digest, p.summary.Digest, again.stderr)
	}
	if after := meander(t, dir, "show", "--run", "r", "--json").must(t, 0).stdout; after != before {
		t.Errorf("the run changed:\n%s\n%s", before, after)
	}
	shown := meander(t, dir, "show", "--run", "r--jpeg_incompressibility-diversity", first.groups[0].UID).must(t,
		0).stdout
	if !strings.Contains(shown, "a pass over run r") || !strings.Contains(shown, "64x64 pixels") {
		t.Errorf("show of a pass:\n%s", shown)
	}
	for want, args := range map[string][]string{
		"other rewards": {
			"rescore", "--run", "r", "--reward", "synthetic", "--pass",
			"r--jpeg_incompressibility-diversity",
		},
		"no stored":            {"rescore", "--run", "x", "--reward", "synthetic"},
		"itself a pass":        {"rescore", "--run", "r--jpeg_incompressibility-diversity", "--reward", "synthetic"},
		"--reward":             {"rescore", "--run", "r"},
		"is empty":             {"rescore", "--store", "none", "--reward", "synthetic"},
		"not configured here":  {"rescore", "--run", "r", "--reward", "http:clip"},
		"must be one of":       {"rescore", "--run", "r", "--reward", "sharpness"},
		"no text in double qu": {"rescore", "--run", "r", "--reward", "glyph"},
	} {
		if out := meander(t, dir, args...).must(t, 2); !strings.Contains(out.stderr, want) {
			t.Errorf("%v: %s, want %q", args, out.stderr, want)
		}
	}
}

// A pass that is killed goes on where it stopped.
func TestRescore_KilledAndResumed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var asked atomic.Int64
	file := scorersFile(t, fmt.Sprintf("http:\n  slow: {url: %q, concurrency: 2}\n",
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, n int) {
			asked.Add(int64(n))
			time.Sleep(40 * time.Millisecond)
			sendScores(w, "0.5", n)
		})))
	meander(t, dir, "run", "--model", "synthetic", "--run", "r", "-n", "16", "--steps", "2", "--out", "-", "a red fox",
		"two owls", "rain").must(t, 0)
	args := []string{
		"rescore", "--run", "r", "--reward", "http:slow", "--reward", "jpeg_compressibility", "--scorers",
		file, "--json", "--out", "-",
	}
	cmd := exec.Command(program(t, "meander"), args...)
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "a part is scored", func() error {
		if n := asked.Load(); n < 12 {
			return fmt.Errorf("%d asked", n)
		}
		return nil
	})
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()
	out := meander(t, dir, args...).must(t, 0)
	p := out.pass(t)
	calm := meander(t, dir, append(args, "--pass", "calm")...).must(t, 0).pass(t)
	if p.summary.Complete != 3 || p.summary.Scored != 48 ||
		!strings.Contains(out.stderr, "samples are scored already, resuming") {
		t.Errorf("after a kill: %+v\n%s", p.summary, out.stderr)
	}
	for i, g := range p.groups {
		for k, m := range g.Members {
			if c := calm.groups[i].Members[k]; *m.Reward != *c.Reward || *m.Advantage != *c.Advantage {
				t.Errorf("%s sample %d: %v, %v; undisturbed %v, %v", g.UID, k, *m.Reward, *m.Advantage, *c.Reward,
					*c.Advantage)
			}
		}
	}
}
