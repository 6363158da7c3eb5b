package lm

import (
	"fmt"
	"sync"
)

// pageTokens is how many tokens a page holds: what a sequence takes at once.
const pageTokens = 16

// Pages hands out the rows of a cache. A page belongs to one sequence, or to several that have the
// same tokens in it; the next free row of a page is the first's who asks. It is safe for
// concurrent use.
type Pages struct {
	mu    sync.Mutex
	limit int // pages
	made  int // pages that were ever handed out
	free  []int32
	users map[int32]int // of a page
	next  map[int32]int // rows of a page that are taken
}

// NewPages has room for at least one page.
func NewPages(tokens int) *Pages {
	return &Pages{limit: max(1, tokens/pageTokens), users: map[int32]int{}, next: map[int32]int{}}
}

// Tokens is how many rows there can be.
func (p *Pages) Tokens() int { return p.limit * pageTokens }

// Rows is how many rows a cache needs for the pages that were ever in use.
func (p *Pages) Rows() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.made * pageTokens
}

// InUse is how many tokens the pages in use have room for.
func (p *Pages) InUse() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.users) * pageTokens
}

// Span is the rows of a sequence. It belongs to one goroutine at a time.
type Span struct {
	pages *Pages
	rows  []int32
	held  []int32 // its pages
}

// NewSpan is empty.
func (p *Pages) NewSpan() *Span { return &Span{pages: p} }

// Rows are those of the tokens, in order.
func (s *Span) Rows() []int32 { return s.rows }

// Len is how many tokens there are.
func (s *Span) Len() int { return len(s.rows) }

// Grow adds n rows at the end, or none and an ErrFull.
func (s *Span) Grow(n int) error {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	room := 0
	if k := len(s.rows); k > 0 && s.ownsNext() {
		room = pageTokens - p.next[s.rows[k-1]/pageTokens]
	}
	need := (n - min(n, room) + pageTokens - 1) / pageTokens
	if have := len(p.free) + p.limit - p.made; need > have {
		return fmt.Errorf("%w: %d tokens; must be at most %d, until sequences end", ErrFull, n, room+have*pageTokens)
	}
	for range n {
		page := int32(0)
		if len(s.rows) > 0 && s.ownsNext() {
			page = s.rows[len(s.rows)-1] / pageTokens
		} else {
			page = p.take()
			s.held = append(s.held, page)
		}
		s.rows = append(s.rows, page*pageTokens+int32(p.next[page]))
		p.next[page]++
	}
	return nil
}

// ownsNext reports whether the row behind the last one is in its page and free: another
// sequence that shares the page may have gone on there.
func (s *Span) ownsNext() bool {
	last := s.rows[len(s.rows)-1]
	at := int(last%pageTokens) + 1
	return at < pageTokens && s.pages.next[last/pageTokens] == at
}

func (p *Pages) take() int32 {
	var page int32
	if n := len(p.free); n > 0 {
		page, p.free = p.free[n-1], p.free[:n-1]
	} else {
		page = int32(p.made)
		p.made++
	}
	p.users[page], p.next[page] = 1, 0
	return page
}

// Cut gives back the rows behind the first n.
func (s *Span) Cut(n int) {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(s.rows) > n {
		last := s.rows[len(s.rows)-1]
		s.rows = s.rows[:len(s.rows)-1]
		page := last / pageTokens
		if p.next[page] == int(last%pageTokens)+1 {
			p.next[page]--
		}
		if len(s.rows) == 0 || s.rows[len(s.rows)-1]/pageTokens != page {
			s.held = s.held[:len(s.held)-1]
			p.give(page)
		}
	}
}

func (p *Pages) give(page int32) {
	if p.users[page]--; p.users[page] == 0 {
		delete(p.users, page)
		delete(p.next, page)
		p.free = append(p.free, page)
	}
}

// Fork is another span with the same rows.
func (s *Span) Fork() *Span {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, page := range s.held {
		p.users[page]++
	}
	return &Span{pages: p, rows: append([]int32(nil), s.rows...), held: append([]int32(nil), s.held...)}
}

// Close gives all rows back.
func (s *Span) Close() {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, page := range s.held {
		p.give(page)
	}
	s.rows, s.held = nil, nil
}
