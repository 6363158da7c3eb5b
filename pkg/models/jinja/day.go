package jinja

import (
	"fmt"
	"strings"
	"time"
)

// Day returns the function strftime_now of a day, as a variable of Render: the text of the day in a format of strftime,
// in English. A time of the day is not known: a format that asks for one fails with ErrUnsupported.
func Day(day time.Time) any {
	return &function{StrftimeNow, func(s *state, c *call) any {
		format := s.text(s.bindArguments(c, 1, "format")[0])
		text, err := strftime(day, format)
		if err != nil {
			s.unsupported("strftime_now(%.40q): %v", format, err)
		}
		s.countMemory(len(text))
		return text
	}}
}

// StrftimeNow is the name of the function.
const StrftimeNow = "strftime_now"

// strftime formats a day as Python does in the C locale.
func strftime(day time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		bare := strings.HasPrefix(format[i:], "%-")
		if bare {
			i++
		}
		if i++; i == len(format) {
			return "", fmt.Errorf("it ends in %%")
		}
		text := ""
		switch format[i] {
		case '%':
			text = "%"
		case 'a':
			text = day.Format("Mon")
		case 'A':
			text = day.Format("Monday")
		case 'b', 'h':
			text = day.Format("Jan")
		case 'B':
			text = day.Format("January")
		case 'd':
			text = day.Format("02")
		case 'e':
			text = day.Format("_2")
		case 'm':
			text = day.Format("01")
		case 'y':
			text = day.Format("06")
		case 'Y':
			text = day.Format("2006")
		case 'j':
			text = fmt.Sprintf("%03d", day.YearDay())
		case 'D', 'x':
			text = day.Format("01/02/06")
		case 'F':
			text = day.Format("2006-01-02")
		case 'u':
			text = fmt.Sprint((int(day.Weekday())+6)%7 + 1)
		case 'w':
			text = fmt.Sprint(int(day.Weekday()))
		default:
			return "", fmt.Errorf("%%%c is not supported: only the day is fixed", format[i])
		}
		if bare {
			text = strings.TrimLeft(text, "0 ")
		}
		b.WriteString(text)
	}
	return b.String(), nil
}
