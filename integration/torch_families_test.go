package integration_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/services/verify"
)

// tinyFamilies writes a small folder of each family, with random weights, and returns where they are.
func tinyFamilies(t *testing.T) (folder string) {
	t.Helper()
	folder = t.TempDir()
	tiny := filepath.Join(root, "pkg/client/python/tests/torch_engine/tiny.py")
	c := exec.Command(os.Getenv("MEANDER_PYTHON"), tiny, folder)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return folder
}

// joinPython starts the worker in Python for a folder, at a socket, and returns what --engine says of it. It ends with
// the test.
func joinPython(t *testing.T, folder string, more ...string) (engine string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "meander-test-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	startTorch(t, os.Getenv("MEANDER_PYTHON"), append([]string{
		"--model", folder, "--socket", socket, "--device", "cpu", "--dtype", "f32", "--threads", "1",
	}, more...)...)
	return "torch=unix:" + socket
}

// Each family goes the whole way: a run with the worker's own batches is verified within the tolerance of its card; row
// by row the digest does not depend on micro-batches, and verify finds no difference at all. Videos become files with
// all of their frames.
func TestTorch_PythonFamilies(t *testing.T) {
	needTorch(t)
	folders := tinyFamilies(t)
	for family, size := range map[string]media.Size{
		"sd3": media.ImageSize(32, 48), "flux1": media.ImageSize(32, 48), "z-image": media.ImageSize(32, 48),
		"qwen-image": media.ImageSize(32, 48), "flux2": media.ImageSize(32, 48),
		"flux2-klein": media.ImageSize(32, 48), "krea2": media.ImageSize(32, 48),
		"wan": {Frames: 9, Height: 32, Width: 48}, "wan-5b": {Frames: 5, Height: 32, Width: 64},
		"wan-two": {Frames: 5, Height: 32, Width: 48}, "hunyuan-video": {Frames: 5, Height: 32, Width: 48},
		"ltx": {Frames: 9, Height: 32, Width: 64},
	} {
		t.Run(family, func(t *testing.T) {
			folder := filepath.Join(folders, family)
			run := func(engine, batch string) (string, summary) {
				dir := t.TempDir()
				_, sum := meander(t, dir, "run", "--json", "--model", folder, "--engine", engine, "--batch", batch,
					"--seed", "5",
					"--run", "r", "-n", "4", "--steps", "4", "--sde-steps", "1,2", "--frames",
					strconv.Itoa(size.Frames), "--height",
					strconv.Itoa(size.Height), "--width", strconv.Itoa(size.Width), "--out", "out", "a red cat").must(t,
					0).parse(t)
				videos, err := filepath.Glob(filepath.Join(dir, "out", "*.apng"))
				if want := map[bool]int{true: 4, false: 0}[size.Frames > 1]; err != nil || len(videos) != want {
					t.Errorf("videos %q, %v; want %d", videos, err, want)
				}
				for _, name := range videos {
					file, err := os.ReadFile(name)
					if is, bad := media.ReadSize(file); err != nil || bad != nil || is != size {
						t.Errorf("%s: %v, %v, %v; want %v", name, is, err, bad, size)
					}
				}
				if sum.Complete != 1 || sum.StepsStored != 16 {
					t.Errorf("%+v", sum)
				}
				return dir, sum
			}
			proven := func(dir, engine string) verify.Report {
				r := provenRun(t, meander(t, dir, "verify", "--json", "--model", folder, "--engine", engine))
				if r.Steps != 8 {
					t.Errorf("%d log-probs were recomputed, want 8", r.Steps)
				}
				return r
			}
			batched := joinPython(t, folder)
			dir, _ := run(batched, "4")
			if r := proven(dir, batched); r.Tolerance != 1e-5 || float64(r.MaxRatio) > r.Tolerance {
				t.Errorf("ratio %g, tolerance %g; want one of 1e-5 that holds", r.MaxRatio, r.Tolerance)
			} else {
				t.Logf("batched: ratio %g", r.MaxRatio)
			}
			exact := joinPython(t, folder, "--deterministic")
			dir, four := run(exact, "4")
			if r := proven(dir, exact); r.Tolerance != 0 || r.MaxRatio != 0 {
				t.Errorf("row by row: ratio %g, tolerance %g; want 0", r.MaxRatio, r.Tolerance)
			}
			if _, two := run(exact, "2"); four.Digest == "" || two.Digest != four.Digest {
				t.Errorf("digest %s of micro-batches of 2, %s of 4", two.Digest, four.Digest)
			}
		})
	}
}

// A run whose whole process is killed leaves no worker behind, and goes on with the same command to the digest that it
// has where nothing disturbs it.
func TestTorch_PythonResumed(t *testing.T) {
	needTorch(t)
	arguments := []string{
		"run", "--json", "--model", absolute(t, signsFolder), "--engine", "torch", "--device", "cpu", "--dtype", "f32",
		"--threads", "1", "--deterministic", "--batch", "2", "--workers", "1", "--seed", "5", "--run", "r", "-n", "6",
		"--steps", "12", "--sde-steps", "1,2", "--checkpoint-every", "2", "--log-level", "info",
		`a red sign that says "EXIT"`,
	}
	calm := background(t, t.TempDir(), arguments...).wait(t).must(t, 0)
	_, want := calm.parse(t)
	dir := t.TempDir()
	killed := background(t, dir, arguments...)
	if n := made(t, dir, "r", 1, killed); n == 0 || n == 6 {
		t.Fatalf("%d samples are there; want to kill it in the middle", n)
	}
	killed.signal(t, syscall.SIGKILL)
	<-killed.ended
	list := workers(t, killed.stderr.String())
	bustest.Until(t, "the worker ends with its parent", func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", list[len(list)-1]))
		if err != nil || strings.Contains(string(stat), ") Z ") { // no one has asked for its exit status yet
			return nil
		}
		return errors.New("it runs")
	})
	_, got := background(t, dir, arguments...).wait(t).must(t, 0).parse(t)
	if got.Digest != want.Digest || got.Digest == "" || got.Trajectories != 6 {
		t.Errorf("%d samples, digest %s; want that of a calm run, %s", got.Trajectories, got.Digest, want.Digest)
	}
}
