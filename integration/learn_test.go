package integration_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// toolbox is a PATH with the named programs of this machine, and with stand-ins: scripts by name.
func toolbox(t *testing.T, programs []string, scripts map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Skipf("not tested: no %s on this machine", name)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range scripts {
		if err := harness.WriteProgram(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// What make learn lacks is said before anything is built or installed, all of it at once, with what to do.
func TestLearn_Needs(t *testing.T) {
	t.Parallel()
	const reader, python, disk = "apt-get install tesseract-ocr", "Python 3.11 to 3.13", "GiB of disk"
	df := func(gib int) string { return fmt.Sprintf("echo header; echo disk 0 0 %d 0 /", gib<<20) }
	snake := `case "$2" in *version_info*) exit %d ;; *ensurepip*) exit %d ;; esac; echo 3.9.2`
	good := map[string]string{"python3": fmt.Sprintf(snake, 0, 0), "df": df(9), "tesseract": ""}
	away := map[string]string{"tesseract": "-"}
	gold := []string{"gold", "--"}
	for name, c := range map[string]struct {
		change map[string]string
		env    string
		args   []string
		lacks  []string
	}{
		"nothing":        {args: gold},
		"the reader":     {away, "", gold, []string{reader}},
		"no gold reader": {away, "", append(gold, "--updates", "3", "--gold", "glyph"), nil},
		"gold by =":      {away, "", append(gold, "--gold=glyph"), nil},
		"rewarded":       {away, "", append(gold, "--gold", "glyph", "--reward", "ocr=1,glyph"), []string{reader}},
		"texts":          {away, "", nil, nil},
		"Python":         {map[string]string{"python3": "-"}, "", nil, []string{python + ": apt-get install python3"}},
		"another Python": {map[string]string{"python3": fmt.Sprintf(snake, 1, 0)}, "", nil, []string{python, "is 3.9.2"}},
		"venv": {
			map[string]string{"python3": fmt.Sprintf(snake, 0, 1)},
			"", nil,
			[]string{"apt-get install python3-venv"},
		},
		"torch engine":   {nil, "ENGINE=torch", gold, nil},
		"server":         {nil, "ENGINE=vllm=http://127.0.0.1:8000", nil, nil},
		"another engine": {nil, "ENGINE=jax", gold, []string{"ENGINE must be torch, or empty"}},
		"disk":           {map[string]string{"df": df(7)}, "", nil, []string{"8 " + disk, "TORCH=cpu"}},
		"disk for a CPU": {map[string]string{"df": df(7)}, "TORCH=cpu", nil, nil},
		"less for a CPU": {map[string]string{"df": df(2)}, "TORCH=cpu", nil, []string{"3 " + disk}},
		"all at the same": {
			map[string]string{"df": df(2), "python3": "-", "tesseract": "-"},
			"", gold,
			[]string{reader, python, disk},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			scripts := map[string]string{}
			for _, from := range []map[string]string{good, c.change} {
				for k, v := range from {
					if scripts[k] = v; v == "-" {
						delete(scripts, k)
					}
				}
			}
			args := append([]string{filepath.Join(t.TempDir(), "venv")}, c.args...)
			script := exec.Command(filepath.Join(root, "deploy/learn/needs.sh"), args...)
			script.Env = []string{"PATH=" + toolbox(t, []string{"awk", "dirname", "mkdir"}, scripts), c.env}
			out, err := script.CombinedOutput()
			if (err == nil) != (len(c.lacks) == 0) || err == nil && len(out) > 0 {
				t.Errorf("%v\n%s", err, out)
			}
			for _, what := range c.lacks {
				if !strings.Contains(string(out), what) {
					t.Errorf("does not name %q:\n%s", what, out)
				}
			}
		})
	}
	t.Run("make", func(t *testing.T) {
		t.Parallel()
		touched := filepath.Join(t.TempDir(), "touched")
		refuse := "echo \"$0 $*\" >> " + touched + "; exit 1"
		scripts := map[string]string{
			"python3": fmt.Sprintf(snake, 0, 0), "df": df(9), "go": `[ "$*" = "env GOFLAGS" ] && exit; ` + refuse, "pip": refuse,
		}
		for _, target := range []string{"learn", "learn-hacked"} {
			c := exec.Command("make", "-C", root, target)
			c.Env = []string{"PATH=" + toolbox(t, []string{"make", "awk", "dirname", "mkdir"}, scripts)}
			out, err := c.CombinedOutput()
			if did, _ := os.ReadFile(touched); err == nil || strings.Count(string(out), reader) != 1 || len(did) > 0 {
				t.Errorf("make %s without tesseract: %v\n%s\nit started %s", target, err, out, did)
			}
		}
	})
}
