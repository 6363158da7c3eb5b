package bus

import (
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// shortestTurn and longestTurn bound how long a message stays away that was returned in favour of others. Between
	// them it is as long as the others have worked already: they may work for hours.
	// leastPace is the least time that a try counts for, with its acknowledgement.
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
	leastPace    = 5 * time.Millisecond
	// maxFailed bounds what is kept of failures: a message that failed here may be finished by another process, and
	// this one does not learn of it.
	maxFailed = 10_000
)

// fairness keeps failing messages from taking the slots of the others. A family of messages (ConsumerConfig.Families)
// is suspect from a failure on until one of its messages succeeds. Of an innermost suspect family, one message is
// tried at a time, and all suspects together get half of the slots. The others go back to the server, which delivers
// them again one after the other. One that has come often is let in all the same: the server stops delivering it at
// its limit, and without a word.
type fairness struct {
	config ConsumerConfig

	mu sync.Mutex
	// failed counts the failures of messages in this process, by stream sequence.
	failed map[uint64]int
	// working are the messages that handlers work on.
	working  map[*Message]try
	suspects map[string]*suspect
	// pace is the smoothed duration of a failing try.
	pace time.Duration
}

// try is a handler's work on a message: since when, and the message's families.
type try struct {
	since    time.Time
	families []string
}

type suspect struct {
	since time.Time // when its first failure was
	turn  time.Time // when the last of the returned messages may come again
}

func newFairness(c ConsumerConfig) *fairness {
	return &fairness{
		config: c, failed: map[uint64]int{}, working: map[*Message]try{}, suspects: map[string]*suspect{},
		pace: leastPace,
	}
}

func (f *fairness) innermostSuspect(families []string) string {
	for i := len(families) - 1; i >= 0; i-- {
		if f.suspects[families[i]] != nil {
			return families[i]
		}
	}
	return ""
}

// admit lets a message in and returns 0, or returns for how long the message must go back to the server: messages of
// its family have failed, and those that are at work fill the slots for suspects.
func (f *fairness) admit(m *Message, now time.Time) (away time.Duration) {
	if f.config.Families == nil {
		return 0
	}
	families := f.config.Families(m)
	f.mu.Lock()
	defer f.mu.Unlock()
	if name := f.innermostSuspect(families); name != "" {
		all, same, last := 0, 0, time.Time{} // last is when the last of them began
		for _, other := range f.working {
			switch f.innermostSuspect(other.families) {
			case "":
				continue
			case name:
				same++
			}
			all++
			if other.since.After(last) {
				last = other.since
			}
		}
		inner := name == families[len(families)-1]
		if (all >= max(1, f.config.Slots/2) || inner && same > 0) && !f.config.cameOften(m) {
			return max(shortestTurn, min(now.Sub(last), longestTurn), f.suspects[name].nextTurn(now, f.pace))
		}
	}
	f.working[m] = try{now, families}
	return 0
}

// nextTurn returns for how long a message of the suspect family goes back to the server: each one comes a pace after
// the one before.
func (s *suspect) nextTurn(now time.Time, pace time.Duration) time.Duration {
	if s.turn.Before(now) {
		s.turn = now
	}
	s.turn = s.turn.Add(pace)
	if limit := now.Add(longestTurn); s.turn.After(limit) {
		s.turn = limit
	}
	d := s.turn.Sub(now)
	return d - rand.N(d/8+1)
}

func (f *fairness) leave(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.working, m)
}

func (f *fairness) forget(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.failed, m.Seq)
}

func (f *fairness) succeeded(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.failed, m.Seq)
	for _, name := range f.working[m].families {
		delete(f.suspects, name)
	}
}

// noteFailure counts one more failure of a message in this process, after a try that lasted took, and makes its
// families suspect. An outage of the server says nothing about them. It returns how many failures there were. hopeless
// means that the innermost family has failed for as long as all tries of one message take. Then the first failure of
// each of its messages is the last; otherwise a family of a thousand messages would be tried thousands of times.
func (f *fairness) noteFailure(m *Message, took time.Duration, now time.Time, outage bool) (n int, hopeless bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.failed) >= maxFailed {
		clear(f.failed) // a few more tries are better than memory that grows without end
	}
	f.failed[m.Seq]++
	n = f.failed[m.Seq]
	families := f.working[m].families
	if outage || len(families) == 0 {
		return n, false
	}
	f.pace += (max(took, leastPace) - f.pace) / 8
	if len(f.suspects) >= maxFailed {
		clear(f.suspects)
	}
	for _, name := range families {
		if f.suspects[name] == nil {
			f.suspects[name] = &suspect{since: now}
		}
	}
	first := f.suspects[families[len(families)-1]].since
	return n, f.config.MaxDeliver > 0 && now.Sub(first) > f.config.retrySpan()
}
