package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/meander-rl/meander/schemas"
)

// Limits of what people say of a run.
const (
	maxTags, maxTag = 16, 40
	maxNote         = 4 << 10
)

// Notes are what people say of a run. They go with it.
type Notes struct {
	Tags []string `json:"tags"`
	Note string   `json:"note,omitempty"`
	// By changed them last, at At, Unix milliseconds.
	By string `json:"noted_by,omitempty"`
	At int64  `json:"noted_at,omitempty"`
}

// Validate returns all that is wrong with the notes, joined.
func (n *Notes) Validate() error {
	var errs []error
	if len(n.Tags) > maxTags {
		errs = append(errs, fmt.Errorf("tags: %d; must be at most %d", len(n.Tags), maxTags))
	}
	for _, tag := range n.Tags {
		odd := func(c rune) bool { return c == ',' || !unicode.IsPrint(c) }
		if tag == "" || tag != strings.TrimSpace(tag) || utf8.RuneCountInString(tag) > maxTag ||
			!utf8.ValidString(tag) || strings.ContainsFunc(tag, odd) {
			errs = append(errs, fmt.Errorf("tag: %.60q; must have 1 to %d characters that can be seen, without a "+
				"comma", tag, maxTag))
		}
	}
	odd := func(c rune) bool { return c != '\n' && c != '\t' && !unicode.IsPrint(c) }
	if len(n.Note) > maxNote || !utf8.ValidString(n.Note) || strings.ContainsFunc(n.Note, odd) {
		errs = append(errs, fmt.Errorf("note: %.60q; must be text of at most %d bytes that can be seen", n.Note,
			maxNote))
	}
	return errors.Join(errs...)
}

// notesKey is the key of the notes of a run; keys of specs have no dot.
func notesKey(run schemas.Run) string { return "notes." + string(run) }

// EditNotes changes the notes of a run, and returns them as they are stored. It fails if they would not be valid.
func (b *Bus) EditNotes(ctx context.Context, run schemas.Run, by string, edit func(*Notes)) (n *Notes, err error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	err = b.updateKey(ctx, schemas.RunBucket, notesKey(run), func(_ context.Context, old []byte) ([]byte, error) {
		n = notesOf(old)
		edit(n)
		slices.Sort(n.Tags)
		n.Tags, n.By, n.At = slices.Compact(n.Tags), by, time.Now().UnixMilli()
		if err := n.Validate(); err != nil {
			return nil, err
		}
		return json.Marshal(n)
	})
	if err != nil {
		return nil, fmt.Errorf("notes of run %s: %w", run, err)
	}
	return n, nil
}

// AddNotes stores notes of a run as they are, unless it has some.
func (b *Bus) AddNotes(ctx context.Context, run schemas.Run, n *Notes) error {
	data, err := json.Marshal(n)
	if err == nil {
		_, err = b.createKey(ctx, schemas.RunBucket, notesKey(run), data)
	}
	if err != nil {
		return fmt.Errorf("notes of run %s: %w", run, err)
	}
	return nil
}

// notesOf returns stored notes. What is not valid is none.
func notesOf(data []byte) *Notes {
	n := &Notes{}
	if json.Unmarshal(data, n) != nil || n.Validate() != nil || n.Tags == nil {
		return &Notes{Tags: []string{}}
	}
	return n
}

// Notes returns the notes of a run, or with "*" of all runs that have some.
func (b *Bus) Notes(ctx context.Context, run schemas.Run) (map[schemas.Run]*Notes, error) {
	entries, err := b.Entries(ctx, schemas.RunBucket, notesKey(run))
	if err != nil {
		return nil, fmt.Errorf("read notes of runs: %w", err)
	}
	all := map[schemas.Run]*Notes{}
	for _, e := range entries {
		all[schemas.Run(strings.TrimPrefix(e.Key, notesKey("")))] = notesOf(e.Value)
	}
	return all, nil
}
