package remote

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// endPatience is how long a process may take to end after its connections broke.
const endPatience = 2 * time.Second

// start starts a worker process, or takes the spare one, and waits until it has loaded, or for Inspect has answered.
func (l *link) start(ctx context.Context) (*peer, error) {
	process := (*process)(nil)
	if !l.early {
		process = l.cfg.Spare.claim(l.dir, l.cfg)
	}
	if process == nil {
		var err error
		if process, err = startProcess(ctx, l.dir, l.cfg); err != nil {
			return nil, err
		}
	}
	p := &peer{network: "unix", address: process.socket(), process: process}
	waiting, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-process.ended:
			stop(process.why())
		case <-waiting.Done():
		}
	}()
	if err := l.await(waiting, p); err != nil {
		if _, isFault := errors.AsType[*wire.Fault](err); isFault {
			process.finish() // it answers, so it can remove its files
		} else {
			select {
			case <-process.ended: // its exit status says more than a broken connection
				err = process.why()
			case <-time.After(endPatience):
			}
		}
		process.kill()
		return nil, err
	}
	return p, nil
}

// join connects to a worker that others started, and waits for it. An error is its refusal, or the end of the wait.
func (l *link) join(ctx context.Context) (*peer, error) {
	p := &peer{}
	var err error
	if p.network, p.address, p.secure, err = l.cfg.parseAddress(); err != nil {
		return nil, &wire.Fault{Class: wire.ClassConfig, Message: err.Error()}
	}
	if l.cfg.Wait > 0 {
		var stop func()
		ctx, stop = context.WithTimeout(ctx, l.cfg.Wait)
		defer stop()
	}
	pause, told := 50*time.Millisecond, time.Time{}
	defer func() {
		if !told.IsZero() {
			l.cfg.log(Event{Waiting: true})
		}
	}()
	for {
		err := l.await(ctx, p)
		if err == nil {
			return p, nil
		}
		if _, isFault := errors.AsType[*wire.Fault](err); isFault {
			return nil, err
		}
		if time.Since(told) > tellEvery {
			l.cfg.log(Event{Waiting: true, Text: "waiting for the worker at " + l.cfg.Address, Err: err})
			told = time.Now()
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, redialMost)
		case <-ctx.Done():
			return nil, fmt.Errorf("no worker at torch=%s: %w", l.cfg.Address, err)
		}
	}
}

// await says hello until the model is loaded, and keeps the connection. A *wire.Fault: it cannot be loaded.
func (l *link) await(ctx context.Context, p *peer) error {
	var detail atomic.Value // of the last answer
	detail.Store("it does not answer yet")
	defer l.cfg.tell(func() string { return detail.Load().(string) })()
	c, h, err := l.greet(ctx, p, readyPatience)
	if err != nil {
		return err
	}
	keep := false
	defer func() {
		if !keep {
			_ = c.Close()
		}
	}()
	for h.State == wire.Loading && !l.early {
		detail.Store(h.Detail)
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if h, err = l.hello(ctx, c, readyPatience); err != nil {
			return err
		}
	}
	if h.State == wire.Failed {
		fault := h.Error
		if fault == nil {
			fault = &wire.Fault{Class: wire.ClassWorker, Message: "the model could not be loaded: " + h.Detail}
		}
		return fault
	}
	keep = true
	p.hello, p.idle = *h, []*conn{c}
	return nil
}
