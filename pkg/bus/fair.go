package bus

import (
	"math/rand/v2"
	"time"
)

const (
	// shortestTurn and longestTurn bound how long a message stays away that was handed back
	// in favour of others, leastPace is what a try of it is thought to take at least, with
	// its settlement.
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
	leastPace    = 5 * time.Millisecond
)

// fairness keeps what fails from taking the place of what does not. A family of messages
// (ConsumerConfig.Families) is suspect from a failure on until one of its messages
// succeeds. Of the innermost family that is suspect one message is tried at a time, and
// all suspects together get half of the slots; the others are handed back, to come again
// one after the other. The consumer's lock guards it.
type fairness struct {
	config ConsumerConfig
	// working are the families of the messages that handlers work on.
	working  map[*Message][]string
	suspects map[string]*suspect
	// pace is the smoothed time of a failing try.
	pace time.Duration
}

type suspect struct {
	since time.Time // of its first failure
	turn  time.Time // up to which messages that were handed back have been promised a place
}

func newFairness(c ConsumerConfig) *fairness {
	return &fairness{config: c, working: map[*Message][]string{}, suspects: map[string]*suspect{}, pace: leastPace}
}

// suspicious returns the innermost of the families that is suspect, or "".
func (f *fairness) suspicious(families []string) string {
	for i := len(families) - 1; i >= 0; i-- {
		if f.suspects[families[i]] != nil {
			return families[i]
		}
	}
	return ""
}

// admit takes a message in; away > 0: it is to be handed back for so long.
func (f *fairness) admit(m *Message, now time.Time) (away time.Duration) {
	if f.config.Families == nil {
		return 0
	}
	families := f.config.Families(m)
	if name := f.suspicious(families); name != "" {
		all, same := 0, 0
		for _, other := range f.working {
			switch f.suspicious(other) {
			case "":
				continue
			case name:
				same++
			}
			all++
		}
		inner := name == families[len(families)-1]
		if all >= max(1, f.config.Slots/2) || inner && same > 0 {
			return f.suspects[name].nextTurn(now, f.pace)
		}
	}
	f.working[m] = families
	return 0
}

// nextTurn promises a place to a message that is handed back.
func (s *suspect) nextTurn(now time.Time, pace time.Duration) time.Duration {
	if s.turn.Before(now) {
		s.turn = now
	}
	s.turn = s.turn.Add(pace)
	if limit := now.Add(longestTurn); s.turn.After(limit) {
		s.turn = limit
	}
	d := s.turn.Sub(now)
	return max(shortestTurn, d-rand.N(d/8+1))
}

// leave forgets a message that is no longer worked on.
func (f *fairness) leave(m *Message) { delete(f.working, m) }

// succeeded clears the families of a message.
func (f *fairness) succeeded(m *Message) {
	for _, name := range f.working[m] {
		delete(f.suspects, name)
	}
}

// failed makes the families of a message suspect. It says whether the innermost has failed
// for as long as the tries of one message would take: then the first failure of each
// message of it is its last, or a family of a thousand would be tried ten thousand times.
func (f *fairness) failed(m *Message, took time.Duration, now time.Time) (hopeless bool) {
	families := f.working[m]
	if len(families) == 0 {
		return false
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
	return f.config.MaxDeliver > 0 && now.Sub(f.suspects[families[len(families)-1]].since) > f.config.patience()
}
