package reward

import (
	"fmt"
	"time"
)

// breaker spares a function that does not answer: after breakerLimit failed calls in a
// row it lets nothing through for a while, then one sample to see, and waits longer each
// time that one fails, too. It is part of a pool, and guarded by the pool's lock.
type breaker struct {
	failures int // in a row
	probes   int // in a row that failed
	probing  bool
	until    time.Time
	last     error
}

const (
	breakerLimit   = 3
	breakerFirst   = time.Second
	breakerLongest = 15 * time.Second
)

// sparedError is a call that was not made, because those before it failed with Err.
type sparedError struct {
	// after is when it makes sense to come again.
	after time.Duration
	err   error
}

func (e *sparedError) Error() string { return fmt.Sprintf("is left alone for a while, for %v", e.err) }

func (e *sparedError) Unwrap() error { return e.err }

func (b *breaker) open() bool { return b.failures >= breakerLimit }

// admit says whether a sample may join the pool, and whether it is the one that goes to
// see.
func (b *breaker) admit(now time.Time) (probe bool, err error) {
	if !b.open() {
		return false, nil
	}
	if b.probing || now.Before(b.until) {
		return false, &sparedError{max(b.until.Sub(now), breakerFirst), b.last}
	}
	b.probing = true
	return true, nil
}

// abandon takes back a probe that found out nothing.
func (b *breaker) abandon() { b.probing = false }

// saw learns from a call: err is why nobody answered, nil when somebody did. It says
// whether the breaker has just opened.
func (b *breaker) saw(err error, probe bool, now time.Time) (opened bool) {
	if err == nil {
		*b = breaker{}
		return false
	}
	b.last = err
	switch {
	case probe:
		b.probing = false
		b.probes++
	case b.open():
		return false // a call from before
	}
	b.failures++
	if b.open() {
		b.until = now.Add(min(breakerFirst<<min(b.probes, 8), breakerLongest))
	}
	return b.open()
}
