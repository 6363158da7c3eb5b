package schemas

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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
	Run         Run   `msgpack:"run,omitempty" form:"token" absent:"the prompt's" digest:"-"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Stage is the one that stored it, by its token, of a sample of several stages.
	Stage     Stage `msgpack:"stage,omitempty" form:"token" absent:"main, of a sample without stages"`
	StepIndex int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
}

// Place returns the stage of the sample that stored the state.
func (b *Branch) Place() Place { return Place{cmp.Or(b.Stage, StageMain), b.SampleIndex} }

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

// SegmentStop is a Stop before T that is resolved.
type SegmentStop struct {
	// StepIndex is the first step that does not run.
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1"`
	// Decode says that there is an image, although the sample stops with noise in it.
	Decode bool `msgpack:"decode,omitempty"`
}

// BranchOff has a request begin with a state that another sample stores, and store none from before.
func (e *Request) BranchOff(at *Branch) {
	e.Start = &SegmentStart{StepIndex: at.StepIndex, Branch: at}
	e.ReturnStepIndices = slices.DeleteFunc(slices.Clone(e.ReturnStepIndices),
		func(k int64) bool { return k < at.StepIndex })
	e.CheckpointStepIndices = slices.DeleteFunc(slices.Clone(e.CheckpointStepIndices),
		func(k int64) bool { return k <= at.StepIndex })
}

// KeepState has the state before step k stored, for others to begin with.
func (o *Outputs) KeepState(k int64) {
	if !slices.Contains(o.ReturnStepIndices, k) {
		o.ReturnStepIndices = append(slices.Clone(o.ReturnStepIndices), k)
		slices.Sort(o.ReturnStepIndices)
	}
}

// Sibling returns the state of another sample of its group that a sample began with; nil: it began otherwise.
func (e *Trajectory) Sibling() *Branch {
	if e.Start == nil || e.Start.Branch == nil || e.Start.Branch.UID != e.UID ||
		e.Start.Branch.Run != cmp.Or(e.Group.SourceRun, e.Run) {
		return nil
	}
	return e.Start.Branch
}

// TrainedSteps returns the number of stochastic steps on the way to where the sample ends: its own, and
// those of the samples of its group that it branched off from. For a text it is 1.
func (e *Trajectory) TrainedSteps() int64 {
	if e.Text != nil {
		return 1 // one advantage, for all tokens that were generated
	}
	begin, end := e.Segment()
	if e.Group.TreeOf(e.Stage) != nil || e.Sibling() != nil {
		begin = 0
	}
	return int64(len(e.stochasticSteps(begin, end)))
}

// Decoded reports whether the sample has an image once it is completed: it ends without noise, or
// the prompt asks for an image of what it ends with.
func (e *Trajectory) Decoded() bool {
	if e.Text != nil {
		return false
	}
	if e.ScheduledSampling != nil {
		return e.ScheduledSampling.RollSettings.Decode
	}
	return e.Stop == nil || e.Stop.Decode
}

// checkSegment checks the fields start and stop of a prompt against each other, against the number of
// steps and against the group size. Prompt.rules calls it; each violation goes to f.
func (p *Prompt) checkSegment(f *faults) {
	first := int64(0)
	if p.Start != nil {
		g := f.inStruct("start")
		if p.InitialNoise != "" && p.Start.Data == nil {
			f.add("initial_noise", quote(p.InitialNoise),
				"must be absent beside start, which gives the state to begin with")
		}
		index := p.Start.StepIndex
		if b := p.Start.Branch; g.checkBegin(p.Start.Latents, p.Start.Data != nil, b, p.groupSize()) {
			if index != nil {
				g.add("step_index", strconv.FormatInt(*index, 10), "must be absent beside branch, which says the step")
			}
			if p.Start.Sigma != nil {
				g.add("sigma", formatFloat(*p.Start.Sigma), "must be absent beside branch, which says the step")
			}
			g, index = g.inStruct("branch"), &b.StepIndex
		}
		if d := p.Start.Data; d != nil {
			d.checkRules(g.inStruct("data"), p.groupSize())
			if index == nil && p.Start.Sigma == nil && p.ScheduledSampling == nil {
				g.add("step_index", "null", "must be there beside data, or sigma: how noisy the samples begin")
			}
		}
		first = checkPlace(g, index, p.Start.Sigma, 0, maxSteps(p.steps())-1, &Range{High: MaxSteps - 1}) + 1
	}
	if p.Stop != nil {
		checkPlace(f.inStruct("stop"), p.Stop.StepIndex, p.Stop.Sigma, max(first, 1), maxSteps(p.steps()),
			&Range{Low: 1, High: MaxSteps})
	}
}

// checkBegin checks that exactly one of latents, data and branch is given, and reports whether it is the branch.
func (f *faults) checkBegin(latents *Tensor, data bool, b *Branch, groupSize int64) (branch bool) {
	switch {
	case latents == nil && b == nil && !data:
		f.add("latents", "null",
			"must be the states to begin with, [n, S, C] or [1, S, C], or branch one that a sample stored, or data "+
				"what noise is added to")
	case data && (latents != nil || b != nil):
		f.add("data", "given", "must be absent beside latents and branch")
	case latents != nil && b != nil:
		f.add("branch", "given", "must be absent beside latents")
	case latents != nil:
		latents.checkStates(f.inStruct("latents"), groupSize)
	}
	return b != nil && !data
}

// maxSteps returns the number of steps, or the largest possible one if steps is 0 (not known).
func maxSteps(steps int64) int64 {
	if steps > 0 {
		return min(steps, MaxSteps)
	}
	return MaxSteps
}

// checkPlace checks that a step from low to high is named by index or by sigma, not by both. It returns the index, 0 if
// it is not known. An index outside the range of its tag is reported by the check of the tag.
func checkPlace(f *faults, index *int64, sigma *float64, low, high int64, tag *Range) int64 {
	if index != nil && sigma != nil {
		f.add("sigma", formatFloat(*sigma), "must be absent beside step_index")
	}
	if index == nil || !tag.Contains(float64(*index)) {
		return 0
	}
	f.checkWithin("step_index", *index, low, high)
	return min(*index, high)
}

// checkSegment checks which steps [begin, end) a sample of a group of that size runs, and returns them. If they are
// faulty it returns all steps, so that the fault is reported only once.
func (s *Sampling) checkSegment(f *faults, groupSize int64) (begin, end int64) {
	all := maxSteps(int64(len(s.Transitions)))
	begin, end = s.askedSegment(all)
	if s.ScheduledSampling != nil {
		s.checkRoll(f, groupSize)
		if begin < 0 || end < begin || end > all {
			return 0, all
		}
		return begin, end
	}
	if start := s.Start; start != nil {
		g := f.inStruct("start")
		if begin >= all && begin < MaxSteps {
			g.checkWithin("step_index", begin, 0, all-1)
		}
		if start.Data != nil {
			start.Data.checkRules(g.inStruct("data"), groupSize)
		}
		if g.checkBegin(start.Latents, start.Data != nil, start.Branch, groupSize) {
			g = g.inStruct("branch")
			if start.Branch.Run == "" {
				g.checkToken("run", "")
			}
			if n := start.Branch.StepIndex; n != begin {
				g.add("step_index", strconv.FormatInt(n, 10), fmt.Sprintf("must be %d, where the sample begins", begin))
			}
		}
	}
	if s.Stop != nil && (end <= begin || end >= all) && end >= 1 && end < MaxSteps {
		f.inStruct("stop").checkWithin("step_index", end, begin+1, all-1)
	}
	if begin < 0 || end <= begin || end > all {
		return 0, all
	}
	return begin, end
}

// checkRoll checks that a sample of scheduled sampling begins with data and has no stop.
func (s *Sampling) checkRoll(f *faults, groupSize int64) {
	switch start := s.Start; {
	case s.Stop != nil:
		f.add("stop", "given", "must be absent beside scheduled_sampling")
	case start == nil || start.Data == nil:
		f.add("start.data", "null", "must be there beside scheduled_sampling")
	default:
		g := f.inStruct("start")
		g.checkBegin(start.Latents, true, start.Branch, groupSize)
		start.Data.checkRules(g.inStruct("data"), groupSize)
	}
}

// checkStates checks latents that a group begins with, [n, S, C] or [1, S, C]; groupSize is n, or
// 0 for not known.
func (t *Tensor) checkStates(f *faults, groupSize int64) {
	if slices.Contains(DTypes, t.DType) { // another is named by its tag
		f.checkEnum("dtype", t.DType, LatentsDTypes)
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

// Data is what the samples of a prompt are made of before noise is added to it: images, which
// the model's autoencoder encodes, or latents; exactly one of them.
type Data struct {
	// Images are PNGs, one per sample or one for all; animated ones for videos. Their size is that of the samples, also
	// where the prompt names none.
	Images []DataImage `msgpack:"images,omitempty" size:"0..MaxGroupSize" flag:"start-image"`
	// Latents are encoded images, F32, F16 or BF16: [n, S, C], or [1, S, C], one for all.
	Latents *Tensor `msgpack:"latents,omitempty"`
}

// DataImage is a PNG, inline or as a blob that was stored before the prompt.
type DataImage struct {
	// Data is the bytes of the file, where they are carried in the event.
	Data []byte `msgpack:"data,omitempty" size:"1..MaxInlineImage"`
	Ref  *Ref   `msgpack:"ref,omitempty"`
}

// SegmentData is the Data of one sample, resolved. The state that the sample begins with is
// (1-sigma) x0 + sigma noise, with the noise of noise_seed.
type SegmentData struct {
	// Image is the image of this sample.
	Image *Ref `msgpack:"image,omitempty"`
	// Latents are the group's, [n, S, C] or [1, S, C], as a blob.
	Latents *Tensor `msgpack:"latents,omitempty"`
	// GroupDigest is the digest of all images of the group (DataDigest); empty beside Latents.
	GroupDigest string `msgpack:"group_digest,omitempty" form:"digest" digest:"-"`
}

// DataDigest returns the digest of a group's images: the BLAKE3 of the text
// "meander data 1" and the list of their digests (text) in the order of the samples.
func DataDigest(images []Ref) string {
	d := newDigester("meander data 1")
	d.addInteger(int64(len(images)))
	for _, r := range images {
		d.addText(r.Digest)
	}
	return d.text()
}

// Of returns the data of one sample. The images have been stored as blobs.
func (e *Data) Of(sample int64) *SegmentData {
	if e.Latents != nil {
		return &SegmentData{Latents: e.Latents}
	}
	refs := make([]Ref, len(e.Images))
	for i, im := range e.Images {
		if refs[i] = (Ref{Bucket: BlobBucket, Size: int64(len(im.Data))}); im.Ref != nil {
			refs[i] = *im.Ref
		} else {
			sum := sha256.Sum256(im.Data)
			refs[i].Digest = hex.EncodeToString(sum[:])
		}
	}
	if len(refs) == 1 {
		sample = 0
	}
	return &SegmentData{Image: &refs[sample], GroupDigest: DataDigest(refs)}
}

// checkRules checks the data of a group with groupSize samples, 0: not known.
func (e *Data) checkRules(f *faults, groupSize int64) {
	switch n := int64(len(e.Images)); {
	case e.Latents != nil && n > 0:
		f.add("latents", "given", "must be absent beside images")
	case e.Latents != nil:
		e.Latents.checkStates(f.inStruct("latents"), groupSize)
	case n == 0:
		f.add("images", "null", "must be there, or latents: what the samples are made of")
	case groupSize > 0 && n != 1 && n != groupSize:
		f.add("images", strconv.FormatInt(n, 10)+" items", fmt.Sprintf("must be %d, the group_size, or 1 for all",
			groupSize))
	}
	for i := range e.Images {
		if im := &e.Images[i]; (im.Data == nil) == (im.Ref == nil) {
			f.inItem("images", i).add("data", "beside ref or without it", "must be the only one of the two")
		}
	}
}

// checkRules checks start.data of a prompt, the images or latents that a rollout begins from: exactly
// one of the two, with valid digests. Each violation goes to f.
func (e *SegmentData) checkRules(f *faults, groupSize int64) {
	switch {
	case (e.Image == nil) == (e.Latents == nil):
		f.add("image", "beside latents or without them", "must be the only one of the two")
	case e.Latents != nil:
		e.Latents.checkStates(f.inStruct("latents"), groupSize)
	default:
		f.requireDigest("group_digest", e.GroupDigest, FormDigest)
	}
}
