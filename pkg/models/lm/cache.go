package lm

import (
	"fmt"
	"sync"
)

// pageTokens is the number of tokens of a page, the unit that a sequence reserves.
const pageTokens = 16

// Pages allocates the rows of a cache; a row holds the keys and values of one token. A page of rows belongs to one
// sequence, or to several sequences that begin with the same tokens. If several share a page, the first one that
// grows gets the next free row of the page. It is safe for concurrent use.
type Pages struct {
	mu     sync.Mutex
	limit  int // pages
	made   int // pages that were allocated so far, free ones included
	free   []int32
	users  map[int32]int // how many spans use a page
	next   map[int32]int // rows of a page below this one are in use
	shared map[int32]int // rows of a page below this one may be in several spans
}

// NewPages returns Pages for so many tokens, rounded down to whole pages, at least one page.
func NewPages(tokens int) *Pages {
	return &Pages{
		limit: max(1, tokens/pageTokens), users: map[int32]int{}, next: map[int32]int{}, shared: map[int32]int{},
	}
}

// Tokens returns the most rows that can be in use.
func (p *Pages) Tokens() int { return p.limit * pageTokens }

// Rows returns how many rows the cache needs: those of all pages that were allocated so far.
func (p *Pages) Rows() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.made * pageTokens
}

// InUse returns the number of rows of the pages in use.
func (p *Pages) InUse() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.users) * pageTokens
}

// Span is the rows of one sequence. It is for one goroutine at a time.
type Span struct {
	pages    *Pages
	rows     []int32
	pageList []int32 // its pages
}

// NewSpan returns an empty span.
func (p *Pages) NewSpan() *Span { return &Span{pages: p} }

// Rows returns the rows of the tokens, in order.
func (s *Span) Rows() []int32 { return s.rows }

// Len returns the number of tokens.
func (s *Span) Len() int { return len(s.rows) }

// Grow appends n rows of the cache to the span, one for each token that Forward adds. If the cache
// has too few, it appends none and fails with ErrFull.
func (s *Span) Grow(n int) error {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	left := 0 // in the last page
	if k := len(s.rows); k > 0 && s.ownsNext() {
		left = pageTokens - p.next[s.rows[k-1]/pageTokens]
	}
	need := (n - min(n, left) + pageTokens - 1) / pageTokens
	if have := len(p.free) + p.limit - p.made; need > have {
		return fmt.Errorf("%w: %d tokens; must be at most %d, until sequences end", ErrFull, n, left+have*pageTokens)
	}
	for range n {
		page := int32(0)
		if len(s.rows) > 0 && s.ownsNext() {
			page = s.rows[len(s.rows)-1] / pageTokens
		} else {
			page = p.allocate()
			s.pageList = append(s.pageList, page)
		}
		s.rows = append(s.rows, page*pageTokens+int32(p.next[page]))
		p.next[page]++
	}
	return nil
}

// ownsNext reports whether the row after the last one is in the same page and free. It is not free if
// another sequence that shares the page uses it.
func (s *Span) ownsNext() bool {
	last := s.rows[len(s.rows)-1]
	at := int(last%pageTokens) + 1
	return at < pageTokens && s.pages.next[last/pageTokens] == at
}

// allocate returns a free page for one span, a new one if none was given back. The caller has
// locked p and checked that there is one.
func (p *Pages) allocate() int32 {
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

// Cut frees the rows after the first n: Forward calls it when it fails. Rows that a fork shares
// stay in use there.
func (s *Span) Cut(n int) {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(s.rows) > n {
		last := s.rows[len(s.rows)-1]
		s.rows = s.rows[:len(s.rows)-1]
		page := last / pageTokens
		if at := int(last % pageTokens); p.next[page] == at+1 && p.shared[page] <= at {
			p.next[page]--
		}
		if len(s.rows) == 0 || s.rows[len(s.rows)-1]/pageTokens != page {
			s.pageList = s.pageList[:len(s.pageList)-1]
			p.release(page)
		}
	}
}

// release ends the use of a page by one span; the last one makes it free. The caller has locked p.
func (p *Pages) release(page int32) {
	if p.users[page]--; p.users[page] < 2 {
		delete(p.shared, page)
	}
	if p.users[page] == 0 {
		delete(p.users, page)
		delete(p.next, page)
		p.free = append(p.free, page)
	}
}

// Fork returns another span with the same rows, so that samples of one prompt compute it once. Both
// keep the rows in use, and what either appends is its own.
func (s *Span) Fork() *Span {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, page := range s.pageList {
		p.users[page]++
	}
	for _, row := range s.rows {
		page := row / pageTokens
		p.shared[page] = max(p.shared[page], int(row%pageTokens)+1)
	}
	return &Span{pages: p, rows: append([]int32(nil), s.rows...), pageList: append([]int32(nil), s.pageList...)}
}

// Close frees all rows that no fork uses, when its sequence ends. A second call does nothing.
func (s *Span) Close() {
	p := s.pages
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, page := range s.pageList {
		p.release(page)
	}
	s.rows, s.pageList = nil, nil
}
