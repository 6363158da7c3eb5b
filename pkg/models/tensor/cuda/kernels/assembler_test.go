package kernels_test

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
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

// Generations of GPUs that take a module: A100, RTX 30, L4 and L40S, H100 and H200, B200, RTX 50.
var generations = map[string][]string{
	"sm_80.ptx":  {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"},
	"sm_90a.ptx": {"sm_90a"},
}

var (
	blockSize = regexp.MustCompile(`\.visible \.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)`)
	assembled = regexp.MustCompile(`Compiling entry function '(\w+)'`)
	stack     = regexp.MustCompile(`(\d+) bytes stack frame`)
	registers = regexp.MustCompile(`Used (\d+) registers`)
)

// update writes the table of registers.
var update = flag.Bool("update", false, "write testdata/registers.txt")

// NVIDIA's assembler takes each module for the generations it is for, lets products of warpgroups run beside other
// instructions, and blocks fit the 65536 registers of a multiprocessor. testdata/registers.txt has, for each generation
// and kernel, the registers of a thread and the bytes that do not fit them. PTXAS names the assembler where it is
// neither on PATH nor made by `make ptxas`, which pins the version that the table is of.
func TestPTX_Assembles(t *testing.T) {
	ptxas, err := exec.LookPath(cmp.Or(os.Getenv("PTXAS"), "../../../../../build/ptxas/nvidia/cuda_nvcc/bin/ptxas"))
	if err != nil {
		if os.Getenv("PTXAS") != "" {
			t.Fatal(err)
		}
		if ptxas, err = exec.LookPath("ptxas"); err != nil {
			t.Skip("no ptxas; make ptxas gets one, PTXAS names one")
		}
	}
	version, err := exec.Command(ptxas, "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	var table []string
	for _, file := range slices.Sorted(maps.Keys(generations)) {
		for _, generation := range generations[file] {
			table = append(table, assemble(t, ptxas, file, generation)...)
		}
	}
	const path = "testdata/registers.txt"
	got := strings.Join(table, "\n") + "\n"
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(version, []byte("V12.9.86")) {
		t.Logf("%s is not of the version of %s, whose figures are not compared:\n%s", ptxas, path, got)
		return
	}
	if got != string(want) {
		t.Errorf("registers and spills of threads, want those of %s; -update writes it:\n%s", path, got)
	}
}

// assemble checks what ptxas says of a module, and returns a line for each kernel: generation, name, registers, and the
// bytes of memory that a thread has beside them.
func assemble(t *testing.T, ptxas, file, generation string) (table []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	threads := map[string]int{}
	for _, m := range blockSize.FindAllSubmatch(text, -1) {
		threads[string(m[1])] = number(t, string(m[2]))
	}
	out, err := exec.Command(ptxas, "-v", "-arch="+generation, "-o", filepath.Join(t.TempDir(), "k.cubin"),
		file).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", generation, err, out)
		return nil
	}
	kernel, memory, found := "", "", []string{}
	for line := range strings.SplitSeq(string(out), "\n") {
		if strings.Contains(line, "serialized") {
			t.Errorf("%s: %s", generation, line)
		}
		if m := assembled.FindStringSubmatch(line); m != nil {
			kernel = m[1]
		}
		if m := stack.FindStringSubmatch(line); m != nil {
			memory = m[1]
		}
		if m := registers.FindStringSubmatch(line); m != nil {
			found = append(found, kernel)
			table = append(table, fmt.Sprintf("%-7s %-20s %3s %2s", generation, kernel, m[1], memory))
			if n := number(t, m[1]) * threads[kernel]; n == 0 || n > 1<<16 {
				t.Errorf("%s, %s: %s registers for %d threads", generation, kernel, m[1], threads[kernel])
			}
		}
	}
	slices.Sort(found)
	if want := slices.Sorted(maps.Keys(threads)); !slices.Equal(found, want) {
		t.Errorf("%s: a report of %v, want %v", generation, found, want)
	}
	slices.Sort(table)
	return table
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
