package view

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// pair is a prompt that two runs have.
type pair struct {
	Prompt string   `json:"prompt"`
	A      GroupRow `json:"a"`
	B      GroupRow `json:"b"`
	// Change is the mean reward of B less that of A; null where one has none.
	Change *float64 `json:"change"`
}

// Comparison is what two runs have in common.
type Comparison struct {
	// Pairs is a page of them, the largest changes first; Total counts all.
	Pairs []pair `json:"pairs"`
	Total int    `json:"total"`
	// MeanA and MeanB are over the pairs of which both have a mean; Better, Worse and Equal count these by their
	// change.
	MeanA *float64 `json:"mean_a"`
	MeanB *float64 `json:"mean_b"`
	// ChangeError is the standard error of MeanB - MeanA over these pairs; null of fewer than two.
	ChangeError *float64 `json:"change_error"`
	Better      int      `json:"better"`
	Worse       int      `json:"worse"`
	Equal       int      `json:"equal"`
	// Settings are those in which the runs differ.
	Settings []differing `json:"settings"`
}

// differing is a setting that two runs have not alike; empty: one does not have it.
type differing struct {
	Part string `json:"part"`
	Name string `json:"name"`
	A    string `json:"a"`
	B    string `json:"b"`
}

// pairsPage is how many pairs a page has.
const pairsPage = 50

// Compare returns the groups of two runs that have the same uid, or else the same prompt: a page of them.
func (r *Reader) Compare(ctx context.Context, a, b schemas.Run, offset int) (*Comparison, error) {
	all := List{Order: "oldest", Limit: MaxRows}
	rowsA, err := r.Groups(ctx, a, all)
	if err != nil {
		return nil, err
	}
	rowsB, err := r.Groups(ctx, b, all)
	if err != nil {
		return nil, err
	}
	pairs := pairsOf(rowsA.Rows, rowsB.Rows)
	x := &Comparison{Total: len(pairs), Settings: []differing{}}
	if offset == 0 {
		if x.Settings, err = r.differences(ctx, a, b); err != nil {
			return nil, err
		}
	}
	x.count(pairs)
	slices.SortStableFunc(pairs, func(a, b pair) int { return cmp.Compare(size(b.Change), size(a.Change)) })
	x.Pairs = pairs[min(offset, x.Total):min(offset+pairsPage, x.Total)]
	return x, nil
}

// size returns how large a change is; one that is not known comes after all others.
func size(change *float64) float64 {
	if change == nil {
		return -1
	}
	return math.Abs(*change)
}

// pairsOf returns the pairs of two lists of groups: those of the same uid and prompt, then those of the same prompt,
// each group once.
func pairsOf(a, b []GroupRow) []pair {
	pairs := []pair{}
	takenA, takenB := map[schemas.UID]bool{}, map[schemas.UID]bool{}
	join := func(key func(*GroupRow) string) {
		free := map[string][]*GroupRow{}
		for i := range b {
			if !takenB[b[i].UID] {
				free[key(&b[i])] = append(free[key(&b[i])], &b[i])
			}
		}
		for i := range a {
			k := key(&a[i])
			if takenA[a[i].UID] || len(free[k]) == 0 {
				continue
			}
			other := free[k][0]
			free[k] = free[k][1:]
			takenA[a[i].UID], takenB[other.UID] = true, true
			p := pair{Prompt: a[i].Prompt, A: a[i], B: *other}
			if p.A.Mean != nil && p.B.Mean != nil {
				p.Change = new(*p.B.Mean - *p.A.Mean)
			}
			pairs = append(pairs, p)
		}
	}
	join(func(r *GroupRow) string { return string(r.UID) + " " + r.Prompt })
	join(func(r *GroupRow) string { return r.Prompt })
	return pairs
}

// count fills the numbers over all pairs.
func (x *Comparison) count(pairs []pair) {
	n, a, b := 0.0, 0.0, 0.0
	for i := range pairs {
		p := &pairs[i]
		if p.Change == nil {
			continue
		}
		n, a, b = n+1, a+*p.A.Mean, b+*p.B.Mean
		switch {
		case *p.Change > 0:
			x.Better++
		case *p.Change < 0:
			x.Worse++
		default:
			x.Equal++
		}
	}
	if n == 0 {
		return
	}
	x.MeanA, x.MeanB = new(a/n), new(b/n)
	squares := 0.0
	for i := range pairs {
		if c := pairs[i].Change; c != nil {
			d := *c - (b-a)/n
			squares += d * d
		}
	}
	if n > 1 {
		x.ChangeError = new(math.Sqrt(squares / (n - 1) / n))
	}
}
