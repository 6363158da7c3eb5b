package counters

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Check counts the newest runs in full, at most most of them, and compares that with what their records and the events
// since come to. It returns how many it has compared, and the runs that differ. It writes nothing.
func Check(ctx context.Context, b *bus.Bus, most int) (compared int, differ []schemas.Run, err error) {
	k, err := look(ctx, b, "*")
	if err != nil {
		return 0, nil, fmt.Errorf("check counts: %w", err)
	}
	var runs []schemas.Run
	for name, r := range k.runs {
		if name != "" && !r.isEmpty() && !r.Large {
			runs = append(runs, name)
		}
	}
	slices.SortFunc(runs, func(x, y schemas.Run) int {
		return cmp.Or(k.runs[y].Newest().Compare(k.runs[x].Newest()), cmp.Compare(x, y))
	})
	runs = runs[:min(most, len(runs))]
	for _, run := range runs {
		same, err := k.sameInFull(ctx, run)
		if err == nil && !same { // events may have gone meanwhile
			var again *book
			if again, err = look(ctx, b, run); err == nil {
				same, err = again.sameInFull(ctx, run)
			}
		}
		if err != nil {
			return 0, nil, fmt.Errorf("check counts of run %s: %w", run, err)
		}
		if !same {
			differ = append(differ, run)
		}
	}
	return len(runs), differ, nil
}

// sameInFull counts a run from the beginning, and reports whether that is what was found.
func (k *book) sameInFull(ctx context.Context, run schemas.Run) (bool, error) {
	x := &book{b: k.b, run: run, runs: map[schemas.Run]*Run{}, states: k.states}
	if err := x.readOn(ctx); err != nil {
		return false, err
	}
	return k.of(run).saysAs(x.of(run)), nil
}

// saysAs reports whether two counts of a run say the same.
func (r *Run) saysAs(other *Run) bool {
	for _, stream := range counted {
		if r.Events(stream) != other.Events(stream) {
			return false
		}
	}
	return r.Groups == other.Groups && r.Mean.N == other.Mean.N && maps.Equal(r.Open, other.Open) &&
		maps.Equal(r.Orphans, other.Orphans) && maps.Equal(r.Batches, other.Batches) &&
		maps.Equal(r.Letters, other.Letters) && len(r.Outcomes) == len(other.Outcomes) &&
		!slices.ContainsFunc(r.Outcomes, func(o Outcome) bool { return other.Of(o.Kind, o.Outcome) != o.N })
}

// Key is where the record of a run is in schemas.CountBucket. Without a record, the run is counted in full.
func Key(run schemas.Run) string { return key(run) }
