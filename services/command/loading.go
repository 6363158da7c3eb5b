package command

import (
	"fmt"
	"io"
	"sync/atomic"

	"github.com/meander-rl/meander/services/internal/present"
)

// loading says how far this process is with loading its model.
type loading struct {
	now, waits atomic.Pointer[string]
	// lines gets what is waited for, until a progress shows it; nil: nothing does.
	lines atomic.Pointer[io.Writer]
}

// wait is told what the worker of an engine is waited for; empty: for nothing.
func (l *loading) wait(text string) {
	if out := l.lines.Load(); out != nil && text != "" {
		fmt.Fprintln(*out, text)
	}
	if text != "" {
		text = "  " + text
	}
	l.waits.Store(&text)
}

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
	text := ""
	for _, part := range []*string{l.now.Load(), l.waits.Load()} {
		if part != nil {
			text += *part
		}
	}
	return text
}
