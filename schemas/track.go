package schemas

import (
	"fmt"
	"slices"
)

// Track is one part of a state that has several, such as the video and the sound of a sample. A state stays one flat
// list of elements: its tracks follow one another in it, in the order in which they are listed.
type Track struct {
	Name string `msgpack:"name" form:"token"`
	// Shape is the track's own.
	Shape []int64 `msgpack:"shape" size:"1..MaxTensorDims" range:"1..MaxTensorBytes"`
	// Elements is the product of Shape: how many of the state's elements are of the track.
	Elements int64 `msgpack:"elements" range:"1..MaxTensorBytes"`
}

// StepTrack is a track with its share of a step's log-prob.
type StepTrack struct {
	Track
	// LogProb is LogProbSum / Elements; both are null on an ode step.
	LogProb    *float64 `msgpack:"log_prob"`
	LogProbSum *float64 `msgpack:"log_prob_sum"`
}

// TrackElements returns how many elements each track has; nil: the state has one track.
func TrackElements(tracks []Track) []int {
	var list []int
	for i := range tracks {
		list = append(list, int(tracks[i].Elements))
	}
	return list
}

// Same reports whether two tracks have the same name and shape.
func (t *Track) Same(o *Track) bool {
	return t.Name == o.Name && t.Elements == o.Elements && slices.Equal(t.Shape, o.Shape)
}

func (t *Track) checkRules(f *faults) {
	of := Tensor{Shape: t.Shape}
	if n, ok := of.ElementCount(); ok && n != t.Elements {
		f.add("elements", fmt.Sprint(t.Elements), fmt.Sprintf("must be %d, the product of the shape %v", n, t.Shape))
	}
}

// checkTracks checks that tracks have different names and are together a state of some elements; 0: not known.
func (f *faults) checkTracks(n int, track func(i int) *Track, elements int64) {
	if n == 0 || n > MaxTracks {
		return
	}
	sum := int64(0)
	for i := range n {
		t := track(i)
		sum += t.Elements
		for k := range i {
			if track(k).Name == t.Name {
				f.inItem("tracks", i).add("name", quote(t.Name), "must come at most once")
			}
		}
	}
	if elements > 0 && sum != elements {
		f.add("tracks", fmt.Sprintf("%d elements", sum), fmt.Sprintf("must be %d in all, the state's", elements))
	}
}

// checkTracks checks the tracks of a step: the step's log-prob is their sum.
func (e *Step) checkTracks(f *faults) {
	f.checkTracks(len(e.Tracks), func(i int) *Track { return &e.Tracks[i].Track }, e.ElementCount)
	if len(e.Tracks) == 0 || len(e.Tracks) > MaxTracks {
		return
	}
	stochastic, sum, whole := TransitionNamed(e.Transition).Stochastic, 0.0, true
	for i := range e.Tracks {
		t, g := &e.Tracks[i], f.inItem("tracks", i)
		g.checkPresence("log_prob", t.LogProb, stochastic)
		g.checkPresence("log_prob_sum", t.LogProbSum, stochastic)
		if t.LogProb == nil || t.LogProbSum == nil {
			whole = false
			continue
		}
		sum += *t.LogProbSum
		if mean := *t.LogProbSum / float64(t.Elements); t.Elements > 0 && *t.LogProb != mean {
			g.add("log_prob", formatFloat(*t.LogProb), "must be "+formatFloat(mean)+", log_prob_sum / elements")
		}
	}
	if !whole {
		return
	}
	if e.LogProbSum != nil && *e.LogProbSum != sum {
		f.add("log_prob_sum", formatFloat(*e.LogProbSum),
			"must be "+formatFloat(sum)+", the sum of the tracks in order")
	}
	if mean := sum / float64(e.ElementCount); e.LogProb != nil && e.ElementCount > 0 && *e.LogProb != mean {
		f.add("log_prob", formatFloat(*e.LogProb), "must be "+formatFloat(mean)+", log_prob_sum / element_count")
	}
}
