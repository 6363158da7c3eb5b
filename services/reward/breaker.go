package reward

import (
	"fmt"
	"time"
)

// breaker stops the calls to a function that does not answer. After breakerLimit failed calls in a row it opens: it
// admits no sample for a while, then one as a probe, and waits longer each time a probe fails. A call that gets an
// answer closes it. The lock of its pool guards it.
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

// breakerError is the error of a sample that gets no call, because the calls before it failed with err.
type breakerError struct {
	// after is when it makes sense to come again.
	after time.Duration
	err   error
}

func (e *breakerError) Error() string {
	return fmt.Sprintf("is not called for a while, because of: %v", e.err)
}

func (e *breakerError) Unwrap() error { return e.err }

func (b *breaker) open() bool { return b.failures >= breakerLimit }

// admit reports whether a sample may join the pool's queue: err is a breakerError if the function does not answer at
// present. probe: this sample is the probe, so its outcome must be given to record, or abandon called.
func (b *breaker) admit(now time.Time) (probe bool, err error) {
	if !b.open() {
		return false, nil
	}
	if b.probing || now.Before(b.until) {
		return false, &breakerError{max(b.until.Sub(now), breakerFirst), b.last}
	}
	b.probing = true
	return true, nil
}

// abandon ends a probe without an outcome.
func (b *breaker) abandon() { b.probing = false }

// record counts the outcome of a call: err is why it got no answer, nil if it got one. It reports whether the breaker
// opened with this call.
func (b *breaker) record(err error, probe bool, now time.Time) (opened bool) {
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
