package reward

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// memory is what this process knows of samples that are not done: scores that need not be
// made again, and since when a function has been away. It is a convenience, and bounded:
// when it is lost, functions are asked once more and patience begins anew.
type memory struct {
	mu      sync.Mutex
	samples map[string]*memo
	groups  map[string]*groupMemo
	records map[string]*schemas.GroupRecord
}

const (
	maxSamplesKept = 20_000
	maxGroupsKept  = 2_000
	maxRecordsKept = 500 // a record may have 16 KiB of prompt and as much of metadata
)

func newMemory() *memory {
	return &memory{samples: map[string]*memo{}, groups: map[string]*groupMemo{}, records: map[string]*schemas.GroupRecord{}}
}

// turn lets one at a time work on something.
type turn chan struct{}

func (t turn) lock(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) unlock() { <-t }

// memo is of one sample. Its fields belong to whoever has the turn. Slices are in the
// order of Group.Reward.
type memo struct {
	turn
	done   bool
	scores []*scored // nil: none yet
	since  []time.Time
	tries  []int
}

// groupMemo is of one group whose functions rate it as a whole.
type groupMemo struct {
	turn
	// scores are by sample index and place in Group.Reward; nil: not rated yet. rated is the
	// trajectories that they are of.
	scores map[int64]map[int]scored
	rated  map[int64]uint64
	// last is the sequence of the trajectory whose handler completes the others: the same in
	// every replica, or two that each lead would leave the rest to one another.
	last uint64
}

// sample is what is known of the trajectory at a sequence.
func (k *memory) sample(t *schemas.Trajectory, seq uint64) *memo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return remember(k.samples, sampleKey(t.Run, t.UID, t.SampleIndex, seq), maxSamplesKept, func() *memo { return &memo{turn: make(turn, 1)} })
}

func (k *memory) group(t *schemas.Trajectory) *groupMemo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return remember(k.groups, groupKey(t.Run, t.UID), maxGroupsKept, func() *groupMemo { return &groupMemo{turn: make(turn, 1)} })
}

// record is that of a group, where it is known; nil: it is not.
func (k *memory) record(run schemas.Run, uid schemas.UID) *schemas.GroupRecord {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.records[groupKey(run, uid)]
}

// keep remembers the record of a group, which never changes.
func (k *memory) keep(r *schemas.GroupRecord) {
	k.mu.Lock()
	defer k.mu.Unlock()
	remember(k.records, groupKey(r.Run, r.UID), maxRecordsKept, func() *schemas.GroupRecord { return r })
}

// forget drops a sample that is done, unless others of its group may come to complete it
// once more.
func (k *memory) forget(r *schemas.Reward) {
	for _, spec := range r.Group.Reward {
		if scorer.NewGroup(spec.Name) != nil {
			return
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.samples, sampleKey(r.Run, r.UID, r.SampleIndex, r.TrajectorySeq))
}

func groupKey(run schemas.Run, uid schemas.UID) string { return string(run) + "." + string(uid) }

func sampleKey(run schemas.Run, uid schemas.UID, index int64, seq uint64) string {
	return fmt.Sprintf("%s.%s.%d.%d", run, uid, index, seq)
}

func remember[T any](all map[string]*T, key string, most int, make func() *T) *T {
	x, ok := all[key]
	if !ok {
		if len(all) >= most {
			clear(all)
		}
		x = make()
		all[key] = x
	}
	return x
}
