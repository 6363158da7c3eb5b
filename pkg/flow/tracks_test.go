package flow_test

import (
	"context"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
)

// The tracks of a state are each scored as a state of its own, and the step by their sum; the states have the bits that
// they have without tracks.
func TestTracks(t *testing.T) {
	p := sdePlan(flow.SDE, []int{0, 2, 3}, fiveSteps)
	x := noise(101, 7)
	whole := run(t, p, x, gaussian{0.4}.velocity)
	p.Tracks = []int{64, 1, 36}
	for i, s := range run(t, p, x, gaussian{0.4}.velocity) {
		if !slices.Equal(s.Next, whole[i].Next) {
			t.Fatalf("step %d: other states than without tracks", i)
		}
		if s.LogProb == nil {
			if whole[i].LogProb != nil {
				t.Fatalf("step %d: no log-prob", i)
			}
			continue
		}
		k, err := p.StepTransition(i)
		if err != nil {
			t.Fatal(err)
		}
		sum, at := 0.0, 0
		for j, n := range p.Tracks {
			lp, err := k.LogProb(p.LogProb, s.X[at:at+n], s.Velocity[at:at+n], s.Next[at:at+n])
			if err != nil || !reflect.DeepEqual(lp, s.LogProb.Tracks[j]) || lp.Count != n {
				t.Errorf("step %d, track %d: %+v, want %+v, %v", i, j, s.LogProb.Tracks[j], lp, err)
			}
			sum, at = sum+lp.Sum, at+n
		}
		if s.LogProb.Sum != sum || s.LogProb.Mean != sum/101 || s.LogProb.Count != 101 {
			t.Errorf("step %d: %+v, want the sum %v of the tracks", i, s.LogProb, sum)
		}
		if of := whole[i].LogProb; of.Tracks != nil || math.Abs(of.Sum-sum) > 1e-12*math.Abs(sum) {
			t.Errorf("step %d: without tracks %+v, want about %v", i, of, sum)
		}
		if again, err := flow.Score(p, i, s.X, s.Velocity, s.Next); err != nil ||
			!reflect.DeepEqual(again, *s.LogProb) {
			t.Errorf("step %d: scored %+v, sampled %+v, %v", i, again, s.LogProb, err)
		}
	}
}

// Tracks that are not the state are refused, when a sample begins and when it is scored.
func TestTracks_Refuses(t *testing.T) {
	x := noise(8, 7)
	for _, tt := range []struct {
		tracks []int
		want   string
	}{
		{[]int{4, 3}, "tracks: [4 3] elements; must be 8 in all"},
		{[]int{4, 5}, "tracks: [4 5] elements; must be at least 1 each, and 8 in all"},
		{[]int{8, 0}, "tracks: [8 0] elements; must be at least 1 each, and 8 in all"},
		{[]int{math.MaxInt, math.MaxInt}, "must be at least 1 each, and 8 in all"},
	} {
		p := sdePlan(flow.SDE, []int{0}, fiveSteps)
		p.Tracks = tt.tracks
		_, err := flowtest.Sample(context.Background(), p, x, gaussian{0.4}.velocity, nil)
		wantError(t, err, tt.want)
		_, err = flow.Score(p, 0, x, x, x)
		wantError(t, err, tt.want)
	}
}
