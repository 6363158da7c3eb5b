package integration_test

import (
	"cmp"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// shortBenches are flags with which each bench takes about a second. BIN is the folder of the programs.
var shortBenches = map[string]string{
	"bench-e2e":       "--bin BIN --batch 2 --true-cfg-scale 1 --groups 1 --n 2 --steps 2 --rounds 1",
	"bench-update":    "--bin BIN --groups 1 --n 2 --steps 2 --size 64",
	"bench-sampler":   "--batch 1 --threads 1 --steps 1 --rounds 1 --round 1ms --profile 0",
	"bench-tokens":    "--batch 1 --tokens 2 --rounds 1 --round 1ms --width 64 --layers 1 --events 1ms",
	"bench-gemm":      "--batch 1 --round 1ms",
	"bench-advantage": "--n 2 --rewards 64 --rounds 1 --latency 50ms --open-groups 0",
	"bench-events":    "--sizes 4 --rounds 1 --volume 1 --profile 0 --latency 50ms --loop 1ms --grow 10",
	"bench-swarm":     "--samplers 2 --groups 2 --n 2",
	"bench-policy":    "--pushes 1 --steps 1 --batch 2 --load 8",
	"bench-weights":   "--bin BIN --gb 0.15 --ways path",
	"bench-torch":     "--batch 1 --samples 1 --steps 1 --rounds 1 --calls 1",
	"bench-families":  "--classes sd3 --rounds 1 --width 64",
}

// longBenches are those that have no short form, and why.
var longBenches = map[string]string{
	"bench-compare":  "compiles another revision",
	"bench-looks":    "stores 100,000 samples first",
	"bench-parts":    "is a Go benchmark without flags, which compiles with the tests of its package",
	"bench-roofline": "interprets kernels for a minute; TestCountingGPU looks at its parts",
}

// What make would run for each bench runs for a second: a bench that nobody has run breaks unseen.
func TestBenches(t *testing.T) {
	bustest.Sequential(t, "they measure programs that are built without the race detector")
	makefile, err := os.ReadFile("../deploy/bench/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, m := range regexp.MustCompile(`(?m)^(bench-[a-z0-9]+):`).FindAllStringSubmatch(string(makefile), -1) {
		targets = append(targets, m[1])
	}
	listed := slices.Concat(slices.Collect(maps.Keys(shortBenches)), slices.Collect(maps.Keys(longBenches)))
	if slices.Sort(targets); !slices.Equal(targets, slices.Sorted(slices.Values(listed))) {
		t.Errorf("the Makefile has %q, the lists here %q", targets, listed)
	}
	python := cmp.Or(os.Getenv("MEANDER_PYTHON"), "python3")
	missing, noTorch := exec.Command(python, "-c", "import torch, diffusers, transformers, nats").CombinedOutput()
	bench, bin := harness.BenchProgram(t), filepath.Dir(harness.Program(t, "meander"))
	for target, flags := range shortBenches {
		t.Run(target, func(t *testing.T) {
			out, err := exec.Command("make", "-C", "..", "--no-print-directory", "-n", target, "PYTHON="+python,
				"MEANDER_PYTHON="+python).CombinedOutput()
			if err != nil {
				t.Fatalf("make -n: %v\n%s", err, out)
			}
			lines := strings.Split(strings.ReplaceAll(strings.TrimSpace(string(out)), "\\\n", " "), "\n")
			line := lines[len(lines)-1]
			if noTorch != nil && strings.Contains(line, python) {
				t.Skipf("%s lacks torch, diffusers, transformers or nats-py: %v\n%s", python, noTorch, missing)
			}
			c := exec.CommandContext(t.Context(), "sh", "-c",
				strings.ReplaceAll(line, "build/bench ", bench+" ")+" "+strings.ReplaceAll(flags, "BIN", bin))
			c.Dir, c.Env = "..", append(os.Environ(), "TMPDIR="+t.TempDir())
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "| --- |") {
				t.Errorf("%s: %v, or no table\n%s", c.Args[2], err, out)
			}
		})
	}
}
