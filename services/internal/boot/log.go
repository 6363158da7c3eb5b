package boot

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/term"
)

// Log is how a program logs. Logs go to standard error.
type Log struct {
	Level  string `koanf:"level" help:"least severe lines to log: trace, debug, info, warn, error"`
	Format string `koanf:"format" help:"json, console, or auto: console on a terminal"`
}

// DefaultLog is info, console on a terminal and JSON elsewhere.
func DefaultLog() Log { return Log{Level: "info", Format: "auto"} }

// Validate joins every fault by field name.
func (l Log) Validate() error {
	return errors.Join(
		oneOf("log.level", l.Level, "trace", "debug", "info", "warn", "error"),
		oneOf("log.format", l.Format, "auto", "json", "console"),
	)
}

func oneOf(field, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("%s: %q; must be one of %s", field, value, strings.Join(allowed, ", "))
}

// Logger writes to w with the fields service, version and instance on every line.
// l must be valid.
func (l Log) Logger(w io.Writer, service, instance string) zerolog.Logger {
	level, err := zerolog.ParseLevel(l.Level)
	if err != nil {
		level = zerolog.InfoLevel
	}
	console := l.Format == "console" || l.Format == "auto" && IsTerminal(w)
	if console {
		// On a terminal the same three values on every line would only be in the way.
		cw := zerolog.ConsoleWriter{Out: w, TimeFormat: time.TimeOnly, NoColor: !IsTerminal(w)}
		return zerolog.New(cw).Level(level).With().Timestamp().Str("service", service).Logger()
	}
	return zerolog.New(w).Level(level).With().Timestamp().
		Str("service", service).Str("version", Version()).Str("instance", instance).Logger()
}

// IsTerminal says whether w is one.
func IsTerminal(w io.Writer) bool {
	f, ok := File(w)
	return ok && term.IsTerminal(int(f.Fd()))
}

// File is the file that w writes to, if it is one, or passes on to one.
func File(w io.Writer) (*os.File, bool) {
	if over, ok := w.(interface{ Under() io.Writer }); ok {
		w = over.Under()
	}
	f, ok := w.(*os.File)
	return f, ok
}
