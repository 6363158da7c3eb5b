package bus

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
)

// The server answers what its permissions do not allow with silence, and with a note on the
// connection that names the subject. Here who waits for the answer meets the note.

const (
	// deniedGrace is how long a question that the client library asked may still be answered
	// after a note that could be about it. An answer takes milliseconds.
	deniedGrace = time.Second
	// deniedFor is how long Denied tells of a note, deniedMost of how many at once.
	deniedFor  = time.Minute
	deniedMost = 16
)

// denials is what the server would not let us do.
type denials struct {
	mu      sync.Mutex
	waiting map[*waiter]struct{}
	recent  []denial
}

type denial struct {
	err error
	at  time.Time
}

// waiter wants to know of notes: about its subject, or with none about anything.
type waiter struct {
	subject string
	told    func(subject string, err error)
}

// deniedError is one refusal. It is ErrPermission.
type deniedError struct {
	subject, text string
}

func (e *deniedError) Error() string { return e.text }
func (e *deniedError) Unwrap() error { return ErrPermission }

// notes is how the server's note reads.
var notes = regexp.MustCompile(`(?i)permissions violation for (publish|subscription) to "([^"]*)"`)

// deny takes a note: it tells who waits for the subject's answer. met says that somebody may.
func (b *Bus) deny(note error) (denied error, met bool) {
	m := notes.FindStringSubmatch(note.Error())
	if m == nil {
		return note, false
	}
	err := &deniedError{subject: m[2]}
	verb := "publish on"
	if strings.EqualFold(m[1], "subscription") {
		verb = "subscribe to"
	}
	err.text = fmt.Sprintf("%v: %s may not %s %q", ErrPermission, b.who.says(), verb, err.subject)
	if verb == "publish on" {
		err.text += whoMay(b.who, err.subject)
	}
	d := &b.denials
	d.mu.Lock()
	defer d.mu.Unlock()
	known := false
	for i := range d.recent {
		if d.recent[i].err.Error() == err.text {
			d.recent[i].at, known = time.Now(), true
		}
	}
	if !known {
		if len(d.recent) == deniedMost {
			d.recent = d.recent[1:]
		}
		d.recent = append(d.recent, denial{err, time.Now()})
	}
	for w := range d.waiting {
		if w.subject == "" || w.subject == err.subject {
			met = true
			go w.told(err.subject, err)
		}
	}
	return err, met
}

// listen tells of notes on a subject (empty: on any) until stop.
func (d *denials) listen(subject string, told func(subject string, err error)) (stop func()) {
	w := &waiter{subject, told}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting == nil {
		d.waiting = map[*waiter]struct{}{}
	}
	d.waiting[w] = struct{}{}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.waiting, w)
	}
}

// Denied is what the server did not let us do in the last minute; nil: nothing. Whoever needs it
// stands still.
func (b *Bus) Denied() error {
	d := &b.denials
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, r := range d.recent {
		if time.Since(r.at) < deniedFor {
			errs = append(errs, r.err)
		}
	}
	return errors.Join(errs...)
}

// undenied is a try whose questions the client library asks. It ends when one that the server
// does not answer was denied: denied returns the note then.
func (b *Bus) undenied(ctx context.Context) (try context.Context, denied func() error, stop func()) {
	try, cancel := context.WithCancelCause(ctx)
	deaf := b.denials.listen("", func(subject string, err error) {
		if !strings.HasPrefix(subject, "$") { // no question of the library's
			return
		}
		if pause(try, deniedGrace) == nil {
			cancel(err)
		}
	})
	denied = func() error {
		note, _ := errors.AsType[*deniedError](context.Cause(try))
		if note == nil || ctx.Err() != nil {
			return nil
		}
		return note
	}
	return try, denied, func() { deaf(); cancel(nil) }
}
