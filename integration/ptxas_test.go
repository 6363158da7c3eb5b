package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// CI holds the kernels to the table of registers and spills. Where the assembler cannot be had, the step passes and
// says why; an assembler that is named and missing is an error.
func TestPTXAS(t *testing.T) {
	t.Parallel()
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	run := func(settings ...string) (string, error) {
		cmd := exec.Command("make", append([]string{"ptxas"}, settings...)...)
		cmd.Dir = t.TempDir()                                                // nothing is built there
		for _, name := range []string{"Makefile", "deploy", "integration"} { // the root's includes those below it
			if err := os.Symlink(filepath.Join(top, name), filepath.Join(cmd.Dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Env = []string{"PATH=" + toolbox(t, []string{"make", "sh"}, map[string]string{
			"pip3": `echo "no package of $5"; exit 1`, "go": `[ "$*" = "env GOFLAGS" ] || { echo "go $PTXAS"; exit 1; }`,
		})}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run("PYTHON=pip3")
	if err != nil || !strings.Contains(out, "no package of") ||
		!strings.Contains(out, "make ptxas: skipped: pip cannot") {
		t.Errorf("without a package: %v\n%s", err, out)
	}
	if out, err := run("PTXAS=/nowhere/ptxas"); err == nil || !strings.Contains(out, "go /nowhere/ptxas") {
		t.Errorf("an assembler that is not there: %v\n%s", err, out)
	}
}
