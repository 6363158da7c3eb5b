package pipeline

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// A sampler that failed begins again after keepFirst, then after twice that, and so on up to keepMost; one that served
// for keepReset begins with keepFirst.
const (
	keepFirst = time.Second
	keepMost  = time.Minute
	keepReset = 5 * time.Minute
)

type keptSampler struct {
	lane schemas.Lane
	bus  *bus.Bus
	log  zerolog.Logger

	mu     sync.Mutex
	served bool
	why    error                   // why the lane is not served; nil: it is, or was never yet
	saying func() error            // ends what presence says of it; nil: nothing
	checks map[string]func() error // conditions of readiness of the sampler that runs
	notes  []func() []string
}

// keepSampling serves with a sampler until ctx ends. One that fails after it has served begins again, with its model
// opened anew; meanwhile presence and readiness say why its lane waits. An error is of a sampler that never served, or
// says that the connection is closed.
func keepSampling(ctx context.Context, c Config, b *bus.Bus, log zerolog.Logger) error {
	k := &keptSampler{lane: c.Lane(), bus: b, log: log, checks: map[string]func() error{}}
	own := c.Sampler
	if c.Health != nil {
		c.Health("sampler", k.fault)
		own.Health = func(name string, check func() error) { k.setCheck(c.Health, name, check) }
	}
	if c.Note != nil {
		c.Note(k.allNotes)
		own.Note = k.addNote
	}
	announced := sync.OnceFunc(func() {
		if c.Sampler.Announced != nil {
			c.Sampler.Announced()
		}
	})
	own.Announced = func() {
		k.say(ctx, nil)
		announced()
	}
	for pause := keepFirst; ; pause = min(2*pause, keepMost) {
		began := time.Now()
		err := sampler.Run(ctx, own, b, log)
		if err == nil || ctx.Err() != nil || !k.hasServed() || errors.Is(err, bus.ErrClosed) {
			k.stopSaying()
			return err
		}
		if time.Since(began) > keepReset {
			pause = keepFirst
		}
		k.say(ctx, fmt.Errorf("lane %s is not served; the next try is at %s: %w", k.lane,
			time.Now().Add(pause).Format(time.RFC3339), err))
		_ = bus.Pause(ctx, pause)
		k.addNote(nil)
	}
}

func (k *keptSampler) hasServed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.served
}

func (k *keptSampler) fault() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.why
}

// say has readiness, presence and log say why the lane is not served; nil: it is.
func (k *keptSampler) say(ctx context.Context, why error) {
	k.stopSaying()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.why = why; why == nil {
		k.served = true
		return
	}
	k.log.Error().Err(why).Msg("the sampler failed; all else goes on")
	instance := "starting-" + strings.ToLower(rand.Text()[:8])
	k.saying = k.bus.Announcing(ctx, func() *schemas.Presence {
		return &schemas.Presence{
			Service: schemas.ServiceStarting, Instance: instance, Lane: k.lane, Waiting: why.Error(),
		}
	}, nil)
}

// stopSaying ends what presence says of the lane.
func (k *keptSampler) stopSaying() {
	k.mu.Lock()
	saying := k.saying
	k.saying = nil
	k.mu.Unlock()
	if saying == nil {
		return
	}
	if err := saying(); err != nil {
		k.log.Error().Err(err).Msg("why the lane waits is not announced")
	}
}

// setCheck sets a condition of readiness of the sampler that runs, in place of that of the one before; add adds it the
// first time.
func (k *keptSampler) setCheck(add func(string, func() error), name string, check func() error) {
	k.mu.Lock()
	_, there := k.checks[name]
	k.checks[name] = check
	k.mu.Unlock()
	if there {
		return
	}
	add(name, func() error {
		k.mu.Lock()
		check, down := k.checks[name], k.why != nil
		k.mu.Unlock()
		if down {
			return nil // said already
		}
		return check()
	})
}

// addNote adds a source of notes of the sampler that runs; nil: another one will run.
func (k *keptSampler) addNote(say func() []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.notes = append(k.notes, say); say == nil {
		k.notes = nil
	}
}

// allNotes returns the notes of the sampler that runs.
func (k *keptSampler) allNotes() (lines []string) {
	k.mu.Lock()
	notes := slices.Clone(k.notes)
	k.mu.Unlock()
	for _, say := range notes {
		lines = append(lines, say()...)
	}
	return lines
}
