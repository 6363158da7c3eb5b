package harness_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// A process whose folder is gone is not started again: that is a death, and its test ends.
func TestProcess_CannotRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	v := harness.Raise(t, &harness.Process{Name: "sleep", Path: "/bin/sleep", Dir: dir, Args: []string{"3600"}})
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if !v.Kill() {
		t.Fatal("there was no process to kill")
	}
	bustest.Until(t, "the restart has failed", func() error {
		if len(v.Deaths()) == 0 {
			return os.ErrNotExist
		}
		return nil
	})
}
