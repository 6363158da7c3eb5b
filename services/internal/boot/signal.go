package boot

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/rs/zerolog"
)

// EndSignals returns the signals that ask a program to end: SIGINT, SIGTERM, and SIGHUP (its terminal is gone) unless
// it was started with SIGHUP ignored (nohup).
func EndSignals() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// Signals returns a context that ends at the first of EndSignals, so that the program drains: it finishes the work in
// flight, or returns it to the server. A second signal ends the process at once with ExitFailure. Call stop when the
// work is done: it restores the signals' usual effect and waits for the goroutine that watched them.
func Signals(parent context.Context, log zerolog.Logger) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, EndSignals()...)
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for first := true; ; first = false {
			select {
			case <-done:
				return
			case s := <-signals:
				if !first {
					log.Warn().Stringer("signal", s).Msg("second signal: exit without draining")
					os.Exit(ExitFailure)
				}
				log.Info().Stringer("signal", s).Msg("draining: a second signal exits at once")
				cancel()
			}
		}
	})
	var once sync.Once
	return ctx, func() {
		once.Do(func() {
			signal.Stop(signals)
			close(done)
			watching.Wait()
			cancel()
		})
	}
}

// Exit statuses of every program.
const (
	ExitOK      = 0
	ExitFailure = 1
	ExitUsage   = 2
)

// usageError marks an error as the caller's: a wrong flag, setting or argument.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// Usage marks err as a mistake in the call, so that ExitCode gives 2. Nil stays nil.
func Usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// ExitCode returns the exit status for the error that a program ended with.
func ExitCode(err error) int {
	if err == nil {
		return ExitOK
	}
	if _, ok := errors.AsType[usageError](err); ok {
		return ExitUsage
	}
	return ExitFailure
}
