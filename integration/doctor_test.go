package integration_test

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// meander doctor without a store, on a pipeline that runs, on one that hangs, and on a server of NATS that
// no one has set up: no fault only where there is none, and never without an end.
func TestDoctor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := filepath.Join(dir, "store")
	ask := func(status int, says []string, args ...string) {
		t.Helper()
		out := meander(t, dir, append([]string{"doctor"}, args...)...)
		if out.code != status {
			t.Errorf("%v: status %d, want %d: %s%s", args, out.code, status, out.stdout, out.stderr)
		}
		for _, say := range says {
			if !strings.Contains(out.stdout, say) {
				t.Errorf("%v: must say %q:\n%s", args, say, out.stdout)
			}
		}
	}
	ask(0, []string{"has nothing in it yet", "there is no server to ask"}, "--store", store, "--model", "synthetic")
	ask(1, []string{"fault"}, "--store", store, "--model", "nowhere")
	ask(1, []string{`"state":"fault"`, "connection refused"}, "--json", "--nats", "nats://"+harness.FreeAddress(t))

	up := background(t, dir, "up", "--store", store, "--model", "synthetic", "--listen", "127.0.0.1:0")
	up.says(t, "model ready")
	ask(0, []string{
		"1 intake, 1 sampler, 1 reward, 1 advantage", "streams as this version expects",
		"synthetic, which needs no files", ", 0 faults",
	}, "--store", store)
	up.signal(t, syscall.SIGSTOP)
	ask(1, []string{"fault", "process"}, "--store", store, "--timeout", "2s")
	up.signal(t, syscall.SIGCONT)

	url := natsServer(t)
	ask(1, []string{"streams not there: MDR_PROMPTS", "name a folder with --model", "cannot be seen from here"},
		"--nats",
		url)
	bare := meander(t, dir, "streams", "--store", store).must(t, 0)
	if !strings.Contains(bare.stdout, "MDR_STEPS") {
		t.Errorf("after all that: %s", bare.stdout)
	}
}
