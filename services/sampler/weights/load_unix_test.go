//go:build unix

package weights_test

import (
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// Weights for which the folder for temporary files has no room are refused once, with what to do. The limit is of the
// whole process, so the test runs in one of its own.
func TestVersions_FullDisk(t *testing.T) {
	const inside = "MEANDER_TEST_FULL_DISK"
	if os.Getenv(inside) == "" {
		c := exec.Command(os.Args[0], "-test.run=^TestVersions_FullDisk$", "-test.timeout=2m")
		c.Env = append(os.Environ(), inside+"=1")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v:\n%s", err, out)
		}
		return
	}
	l := newLane(t)
	l.serve(weights.Own{})
	l.push(func(p *schemas.Policy) {
		ref, err := l.Bus.PutBlob(t.Context(), make([]byte, 6<<20))
		if err != nil {
			t.Fatal(err)
		}
		p.Weights = []schemas.WeightsFile{schemas.FileOfBlob(ref)}
		signal.Ignore(syscall.SIGXFSZ) // a write beyond the limit is an error then
		limit := syscall.Rlimit{Cur: 5 << 20, Max: 5 << 20}
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
			t.Fatal(err)
		}
	})
	a := l.applied(1, schemas.AppliedRefused)
	if !strings.Contains(a.Error, "weights[0]: 6291456 bytes do not fit") || !strings.Contains(a.Error, "TMPDIR") {
		t.Error(a.Error)
	}
}
