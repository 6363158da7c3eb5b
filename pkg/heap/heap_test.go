package heap_test

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/heap"
)

const (
	mib   = 1 << 20
	piece = 4 * mib
)

var kept, garbage []byte

// churn allocates without keeping, and returns the largest heap that it saw, in MiB, and how many collections ran.
func churn(total int) (most, collections int) {
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	for range total / piece {
		garbage = make([]byte, piece)
		runtime.ReadMemStats(&now)
		most = max(most, int(now.HeapAlloc/mib))
	}
	return most, int(now.NumGC - before.NumGC)
}

// What a program holds lets no garbage grow, and one that holds little is seldom collected.
func TestBound(t *testing.T) {
	if os.Getenv("HEAP_TEST") == "" {
		t.Setenv("HEAP_TEST", "child")
		t.Setenv("GOGC", "")
		t.Setenv("GOMEMLIMIT", "8GiB")
		out, err := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestBound$", "-test.v").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestBound") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	heap.Bound()
	if _, n := churn(192 * mib); n > 0 {
		t.Errorf("%d collections of 192 MiB of garbage", n)
	}
	kept = make([]byte, 1024*mib)
	// The first collections learn that it is kept.
	churn(512 * mib)
	most, n := churn(3072 * mib)
	if most > 1024+2*256 {
		t.Errorf("a heap of %d MiB; 1024 are in use", most)
	}
	if n < 6 || n > 24 {
		t.Errorf("%d collections of 3072 MiB of garbage; room is 256", n)
	}
	runtime.KeepAlive(kept)
}
