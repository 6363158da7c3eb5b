package lm_test

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/lm"
)

// pageTokens is what a sequence reserves at once.
const pageTokens = 16

// A span keeps the rows of its tokens, whatever others do: no row belongs to two spans, but for the tokens
// that a fork shares with its origin, and at the end all rows are free.
func TestPages_Laws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 6).Draw(t, "pages")
		pages := lm.NewPages(limit*pageTokens + rapid.IntRange(0, pageTokens-1).Draw(t, "rest"))
		if pages.Tokens() != limit*pageTokens {
			t.Fatalf("%d tokens in %d pages", pages.Tokens(), limit)
		}
		type sequence struct {
			span   *lm.Span
			tokens []int // each with a number of its own, which forks share
		}
		var open []*sequence
		tokens := 0
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			if len(open) == 0 {
				open = append(open, &sequence{span: pages.NewSpan()})
			}
			i := rapid.IntRange(0, len(open)-1).Draw(t, "sequence")
			s := open[i]
			switch rapid.SampledFrom([]string{"grow", "grow", "cut", "fork", "close", "new"}).Draw(t, "step") {
			case "grow":
				n := rapid.IntRange(0, 2*pageTokens).Draw(t, "n")
				before := slices.Clone(s.span.Rows())
				if err := s.span.Grow(n); err != nil {
					if !errors.Is(err, lm.ErrFull) || !slices.Equal(s.span.Rows(), before) {
						t.Fatalf("%v, rows %v, before %v", err, s.span.Rows(), before)
					}
					continue
				}
				for range n {
					tokens++
					s.tokens = append(s.tokens, tokens)
				}
			case "cut":
				n := rapid.IntRange(0, len(s.tokens)).Draw(t, "n")
				s.span.Cut(n)
				s.tokens = s.tokens[:n:n]
			case "fork":
				open = append(open, &sequence{s.span.Fork(), slices.Clone(s.tokens)})
			case "close":
				s.span.Close()
				open = slices.Delete(open, i, i+1)
			case "new":
				open = append(open, &sequence{span: pages.NewSpan()})
			}
			holds := map[int32]int{}
			for _, s := range open {
				if s.span.Len() != len(s.tokens) {
					t.Fatalf("%d rows of %d tokens", s.span.Len(), len(s.tokens))
				}
				for k, row := range s.span.Rows() {
					if token, ok := holds[row]; ok && token != s.tokens[k] {
						t.Fatalf("row %d holds the tokens %d and %d", row, token, s.tokens[k])
					}
					holds[row] = s.tokens[k]
				}
			}
			if used := pages.InUse(); used < len(holds) || used > pages.Rows() || pages.Rows() > pages.Tokens() {
				t.Fatalf("%d tokens in %d rows of %d, at most %d", len(holds), used, pages.Rows(), pages.Tokens())
			}
		}
		for _, s := range open {
			s.span.Close()
			s.span.Close()
		}
		if pages.InUse() != 0 {
			t.Fatalf("%d rows in use after the last span is closed", pages.InUse())
		}
	})
}

// A full cache says how many tokens there is space for, and has space again once a span is closed.
func TestPages_Full(t *testing.T) {
	pages := lm.NewPages(1) // one page at least
	first, second := pages.NewSpan(), pages.NewSpan()
	if err := first.Grow(3); err != nil {
		t.Fatal(err)
	}
	if err := second.Grow(1); !errors.Is(err, lm.ErrFull) {
		t.Fatalf("a second span in one page: %v", err)
	}
	if err := first.Grow(14); !errors.Is(err, lm.ErrFull) {
		t.Fatalf("17 tokens in one page: %v", err)
	}
	if err := first.Grow(13); err != nil || first.Len() != pageTokens {
		t.Fatalf("%d tokens, %v; want a full page", first.Len(), err)
	}
	first.Close()
	if err := second.Grow(pageTokens); err != nil {
		t.Errorf("after the first is closed: %v", err)
	}
}
