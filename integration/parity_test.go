package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A folder has one schedule and one sample in diffusers' pipeline and in meander, by a worker and by this program. A
// release of diffusers that computes another schedule is named by the sampler's card and by parity.
func TestParity(t *testing.T) {
	needTorch(t)
	signs, dir := absolute(t, signsFolder), t.TempDir()
	parity := []string{"parity", "--model", signs, "--steps", "4", `a red sign that says "EXIT"`}
	for _, how := range [][]string{nil, {"--own"}} {
		out := meander(t, dir, append(parity, how...)...).must(t, 0)
		if !strings.HasSuffix(out.stdout, "they agree\n") || strings.Count(out.stdout, "\n") != 12 {
			t.Errorf("parity %v:\n%s", how, out.stdout)
		}
	}
	info := meander(t, dir, "model", "info", "--engine", "torch", signs).must(t, 0)
	if !strings.Contains(info.stdout, "the schedule has the bits of the worker's diffusers") {
		t.Errorf("model info:\n%s", info.stdout)
	}

	// Another release, whose schedulers shift by a hundredth more than their configuration says.
	python, err := exec.LookPath(os.Getenv("MEANDER_PYTHON"))
	if err != nil {
		t.Fatal(err)
	}
	drifted := filepath.Join(dir, "python")
	script := "#!" + python + `
import functools, runpy, sys
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler

set_timesteps = Scheduler.set_timesteps


@functools.wraps(set_timesteps)
def drifted(self, *args, **kwargs):
    set_timesteps(self, *args, **kwargs)
    self.sigmas = self.sigmas * 0.99


Scheduler.set_timesteps = drifted
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
`
	if err := os.WriteFile(drifted, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MEANDER_PYTHON", drifted)
	out := meander(t, dir, parity...)
	if out.code != 1 || !strings.Contains(out.stdout, "sigma 0: 0.99 in diffusers, 1 in meander\n") ||
		!strings.HasSuffix(out.stdout, "they do NOT agree\n") {
		t.Errorf("drifted: exit %d\n%s%s", out.code, out.stdout, out.stderr)
	}
	info = meander(t, dir, "model", "info", "--engine", "torch", signs)
	if !strings.Contains(info.stdout, "schedule differs: sigma 0 of 8 steps is 0.99 to the worker's diffusers") {
		t.Errorf("model info:\n%s%s", info.stdout, info.stderr)
	}
}

// A pipeline that is computed as a whole, and one that edits a given image, agree with diffusers' own call of them.
func TestParity_Pipelines(t *testing.T) {
	needTorch(t)
	python, dir := os.Getenv("MEANDER_PYTHON"), t.TempDir()
	tiny := absolute(t, filepath.Join(root, "pkg/client/python/tests/torch_engine"))
	write := exec.Command(python, "-c", `
import sys
from pathlib import Path
from PIL import Image
import tiny, tiny_whole
tiny.write(Path(sys.argv[1]), ("sd3",))
tiny_whole.write(Path(sys.argv[1]), "kontext")
Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(sys.argv[1] + "/in.png")
`, dir)
	write.Env = append(os.Environ(), "PYTHONPATH="+tiny+":"+filepath.Join(tiny, "..")+":"+os.Getenv("PYTHONPATH"))
	if said, err := write.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for _, of := range [][]string{{"sd3", "--generic"}, {"kontext", "--condition", "image=in.png"}} {
		out := meander(t, dir, append([]string{"parity", "--steps", "3", "--model", of[0], "a red cat"}, of[1:]...)...)
		if out.code != 0 || !strings.HasSuffix(out.stdout, "they agree\n") {
			t.Errorf("parity %v: exit %d\n%s%s", of, out.code, out.stdout, out.stderr)
		}
	}
}
