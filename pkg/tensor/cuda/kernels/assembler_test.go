package kernels_test

import (
	"cmp"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Generations of GPUs: A100, RTX 30, L4 and L40S, H100 and H200.
var generations = []string{"sm_80", "sm_86", "sm_89", "sm_90"}

var (
	blockSize = regexp.MustCompile(`\.visible \.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)`)
	assembled = regexp.MustCompile(`Compiling entry function '(\w+)'`)
	stack     = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores`)
	registers = regexp.MustCompile(`Used (\d+) registers`)
)

// NVIDIA's assembler takes the PTX for each generation, keeps what threads have in registers, and
// blocks fit the 65536 of a multiprocessor. PTXAS names it where it is not on PATH; it needs no GPU
// (the Python package nvidia-cuda-nvcc-cu12 has it).
func TestPTX_Assembles(t *testing.T) {
	ptxas, err := exec.LookPath(cmp.Or(os.Getenv("PTXAS"), "ptxas"))
	if err != nil {
		if os.Getenv("PTXAS") != "" {
			t.Fatal(err)
		}
		t.Skip("no ptxas; PTXAS names one")
	}
	text, err := os.ReadFile("sm_80.ptx")
	if err != nil {
		t.Fatal(err)
	}
	threads := map[string]int{}
	for _, m := range blockSize.FindAllSubmatch(text, -1) {
		threads[string(m[1])] = number(t, string(m[2]))
	}
	for _, generation := range generations {
		out, err := exec.Command(ptxas, "-v", "-arch="+generation, "-o", filepath.Join(t.TempDir(), "k.cubin"),
			"sm_80.ptx").CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", generation, err, out)
			continue
		}
		kernel, found := "", []string{}
		for line := range strings.SplitSeq(string(out), "\n") {
			if m := assembled.FindStringSubmatch(line); m != nil {
				kernel = m[1]
			}
			if m := stack.FindStringSubmatch(line); m != nil && (m[1] != "0" || m[2] != "0") {
				t.Errorf("%s, %s: %s", generation, kernel, strings.TrimSpace(line))
			}
			if m := registers.FindStringSubmatch(line); m != nil {
				found = append(found, kernel)
				if n := number(t, m[1]) * threads[kernel]; n == 0 || n > 1<<16 {
					t.Errorf("%s, %s: %s registers for %d threads", generation, kernel, m[1], threads[kernel])
				}
			}
		}
		slices.Sort(found)
		if want := slices.Sorted(maps.Keys(threads)); !slices.Equal(found, want) {
			t.Errorf("%s: a report of %v, want %v", generation, found, want)
		}
	}
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
