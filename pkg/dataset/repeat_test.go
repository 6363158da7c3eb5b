package dataset_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/dataset"
)

// Batches go on over the records, pass by pass, each pass in an order of its own; spares are what would come next.
func TestChoose_Batches(t *testing.T) {
	set, err := readAll(strings.NewReader("a\nb\nc\n"), "p.txt", dataset.Options{})
	if err != nil {
		t.Fatal(err)
	}
	display := func(c dataset.Choice) (lines []string) {
		t.Helper()
		batches, report, err := choose(each(set.Records), c)
		if err != nil || report.Batches != c.Batches || report.Chosen != c.Batches*c.BatchSize {
			t.Fatalf("%+v: %+v, %v", c, report, err)
		}
		for _, b := range batches {
			var parts []string
			for _, r := range b.Records {
				text, _ := r.Prompt()
				part := fmt.Sprint(text, r.Epoch)
				for _, s := range r.Spares {
					other, _ := s.Prompt()
					part += " " + other
				}
				parts = append(parts, part)
			}
			lines = append(lines, strings.Join(parts, ", "))
		}
		return lines
	}
	if got := fmt.Sprint(display(dataset.Choice{BatchSize: 2, Batches: 4})); got != "[a0, b0 c0, a1 b1, c1 a2, b2]" {
		t.Errorf("in order: %s", got)
	}
	if got := fmt.Sprint(display(dataset.Choice{BatchSize: 2, Batches: 1, Spares: 2})); got != "[a0 c b, b0 c a]" {
		t.Errorf("spares: %s", got)
	}
	shuffled := display(dataset.Choice{BatchSize: 3, Batches: 8, Shuffle: new(int64(3))})
	orders := map[string]bool{}
	for i, line := range shuffled {
		for _, text := range []string{"a", "b", "c"} {
			if !strings.Contains(line, fmt.Sprint(text, i)) {
				t.Errorf("pass %d is %s; want each record once", i, line)
			}
		}
		orders[strings.NewReplacer(fmt.Sprint(i), "").Replace(line)] = true
	}
	if len(orders) < 2 {
		t.Errorf("all passes in one order: %v", shuffled)
	}
	if again := display(dataset.Choice{
		BatchSize: 3, Batches: 2, Shuffle: new(int64(3)),
	}); fmt.Sprint(again) != fmt.Sprint(shuffled[:2]) {
		t.Errorf("fewer batches are others: %v", again)
	}
	set.Records[0].Fields["metadata"] = map[string]any{"k": "v"}
	batches, _, err := choose(each(set.Records), dataset.Choice{BatchSize: 1, Batches: 4})
	if err != nil {
		t.Fatal(err)
	}
	batches[0].Records[0].Fields["metadata"].(map[string]any)["k"] = "w"
	if batches[3].Records[0].Fields["metadata"].(map[string]any)["k"] != "v" {
		t.Error("the records of two passes share their fields")
	}
	for _, bad := range []dataset.Choice{
		{Batches: 2},
		{Batches: -1, BatchSize: 1},
		{BatchSize: 1 << 11, Batches: 1 << 11},
		{Spares: -1},
		{Limit: 1, Spares: 1},
	} {
		if _, _, err := choose(each(set.Records), bad); err == nil || !strings.Contains(err.Error(), "must be") {
			t.Errorf("%+v: %v, want a fault", bad, err)
		}
	}
}
