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

// The server does not answer a request that its permissions do not allow. It only sends a note on the connection that
// names the subject. The code here gives that note to the caller who waits for the answer.

const (
	// deniedGrace is how long a request of the client library may still be answered after a note that could be about
	// it. An answer takes milliseconds.
	deniedGrace = time.Second
	// Denied reports notes of the last deniedFor, and at most deniedMost of them.
	deniedFor  = time.Minute
	deniedMost = 16
)

// denials has the notes of what the server did not allow, and the callers that wait for such notes.
type denials struct {
	mu      sync.Mutex
	waiting map[*waiter]struct{}
	recent  []denial
}

type denial struct {
	err *deniedError
	at  time.Time
}

// waiter is a caller that wants notes about its subject, or, with an empty one, about any. told must not block.
type waiter struct {
	subject string
	told    func(subject string, err error)
}

// deniedError is the error of one note. It is ErrPermission.
type deniedError struct {
	subject, text string
}

func (e *deniedError) Error() string { return e.text }
func (e *deniedError) Unwrap() error { return ErrPermission }

var notes = regexp.MustCompile(`(?i)permissions violation for (publish|subscription) to "([^"]*)"`)

// noteDenial gives a denial of the server to all callers that wait for an answer on its subject, and keeps it for
// Denied. It returns the denial as an error, and in met whether some caller was waiting.
func (b *Bus) noteDenial(note error) (denied error, met bool) {
	m := notes.FindStringSubmatch(note.Error())
	if m == nil {
		return note, false
	}
	err := &deniedError{subject: m[2]}
	verb := "publish on"
	if strings.EqualFold(m[1], "subscription") {
		verb = "subscribe to"
	}
	err.text = fmt.Sprintf("%v: %s may not %s %q", ErrPermission, b.user, verb, err.subject)
	if verb == "publish on" {
		err.text += b.user.MissingRight(err.subject)
	}
	d := &b.denials
	d.mu.Lock()
	defer d.mu.Unlock()
	known := false
	for i := range d.recent {
		if *d.recent[i].err == *err {
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
			w.told(err.subject, err)
		}
	}
	return err, met
}

// listen calls told for each denial about a subject (empty: any) until stop is called. told is called under the lock:
// it must not block, nor call listen or stop.
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

// Denied returns what the server did not allow in the last minute, joined, or nil; services show it in their health.
// Work that needs it stands still.
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

// watchDenials returns a context for calls of the client library. It ends when the server denied a request of the
// library and did not answer; denied returns the note then, else nil. Call stop at the end.
func (b *Bus) watchDenials(ctx context.Context) (try context.Context, denied func() error, stop func()) {
	try, cancel := context.WithCancelCause(ctx)
	unlisten := b.denials.listen("", func(subject string, err error) {
		if strings.HasPrefix(subject, "$") { // a request of the library's
			time.AfterFunc(deniedGrace, func() { cancel(err) })
		}
	})
	denied = func() error {
		note, _ := errors.AsType[*deniedError](context.Cause(try))
		if note == nil || ctx.Err() != nil {
			return nil
		}
		return note
	}
	return try, denied, func() { unlisten(); cancel(nil) }
}
