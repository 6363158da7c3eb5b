package integration_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The worker in Python and this program compute the same: samples of each, with and without an adapter, are verified
// by the other within roundings. Row by row, the digest of a run does not depend on micro-batches.
func TestTorch_Python(t *testing.T) {
	t.Parallel()
	python := pythonWith(t, "torch, diffusers, transformers, peft, accelerate, msgpack")
	python, err := exec.LookPath(python)
	if err != nil {
		t.Fatal(err)
	}
	path := func(name string) string {
		at, err := filepath.Abs(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	variables := []string{"MEANDER_PYTHON=" + python, "PYTHONPATH=" + path("pkg/client/python"), "OMP_NUM_THREADS=1"}
	signs, adapter := path("deploy/models/signs"), path("deploy/demo/adapter")
	engine := []string{"--engine", "torch", "--device", "cpu", "--dtype", "f32", "--threads", "1", "--deterministic"}
	native := []string{"--engine", "none", "--device", "cpu", "--tolerance", "1e-5"}
	var digests []string
	for name, x := range map[string]struct{ run, verify, other []string }{
		"worker":         {engine, nil, native},
		"worker, by two": {append([]string{"--batch", "2"}, engine...), nil, native},
		"adapter":        {append([]string{"--adapter", adapter}, engine...), []string{"--adapter", adapter}, native},
		"native":         {[]string{"--device", "cpu"}, nil, append([]string{"--tolerance", "1e-5"}, engine...)},
	} {
		dir := t.TempDir()
		run := slices.Concat([]string{
			"run", "--model", signs, "--json", "--seed", "5", "-n", "4", "--steps", "4", "--sde-steps", "1,2", "--run", "r",
			`a red sign that says "EXIT"`,
		}, x.run)
		_, sum := byWorker(t, dir, variables, run...).must(t, 0).parse(t)
		if sum.Complete != 1 {
			t.Fatalf("%s: %+v", name, sum)
		}
		if strings.HasPrefix(name, "worker") {
			digests = append(digests, sum.Digest)
		}
		check := append([]string{"verify", "--json", "--model", signs}, x.verify...)
		if r := provenRun(t, byWorker(t, dir, variables, check...)); r.Steps != 8 || r.MaxRatio != 0 {
			t.Errorf("%s: %d steps, ratio %g; want all exact by what made them", name, r.Steps, r.MaxRatio)
		}
		r := provenRun(t, byWorker(t, dir, variables, append(check, x.other...)...))
		if r.Steps != 8 || r.MaxRatio == 0 || r.MaxRatio > 1e-5 {
			t.Errorf("%s: %d steps, ratio %g; want a small difference by the other", name, r.Steps, r.MaxRatio)
		}
	}
	if len(digests) != 2 || digests[0] != digests[1] {
		t.Errorf("digests %q of two sizes of micro-batches", digests)
	}
}
