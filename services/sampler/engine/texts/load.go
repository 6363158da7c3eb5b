package texts

import (
	"sync"

	"github.com/meander-rl/meander/pkg/remotelm"
)

// load is how many answers a server is asked for at once. It halves when the server says that it is overloaded, and
// grows by one with each limit's number of answers that end well, up to most. It is safe for concurrent use.
type load struct {
	mu           sync.Mutex
	most, limit  int
	asked, ended int // answers in flight; answers since the limit last changed
}

func newLoad(most int) *load { return &load{most: most, limit: most} }

// take reports whether one more answer may be asked for; the caller then calls leave when it has ended.
func (l *load) take() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked >= l.limit {
		return false
	}
	l.asked++
	return true
}

// leave notes that an answer has ended.
func (l *load) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked--
	if l.ended++; l.ended >= l.limit && l.limit < l.most {
		l.limit, l.ended = l.limit+1, 0
	}
}

// failed notes why an answer broke off. It reports the new limit if that is lower; else 0.
func (l *load) failed(err error) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lowered := l.limit < l.most && l.ended == 0; !remotelm.Overloaded(err) || lowered || l.limit == 1 {
		return 0 // an answer that was asked for before the limit fell tells nothing new
	}
	l.limit, l.ended = max(1, min(l.limit, l.asked)/2), 0
	return l.limit
}
