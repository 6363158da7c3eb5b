package jinja_test

import (
	"errors"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/jinja"
)

// The day that a template asks for is written as Python writes it; a time of the day is refused.
func TestDay(t *testing.T) {
	t.Parallel()
	day := time.Date(2026, 3, 5, 0, 0, 0, 0, time.UTC)
	for format, want := range map[string]string{
		"%d %b %Y": "05 Mar 2026", "%Y-%m-%d": "2026-03-05", "%A, %B %-d": "Thursday, March 5", "%j %u %w %y %% %e": "064 4 4 26 %  5",
		"%x %D %F %a": "03/05/26 03/05/26 2026-03-05 Thu", "%-j %-m": "64 3", "%H": "", "%Q": "", "%": "",
	} {
		tpl, err := jinja.Parse("{{ strftime_now('" + format + "') if strftime_now is defined }}")
		if err != nil {
			t.Fatal(err)
		}
		got, err := tpl.Render(map[string]any{jinja.StrftimeNow: jinja.Day(day)})
		if want == "" && !errors.Is(err, jinja.ErrUnsupported) || want != "" && (err != nil || got != want) {
			t.Errorf("%s: %q, %v; want %q", format, got, err, want)
		}
	}
}
