package command

import (
	"fmt"
	"sync/atomic"

	"github.com/meander-rl/meander/services/internal/present"
)

// loading says how far this process is with loading its model.
type loading struct{ now atomic.Pointer[string] }

// update is a model.Progress: done of total bytes of a part are loaded.
func (l *loading) update(part string, done, total int) {
	s := ""
	if done < total {
		s = fmt.Sprintf("  loading %s: %s of %s", part, present.Size(done), present.Size(total))
	}
	l.now.Store(&s)
}

// String returns the text behind a bar; "" when nothing is being loaded.
func (l *loading) String() string {
	if s := l.now.Load(); s != nil {
		return *s
	}
	return ""
}
