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

// Log is the settings of a program's logs. They go to standard error.
type Log struct {
	Level  string `koanf:"level" help:"least severe lines to log: trace, debug, info, warn, error"`
	Format string `koanf:"format" help:"json, console, or auto: console on a terminal"`
}

// DefaultLog has level info; its format is console on a terminal and JSON elsewhere.
func DefaultLog() Log { return Log{Level: "info", Format: "auto"} }

// Validate returns all faults, joined, each with the name of its field.
func (l Log) Validate() error {
	return errors.Join(
		oneOf("log.level", l.Level, "trace", "debug", "info", "warn", "error"),
		oneOf("log.format", l.Format, "auto", "json", "console"),
	)
}

// oneOf returns an error that lists the allowed values, unless value is one of them.
func oneOf(field, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("%s: %q; must be one of %s", field, value, strings.Join(allowed, ", "))
}

// Logger returns a logger that writes to w, as lines for people on a terminal, as JSON with the fields service,
// version and instance otherwise. l must be valid.
func (l Log) Logger(w io.Writer, service, instance string) zerolog.Logger {
	level, err := zerolog.ParseLevel(l.Level)
	if err != nil {
		level = zerolog.InfoLevel
	}
	console := l.Format == "console" || l.Format == "auto" && IsTerminal(w)
	if console {
		// Version and instance would be the same on every line of a terminal.
		cw := zerolog.ConsoleWriter{Out: safeWriter{w}, TimeFormat: time.TimeOnly, NoColor: !IsTerminal(w)}
		cw.FormatPrepare = safeFields
		return zerolog.New(cw).Level(level).With().Timestamp().Str("service", service).Logger()
	}
	return zerolog.New(w).Level(level).With().Timestamp().
		Str("service", service).Str("version", Version()).Str("instance", instance).Logger()
}

// safeFields makes what strangers wrote in a line safe; the colours come later.
func safeFields(fields map[string]any) error {
	for name, value := range fields {
		if text, ok := value.(string); ok {
			fields[name] = Safe(text)
		}
	}
	return nil
}

// safeWriter writes lines with colours, in which all else is safe.
type safeWriter struct{ io.Writer }

func (w safeWriter) Write(p []byte) (int, error) {
	_, err := io.WriteString(w.Writer, SafeOutput(string(p), true))
	return len(p), err
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := File(w)
	return ok && term.IsTerminal(int(f.Fd()))
}

// File returns the file that w is, or that w passes its bytes on to; false if there is none.
func File(w io.Writer) (*os.File, bool) {
	if over, ok := w.(interface{ Under() io.Writer }); ok {
		w = over.Under()
	}
	f, ok := w.(*os.File)
	return f, ok
}
