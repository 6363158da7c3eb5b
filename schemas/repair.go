package schemas

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// The error texts of an event may be too long or not UTF-8: they come from a scorer, a
// driver, or the refused bytes themselves. Encode calls repair on a shallow copy of the
// event. It makes the texts legal, so that the event can be published.

func (e *Trajectory) repairTexts() *int64 {
	e.Error = legalText(e.Error, MaxText)
	return &e.V
}

func (e *Advantage) repairTexts() { e.Error = legalText(e.Error, MaxText) }

func (e *Receipt) repairTexts() {
	e.Error, e.Waiting = legalText(e.Error, MaxText), legalText(e.Waiting, MaxText)
}

// repairTexts copies Scores before it changes one.
func (e *Reward) repairTexts() {
	e.Error = legalText(e.Error, MaxText)
	cloned := false
	for i := range e.Scores {
		text, detail := legalText(e.Scores[i].Error, MaxText), legalText(e.Scores[i].Detail, MaxDetail)
		if text == e.Scores[i].Error && detail == e.Scores[i].Detail {
			continue
		}
		if !cloned {
			e.Scores, cloned = slices.Clone(e.Scores), true // the caller's stay as they are
		}
		e.Scores[i].Error, e.Scores[i].Detail = text, detail
	}
}

// repairTexts makes all texts legal; the original bytes in Data stay as they are.
func (d *Dead) repairTexts() {
	d.Reason = legalText(d.Reason, MaxText)
	d.OriginalSubject = legalText(d.OriginalSubject, MaxSubject)
	d.Stream = legalText(d.Stream, MaxName)
	d.Run = Run(legalText(string(d.Run), MaxToken))
	d.UID = UID(legalText(string(d.UID), MaxToken))
	if d.Headers == nil {
		return
	}
	headers := make([]Header, min(len(d.Headers), MaxHeaders))
	for i := range headers {
		headers[i] = Header{
			Name: legalText(d.Headers[i].Name, MaxHeaderName), Value: legalText(d.Headers[i].Value, MaxHeaderValue),
		}
	}
	d.Headers = headers
}

// legalText returns s as UTF-8 of at most limit bytes, cut between characters.
func legalText(s string, limit int) string {
	if len(s) > limit {
		cut := limit
		for cut > 0 && limit-cut < utf8.UTFMax && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut]
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	for len(s) > limit { // a replaced byte takes three
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return s
}
