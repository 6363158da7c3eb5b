package texts

import (
	"testing"

	"github.com/meander-rl/meander/pkg/remotelm"
)

// An overloaded server is asked for half as many answers at once, once for all that it refused together, and for more
// again as answers end well. Other errors change nothing.
func TestLoad_Adapts(t *testing.T) {
	t.Parallel()
	l := newLoad(16)
	for range 16 {
		if !l.take() {
			t.Fatal("fewer than the limit")
		}
	}
	if l.take() {
		t.Fatal("more than the limit")
	}
	if n := l.failed(remotelm.ErrGarbage); n != 0 || l.limit != 16 {
		t.Errorf("garbage: %d", n)
	}
	if a, b := l.failed(remotelm.ErrSilent), l.failed(remotelm.ErrSilent); a != 8 || b != 0 {
		t.Errorf("two refusals at once: %d, %d; want 8, and no change", a, b)
	}
	for range 16 {
		l.leave()
	}
	if l.limit != 9 {
		t.Errorf("after 16 answers: %d; want 9, one more after 8", l.limit)
	}
	for range 200 {
		l.asked++
		l.leave()
	}
	if l.limit != 16 {
		t.Errorf("grown to %d; want 16", l.limit)
	}
}
