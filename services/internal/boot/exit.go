package boot

import "errors"

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
