package schemas

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Policy is weights with their version, and what the lane that serves them takes. The current one of
// each lane is in the key-value bucket PolicyBucket; MDR_POLICIES keeps the history, each
// version after the one that it follows. The first of a lane is what a sampler began with; those
// after it are pushed, and are the same but for the weights.
type Policy struct {
	V    int64 `msgpack:"v"`
	Lane Lane  `msgpack:"lane" form:"token"`
	// Tenant is the owner of the weights. Each has versions of its own, from 0 on.
	Tenant Tenant `msgpack:"tenant" form:"token" of:"version"`
	// Model and Family name the network; PolicyVersion counts weight updates.
	Model         string `msgpack:"model" size:"1..MaxName"`
	Family        string `msgpack:"family" size:"0..MaxName"`
	PolicyVersion int64  `msgpack:"policy_version" range:"0.." of:"version"`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName" of:"version"`
	// Source is the name and commit of the checkpoint on the Hugging Face Hub, ORG/NAME@COMMIT; empty: not known.
	Source string `msgpack:"source,omitempty" size:"0..MaxName"`
	// BaseDigest names the checkpoint of the lane: the weights without what Adapter adds. Samplers
	// of another checkpoint refuse the policy.
	BaseDigest string `msgpack:"base_digest,omitempty" size:"0..MaxName"`
	// Adapter is added to the checkpoint; absent: nothing is.
	Adapter *PolicyAdapter `msgpack:"adapter,omitempty" of:"version"`
	// Weights are the files of a whole transformer (safetensors) in place of the checkpoint's; none: the checkpoint's
	// own.
	Weights []WeightsFile `msgpack:"weights,omitempty" size:"0..MaxPolicyFiles" of:"version"`
	// Tensors is the table of what Weights must have: JSON, of each tensor its name and shape; absent: the
	// model takes no others.
	Tensors *Ref `msgpack:"tensors,omitempty"`
	// Modules is the table of what adapters can change: JSON, of each projection its name and the
	// shape [n, k] of its weight; absent: the model takes no adapters.
	Modules *Ref `msgpack:"modules,omitempty"`
	// Parent is the version that it follows, Rollback the one whose weights it has again.
	Parent   *int64 `msgpack:"parent,omitempty" range:"0.." of:"version"`
	Rollback *int64 `msgpack:"rollback,omitempty" range:"0.." of:"version"`
	// Rule says what becomes of samples that have begun: finish (they end on the weights that they
	// began with), switch (the next step is on the new ones; each step says which) or restart (they
	// begin again). Empty: finish.
	Rule string `msgpack:"rule,omitempty" enum:"SwapRules?" of:"version"`
	// Epoch counts the trainers that took the lane for themselves, one after the other: one that takes it announces the
	// version again, with the next epoch. What was made under an older one is refused. 0: none has taken it.
	Epoch int64 `msgpack:"epoch,omitempty" range:"0.." of:"version"`
	// By is who pushed it, empty for what a sampler began with; Note is for people.
	By   string `msgpack:"by,omitempty" size:"0..MaxName" of:"version"`
	Note string `msgpack:"note,omitempty" size:"0..MaxText" of:"version"`
	// Text is what a lane of a language model takes; absent: it makes images. What is an image's, from SchedulerConfig
	// to MaxPixels, is empty beside it.
	Text *TextPolicy `msgpack:"text,omitempty"`
	// Engine makes the images; absent: the sampler does. Of texts it is in Text.
	Engine *Engine `msgpack:"engine,omitempty"`
	// EngineMix says that the samplers also finish groups that another engine has begun: a server of another kind, or a
	// server in place of a sampler, or the other way round. Else such groups wait for an engine of the kind.
	EngineMix bool `msgpack:"engine_mix,omitempty"`
	// SchedulerConfig is the model's scheduler_config.json, as in the diffusers layout.
	SchedulerConfig []byte `msgpack:"scheduler_config" size:"0..MaxSchedulerConfig"`
	// Pipeline says what a pipeline takes that computes as a whole, with guidance inside, as JSON: its class, its
	// conditions and arguments by name and type. Empty: the model takes texts alone.
	Pipeline []byte `msgpack:"pipeline,omitempty" size:"0..MaxSchedulerConfig"`
	// Grid names the sigmas before the scheduler shifts them: linspace (T points from 1 to 1/T), linspace_torch (the
	// same as torch computes them in float32), scheduler (as FlowMatchEulerDiscreteScheduler chooses where the pipeline
	// gives it none), uni_flow (as UniPCMultistepScheduler with use_flow_sigmas), diffusion (of models that predict
	// epsilon, v or the sample: b/(a+b) of the scheduler's own timesteps, where states are (a x0 + b eps) / (a+b)) or
	// pipeline (Pipeline lists them, shifted). Empty: linspace.
	Grid string `msgpack:"grid,omitempty" enum:"Grids?"`
	// Mu says how the shift of a scheduler with use_dynamic_shifting is found: linear in the number of latent tokens,
	// none (such a scheduler is refused), flux2 (from tokens and steps) or constant (MuConstant). Empty: linear.
	Mu string `msgpack:"mu,omitempty" enum:"MuRules?"`
	// MuConstant is the logarithm of the shift where Mu is constant, whatever the size of the image.
	MuConstant float64 `msgpack:"mu_constant,omitempty" range:"-MaxMu..MaxMu"`
	// LatentChannels is C of the packed latents [S, C]; a token covers a square, of which
	// PixelsPerToken is the side in pixels.
	LatentChannels int64 `msgpack:"latent_channels" range:"0..MaxLatentChannels"`
	PixelsPerToken int64 `msgpack:"pixels_per_token" range:"0..MaxPixelsPerToken"`
	// Height and Width in pixels, NumInferenceSteps and TrueCFGScale are for prompts that leave
	// them out.
	Height            int64   `msgpack:"height" range:"0..MaxSide"`
	Width             int64   `msgpack:"width" range:"0..MaxSide"`
	NumInferenceSteps int64   `msgpack:"num_inference_steps" range:"0..MaxSteps"`
	TrueCFGScale      float64 `msgpack:"true_cfg_scale" range:"0..MaxCFGScale"`
	// LatentsDType is the type that states are rounded to of prompts that leave it out: that of a network which
	// computes in it and so reads no more of them. Empty: F32.
	LatentsDType string `msgpack:"latents_dtype,omitempty" enum:"LatentsDTypes?"`
	// BoundaryRatio is the noise level below which a second network computes, as in diffusers; 0: the model has one.
	BoundaryRatio float64 `msgpack:"boundary_ratio,omitempty" range:"0..1"`
	// Frames is the number of frames of a video for prompts that leave it out, MaxFrames the most that the lane makes;
	// 0: it makes images.
	Frames    int64 `msgpack:"frames,omitempty" range:"0..MaxFrames"`
	MaxFrames int64 `msgpack:"max_frames,omitempty" range:"0..MaxFrames"`
	// FramesPerToken is how many frames a token covers, after the first, which covers one: a video of F frames has
	// 1 + (F-1) / FramesPerToken tokens for each square of PixelsPerToken. 0: 1.
	FramesPerToken int64 `msgpack:"frames_per_token,omitempty" range:"0..MaxFrames"`
	// FPS is how many frames of a video are shown in a second.
	FPS float64 `msgpack:"fps,omitempty" range:"0..MaxFPS"`
	// Guidance is the guidance input of the network for prompts that leave it out; 0: the network has none.
	Guidance float64 `msgpack:"guidance,omitempty" range:"0..MaxCFGScale"`
	// NegativePrompt is what guidance leads away from where a prompt does not say.
	NegativePrompt string `msgpack:"negative_prompt,omitempty" size:"0..MaxPromptBytes"`
	// Prompts is how many texts a prompt may have: prompt, prompt_2 and prompt_3. 0: one.
	Prompts int64 `msgpack:"prompts,omitempty" range:"0..3"`
	// ConditioningBytes is the most that the conditioning of one text takes, ConditioningTokenBytes what
	// one of its tokens does.
	ConditioningBytes      int64 `msgpack:"conditioning_bytes,omitempty" range:"0..MaxBlobBytes"`
	ConditioningTokenBytes int64 `msgpack:"conditioning_token_bytes,omitempty" range:"0..MaxBlobBytes"`
	// MaxPixels is the largest product of height and width that the lane makes, of each frame of a video.
	MaxPixels int64 `msgpack:"max_pixels" range:"0..MaxSide*MaxSide"`
	// Announced is when it was published, Unix nanoseconds.
	Announced int64 `msgpack:"announced" range:"0.." of:"version"`
	// Reward lists the reward functions of prompts that name none; empty: the service's.
	Reward []string `msgpack:"reward,omitempty" size:"0..MaxRewards" form:"reward_name"`
}

// SameLane reports whether two policies say the same of their lane: all but what each version of the weights has of its
// own (the tag of). It compares encodings, which a stored policy and the one it was made of have in common.
func (e *Policy) SameLane(other *Policy) bool {
	encode := func(p *Policy) ([]byte, error) {
		c := *p
		c.clearVersion()
		return Encode(&c)
	}
	a, err1 := encode(e)
	b, err2 := encode(other)
	return err1 == nil && err2 == nil && bytes.Equal(a, b)
}

// Founding returns the version 0 of a tenant of the policy's lane: the checkpoint.
func (e *Policy) Founding(tenant Tenant) *Policy {
	p := *e
	p.clearVersion()
	p.Tenant, p.WeightsDigest, p.Announced = tenant, p.BaseDigest, time.Now().UnixNano()
	return &p
}

// clearVersion leaves what a policy says of its lane.
func (e *Policy) clearVersion() {
	v := reflect.ValueOf(e).Elem()
	for _, f := range Fields(v.Type()) {
		if f.Of == OfVersion {
			f.In(v).SetZero()
		}
	}
}

// IsCheckpoint reports whether the policy is the checkpoint without an adapter or other weights.
func (e *Policy) IsCheckpoint() bool { return e.Adapter == nil && len(e.Weights) == 0 }

// Files returns the files of the adapter or of the whole transformer.
func (e *Policy) Files() []WeightsFile {
	if e.Adapter != nil {
		return append(slices.Clone(e.Weights), FileOfBlob(e.Adapter.File))
	}
	return e.Weights
}

// Checkpoint returns the BaseDigest that prompts and requests must name: that of the policy or, if a server draws the
// samples, whose weights are not known here, its kind (ServedBy).
func (e *Policy) Checkpoint() string {
	if by := e.DrawnBy(); by != nil {
		return ServedBy(by.Name)
	}
	return e.BaseDigest
}

// servedBy begins the digests of what servers draw.
const servedBy = "served by "

// ServedBy returns what stands for the digest of the weights of a kind of server.
func ServedBy(engine string) string { return servedBy + engine }

// Continues reports whether the policy is the checkpoint of another one under another engine, see EngineMix: samples of
// both count as samples of one version.
func (e *Policy) Continues(other *Policy) bool {
	return e.EngineMix && e.IsCheckpoint() && other.IsCheckpoint() && e.Checkpoint() != other.Checkpoint() &&
		(e.DrawnBy() != nil || other.DrawnBy() != nil)
}

// IsServed reports whether a digest is one of ServedBy.
func IsServed(digest string) bool { return strings.HasPrefix(digest, servedBy) }

// Makes reports whether samplers of the policy make samples of groups that name the checkpoint base; empty: of any.
// mixed says that the group was begun by another engine, see EngineMix.
func (e *Policy) Makes(base string) (makes, mixed bool) {
	if base == "" || base == e.Checkpoint() {
		return true, false
	}
	mixed = e.EngineMix && (e.DrawnBy() != nil || IsServed(base))
	return mixed, mixed
}

// DrawnBy returns the server that draws the samples of the lane; nil if its samplers do.
func (e *Policy) DrawnBy() *Engine {
	if e.Text != nil {
		return e.Text.Engine
	}
	return e.Engine
}

// StateElements returns the number of elements of a state, S x C, for samples of that size in pixels; frames is 0 or 1
// for images.
func (e *Policy) StateElements(frames, height, width int64) int64 {
	edge, covered := max(1, e.PixelsPerToken), max(1, e.FramesPerToken)
	return (1 + (max(1, frames)-1)/covered) * (height / edge) * (width / edge) * e.LatentChannels
}

// PolicyAdapter is a LoRA (low-rank adaptation) in PEFT's form.
type PolicyAdapter struct {
	// Source is that of Policy, of the adapter.
	Source string `msgpack:"source,omitempty" size:"0..MaxName"`
	// File is adapter_model.safetensors, in the object store.
	File Ref `msgpack:"file"`
	// Config is adapter_config.json; empty: the file says it all.
	Config []byte `msgpack:"config" size:"0..MaxAdapterConfig"`
	// Scale multiplies its changes; it was trained at 1.
	Scale float64 `msgpack:"scale" range:"-MaxAdapterScale..MaxAdapterScale"`
}

// WeightsFile is a file of a whole transformer: a blob in the object store, or a file in the folder that those who push
// share with the samplers.
type WeightsFile struct {
	// Bucket is the object store bucket of a blob; absent: it is the file at Path.
	Bucket string `msgpack:"bucket,omitempty" form:"token"`
	// Digest is the sha-256 of the bytes in lower-case hex; it is also the name of a blob.
	Digest string `msgpack:"digest" form:"sha256"`
	// Size is the length in bytes.
	Size int64 `msgpack:"size" range:"1..MaxWeightsFile"`
	// Path leads to the file from the shared folder on, which each sampler may have in another place (--weights-dir):
	// its elements with slashes between them, none of them "." or "..".
	Path string `msgpack:"path,omitempty" form:"path"`
}

// Blob returns the reference to the blob.
func (e *WeightsFile) Blob() Ref { return Ref{Bucket: e.Bucket, Digest: e.Digest, Size: e.Size} }

// FileOfBlob returns a blob as a file of weights.
func FileOfBlob(ref Ref) WeightsFile {
	return WeightsFile{Bucket: ref.Bucket, Digest: ref.Digest, Size: ref.Size}
}

// checkRules checks that the file is in one place, and that a blob is one that can be read.
func (e *WeightsFile) checkRules(f *faults) {
	if e.Bucket != "" && e.Bucket != BlobBucket {
		f.add("bucket", quote(e.Bucket), "must be "+BlobBucket)
	}
	if e.Bucket != "" && e.Size > MaxBlobBytes {
		f.add("size", strconv.FormatInt(e.Size, 10), fmt.Sprintf("must be at most %d for a blob", int64(MaxBlobBytes)))
	}
	if (e.Bucket == "") == (e.Path == "") {
		f.add("path", quote(e.Path), "must be given without bucket, and only then")
	}
}

// Rules of a policy for samples that have begun.
const (
	SwapFinish  = "finish"
	SwapSwitch  = "switch"
	SwapRestart = "restart"
)

// Applied is a sampler's answer to a policy.
type Applied struct {
	V      int64  `msgpack:"v"`
	Lane   Lane   `msgpack:"lane" form:"token"`
	Tenant Tenant `msgpack:"tenant" form:"token"`
	// Instance is the sampler, as it is named in its Presence.
	Instance string `msgpack:"instance" form:"token"`
	// PolicyVersion is the version that was to be taken over.
	PolicyVersion int64 `msgpack:"policy_version" range:"0.."`
	// State is applied: samples that begin from now on are made with it; or refused: Error says why,
	// and the sampler goes on with Serving.
	State string `msgpack:"state" enum:"AppliedStates"`
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	// Serving is the version that is in use from now on, WeightsDigest names its weights.
	Serving       int64  `msgpack:"serving" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	// Canary is what the weights in use make of a fixed input; absent: it was not tried.
	Canary *Canary `msgpack:"canary,omitempty"`
	// Backend is what computes; Canaries of one backend can be compared.
	Backend string `msgpack:"backend" size:"0..MaxName"`
	// LoadNS is the time from the news of the version to this answer, in nanoseconds.
	LoadNS int64 `msgpack:"load_ns" range:"0.."`
	// At is when, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// Canary is the velocity that weights give at a fixed input: updates that change nothing are seen by it.
type Canary struct {
	// Digest is the sha-256 of its elements, float32 little-endian, in lower-case hex.
	Digest string `msgpack:"digest" form:"sha256"`
	// Norm is its Euclidean length.
	Norm float64 `msgpack:"norm" range:"0.."`
}

// States of Applied.
const (
	AppliedApplied = "applied"
	AppliedRefused = "refused"
)

// Validate returns all faults of the policy, joined. That the scheduler configuration makes
// sense is for the services that use it; here it must be a JSON object.
func (e *Policy) Validate() error { return CheckFields(e) }

// checkRules checks that image settings are there exactly for a lane of images, that JSON fields are objects, and that
// an adapter or weights name the checkpoint that they are for.
func (e *Policy) checkRules(f *faults) {
	for _, of := range []struct {
		field string
		n     int64
		most  int64
	}{
		{"latent_channels", e.LatentChannels, MaxLatentChannels},
		{"pixels_per_token", e.PixelsPerToken, MaxPixelsPerToken},
		{"height", e.Height, MaxSide},
		{"width", e.Width, MaxSide},
		{"num_inference_steps", e.NumInferenceSteps, MaxSteps},
		{"max_pixels", e.MaxPixels, MaxSide * MaxSide},
	} {
		switch {
		case e.Text == nil && of.n == 0:
			f.checkWithin(of.field, 0, 1, of.most)
		case e.Text != nil && of.n != 0:
			f.checkWithin(of.field, of.n, 0, 0)
		}
	}
	if (e.MaxFrames > 1) != (e.FPS > 0) {
		f.add("fps", strconv.FormatFloat(e.FPS, 'g', -1, 64), "must be above 0 where max_frames is above 1, else 0")
	}
	if e.MaxFrames <= 1 && e.Frames > 1 || e.MaxFrames > 1 && e.Frames > e.MaxFrames {
		f.checkWithin("frames", e.Frames, 0, max(e.MaxFrames, 1))
	}
	if e.MuConstant != 0 && e.Mu != MuConstant {
		f.add("mu_constant", strconv.FormatFloat(e.MuConstant, 'g', -1, 64), "must be 0 unless mu is constant")
	}
	if e.Text != nil && e.Text.Engine != nil {
		f.requireOneOf("text.engine.values", e.Text.Engine.Values, EngineValues)
	}
	if e.Text != nil && e.Engine != nil {
		f.add("engine", quote(e.Engine.Name), "must be absent beside text, which has its own")
	}
	object := func(field string, data []byte, most int) {
		if n := len(data); n > 0 && n <= most {
			var object map[string]json.RawMessage
			if json.Unmarshal(data, &object) != nil || object == nil {
				f.add(field, strconv.Itoa(n)+" bytes", "must be a JSON object")
			}
		}
	}
	object("scheduler_config", e.SchedulerConfig, MaxSchedulerConfig)
	if e.Adapter != nil {
		object("adapter.config", e.Adapter.Config, MaxAdapterConfig)
		if e.BaseDigest == "" {
			f.add("base_digest", "empty", "must name the checkpoint that the adapter is for")
		}
	}
	if len(e.Weights) > 0 {
		if e.Adapter != nil {
			f.add("weights", strconv.Itoa(len(e.Weights))+" files",
				"must be absent beside an adapter, which is for the checkpoint's")
		}
		if e.BaseDigest == "" {
			f.add("base_digest", "empty", "must name the checkpoint whose transformer is replaced")
		}
	}
	if e.Parent != nil && *e.Parent >= e.PolicyVersion {
		f.checkWithin("parent", *e.Parent, 0, e.PolicyVersion-1)
	}
	if e.Rollback != nil && *e.Rollback >= e.PolicyVersion {
		f.checkWithin("rollback", *e.Rollback, 0, e.PolicyVersion-1)
	}
}

// checkRules checks error and serving against the state.
func (e *Applied) checkRules(f *faults) {
	switch e.State {
	case AppliedRefused:
		f.requireText("error", e.Error)
	case AppliedApplied:
		if e.Error != "" {
			f.add("error", quote(e.Error), "must be empty when applied")
		}
		if e.Serving != e.PolicyVersion {
			f.add("serving", strconv.FormatInt(e.Serving, 10), "must be the policy_version when applied")
		}
	}
}
