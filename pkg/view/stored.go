package view

import (
	"context"
	"fmt"
	"iter"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Key names one sample of a run.
type Key struct {
	UID   schemas.UID
	Index int64
}

// String returns a text that sorts by uid, then by index.
func (s Key) String() string { return fmt.Sprintf("%s.%06d", s.UID, s.Index) }

// Trajectory is a stored trajectory with its sequence in the stream.
type Trajectory struct {
	*schemas.Trajectory
	Seq uint64
}

// Trajectories yields the stored trajectories of a run, or of one group of it (uid "*": all). After an error, of the
// server, it yields no more.
func Trajectories(ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID) iter.Seq2[Trajectory, error] {
	return func(yield func(Trajectory, error) bool) {
		for m, err := range b.Read(ctx, schemas.StreamTrajectories, []string{schemas.TrajectoryFilter(run, uid)},
			bus.ReadOptions{}) {
			if err != nil {
				yield(Trajectory{}, fmt.Errorf("read trajectories: %w", err))
				return
			}
			t := Trajectory{&schemas.Trajectory{}, m.Seq}
			if bus.Fits(m, t.Trajectory) != nil {
				continue // not a trajectory; the sample's true one will replace it
			}
			if !yield(t, nil) {
				return
			}
		}
	}
}

// Rewards returns the stored rewards of a run, or of one group of it (uid "*": all). It fails if the server cannot be
// read.
func Rewards(ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID) (map[Key]*schemas.Reward, error) {
	out := map[Key]*schemas.Reward{}
	for m, err := range b.Read(ctx, schemas.StreamRewards, []string{schemas.RewardFilter(run, "*", uid)},
		bus.ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("read rewards: %w", err)
		}
		r := &schemas.Reward{}
		if bus.Fits(m, r) == nil { // else the sample's true one will replace it
			out[Key{r.UID, r.SampleIndex}] = r
		}
	}
	return out, nil
}
