package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// checkWait is how long a look waits for members that join beside one that is used.
	checkWait = 2 * time.Second
	// redialEvery is the pause between two tries to reach a first member, toldEvery that between two words to Waiting.
	redialEvery = time.Second
	toldEvery   = 10 * time.Second
)

// Check looks at each member now: one that is well again must join. A slow one keeps no other waiting. See Away.
func (p *Pool[M]) Check(ctx context.Context) error { return p.look(ctx, true) }

// Reach waits until a member can be used. An error is the end of ctx, or ErrRefused: waiting does not help any of them.
func (p *Pool[M]) Reach(ctx context.Context) error {
	for {
		switch err := p.Check(ctx); {
		case err == nil:
			p.say(nil)
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrRefused):
			return err
		default:
			p.tell(err)
		}
		select {
		case <-time.After(redialEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Watch looks at the members when they are due, until ctx ends or stop is called. It comes after Reach or Check.
func (p *Pool[M]) Watch(ctx context.Context) (stop func()) {
	ctx, end := context.WithCancel(ctx)
	p.setWatched(true)
	var watching sync.WaitGroup
	watching.Go(func() {
		defer p.setWatched(false)
		for {
			select {
			case <-time.After(p.untilDue()):
			case <-p.news:
			case <-ctx.Done():
				return
			}
			if err := p.look(ctx, false); ctx.Err() == nil {
				p.tell(err)
			}
		}
	})
	return func() {
		end()
		watching.Wait()
	}
}

func (p *Pool[M]) setWatched(is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watched = is
	p.wake()
}

// untilDue returns how long no member is due for a look.
func (p *Pool[M]) untilDue() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := never
	for _, m := range p.members {
		if m.due.Before(next) && !m.asked {
			next = m.due
		}
	}
	return time.Until(next)
}

// tell tells Waiting why no member can be used, unless it was told a moment ago, or that one can.
func (p *Pool[M]) tell(why error) {
	if why == nil && !p.told.IsZero() || why != nil && time.Since(p.told) > toldEvery {
		p.say(why)
	}
}

// say is tell, whatever was told before.
func (p *Pool[M]) say(why error) {
	p.told = time.Time{}
	if why != nil {
		p.told = time.Now()
	}
	if p.config.Waiting != nil {
		p.config.Waiting(why)
	}
}

// look looks at all members, or at those that are due.
func (p *Pool[M]) look(ctx context.Context, all bool) error {
	p.check.Lock()
	defer p.check.Unlock()
	var wait sync.WaitGroup
	for _, m := range p.members {
		p.mu.Lock()
		skip := m.asked || m.due.Equal(never) && m.out != nil || !all && time.Now().Before(m.due)
		m.asked = m.asked || !skip
		p.mu.Unlock()
		switch {
		case skip:
		case len(p.Members()) == 0: // which one is the first must not depend on chance
			p.checkMember(ctx, m)
		default:
			wait.Go(func() { p.checkMember(ctx, m) })
		}
	}
	checked := make(chan struct{})
	go func() {
		defer close(checked)
		wait.Wait()
	}()
	select {
	case <-checked:
	case <-time.After(checkWait):
	}
	return p.Away()
}

// checkMember looks at one member.
func (p *Pool[M]) checkMember(ctx context.Context, m *member[M]) {
	p.mu.Lock()
	out := m.out
	p.mu.Unlock()
	var err error
	if p.config.Probe != nil {
		err = p.config.Probe(ctx, m.of)
	}
	p.mu.Lock()
	working := len(m.leases) > 0
	p.mu.Unlock()
	if err == nil && out != nil {
		if working && p.config.Switch != nil { // it may change its weights when it joins: not beside a call
			err = out
		} else {
			err = p.config.Join(ctx, m.of)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m.asked = false
	leftMeanwhile := out == nil && m.out != nil // it has to join
	if ctx.Err() != nil || leftMeanwhile || errors.Is(m.out, errFinal) {
		return
	}
	if out != nil && err == nil {
		m.weights, m.drains, m.refused = "", false, nil
		m.joins++
	}
	p.set(m, err)
}

// set says that a member cannot be used, for a reason, or that it can. p.mu is held.
func (p *Pool[M]) set(m *member[M], err error) {
	was, now := m.out, time.Now()
	m.out = err
	switch {
	case err == nil:
		m.outSince, m.due = time.Time{}, never
		if p.config.Probe != nil {
			m.due = now.Add(p.config.Every)
		}
	case errors.Is(err, errFinal):
		m.due = never
	default:
		if m.losses++; m.losses > 1 {
			m.due = now.Add(min(p.config.RetryMost, p.config.Retry<<min(m.losses-2, 20)))
		} else {
			m.due = now
		}
		if m.outSince.IsZero() {
			m.outSince = now
		} else if p.config.Patience > 0 && now.Sub(m.outSince) >= p.config.Patience {
			for _, giveUp := range m.leases {
				//nolint:errorlint // its class is of the member, not of the call
				giveUp(fmt.Errorf("%w: %v", ErrSilent, err))
			}
		}
	}
	select {
	case p.news <- struct{}{}:
	default:
	}
	changed := (was == nil) != (err == nil)
	if p.config.Changed != nil && changed != errors.Is(was, errUnknown) { // of a first check the faults alone are said
		p.config.Changed(m.of.String(), err)
	}
	p.wake()
}
