package schemas

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
)

// Start is where the samples of a prompt begin: before a step of their schedule, which
// stays the whole one, with the noise that each step would have had.
type Start struct {
	// Latents are the states there, F32, F16 or BF16: [n, S, C], one [S, C] per sample, or
	// [1, S, C], one for all. Large ones are a ref to a blob. They are rounded to latents_dtype.
	Latents *Tensor `msgpack:"latents,omitempty" flag:"start-latents"`
	// Branch is a state that another sample stored, for all samples of the group to begin with, at
	// the step it was stored for; instead of Latents.
	Branch *Branch `msgpack:"branch,omitempty" flag:"branch-from"`
	// Data is what to add noise to instead: images or their latents x0. The states are
	// (1-sigma) x0 + sigma noise, with the noise that would have been x_T.
	Data *Data `msgpack:"data,omitempty"`
	// StepIndex is the first step to run with those states. The schedule and its noise stay the
	// whole ones; the state of step 0 is x_T.
	StepIndex *int64 `msgpack:"step_index,omitempty" range:"0..MaxSteps-1" default:"0" flag:"start-step"`
	// Sigma names the first step by its sigma, as trajectories have it; not beside StepIndex.
	Sigma *float64 `msgpack:"sigma,omitempty" range:"(0..MaxSigma]" flag:"start-sigma"`
}

// Stop is where the samples of a prompt end: with the state before a step of their schedule.
type Stop struct {
	// StepIndex is the first step not to run. What stops with noise in it has no image.
	StepIndex *int64 `msgpack:"step_index,omitempty" range:"1..MaxSteps" absent:"T, where all have run" flag:"stop-step"`
	// Sigma names the first step not to run by its sigma, 0 for T; not beside StepIndex.
	Sigma *float64 `msgpack:"sigma,omitempty" range:"0..MaxSigma" flag:"stop-sigma"`
	// Decode asks for an image of latents that still have noise in them, as they are.
	// Without it only a sample that stops at T has one.
	Decode bool `msgpack:"decode,omitempty" default:"false" flag:"stop-decode"`
}

// Branch names a state that a sample stored: the one before a step.
type Branch struct {
	Run         Run   `msgpack:"run,omitempty" form:"token" absent:"that of the prompt"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	StepIndex   int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
}

// SegmentStart is a Start that is resolved: it has Latents, a Branch or Data.
type SegmentStart struct {
	// StepIndex is the first step that runs.
	StepIndex int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
	// Latents are the states before it, [n, S, C] or [1, S, C], as a blob.
	Latents *Tensor `msgpack:"latents,omitempty"`
	// Branch is the parent: the sample whose state this one begins with, and whose steps come
	// before its own.
	Branch *Branch `msgpack:"branch,omitempty"`
	// Data is what noise is added to.
	Data *SegmentData `msgpack:"data,omitempty"`
}

func (e *SegmentStart) digest(d *digester) error {
	d.text("start")
	d.integer(e.StepIndex)
	switch b := e.Branch; {
	case b != nil:
		d.text("branch")
		d.text(string(b.UID))
		d.integer(b.SampleIndex)
		d.integer(b.StepIndex)
	case e.Data != nil:
		return e.Data.digest(d)
	case e.Latents != nil:
		return d.tensor(e.Latents)
	}
	return nil
}

// SegmentStop is a Stop before T that is resolved.
type SegmentStop struct {
	// StepIndex is the first step that does not run.
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1"`
	// Decode says that there is an image all the same.
	Decode bool `msgpack:"decode,omitempty"`
}

// Segment returns the steps that the request asks for, [begin, end): all of 0..T where it
// has neither start nor stop.
func (e *Request) Segment() (begin, end int64) {
	return clamped(e.ScheduledSampling, e.Start, e.Stop, len(e.Transitions))
}

// Segment returns the steps that the sample ran, or was to run, [begin, end). Steps[i] is
// step begin+i.
func (e *Trajectory) Segment() (begin, end int64) {
	return clamped(e.ScheduledSampling, e.Start, e.Stop, len(e.Transitions))
}

// clamped is a segment of the steps that there are, whatever an event says.
func clamped(rolled *ScheduledSample, start *SegmentStart, stop *SegmentStop, steps int) (begin, end int64) {
	if rolled != nil {
		begin, end = rolled.segment()
	} else {
		begin, end = segment(start, stop, steps)
	}
	end = max(0, min(end, int64(steps)))
	return max(0, min(begin, end)), end
}

func segment(start *SegmentStart, stop *SegmentStop, steps int) (begin, end int64) {
	end = int64(steps)
	if start != nil {
		begin = start.StepIndex
	}
	if stop != nil {
		end = stop.StepIndex
	}
	return begin, end
}

// StochasticSteps are those that are not ode, of the steps that the request asks for, ascending.
func (e *Request) StochasticSteps() []int64 { return stochasticSteps(e.Segment, e.Transitions) }

// TrainedSteps is the number of steps that are not ode on the way to where the sample ends: its
// own, and of a leaf of a tree those of the samples that it parted from. Of a text it is 1: samples of a group differ
// in their tokens.
func (e *Trajectory) TrainedSteps() int64 {
	if e.Text != nil {
		return 1 // one advantage, for all tokens that were generated
	}
	if e.Group.Tree == nil {
		return int64(len(e.StochasticSteps()))
	}
	path := Trajectory{Stop: e.Stop, Transitions: e.Transitions}
	return int64(len(path.StochasticSteps()))
}

// StochasticSteps are those that are not ode, of the steps of Segment, ascending: what there is
// to train on.
func (e *Trajectory) StochasticSteps() []int64 { return stochasticSteps(e.Segment, e.Transitions) }

func stochasticSteps(segment func() (begin, end int64), transitions []string) []int64 {
	begin, end := segment()
	steps := []int64{}
	for i, t := range transitions {
		if ran := begin <= int64(i) && int64(i) < end; ran && t != TransitionODE {
			steps = append(steps, int64(i))
		}
	}
	return steps
}

// Decoded says that the sample has an image once it is completed: it ends without noise, or
// is to be decoded all the same.
func (e *Trajectory) Decoded() bool {
	if e.Text != nil {
		return false
	}
	if e.ScheduledSampling != nil {
		return e.ScheduledSampling.RollSettings.Decode
	}
	return e.Stop == nil || e.Stop.Decode
}

// segment checks what Start and Stop say of each other, of the steps and of the group.
func (p *Prompt) segment(f *faults) {
	first := int64(0)
	if p.Start != nil {
		g := f.in("start")
		if p.InitialNoise != "" && p.Start.Data == nil {
			f.add("initial_noise", quote(p.InitialNoise), "must be absent beside start, which gives the state to begin with")
		}
		index := p.Start.StepIndex
		if b := p.Start.Branch; g.begin(p.Start.Latents, p.Start.Data != nil, b, p.groupSize()) {
			if index != nil {
				g.add("step_index", strconv.FormatInt(*index, 10), "must be absent beside branch, which says the step")
			}
			if p.Start.Sigma != nil {
				g.add("sigma", formatFloat(*p.Start.Sigma), "must be absent beside branch, which says the step")
			}
			g, index = g.in("branch"), &b.StepIndex
		}
		if d := p.Start.Data; d != nil {
			d.check(g.in("data"), p.groupSize())
			if index == nil && p.Start.Sigma == nil && p.ScheduledSampling == nil {
				g.add("step_index", "null", "must be there beside data, or sigma: how noisy the samples begin")
			}
		}
		first = place(g, index, p.Start.Sigma, 0, most(p.steps())-1, &Range{High: MaxSteps - 1}) + 1
	}
	if p.Stop != nil {
		place(f.in("stop"), p.Stop.StepIndex, p.Stop.Sigma, max(first, 1), most(p.steps()), &Range{Low: 1, High: MaxSteps})
	}
}

// begin checks that there is one thing to begin with, and says whether it is the state of a branch.
func (f *faults) begin(latents *Tensor, data bool, b *Branch, groupSize int64) (branch bool) {
	switch {
	case latents == nil && b == nil && !data:
		f.add("latents", "null", "must be the states to begin with, [n, S, C] or [1, S, C], or branch one that a sample stored, or data what noise is added to")
	case data && (latents != nil || b != nil):
		f.add("data", "given", "must be absent beside latents and branch")
	case latents != nil && b != nil:
		f.add("branch", "given", "must be absent beside latents")
	case latents != nil:
		latents.states(f.in("latents"), groupSize)
	}
	return b != nil && !data
}

// most is the number of steps, or the largest that it can be.
func most(steps int64) int64 {
	if steps > 0 {
		return min(steps, MaxSteps)
	}
	return MaxSteps
}

// place checks the two ways to name a step, from low to high, and returns it, 0 where it is not
// known. What is not in the range of its tag is named by that.
func place(f *faults, index *int64, sigma *float64, low, high int64, tag *Range) int64 {
	if index != nil && sigma != nil {
		f.add("sigma", formatFloat(*sigma), "must be absent beside step_index")
	}
	if index == nil || !tag.Holds(float64(*index)) {
		return 0
	}
	f.within("step_index", *index, low, high)
	return min(*index, high)
}

// segment checks a resolved one of a schedule of that many steps, and returns its steps; all
// of them where it is faulty, so that a fault is said once.
func (f *faults) segment(rolled *ScheduledSample, start *SegmentStart, stop *SegmentStop, groupSize int64, steps int) (begin, end int64) {
	all := most(int64(steps))
	if rolled != nil {
		return f.rolls(rolled, start, stop, groupSize, all)
	}
	begin, end = segment(start, stop, int(all))
	if start != nil {
		g := f.in("start")
		if begin >= all && begin < MaxSteps {
			g.within("step_index", begin, 0, all-1)
		}
		if start.Data != nil {
			start.Data.check(g.in("data"), groupSize)
		}
		if g.begin(start.Latents, start.Data != nil, start.Branch, groupSize) {
			g = g.in("branch")
			if start.Branch.Run == "" {
				g.token("run", "")
			}
			if n := start.Branch.StepIndex; n != begin {
				g.add("step_index", strconv.FormatInt(n, 10), fmt.Sprintf("must be %d, where the sample begins", begin))
			}
		}
	}
	if stop != nil && (end <= begin || end >= all) && end >= 1 && end < MaxSteps {
		f.in("stop").within("step_index", end, begin+1, all-1)
	}
	if begin < 0 || end <= begin || end > all {
		return 0, all
	}
	return begin, end
}

// rolls checks the steps of scheduled sampling of a schedule of that many, and returns them.
func (f *faults) rolls(rolled *ScheduledSample, start *SegmentStart, stop *SegmentStop, groupSize, all int64) (begin, end int64) {
	begin, end = rolled.segment()
	switch {
	case stop != nil:
		f.add("stop", "given", "must be absent beside scheduled_sampling")
	case start == nil || start.Data == nil:
		f.add("start.data", "null", "must be there beside scheduled_sampling")
	default:
		g := f.in("start")
		g.begin(start.Latents, true, start.Branch, groupSize)
		start.Data.check(g.in("data"), groupSize)
	}
	if begin < 0 || end < begin || end > all {
		return 0, all
	}
	return begin, end
}

// states checks latents that a group begins with, [n, S, C] or [1, S, C]; groupSize is n, or
// 0 for not known.
func (t *Tensor) states(f *faults, groupSize int64) {
	if slices.Contains(DTypes, t.DType) { // another is named by its tag
		f.enum("dtype", t.DType, LatentsDTypes)
	}
	if len(t.Shape) != 3 {
		f.add("shape", fmt.Sprint(t.Shape[:min(len(t.Shape), MaxTensorDims)]), "must be [samples, tokens, channels]")
	} else if n := t.Shape[0]; groupSize > 0 && n != 1 && n != groupSize {
		f.add("shape", fmt.Sprint(t.Shape), fmt.Sprintf("must begin with %d, the group_size, or 1 for all", groupSize))
	}
	if t.Parts != nil {
		f.add("parts", "given", "must be data or ref: only steps have parts")
	}
}

// sameSegment says in what the trajectory has otherwise begun or ended than was asked for.
func (e *Request) sameSegment(t *Trajectory) (field string, same bool) {
	switch {
	case !reflect.DeepEqual(e.Start, t.Start):
		return "start", false
	case !reflect.DeepEqual(e.Stop, t.Stop):
		return "stop", false
	case !reflect.DeepEqual(e.ScheduledSampling, t.ScheduledSampling):
		return "scheduled_sampling", false
	}
	return "", true
}
