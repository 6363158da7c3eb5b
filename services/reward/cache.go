package reward

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// sampleCache remembers samples that are not done: the scores that they have, so that no function is called twice, and
// since when a function has been away. It is bounded. If an entry is dropped, functions are called again and
// ScorePatience begins anew.
type sampleCache struct {
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

func newSampleCache() *sampleCache {
	return &sampleCache{
		samples: map[string]*memo{}, groups: map[string]*groupMemo{}, records: map[string]*schemas.GroupRecord{},
	}
}

// ctxLock is a mutex whose lock gives up when a context ends. It is a channel of capacity 1.
type ctxLock chan struct{}

func (l ctxLock) lock(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l ctxLock) unlock() { <-l }

// memo is what is known of one sample. The lock guards it. Slices are in the order of Group.Reward.
type memo struct {
	ctxLock
	waits
	done   bool                  // its reward is stored
	scores []*scored             // nil: none yet
	ran    []bus.Made            // the stages of the sample, in order; none: it has one
	midway *schemas.StepQuestion // of a sample in the middle; nil: it has ended
}

// waits is how long functions have been away, in the order of Group.Reward.
type waits struct {
	since []time.Time // since when a function does not answer
	tries []int       // calls in a row without an answer
}

func newWaits(functions int) waits {
	return waits{make([]time.Time, functions), make([]int, functions)}
}

// groupMemo is what is known of a group that functions rate as a whole. The lock guards it.
type groupMemo struct {
	ctxLock
	waits
	// scores are by sample index and index in Group.Reward; nil: not rated yet. rated are the
	// sequences of the trajectories that were rated.
	scores map[int64]map[int]scored
	rated  map[int64]uint64
	// answers are those of the functions that have answered so far, by index in Group.Reward, and next is when the
	// others are asked again.
	answers map[int]map[int64]scored
	next    time.Time
	// last is the sequence of the trajectory whose handler completes the others. It is the same in every replica of
	// the service: otherwise each of two replicas could leave that to the other.
	last uint64
}

// sample returns the memo of the trajectory at a sequence, a new one if there is none.
func (k *sampleCache) sample(t *schemas.Trajectory, seq uint64) *memo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return getOrAdd(k.samples, keyOfSample(t.Run, t.UID, t.SampleIndex, seq), maxSamplesKept,
		func() *memo { return &memo{ctxLock: make(ctxLock, 1)} })
}

// group returns the memo of a trajectory's group, a new one if there is none.
func (k *sampleCache) group(t *schemas.Trajectory) *groupMemo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return getOrAdd(k.groups, keyOfGroup(t.Run, t.UID), maxGroupsKept,
		func() *groupMemo { return &groupMemo{ctxLock: make(ctxLock, 1)} })
}

// record returns the record of a group, nil if it is not in the cache.
func (k *sampleCache) record(run schemas.Run, uid schemas.UID) *schemas.GroupRecord {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.records[keyOfGroup(run, uid)]
}

// putRecord remembers the record of a group, which never changes.
func (k *sampleCache) putRecord(r *schemas.GroupRecord) {
	k.mu.Lock()
	defer k.mu.Unlock()
	getOrAdd(k.records, keyOfGroup(r.Run, r.UID), maxRecordsKept, func() *schemas.GroupRecord { return r })
}

// forget removes the memo of a sample whose reward is stored. If its group is rated as a whole the memo stays, as the
// handlers of other samples may complete it again.
func (k *sampleCache) forget(r *schemas.Reward) {
	if slices.ContainsFunc(r.Group.Reward, ratesGroup) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.samples, keyOfSample(r.Run, r.UID, r.SampleIndex, r.TrajectorySeq))
}

func keyOfGroup(run schemas.Run, uid schemas.UID) string { return string(run) + "." + string(uid) }

func keyOfSample(run schemas.Run, uid schemas.UID, index int64, seq uint64) string {
	return fmt.Sprintf("%s.%s.%d.%d", run, uid, index, seq)
}

// getOrAdd returns the entry of a key, or adds a new one. If the map has most entries already, it clears it first:
// what is lost is computed again.
func getOrAdd[T any](all map[string]*T, key string, most int, make func() *T) *T {
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
