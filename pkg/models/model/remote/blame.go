package remote

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// work names what a call computes: a part for each sample. nil: nothing, as that of a call which only asks.
type work func() []part

// part is what a call computes for one sample: its name, and that of the prompt, which its siblings share.
type part struct{ call, prompt string }

// oneWork is the work of a call for one sample: of is what distinguishes it, kind what it shares with its siblings.
func oneWork(of []byte, kind ...any) work {
	return func() []part {
		prompt := fmt.Sprint(kind...)
		return []part{{prompt + string(sum(of)), prompt}}
	}
}

// velocityWork is the work of an evaluation. Rows of one state are of one sample.
func velocityWork(args *wire.VelocityArgs, x wire.Tensor) work {
	return func() []part {
		parts := make([]part, len(x.Rest))
		for i, state := range x.Rest {
			parts[i].call = string(sum(state))
		}
		for row, handle := range args.Handles {
			state := row
			if args.States != nil {
				state = args.States[row]
			}
			p := &parts[state]
			p.call += fmt.Sprint(args.Weights, args.Sigmas[row], args.Guidance[row], handle, args.Frames, args.Height,
				args.Width)
			p.prompt += fmt.Sprint(handle, args.Frames, args.Height, args.Width)
		}
		return parts
	}
}

func sum(b []byte) []byte {
	s := sha256.Sum256(b)
	return s[:]
}

// blame is how often the worker was lost in a call, in a row, and why and when it last was.
type blame struct {
	times int
	why   error
	at    time.Time
}

// A call is not made again after it has lost the worker maxKills times in a row, or maxSiblingKills times for a prompt
// of which another was given up. After maxTogether losses samples are computed alone. All is forgotten in time.
const (
	maxKills        = 5
	maxSiblingKills = 2
	maxTogether     = 2
	blameFor        = time.Hour
	maxBlamed       = 4096
)

// errTogether says that the worker was lost while it computed several samples: each is to be computed alone.
var errTogether = errors.New("the worker was lost while it computed several samples at once")

// admit lets a call begin beside those that it may be beside, until release: model.ErrKills, or errTogether.
func (l *link) admit(work work, call string) (release func(), err error) {
	if work == nil {
		return func() {}, nil
	}
	l.mu.Lock()
	suspect := false
	if len(l.blamed) > 0 {
		suspect, err = l.verdict(work(), call)
	}
	l.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case suspect:
		l.alone.Lock()
		return l.alone.Unlock, nil
	}
	l.alone.RLock()
	return l.alone.RUnlock, nil
}

// verdict says whether the worker was lost in a call before; see admit for its errors. Lock held.
func (l *link) verdict(parts []part, call string) (suspect bool, err error) {
	for _, p := range parts {
		b, most := l.blamed[p.call], maxKills
		if b.times == 0 || time.Since(b.at) > blameFor {
			continue
		}
		suspect = true
		if _, killed := l.blamed[p.prompt]; killed {
			most = maxSiblingKills
		}
		switch {
		case len(parts) > 1 && b.times >= maxTogether:
			return true, fmt.Errorf("%w: %w", errTogether, b.why)
		case b.times >= most:
			l.blamed[p.prompt] = blame{at: b.at}
			return true, fmt.Errorf("%w: %d times in %s, the last by: %w", model.ErrKills, b.times, call, b.why)
		}
	}
	return suspect, nil
}

// blame notes that the worker was lost in a call of work. An error: it is not to be repeated as it is, see admit.
func (l *link) blame(work work, call string, why error) error {
	if work == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.blamed) > maxBlamed {
		clear(l.blamed)
	}
	parts := work()
	for _, p := range parts {
		l.blamed[p.call] = blame{times: l.blamed[p.call].times + 1, why: why, at: time.Now()}
	}
	_, err := l.verdict(parts, call)
	return err
}

// answered clears work that the worker has done.
func (l *link) answered(work work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.blamed) == 0 {
		return
	}
	for _, p := range work() {
		delete(l.blamed, p.call)
	}
}
