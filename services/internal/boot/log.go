package boot

import (
	"io"
	"os"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/term"
)

// Log is the settings of a program's logs. They go to standard error.
type Log struct {
	Level  string `key:"log.level" env:"MEANDER_LOG_LEVEL" enum:"trace,debug,info,warn,error" help:"least severe lines to log"`
	Format string `key:"log.format" env:"MEANDER_LOG_FORMAT" enum:"auto,json,console" help:"form of the lines; auto is console on a terminal, else json"`
}

// DefaultLog has level info; its format is console on a terminal and JSON elsewhere.
func DefaultLog() Log { return Log{Level: "info", Format: "auto"} }

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
