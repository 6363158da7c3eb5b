package dataset_test

import (
	"fmt"
	"iter"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/dataset"
)

// texts makes records of prompts.
func texts(prompts ...string) []dataset.Record {
	out := make([]dataset.Record, len(prompts))
	for i, p := range prompts {
		out[i] = dataset.Record{Index: i, Fields: object{"prompt": p}}
	}
	return out
}

// lineCounter lists the indices of each batch.
func lineCounter(batches []dataset.Batch) [][]int {
	var out [][]int
	for _, b := range batches {
		var list []int
		for _, r := range b.Records {
			list = append(list, r.Index)
		}
		out = append(out, list)
	}
	return out
}

// choose returns all batches that a choice yields; one without a size is whole.
func choose(records iter.Seq2[dataset.Record, error], c dataset.Choice) (all []dataset.Batch, r dataset.Report,
	err error,
) {
	for b, err := range dataset.Choose(records, c, &r) {
		if err != nil {
			return nil, r, err
		}
		if len(all) > 0 && c.BatchSize == 0 {
			all[0].Records = append(all[0].Records, b.Records...)
			continue
		}
		all = append(all, b)
	}
	return all, r, nil
}

func TestChoose(t *testing.T) {
	letters := texts("a", "bb", "a", "ccc", "dd", "éé", "bb")
	tests := []struct {
		name   string
		choice dataset.Choice
		want   [][]int
		report dataset.Report
	}{
		{"all", dataset.Choice{}, [][]int{{0, 1, 2, 3, 4, 5, 6}}, dataset.Report{Duplicates: 2, Chosen: 7, Batches: 1}},
		{"offset and limit", dataset.Choice{Offset: 2, Limit: 3}, [][]int{{2, 3, 4}}, dataset.Report{Records: 5, Partial: true, Duplicates: 1, Chosen: 3, Batches: 1}},
		{"offset beyond", dataset.Choice{Offset: 9}, nil, dataset.Report{Duplicates: 2}},
		{"batches", dataset.Choice{BatchSize: 3}, [][]int{{0, 1, 2}, {3, 4, 5}, {6}}, dataset.Report{Duplicates: 2, Chosen: 7, Batches: 3}},
		{"shard of records", dataset.Choice{Shard: 1, Shards: 3}, [][]int{{1, 4}}, dataset.Report{Duplicates: 2, Chosen: 7, Batches: 1}},
		{"shard of batches", dataset.Choice{BatchSize: 3, Shard: 0, Shards: 2}, [][]int{{0, 1, 2}, {6}}, dataset.Report{Duplicates: 2, Chosen: 7, Batches: 3}},
		{"shard without records", dataset.Choice{Limit: 1, Shard: 1, Shards: 2}, nil, dataset.Report{Records: 1, Partial: true, Chosen: 1, Batches: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.report.Partial {
				tt.report.Records = len(letters)
			}
			batches, report, err := choose(each(letters), tt.choice)
			if err != nil {
				t.Fatal(err)
			}
			if got := lineCounter(batches); !reflect.DeepEqual(got, tt.want) || report != tt.report {
				t.Errorf("%v %+v\nwant %v %+v", got, report, tt.want, tt.report)
			}
		})
	}
}

// The same task is the same text, negative prompt and answer, wherever the answer stands.
func TestChoose_Duplicates(t *testing.T) {
	spec := func(truth string) []any { return []any{object{"name": "ocr", "ground_truth": truth}} }
	records := []dataset.Record{
		{Index: 0, Fields: object{"prompt": "a"}},
		{Index: 1, Fields: object{"prompt": "a", "negative_prompt": ""}},
		{Index: 2, Fields: object{"prompt": "a"}, GroundTruth: "x"},
		{Index: 3, Fields: object{"prompt": "a", "reward": spec("x")}},
		{Index: 4, Fields: object{"prompt": "a", "reward": spec("y")}},
		{Index: 5, Fields: object{"prompt": int64(7)}},
		{Index: 6, Fields: object{"prompt": int64(7)}},
		{Index: 7, Fields: object{"prompt": "a", "seed": int64(3)}},
		{Index: 8, Fields: object{"prompt": "a", "reward": spec("y")}},
		{Index: 9, Fields: object{"prompt": "a", "reward": []any{object{"name": "ocr"}}}},
	}
	for n, want := range []int{7: 0, 8: 1, 9: 2, 10: 3} { // of the first n
		if _, report, err := choose(each(records[:n]), dataset.Choice{}); n >= 7 &&
			(err != nil || report.Duplicates != want) {
			t.Errorf("%d records: %d duplicates, %v; want %d", n, report.Duplicates, err, want)
		}
	}
}

func TestChoose_Errors(t *testing.T) {
	for want, c := range map[string]dataset.Choice{
		"offset: -1; must be at least 0":                                {Offset: -1},
		"limit: -2; must be at least 0":                                 {Limit: -2},
		"batch size: -1; must be at least 0":                            {BatchSize: -1},
		"shard: 2/2; must be I/N with I from 0 to N-1":                  {Shard: 2, Shards: 2},
		"shard: 1/0; must be I/N with I from 0 to N-1":                  {Shard: 1},
		"offset: -3; must be at least 0\nlimit: -1; must be at least 0": {Offset: -3, Limit: -1},
	} {
		if _, _, err := choose(each(nil), c); fmt.Sprint(err) != want {
			t.Errorf("%+v: error %v, want %s", c, err, want)
		}
	}
}

// The order of a seed is a promise: a run that is resumed chooses the same prompts.
func TestChoose_ShuffleIsPinned(t *testing.T) {
	seed := int64(42)
	batches, _, err := choose(each(texts("a", "b", "c", "d", "e", "f", "g", "h")), dataset.Choice{Shuffle: &seed})
	if err != nil {
		t.Fatal(err)
	}
	// sorted(range(8), key=lambda i: hashlib.sha256(struct.pack("<qq", 42, i)).digest())
	if want := [][]int{{3, 7, 5, 4, 2, 6, 0, 1}}; !reflect.DeepEqual(lineCounter(batches), want) {
		t.Errorf("order %v, want %v", lineCounter(batches), want)
	}
}

// Whatever is chosen: the shards together are the whole, nothing twice, in the same
// batches; a shuffle is a permutation that offset and limit do not change.
func TestChoose_Laws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		var prompts []string
		for i := range n {
			prompts = append(prompts, strings.Repeat("x", 1+i%7)+fmt.Sprint(rapid.IntRange(0, 30).Draw(t, "word")))
		}
		records := texts(prompts...)
		c := dataset.Choice{
			Offset: rapid.IntRange(0, 10).Draw(t, "offset"), Limit: rapid.IntRange(0, 40).Draw(t, "limit"),
			BatchSize: rapid.IntRange(0, 9).Draw(t, "batch"),
		}
		if rapid.Bool().Draw(t, "shuffled") {
			c.Shuffle = new(rapid.Int64().Draw(t, "seed"))
		}
		whole, report, err := choose(each(records), c)
		if err != nil {
			t.Fatal(err)
		}
		shards := rapid.IntRange(1, 5).Draw(t, "shards")
		byNumber := map[int][]dataset.Record{}
		seen := map[int]int{}
		for shard := range shards {
			part := c
			part.Shard, part.Shards = shard, shards
			batches, r, err := choose(each(records), part)
			if err != nil {
				t.Fatal(err)
			}
			if r != report {
				t.Fatalf("shard %d reports %+v, the whole %+v", shard, r, report)
			}
			for _, b := range batches {
				byNumber[b.Number] = append(byNumber[b.Number], b.Records...)
				for _, r := range b.Records {
					seen[r.Index]++
				}
			}
		}
		count := 0
		for _, b := range whole {
			count += len(b.Records)
			if c.BatchSize > 0 && !reflect.DeepEqual(lineCounter([]dataset.Batch{b}),
				lineCounter([]dataset.Batch{{Records: byNumber[b.Number]}})) {
				t.Fatalf("batch %d differs in its shard", b.Number)
			}
			for _, r := range b.Records {
				if seen[r.Index] != 1 {
					t.Fatalf("record %d is in %d shards", r.Index, seen[r.Index])
				}
			}
		}
		if count != len(seen) || count != report.Chosen {
			t.Fatalf("the whole has %d records, its shards %d, the report %d", count, len(seen), report.Chosen)
		}
		if c.Shuffle == nil {
			return
		}
		all, _, err := choose(each(records), dataset.Choice{Shuffle: c.Shuffle})
		if err != nil {
			t.Fatal(err)
		}
		next := 0
		for _, b := range whole {
			for _, r := range b.Records {
				for next < n && all[0].Records[next].Index != r.Index {
					next++
				}
				if next == n {
					t.Fatal("offset and limit changed the order of a shuffle")
				}
			}
		}
	})
}
