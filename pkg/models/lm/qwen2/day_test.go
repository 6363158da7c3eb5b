package qwen2_test

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
)

// A template that asks for the day gets the one that the prompt has, and is the same text on any other day.
func TestTemplate_Day(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "dated")
	if err := (qwen2test.Random{Seed: 1, Template: "{% if not date_string is defined %}{% set date_string = " +
		"strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}: " +
		"{% for m in messages %}{{ m.content }}{% endfor %}"}).Write(dir); err != nil {
		t.Fatal(err)
	}
	m, err := qwen2.Open(dir, lm.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	if !m.Card().Dated {
		t.Error("the card does not say that the template asks for the day")
	}
	ids := func(variables map[string]string) []int32 {
		got, err := m.With(variables).Prompt([]lm.Message{{Role: "user", Content: "1+1=?"}})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	first := ids(map[string]string{"strftime_now": "2026-11-28"})
	if text := lm.Text(m, first); text != "28 Nov 2026: 1+1=?" {
		t.Errorf("%q", text)
	}
	if fixed := ids(map[string]string{"date_string": "28 Nov 2026"}); !slices.Equal(fixed, first) {
		t.Errorf("with date_string: %q", lm.Text(m, fixed))
	}
	if other := ids(map[string]string{"strftime_now": "2026-11-29"}); slices.Equal(other, first) {
		t.Error("another day is the same text")
	}
	for _, variables := range []map[string]string{nil, {"strftime_now": "today"}} {
		if _, err := m.With(variables).Prompt([]lm.Message{{Role: "user", Content: "1+1=?"}}); !errors.Is(err,
			lm.ErrPrompt) {
			t.Errorf("%v: %v; want an ErrPrompt", variables, err)
		}
	}
}
