package view

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Letter is a dead letter.
type Letter struct {
	ID         uint64      `json:"id"`
	At         int64       `json:"at"` // Unix milliseconds
	Stage      string      `json:"stage"`
	Code       string      `json:"code"`
	Reason     string      `json:"reason"`
	Fix        string      `json:"fix"`
	Run        schemas.Run `json:"run,omitempty"`
	UID        schemas.UID `json:"uid,omitempty"`
	Subject    string      `json:"subject,omitempty"`
	Stream     string      `json:"stream,omitempty"`
	Deliveries uint64      `json:"deliveries,omitempty"`
	// Original is what was refused, as far as it can be read.
	Original json.RawMessage `json:"original,omitempty"`
	Bytes    int             `json:"bytes,omitempty"`
}

// LetterOf returns a dead letter, without its original, and its event; the letter of one that cannot be read says so.
func LetterOf(m *bus.Message) (*Letter, *schemas.Dead) {
	l := &Letter{ID: m.Seq, At: milliseconds(m.Time)}
	defer func() { l.Fix = outcomes.FixLetter(l.Stage, l.Code) }()
	d := &schemas.Dead{}
	if err := schemas.Decode(m.Data, d); err != nil { // others may write there
		l.Code, l.Reason = "unreadable", err.Error()
		l.Run, _ = schemas.RunOf(m.Subject)
		return l, nil
	}
	l.Stage, l.Code, l.Reason, l.Run, l.UID = d.Service, d.Code, d.Reason, d.Run, d.UID
	l.Subject, l.Stream, l.Deliveries = d.OriginalSubject, d.Stream, d.Deliveries
	return l, d
}

const (
	// lettersPage is how many dead letters a page has; deadWindow how many sequences one read looks at, of maxWindows.
	lettersPage            = 50
	deadWindow, maxWindows = 500, 20
)

// Letters is a page of dead letters, the newest first.
type Letters struct {
	Letters []*Letter `json:"letters"`
	Total   uint64    `json:"total"`
	// Before is where the next page begins; 0: there is none.
	Before uint64 `json:"before,omitempty"`
}

// Letters returns the dead letters of a run, or with "*" all, before a sequence; 0: the newest.
func (r *Reader) Letters(ctx context.Context, run schemas.Run, before uint64) (*Letters, error) {
	info, err := r.bus.StreamInfo(ctx, schemas.StreamDead)
	if err != nil {
		return nil, err
	}
	if before == 0 || before > info.State.LastSeq {
		before = info.State.LastSeq + 1
	}
	filter := schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()
	letters := []*Letter{}
	first := max(1, info.State.FirstSeq)
	for range maxWindows {
		if before <= first || len(letters) >= lettersPage {
			break
		}
		from := max(first, before-min(before-1, deadWindow))
		var part []*Letter
		o := bus.ReadOptions{FromSeq: from}
		for m, err := range r.bus.Read(ctx, schemas.StreamDead, []string{filter}, o) {
			if err != nil {
				return nil, err
			}
			if m.Seq >= before {
				break
			}
			l, _ := LetterOf(m)
			if part = append(part, l); len(part) > deadWindow {
				break
			}
		}
		slices.Reverse(part)
		letters, before = append(letters, part...), from
	}
	if len(letters) > lettersPage {
		letters = letters[:lettersPage]
		before = letters[lettersPage-1].ID
	}
	out := &Letters{Letters: letters, Total: info.State.Msgs}
	if before > first {
		out.Before = before
	}
	return out, nil
}

// maxOriginal is how many bytes of JSON of a refused message are shown.
const maxOriginal = 64 << 10

// Letter returns a dead letter with its original.
func (r *Reader) Letter(ctx context.Context, id uint64) (*Letter, error) {
	m, err := r.bus.Get(ctx, schemas.StreamDead, id)
	if err != nil {
		return nil, err
	}
	l, d := LetterOf(m)
	if d == nil {
		return l, nil
	}
	data, err := r.bus.DeadData(ctx, d)
	if err != nil && !errors.Is(err, client.ErrNotFound) {
		return nil, err
	}
	if l.Bytes = len(data); schemas.Precheck(data) == nil {
		if text, err := json.Marshal(schemas.JSONOfBytes(data)); err == nil && len(text) <= maxOriginal {
			l.Original = text
		}
	}
	return l, nil
}
