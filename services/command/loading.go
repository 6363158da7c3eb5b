package command

import (
	"fmt"
	"sync/atomic"
)

// loading is how far the model of this process is.
type loading struct{ now atomic.Pointer[string] }

// heard is a model.Progress.
func (l *loading) heard(part string, done, total int) {
	s := ""
	if done < total {
		s = fmt.Sprintf("  loading %s: %s of %s", part, size(int64(done)), size(int64(total)))
	}
	l.now.Store(&s)
}

// String is what to show behind a bar; empty when nothing is being loaded.
func (l *loading) String() string {
	if s := l.now.Load(); s != nil {
		return *s
	}
	return ""
}
