package integration_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// torchRun are the arguments of a run of eight samples in three sizes of micro-batches.
var torchRun = []string{
	"--json", "--seed", "5", "-n", "8", "--sde-steps", "1,2", "--run", "r", "a red fox", "a blue fox",
}

// byWorker runs the program with the worker of tests in place of Python, and with variables.
func byWorker(t *testing.T, dir string, variables []string, args ...string) (out output) {
	t.Helper()
	c := exec.Command(program(t, "meander"), args...)
	var stdout, stderr strings.Builder
	c.Dir, c.Stdout, c.Stderr = dir, &stdout, &stderr
	c.Env = append(append(os.Environ(), "MEANDER_PYTHON="+harness.WorkerProgram(t)), variables...)
	err := c.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		t.Fatal(err)
	}
	return output{stdout: stdout.String(), stderr: stderr.String(), code: c.ProcessState.ExitCode()}
}

// provenRun is the report of a run that verify found right.
func provenRun(t *testing.T, out output) (r verify.Report) {
	t.Helper()
	if err := json.Unmarshal([]byte(out.must(t, 0).stdout), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// joinWorker starts the worker in Go at a socket, or at a port with a token, and returns its address.
func joinWorker(t *testing.T, args ...string) (address string) {
	t.Helper()
	return startTorch(t, harness.WorkerProgram(t), args...)
}

// startTorch starts a worker by its interpreter, and returns its address once it listens. It ends with the test.
func startTorch(t *testing.T, interpreter string, args ...string) (address string) {
	t.Helper()
	c := exec.Command(interpreter, append([]string{"-m", "meander.torch", "--exit-with-stdin"}, args...)...)
	var log logbook
	c.Stderr = &log
	stdin, err1 := c.StdinPipe()
	stdout, err2 := c.StdoutPipe()
	if err := errors.Join(err1, err2, c.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("the worker's log:\n%s", &log)
		}
	})
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	var ready struct {
		Ready   bool
		Address string
	}
	if err = errors.Join(err, json.Unmarshal(line, &ready)); err != nil || !ready.Ready {
		t.Fatalf("%q: %v\n%s", line, err, &log)
	}
	return ready.Address
}

// A class that this program does not compute goes the whole way by a worker that runs already: its samples are
// verified within the tolerance of its card, and exactly where it is deterministic.
func TestTorch_Joined(t *testing.T) {
	t.Parallel()
	folder := remotetest.Folder(t, "FluxPipeline", 1)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sockets, err := os.MkdirTemp("/tmp", "meander-test-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(sockets) })
	for name, worker := range map[string][]string{
		"unix": {"--socket", filepath.Join(sockets, "s")}, "tcp": {"--listen", "127.0.0.1:0", "--token-file", token},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := joinWorker(t, append(worker, "--model", folder)...)
			if name == "unix" {
				address = "unix:" + address
			}
			engine, dir := "torch="+address, t.TempDir()
			key := []string{"MEANDER_SAMPLER_ENGINE_KEY="}
			if name == "tcp" {
				key[0] += "secret"
				wrong := byWorker(t, dir, nil, append([]string{"run", "--model", folder, "--engine", engine},
					torchRun...)...)
				if wrong.code == 0 || !strings.Contains(wrong.stderr, "token: wrong") {
					t.Errorf("exit %d, %s; want the token refused", wrong.code, wrong.stderr)
				}
			}
			groups, sum := byWorker(t, dir, key, append([]string{"run", "--model", folder, "--engine", engine},
				torchRun...)...).
				must(t, 0).parse(t)
			if len(groups) != 2 || sum.Complete != 2 || sum.Trajectories != 16 {
				t.Fatalf("%d groups, %+v", len(groups), sum)
			}
			r := provenRun(t, byWorker(t, dir, key, "verify", "--json", "--model", folder, "--engine", engine))
			if r.Steps != 32 || r.Tolerance != 1e-5 || r.MaxRatio == 0 || r.MaxRatio > 1e-5 {
				t.Errorf("%d steps, tolerance %g, ratio %g; want a small difference within 1e-5", r.Steps, r.Tolerance,
					r.MaxRatio)
			}
			folder := remotetest.Folder(t, "FluxPipeline", 2)
			other := byWorker(t, dir, key, "verify", "--json", "--model", folder, "--engine", engine)
			if other.code != 2 || !strings.Contains(other.stderr, "the worker has other weights than this folder") {
				t.Errorf("exit %d with other weights, %s", other.code, other.stderr)
			}
		})
	}
}

// A worker that is started gets device, dtype and deterministic; the digest of a run does not depend on micro-batches
// then, nor on a worker that dies, and verify starts the same kind of worker by itself.
func TestTorch_Started(t *testing.T) {
	t.Parallel()
	folder := remotetest.Folder(t, "StableDiffusion3Pipeline", 3)
	var digests []string
	for _, x := range []struct {
		variables, args []string
		lost            bool
	}{
		{nil, []string{"--batch", "8"}, false},
		{nil, []string{"--batch", "3"}, false},
		{
			[]string{
				remotetest.FaultVariable + "=" + remotetest.FaultOnce,
				remotetest.FileVariable + "=" + filepath.Join(t.TempDir(), "died"),
			},
			[]string{"--batch", "4"},
			true,
		},
	} {
		dir := t.TempDir()
		args := append([]string{
			"run", "--model", folder, "--engine", "torch", "--deterministic", "--dtype", "bf16", "--log-level", "info",
		}, x.args...)
		out := byWorker(t, dir, x.variables, append(args, torchRun...)...).must(t, 0)
		_, sum := out.parse(t)
		digests = append(digests, sum.Digest)
		if sum.Complete != 2 || strings.Contains(out.stderr, "the worker is lost") != x.lost {
			t.Errorf("%v: %+v\n%s", x.args, sum, out.stderr)
		}
		again := 0
		if x.lost {
			again = 1
		}
		if n := strings.Count(out.stderr, "started a worker"); n != again ||
			!strings.Contains(out.stderr, "took the worker of the inspection") {
			t.Errorf("%v: %d workers were started after the estimate, want %d\n%s", x.args, n, again, out.stderr)
		}
		// On this device, though the program itself computes no bf16 there.
		r := provenRun(t, byWorker(t, dir, nil, "verify", "--json", "--model", folder, "--device", "cpu", "--dtype",
			"bf16"))
		if r.Steps != 32 || r.Tolerance != 0 || r.MaxRatio != 0 {
			t.Errorf("%d steps, tolerance %g, ratio %g; want all exact", r.Steps, r.Tolerance, r.MaxRatio)
		}
	}
	for want, args := range map[string][]string{"states of BF16": nil, "states of F32": {"--latents-dtype", "F32"}} {
		out := byWorker(t, t.TempDir(), nil, slices.Concat([]string{
			"run", "--dry-run", "--model", folder, "--engine", "torch", "--dtype", "bf16",
		}, torchRun[1:], args)...).must(t, 0)
		if !strings.Contains(out.stdout, want) {
			t.Errorf("the estimate lacks %q:\n%s", want, out.stdout)
		}
	}
	if digests[0] == "" || digests[0] != digests[1] || digests[0] != digests[2] {
		t.Errorf("digests %q; want them equal", digests)
	}
}

// A run that waits for Python says so before it has anything else to show.
func TestTorch_RunSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	c := exec.Command(program(t, "meander"), append([]string{
		"run", "--model", remotetest.Folder(t, "FluxPipeline", 1), "--engine", "torch",
	}, torchRun...)...)
	c.Dir = t.TempDir()
	c.Env = append(os.Environ(), "MEANDER_PYTHON="+harness.WorkerProgram(t),
		remotetest.FaultVariable+"="+remotetest.FaultImport)
	stderr, err := c.StderrPipe()
	if err = errors.Join(err, c.Start()); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	if !lines.Scan() || !strings.Contains(lines.Text(), "waiting for the torch worker since ") ||
		!strings.Contains(lines.Text(), ": Python starts; it") {
		t.Errorf("the first line is %q, %v", lines.Text(), lines.Err())
	}
	if err := errors.Join(c.Process.Signal(os.Interrupt), c.Wait()); err == nil {
		t.Error("the run ended well")
	}
}

// New weights reach a worker as they reach this program: a LoRA and a whole network, one after the other, each with
// samples of its own that verify computes with the version it fetches.
func TestTorch_Policy(t *testing.T) {
	t.Parallel()
	dir := remotetest.Folder(t, "StableDiffusion3Pipeline", 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	engine := "torch=" + address
	w := start(t, func(c *config) { c.sampler.Model, c.sampler.Engine = dir, engine })
	full, err := lora.OpenFull(remotetest.Folder(t, "StableDiffusion3Pipeline", 2))
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	digests := map[string]bool{}
	for _, run := range []schemas.Run{"base", "lora", "whole"} {
		var p *schemas.Policy
		switch n := remotetest.Channels; run {
		case "lora":
			p, err = w.client.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, "proj", n, n, 4, 7, 0)), client.Push{})
		case "whole":
			p, err = w.client.PushWeights(t.Context(), full, client.Push{})
		}
		if err == nil && p != nil {
			_, err = w.client.AwaitPolicy(limited(t), p)
		}
		if err != nil {
			t.Fatalf("%s: %v", run, err)
		}
		prompt := &schemas.Prompt{
			UID: "u", Prompt: "red", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{1}}},
		}
		if r, err := w.client.Publish(t.Context(), run, prompt); err != nil || !r.Accepted {
			t.Fatalf("%s: receipt %+v, %v", run, r, err)
		}
		if a := w.advantages(t, run, 1)["u"]; a == nil || a.Status != schemas.StatusComplete {
			t.Fatalf("%s: advantage %+v", run, a)
		}
		tr, err := w.client.Trajectory(t.Context(), run, "u", 0)
		if err != nil {
			t.Fatal(err)
		}
		digests[tr.WeightsDigest] = true
		report, err := verify.Run(t.Context(), w.Bus, run, verify.Options{Model: []string{dir}, Engine: engine})
		if err != nil || !report.OK(0) || report.MaxRatio != 0 {
			t.Errorf("%s: %+v, %v", run, report, err)
		}
	}
	if len(digests) != 3 {
		t.Errorf("weights %v; want those of three versions", digests)
	}
}

// Every command that looks at a model says how such a class is computed, and takes the engine.
func TestTorch_Commands(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, "FluxPipeline", 1), t.TempDir()
	const fix = `FluxPipeline is computed by the torch engine: --engine torch; pip install "meander-rl[torch]"`
	for _, c := range []struct {
		args      []string
		variables []string
		code      int
		says      []string
	}{
		{[]string{"run", "--model", folder, "x"}, nil, 2, []string{fix}},
		{[]string{"run", "--dry-run", "--model", folder, "x"}, nil, 2, []string{fix}},
		{[]string{"model", "info", folder}, nil, 2, []string{fix}},
		{[]string{"doctor", "--model", folder, "--device", "cpu"}, nil, 1, []string{fix}},
		{[]string{"run", "--dry-run", "--engine", "torch", "--model", folder, "x"}, nil, 0, []string{"1 prompt"}},
		{[]string{"model", "info", "--engine", "torch", folder}, nil, 0, []string{"flux1", "transformer", "loads: yes"}},
		{[]string{"doctor", "--engine", "torch", "--model", folder}, nil, -1, []string{"a worker knows it: torch-"}},
		{[]string{"run", "--engine", "torch", "--model", "synthetic", "x"}, nil, 2, []string{"synthetic", "no such model"}},
		{
			[]string{"run", "--engine", "torch=nowhere", "--model", folder, "x"},
			nil, 2,
			[]string{"--engine: torch=nowhere; must be unix:/PATH"},
		},
		{
			[]string{"run", "--engine", "torch=unix:/s", "--device", "mps", "--model", folder, "x"},
			nil, 2,
			[]string{"--device: set; must be absent beside torch=unix:/s"},
		},
		{
			[]string{"run", "--engine", "torch", "--model", folder, "x"},
			[]string{remotetest.FaultVariable + "=" + remotetest.FaultNoModule},
			2,
			[]string{"has no module 'torch'", "pip install"},
		},
		{
			[]string{"run", "--engine", "torch", "--model", folder, "--run", "r", "-n", "2", "--sde-steps", "1", "x"},
			nil, 0, nil,
		},
		{[]string{"verify", "--model", folder}, nil, 0, []string{"verified"}},
		{[]string{"verify", "--engine", "none", "--model", folder}, nil, 2, []string{fix}},
		{
			[]string{"verify", "--engine", "vllm=http://x", "--model", folder},
			nil, 2,
			[]string{`"vllm=http://x"; must be none, torch or torch=ADDRESS`},
		},
	} {
		out := byWorker(t, dir, c.variables, c.args...)
		if c.code >= 0 && out.code != c.code {
			t.Errorf("%v: exit %d, want %d\n%s%s", c.args, out.code, c.code, out.stdout, out.stderr)
		}
		for _, says := range c.says {
			if !strings.Contains(strings.Join(strings.Fields(out.stdout+out.stderr), " "), says) {
				t.Errorf("%v: want %q\n%s%s", c.args, says, out.stdout, out.stderr)
			}
		}
	}
}

// A worker that hangs in a call holds up no stop: the command ends by itself once the time to drain is over, and the
// samples stay for the next one.
func TestTorch_HangsAtStop(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, "FluxPipeline", 1), t.TempDir()
	asked := filepath.Join(dir, "asked")
	c := exec.Command(program(t, "meander"), append([]string{"run", "--model", folder, "--engine", "torch"},
		torchRun...)...)
	var stdout bytes.Buffer
	x := &task{cmd: c, ended: make(chan struct{})}
	c.Dir, c.Stdout, c.Stderr = dir, &stdout, &x.stderr
	c.Env = append(os.Environ(), "MEANDER_PYTHON="+harness.WorkerProgram(t),
		remotetest.FaultVariable+"="+remotetest.FaultHang, remotetest.FileVariable+"="+asked)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(x.ended)
		_ = c.Wait() // the status is looked at below
	}()
	t.Cleanup(func() {
		_ = c.Process.Kill()
		<-x.ended
	})
	bustest.Until(t, "the worker is in a call", func() error {
		_, err := os.Stat(asked)
		return err
	})
	x.signal(t, os.Interrupt)
	if out := x.wait(t); out.code != 1 || !strings.Contains(out.stderr, "interrupted; continue with") ||
		strings.Contains(out.stderr, "not stopped after") {
		t.Errorf("exit %d; want it to end by itself\n%s", out.code, out.stderr)
	}
}
