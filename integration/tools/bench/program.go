package main

import (
	"errors"
	"io"
	"os"

	"github.com/rs/zerolog"
	"golang.org/x/term"
)

// exitUsage is the exit status after a mistake in the call.
const exitUsage = 2

// usageError is a mistake in the call.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usage marks err as a mistake in the call; nil stays nil.
func usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// exitCode is the exit status for the error that the program ended with.
func exitCode(err error) int {
	_, wrongCall := errors.AsType[usageError](err)
	switch {
	case err == nil:
		return 0
	case wrongCall:
		return exitUsage
	}
	return 1
}

// newLog writes warnings and errors.
func newLog(w io.Writer) zerolog.Logger {
	if isTerminal(w) {
		w = zerolog.ConsoleWriter{Out: w}
	}
	return zerolog.New(w).Level(zerolog.WarnLevel).With().Timestamp().Logger()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
