package qwen2_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// folder is one of random weights.
func folder(t testing.TB, r qwen2test.Random) string {
	t.Helper()
	dir := t.TempDir()
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t testing.TB, dir string, o lm.Options) *qwen2.Model {
	t.Helper()
	m, err := qwen2.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func forward(t testing.TB, m lm.Model, rows ...lm.Row) {
	t.Helper()
	if err := m.Forward(t.Context(), rows); err != nil {
		t.Fatal(err)
	}
}

// logits are those after ids, in one call, alone.
func logits(t testing.TB, m lm.Model, ids []int32) []float32 {
	t.Helper()
	s := m.NewSequence()
	defer s.Close()
	out := make([]float32, m.Card().Vocabulary)
	forward(t, m, lm.Row{Sequence: s, IDs: ids, Logits: out})
	return out
}

func randomIDs(r *rand.Rand, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(r.IntN(256))
	}
	return ids
}

// The bits of a row are those of its ids alone: whatever the cut, the company, the threads and
// the kernels.
func TestForward_Invariance(t *testing.T) {
	t.Parallel()
	dir := folder(t, qwen2test.Random{Width: 48, Heads: 3, KVHeads: 1, Vocabulary: 300, MaxPositions: 1200})
	r := rand.New(rand.NewPCG(1, 2))
	const n = 6
	var ids [n][]int32
	var want [n][]float32
	alone := open(t, dir, lm.Options{Options: model.Options{Threads: 1}})
	for i := range ids {
		ids[i] = randomIDs(r, []int{1, 3, 17, 64, 130, 530}[i])
		want[i] = logits(t, alone, ids[i])
	}
	for _, threads := range []int{1, 3} {
		for _, kernels := range cpu.AvailableKernels() {
			t.Run(fmt.Sprint(threads, kernels), func(t *testing.T) {
				d, err := cpu.NewDevice(cpu.Options{Threads: threads, Kernels: kernels})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = d.Close() }()
				m := open(t, dir, lm.Options{Options: model.Options{Device: d}})
				got := cutAtRandom(t, m, r, ids[:])
				for i := range ids {
					if !slices.Equal(got[i], want[i]) {
						t.Errorf("row %d of %d tokens: other bits than alone and in one call", i, len(ids[i]))
					}
				}
			})
		}
	}
}

// cutAtRandom feeds sequences in pieces, some beside others in a call.
func cutAtRandom(t *testing.T, m lm.Model, r *rand.Rand, ids [][]int32) [][]float32 {
	t.Helper()
	sequences, out := make([]lm.Sequence, len(ids)), make([][]float32, len(ids))
	for i := range ids {
		sequences[i], out[i] = m.NewSequence(), make([]float32, m.Card().Vocabulary)
		defer sequences[i].Close()
	}
	for {
		var rows []lm.Row
		for i, s := range sequences {
			if left := ids[i][s.Len():]; len(left) > 0 && r.IntN(3) > 0 {
				n := 1 + r.IntN(len(left))
				rows = append(rows, lm.Row{Sequence: s, IDs: left[:n], Logits: out[i]})
			}
		}
		done := !slices.ContainsFunc(sequences,
			func(s lm.Sequence) bool { return s.Len() < len(ids[slices.Index(sequences, s)]) })
		if done {
			return out
		}
		if len(rows) > 0 {
			forward(t, m, rows...)
		}
	}
}

// Sequences that share a beginning have the bits of those that do not, and give all pages back.
func TestFork(t *testing.T) {
	t.Parallel()
	m := open(t, folder(t, qwen2test.Random{}), lm.Options{Options: model.Options{Threads: 2}})
	r := rand.New(rand.NewPCG(3, 4))
	prefix := randomIDs(r, 21) // a page and a part of one
	root := m.NewSequence()
	forward(t, m, lm.Row{Sequence: root, IDs: prefix})
	var forks []lm.Sequence
	ids := make([][]int32, 5)
	for i := range ids {
		forks = append(forks, root.Fork())
		ids[i] = slices.Clone(prefix)
	}
	root.Close()
	for step := range 40 {
		var rows []lm.Row
		for i, s := range forks {
			if step%(i+1) > 0 {
				continue
			}
			id := randomIDs(r, 1)
			ids[i] = append(ids[i], id...)
			rows = append(rows, lm.Row{Sequence: s, IDs: id, Logits: make([]float32, m.Card().Vocabulary)})
		}
		forward(t, m, rows...)
		if step == 20 { // a fork of a fork, and one that ends
			forks = append(forks, forks[0].Fork())
			ids = append(ids, slices.Clone(ids[0]))
			forks[1].Close()
			forks[1] = m.NewSequence()
			forward(t, m, lm.Row{Sequence: forks[1], IDs: ids[1]})
		}
	}
	next := randomIDs(r, 2)
	for i, s := range forks {
		got := make([]float32, m.Card().Vocabulary)
		forward(t, m, lm.Row{Sequence: s, IDs: next, Logits: got})
		if want := logits(t, m, append(ids[i], next...)); !slices.Equal(got, want) {
			t.Errorf("fork %d: other bits than alone", i)
		}
	}
	for _, s := range forks {
		s.Close()
		s.Close()
	}
	if n := qwen2.CacheInUse(m); n != 0 {
		t.Errorf("%d tokens of the cache in use, want none", n)
	}
}

// A call that fails leaves sequences as they were.
func TestForward_Refuses(t *testing.T) {
	t.Parallel()
	m := open(t, folder(t, qwen2test.Random{MaxPositions: 60}),
		lm.Options{Options: model.Options{Threads: 1}, CacheBytes: 64 * 4 * 64})
	other := open(t, folder(t, qwen2test.Random{}), lm.Options{Options: model.Options{Threads: 1}})
	s, long := m.NewSequence(), m.NewSequence()
	ids := []int32{1, 2, 3}
	want := logits(t, m, append(ids, 4))
	forward(t, m, lm.Row{Sequence: s, IDs: ids})
	for name, c := range map[string]struct {
		rows []lm.Row
		is   error
	}{
		"no ids":             {[]lm.Row{{Sequence: s}}, nil},
		"twice":              {[]lm.Row{{Sequence: s, IDs: ids}, {Sequence: s, IDs: ids}}, nil},
		"other model":        {[]lm.Row{{Sequence: other.NewSequence(), IDs: ids}}, nil},
		"an id of no row":    {[]lm.Row{{Sequence: s, IDs: []int32{259}}}, lm.ErrPrompt},
		"negative id":        {[]lm.Row{{Sequence: s, IDs: []int32{-1}}}, lm.ErrPrompt},
		"short logits":       {[]lm.Row{{Sequence: s, IDs: ids, Logits: make([]float32, 3)}}, nil},
		"beyond the context": {[]lm.Row{{Sequence: s, IDs: make([]int32, 58)}}, lm.ErrLong},
		"a full cache":       {[]lm.Row{{Sequence: s, IDs: ids}, {Sequence: long, IDs: make([]int32, 60)}}, lm.ErrFull},
	} {
		checkRefused(t, name, m.Forward(t.Context(), c.rows), c.is)
		if s.Len() != 3 || long.Len() != 0 {
			t.Fatalf("%s: sequences of %d and %d tokens, want 3 and none", name, s.Len(), long.Len())
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	checkRefused(t, "cancelled", m.Forward(ctx, []lm.Row{{Sequence: s, IDs: ids}}), context.Canceled)
	got := make([]float32, m.Card().Vocabulary)
	forward(t, m, lm.Row{Sequence: s, IDs: []int32{4}, Logits: got})
	if !slices.Equal(got, want) {
		t.Error("other bits after calls that failed")
	}
}

func checkRefused(t *testing.T, name string, err, is error) {
	t.Helper()
	if err == nil || is != nil && !errors.Is(err, is) {
		t.Errorf("%s: %v, want an error (%v)", name, err, is)
	}
}

// The logits after each id of a row have the bits of those after the last, also where the row takes several passes.
func TestForward_LogitsOfEachID(t *testing.T) {
	t.Parallel()
	m := open(t, folder(t, qwen2test.Random{Width: 48, Heads: 3, KVHeads: 1, Vocabulary: 300, MaxPositions: 1200}),
		lm.Options{})
	v, r := m.Card().Vocabulary, rand.New(rand.NewPCG(3, 4))
	ids, other := randomIDs(r, 520), randomIDs(r, 9)
	s, beside := m.NewSequence(), m.NewSequence()
	defer s.Close()
	defer beside.Close()
	all, last := make([]float32, len(ids)*v), make([]float32, v)
	forward(t, m, lm.Row{Sequence: beside, IDs: other, Logits: last}, lm.Row{Sequence: s, IDs: ids, Logits: all})
	if !slices.Equal(last, logits(t, m, other)) {
		t.Error("the row beside: other bits than alone")
	}
	for _, n := range []int{1, 2, 60, 503, 504, 520} {
		if !slices.Equal(all[(n-1)*v:n*v], logits(t, m, ids[:n])) {
			t.Errorf("logits after id %d: other bits than those after the last of %d ids", n-1, n)
		}
	}
	if err := m.Forward(t.Context(), []lm.Row{{Sequence: s, IDs: ids[:3], Logits: all[:2*v]}}); err == nil {
		t.Error("logits of two ids of three: no error")
	}
}
