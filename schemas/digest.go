package schemas

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// A content digest is taken over a sequence of fields, so that any language can
// compute it. The bytes of a field are:
//
//	integer     8 bytes, two's complement, little-endian
//	float64     8 bytes, its IEEE 754 bits, little-endian
//	float32     4 bytes, its IEEE 754 bits, little-endian
//	text        its length in bytes as an integer, then its UTF-8
//	bytes       its length as an integer, then the bytes
//	optional    1 byte, 0 for null, or 1 and then the value
//	list        its length as an integer, then its items
//	digest      its 32 bytes
//
// Each begins with a text that names what is digested and the layout's version.
//
// digester collects the bytes of all fields before it hashes them: fields are short, and a tensor
// is represented by its own digest.
type digester struct {
	fields []byte
	hash   Hash
}

// newDigester begins a SHA-256; domain says what is digested and the layout's version.
func newDigester(domain string) *digester {
	d := &digester{fields: make([]byte, 0, 1024)}
	d.addText(domain)
	return d
}

func (d *digester) addInteger(n int64) {
	d.fields = binary.LittleEndian.AppendUint64(d.fields, uint64(n))
}

// addRaw adds bytes without their length.
func (d *digester) addRaw(b ...byte) { d.fields = append(d.fields, b...) }

func (d *digester) addFloat(x float64) { d.addInteger(int64(math.Float64bits(x))) }

func (d *digester) addFloat32(x float32) {
	d.fields = binary.LittleEndian.AppendUint32(d.fields, math.Float32bits(x))
}

func (d *digester) addText(s string) {
	d.addInteger(int64(len(s)))
	d.fields = append(d.fields, s...)
}

func (d *digester) addOptional(x *float64) {
	if x == nil {
		d.addRaw(0)
		return
	}
	d.addRaw(1)
	d.addFloat(*x)
}

func (d *digester) addIntegers(list []int64) {
	d.addInteger(int64(len(list)))
	for _, n := range list {
		d.addInteger(n)
	}
}

func (d *digester) addFloats32(list []float32) {
	d.addInteger(int64(len(list)))
	for _, x := range list {
		d.addFloat32(x)
	}
}

func addTexts[S ~string](d *digester, list []S) {
	d.addInteger(int64(len(list)))
	for _, s := range list {
		d.addText(string(s))
	}
}

func (d *digester) addBool(b bool) {
	if b {
		d.addInteger(1)
	} else {
		d.addInteger(0)
	}
}

func (d *digester) finish() [32]byte { return d.hash.Sum(d.fields) }

// ComputeScheduleDigest returns the SHA-256, in lower-case hex, over what must be equal in
// a group so that its samples can be compared: the text "meander schedule 1", sigmas
// (list of float32), transitions (list of text), noise_level (float64), solver,
// log_prob_kind, latents_dtype (text), true_cfg_scale (float64), height, width
// (integer), and the number of steps (integer); then of each further setting that is set its name and value (see
// Sampling). See digester for the bytes. Of text it is what TextRequest says.
func (e *Request) ComputeScheduleDigest() string {
	if e.Text != nil {
		return e.Text.scheduleDigest()
	}
	return e.scheduleDigest()
}

// ComputeScheduleDigest returns the digest of the request, from the settings that the trajectory repeats.
func (e *Trajectory) ComputeScheduleDigest() string {
	if e.Text != nil {
		return e.Text.Settings.scheduleDigest()
	}
	return e.scheduleDigest()
}

// CheckSchedule refuses a request with a setting that this version does not know, by its name, and one whose fields
// do not give its schedule digest.
func (e *Request) CheckSchedule() error {
	return checkSchedule(&e.Sampling, e.ScheduleDigest, e.ComputeScheduleDigest())
}

// CheckSchedule is that of a request.
func (e *Trajectory) CheckSchedule() error {
	return checkSchedule(&e.Sampling, e.ScheduleDigest, e.ComputeScheduleDigest())
}

func checkSchedule(s *Sampling, stored, computed string) error {
	if err := s.CheckKnown(); err != nil || stored == computed {
		return err
	}
	return fmt.Errorf("schedule_digest: stored %.16s, the fields give %.16s", stored, computed)
}

// ErrNoContent is returned by ContentDigest for an event that has no content of its own.
var ErrNoContent = errors.New("event has no content digest")

// ContentDigest returns the digest of what a rollout computed, not of where and
// when: two runs with the same seed, prompts and weights give equal digests, whatever
// their run id, retries, batch packing or number of replicas. Left out are the run,
// stream sequences, times and durations, attempts, instance and backend names, how
// tensors travelled (inline, parts or blob), and caller's metadata.
//
// It is defined for a Step and Tokens (by BLAKE3), Trajectory, Reward, Advantage and Batch (by SHA-256); other events
// give ErrNoContent. A digest field or tensor that is not legal is an error.
func ContentDigest(e Event) ([32]byte, error) {
	switch e := e.(type) {
	case StepEvent:
		return e.ContentDigest(BLAKE3)
	case *Trajectory:
		return e.contentDigest()
	case *Reward:
		return e.contentDigest(), nil
	case *Advantage:
		return e.contentDigest(), nil
	case *Batch:
		return e.contentDigest(), nil
	}
	return [32]byte{}, fmt.Errorf("%w: %s", ErrNoContent, e.Type())
}

// ContentDigest covers, after the text "meander step 1": uid, sample_index,
// step_index, num_inference_steps, transition, noise_level, sigma, sigma_next,
// timestep, std_dev_t, noise_std, log_prob, log_prob_kind, log_prob_sum,
// element_count, latents (list of index and tensor), debug (list of name and tensor),
// policy_version, weights_digest and schedule_digest, and of a step of scheduled sampling what
// RolledStep says. A tensor is dtype, shape and
// the digest of its bytes by the same algorithm, inline or in parts. A checkpoint is not in it: what
// a rollout computes does not depend on where it could be gone on from.
func (e *Step) ContentDigest(h Hash) ([32]byte, error) {
	sums, err := e.TensorSums(h)
	if err != nil {
		return [32]byte{}, err
	}
	return e.ContentDigestOf(sums), nil
}

// ContentDigestOf is ContentDigest of a step whose tensors have been digested.
func (e *Step) ContentDigestOf(sums *TensorSums) [32]byte {
	d := newStepDigester("meander step 1", sums)
	d.addText(string(e.UID))
	d.addInteger(e.SampleIndex)
	d.addText(string(e.Stage))
	d.addInteger(e.StepIndex)
	d.addInteger(e.NumInferenceSteps)
	d.addText(e.Transition)
	d.addFloat(e.NoiseLevel)
	d.addFloat32(e.Sigma)
	d.addFloat32(e.SigmaNext)
	d.addFloat32(e.Timestep)
	d.addFloat(e.StdDevT)
	d.addFloat(e.NoiseStd)
	d.addOptional(e.LogProb)
	d.addText(e.LogProbKind)
	d.addOptional(e.LogProbSum)
	d.addInteger(e.ElementCount)
	d.addInteger(int64(len(e.Latents)))
	for i := range e.Latents {
		d.addInteger(e.Latents[i].Index)
		d.addTensorSum(&e.Latents[i].Tensor, sums.list[i])
	}
	d.addInteger(int64(len(e.Debug)))
	for i := range e.Debug {
		d.addText(e.Debug[i].Name)
		d.addTensorSum(&e.Debug[i].Tensor, sums.list[len(sums.list)-len(e.Debug)+i])
	}
	d.addInteger(e.PolicyVersion)
	d.addText(e.WeightsDigest)
	d.addText(e.ScheduleDigest)
	if e.ScheduledSampling != nil {
		e.ScheduledSampling.addTo(d)
	}
	return d.finish()
}

// TensorSums are the digests of the bytes of an event's tensors, in the order of its Tensors. They are made once for
// all digests that tensors are in, which are then by the same algorithm.
type TensorSums struct {
	hash Hash
	list [][32]byte
}

// newStepDigester begins a digest by the algorithm of sums.
func newStepDigester(domain string, sums *TensorSums) *digester {
	d := newDigester(domain)
	d.hash = sums.hash
	return d
}

// TensorSums digests the tensors by h. A digest in the place of one that is not legal, or by another algorithm, is an
// error: such a tensor must be loaded first.
func (e *Step) TensorSums(h Hash) (*TensorSums, error) { return sumTensors(h, e.Tensors()) }

// sumTensors returns the digest of the bytes of each tensor, in order.
func sumTensors(h Hash, tensors []*Tensor) (*TensorSums, error) {
	sums := &TensorSums{h, make([][32]byte, len(tensors))}
	for i, t := range tensors {
		var err error
		if sums.list[i], err = t.sum(h); err != nil {
			return nil, fmt.Errorf("tensor %d of %d: %w", i+1, len(tensors), err)
		}
	}
	return sums, nil
}

// Text returns the digest of tensor i as events carry it.
func (s *TensorSums) Text(i int) string { return s.hash.Text(s.list[i]) }

// CheckpointSum returns the digest of the checkpoint; zeros if there is none.
func (e *Step) CheckpointSum(sums *TensorSums) (sum [32]byte) {
	if e.Checkpoint != nil {
		sum = sums.list[len(e.Latents)]
	}
	return sum
}

// sum returns the digest of the tensor's bytes by h, computed from its data or taken from its reference.
func (t *Tensor) sum(h Hash) ([32]byte, error) {
	switch {
	case t.Ref != nil:
		return h.sumOf("tensor.ref.digest", t.Ref.Digest)
	case t.Parts != nil:
		return h.sumOf("tensor.parts.digest", t.Parts.Digest)
	}
	return h.Sum(t.Data), nil
}

func (d *digester) addTensor(t *Tensor) error {
	sum, err := t.sum(SHA256)
	d.addTensorSum(t, sum)
	return err
}

// addTensorSum adds a tensor, given the digest of its bytes.
func (d *digester) addTensorSum(t *Tensor, sum [32]byte) {
	d.addText(t.DType)
	d.addIntegers(t.Shape)
	d.addRaw(sum[:]...)
}

// addHex adds a digest that an event carries as text.
func (d *digester) addHex(field, s string) error {
	sum, err := SHA256.sumOf(field, s)
	d.addRaw(sum[:]...)
	return err
}

// StepsDigest returns the value of Trajectory.ContentDigest: the digest by h of the
// text "meander steps 1" and the list of the steps' content digests by h, in step order.
func StepsDigest(h Hash, steps [][32]byte) string {
	d := newStepDigester("meander steps 1", &TensorSums{hash: h})
	d.addInteger(int64(len(steps)))
	for i := range steps {
		d.addRaw(steps[i][:]...)
	}
	return h.Text(d.finish())
}

// contentDigest covers, after the text "meander trajectory 1": uid, sample_index,
// group_size, stop_reason, prompt, negative_prompt, height, width, true_cfg_scale,
// cfg_rule, sample_seed, noise_seed, sigmas, timesteps, transitions, log_probs,
// log_prob_kind, noise_level, solver, latent_step_indices, latents_shape,
// latents_dtype, the steps' content_digest (text), the image's format, width, height
// and pixel digest where it has one, conditioning, schedule_digest, weights_digest,
// policy_version_min and policy_version_max; then, each only where it is there, the text
// "start" with step_index and latents or, of a branch, the text "branch", uid, sample_index and
// step_index, or the text "data" and the tensor or the image's digest, the text "stop" with step_index
// and decode (1 or 0), what ScheduledSample and Rolled say, the text "step_seeds" with a list of step_index
// and seed, the text "truncated_tokens" with the
// number of tokens that were cut off, the text "video" with the video's format, frames, height, width, fps (float64)
// and pixel digest, what TextResult says or, of an image that a server drew, the text "drawn",
// the server's name and its values; and of each further setting its name and value (see Sampling).
func (e *Trajectory) contentDigest() ([32]byte, error) {
	d := newDigester("meander trajectory 1")
	d.addText(string(e.UID))
	d.addInteger(e.SampleIndex)
	d.addText(string(e.Stage))
	d.addInteger(e.GroupSize)
	d.addText(e.StopReason)
	d.addText(e.Prompt)
	d.addText(e.NegativePrompt)
	d.addInteger(e.Height)
	d.addInteger(e.Width)
	d.addFloat(e.TrueCFGScale)
	d.addText(e.CFGRule)
	d.addInteger(int64(e.SampleSeed))
	d.addInteger(int64(e.NoiseSeed))
	d.addFloats32(e.Sigmas)
	d.addFloats32(e.Timesteps)
	addTexts(d, e.Transitions)
	d.addInteger(int64(len(e.LogProbs)))
	for _, p := range e.LogProbs {
		d.addOptional(p)
	}
	d.addText(e.LogProbKind)
	d.addFloat(e.NoiseLevel)
	d.addText(e.Solver)
	d.addIntegers(e.LatentStepIndices)
	d.addIntegers(e.LatentsShape)
	d.addText(e.LatentsDType)
	d.addText(e.ContentDigest)
	if err := e.Image.addTo(d); err != nil {
		return [32]byte{}, err
	}
	d.addInteger(int64(len(e.Conditioning)))
	for i := range e.Conditioning {
		d.addText(e.Conditioning[i].Name)
		if err := d.addTensor(&e.Conditioning[i].Tensor); err != nil {
			return [32]byte{}, fmt.Errorf("conditioning[%d]: %w", i, err)
		}
	}
	d.addText(e.ScheduleDigest)
	d.addText(e.WeightsDigest)
	d.addInteger(e.PolicyVersionMin)
	d.addInteger(e.PolicyVersionMax)
	if e.Start != nil {
		if err := e.Start.addTo(d); err != nil {
			return [32]byte{}, fmt.Errorf("start: %w", err)
		}
	}
	if e.Stop != nil {
		d.addText("stop")
		d.addInteger(e.Stop.StepIndex)
		d.addBool(e.Stop.Decode)
	}
	if e.ScheduledSampling != nil {
		e.ScheduledSampling.addTo(d)
	}
	if e.Rolled != nil {
		if err := e.Rolled.addTo(d); err != nil {
			return [32]byte{}, fmt.Errorf("rolled: %w", err)
		}
	}
	d.addSeeds(e.StepSeeds)
	if e.TruncatedTokens > 0 {
		d.addText("truncated_tokens")
		d.addInteger(e.TruncatedTokens)
	}
	if err := e.Video.addTo(d); err != nil {
		return [32]byte{}, err
	}
	if e.Text == nil {
		e.Drawn.addTo(d)
	} else if err := e.Text.addTo(d, e.DrawnBy()); err != nil {
		return [32]byte{}, fmt.Errorf("text: %w", err)
	}
	d.addLaterSettings(&e.Sampling)
	return d.finish(), nil
}

// contentDigest covers, after the text "meander reward 1": uid, sample_index,
// group_size, status, reward, scores (list of name, version, weight, status, value),
// trained_steps, schedule_digest, policy_version_min and policy_version_max; of a text then tokens.
func (e *Reward) contentDigest() [32]byte {
	d := newDigester("meander reward 1")
	d.addText(string(e.UID))
	d.addInteger(e.SampleIndex)
	d.addInteger(e.GroupSize)
	d.addText(e.Status)
	d.addOptional(e.Reward)
	d.addInteger(int64(len(e.Scores)))
	for i := range e.Scores {
		s := &e.Scores[i]
		d.addText(s.Name)
		d.addText(s.Version)
		d.addFloat(s.Weight)
		d.addText(s.Status)
		d.addOptional(s.Value)
	}
	d.addInteger(e.TrainedSteps)
	d.addText(e.ScheduleDigest)
	d.addInteger(e.PolicyVersionMin)
	d.addInteger(e.PolicyVersionMax)
	if e.Tokens != nil {
		d.addInteger(*e.Tokens)
	}
	return d.finish()
}

// contentDigest covers, after the text "meander advantage 1": uid, batch, status,
// group_size, members (list of sample_index, reward, advantage, status), mean, std,
// scale, std_basis, estimator, epsilon, trained_steps, schedule_digest,
// policy_version_min and policy_version_max; then, each only where it is there, mode,
// adv_clip_max, gamma, singleton, each member's step_advantages, refilled_by, and of a tree
// branch_scope and branches (list of step_index, mean, std, children, a list of sample_index,
// leaves, reward, advantage).
func (e *Advantage) contentDigest() [32]byte {
	d := newDigester("meander advantage 1")
	d.addText(string(e.UID))
	d.addText(e.Batch)
	d.addText(e.Status)
	d.addInteger(e.GroupSize)
	d.addInteger(int64(len(e.Members)))
	for i := range e.Members {
		m := &e.Members[i]
		d.addInteger(m.SampleIndex)
		d.addOptional(m.Reward)
		d.addOptional(m.Advantage)
		d.addText(m.Status)
	}
	d.addOptional(e.Mean)
	d.addOptional(e.Std)
	d.addText(e.Scale)
	d.addText(e.StdBasis)
	d.addText(e.Estimator)
	d.addFloat(e.Epsilon)
	d.addInteger(e.TrainedSteps)
	d.addText(e.ScheduleDigest)
	d.addInteger(e.PolicyVersionMin)
	d.addInteger(e.PolicyVersionMax)
	if e.Mode != "" {
		d.addText(e.Mode)
	}
	if e.AdvClipMax != nil {
		d.addOptional(e.AdvClipMax)
	}
	if e.Gamma != nil {
		d.addOptional(e.Gamma)
	}
	if e.Singleton != "" {
		d.addText(e.Singleton)
	}
	for i := range e.Members {
		for _, a := range e.Members[i].StepAdvantages {
			d.addFloat(a)
		}
	}
	if e.RefilledBy != "" {
		d.addText(string(e.RefilledBy))
	}
	d.addBranches(e.BranchScope, e.Branches)
	return d.finish()
}

// addTo covers the image as an optional value: format, width, height and the digest of its pixels.
func (im *Image) addTo(d *digester) error {
	if im == nil {
		d.addRaw(0)
		return nil
	}
	d.addRaw(1)
	d.addText(im.Format)
	d.addInteger(im.Width)
	d.addInteger(im.Height)
	return d.addHex("image.digest", im.Digest)
}

// addTo covers what contentDigest says of a video; nothing if there is none.
func (v *Video) addTo(d *digester) error {
	if v == nil {
		return nil
	}
	d.addText("video")
	d.addText(v.Format)
	d.addInteger(v.Frames)
	d.addInteger(v.Height)
	d.addInteger(v.Width)
	d.addFloat(v.FPS)
	return d.addHex("video.digest", v.Digest)
}

// addSeeds adds the seeds of steps; nothing if there are none.
func (d *digester) addSeeds(list []StepSeed) {
	if len(list) == 0 {
		return
	}
	d.addText("step_seeds")
	d.addInteger(int64(len(list)))
	for _, s := range list {
		d.addInteger(s.StepIndex)
		d.addInteger(int64(s.Seed))
	}
}

// addBranches adds the branch points of a tree; nothing if the group is no tree.
func (d *digester) addBranches(scope string, list []BranchGroup) {
	if scope == "" {
		return
	}
	d.addText(scope)
	d.addInteger(int64(len(list)))
	for _, b := range list {
		d.addInteger(b.StepIndex)
		d.addOptional(b.Mean)
		d.addOptional(b.Std)
		d.addInteger(int64(len(b.Children)))
		for _, c := range b.Children {
			d.addInteger(c.SampleIndex)
			d.addInteger(c.Leaves)
			d.addOptional(c.Reward)
			d.addOptional(c.Advantage)
		}
	}
}

// contentDigest covers, after the text "meander batch 1": batch, groups, uids,
// samples, mean, std and std_basis; then, where there is a status, status, expected,
// refills and dropped. Metrics hold times, so they are left out.
func (e *Batch) contentDigest() [32]byte {
	d := newDigester("meander batch 1")
	d.addText(e.Batch)
	d.addInteger(e.Groups)
	addTexts(d, e.UIDs)
	d.addInteger(e.Samples)
	d.addOptional(e.Mean)
	d.addOptional(e.Std)
	d.addText(e.StdBasis)
	if e.Status != "" {
		d.addText(e.Status)
		d.addInteger(e.Expected)
		d.addInteger(e.Refills)
		addTexts(d, e.Dropped)
	}
	return d.finish()
}
