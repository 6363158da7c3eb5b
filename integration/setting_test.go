package integration_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A setting that decides bits goes from its flag to the trainer: it is in the digest, verify recomputes with it, views
// and datasets have it, and a trainer's batch has its effect, so that the first ratio is 1 with it and not without. The
// files that name it by hand are a row of extensions.
func TestExtend_SettingReachesTheTrainer(t *testing.T) {
	skipShort(t)
	t.Parallel()
	dir := t.TempDir()
	info := serve(t, dir)
	uid := ""
	read := func(run string, flags ...string) (digest string, rollout map[string]any) {
		t.Helper()
		out := meander(t, dir, slices.Concat([]string{
			"run", "--json", "--run", run, "-n", "2", "--steps", "4", "--true-cfg-scale", "3", "--sde-steps", "0,1,2", "--seed", "7",
			"--reward", "synthetic", "--debug", "model_output", "--return-conditioning",
		}, flags, []string{`a red sign that says "FOX"`})...)
		var group struct {
			UID     string
			Members []struct {
				Digest  string         `json:"content_digest"`
				Rollout map[string]any `json:"rollout"`
			}
		}
		for text := range strings.Lines(out.stdout) {
			if err := json.Unmarshal([]byte(text), &group); err == nil && len(group.Members) > 0 {
				uid = group.UID
				return group.Members[0].Digest, group.Members[0].Rollout
			}
		}
		t.Fatalf("run %s: no group in %s%s", run, out.stdout, out.stderr)
		return "", nil
	}
	plain, without := read("plain")
	same, zero := read("zero", "--cfg-from", "0")
	part, with := read("part", "--cfg-from", "0.25", "--cfg-until", "0.75")
	if same != plain || zero["schedule_digest"] != without["schedule_digest"] || zero["cfg_from"] != nil {
		t.Errorf("--cfg-from 0 is not what an absent one is: %v", zero)
	}
	if part == plain || with["schedule_digest"] == without["schedule_digest"] || with["cfg_from"] != 0.25 ||
		!slices.Equal(with["cfg_scales"].([]any), []any{1.0, 3.0, 3.0, 1.0}) {
		t.Errorf("--cfg-from 0.25 changes no digest, or is not in the results: %v", with)
	}
	if out := meander(t, dir, "show", "--run", "part", uid); !strings.Contains(out.stdout, "cfg_from 0.25\n") {
		t.Errorf("show: %s", out.stdout)
	}
	if out := meander(t, dir, "verify", "--run", "part"); out.code != 0 {
		t.Errorf("verify: %s%s", out.stdout, out.stderr)
	}
	meander(t, dir, "runs", "export", "part", "--format", "webdataset", "--out", filepath.Join(dir, "tars"))
	tar, err := os.ReadFile(filepath.Join(dir, "tars", "00000.tar"))
	if err != nil || !strings.Contains(string(tar), `\"cfg_from\":0.25`) {
		t.Errorf("a dataset without the setting: %v", err)
	}
	python := pythonWith(t, "nats, msgpack, blake3, numpy")
	trainer := exec.CommandContext(t.Context(), python, "testdata/setting.py", info.URL, "part")
	trainer.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"),
		"PYTHONDONTWRITEBYTECODE=1")
	if out, err := trainer.CombinedOutput(); err != nil {
		t.Errorf("trainer: %v\n%s", err, out)
	}
}
