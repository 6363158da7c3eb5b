package schemas_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// sample is one legal event; its name is also that of its golden files.
type sample struct {
	name  string
	event schemas.Event
}

// samples are legal events of every type, from nearly empty to every field set.
func samples(t testing.TB) []sample {
	t.Helper()
	return slices.Concat(requestSamples(t), networkSamples(t), guidanceSamples(t), diffusionSamples(t),
		rolloutSamples(t),
		resultSamples(t),
		groupSamples(t), presenceSamples(), policySamples(t),
		controlSamples(), scheduledSamples(t), treeSamples(t), textSamples(t), engineSamples(t),
		hashSamples(t), stagesSamples(t), scoreSamples(t))
}

func requestSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"prompt-minimal", &schemas.Prompt{Prompt: "a blue sign that says \"4071\""}},
		{"prompt-full", fullPrompt(t)},
		{"prompt-empty-lists", &schemas.Prompt{
			Prompt: "x", Reward: []schemas.RewardSpec{},
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{}, ReturnStepIndices: []int64{}, Debug: []string{}}},
		}},
		{"prompt-window", &schemas.Prompt{
			Prompt: "日本語 and emoji 🌊",
			ImageSettings: schemas.ImageSettings{
				NumInferenceSteps: new(int64(10)),
				Rollout: schemas.Rollout{SDEType: "cps", SDEWindow: &schemas.SDEWindow{
					Size: 2, Range: []int64{0, 5}, Strategy: "progressive", Iteration: 3, ItersPerGroup: 25, Seed: new(int64(7)),
				}},
			},
		}},
		{"prompt-zeros", &schemas.Prompt{
			Prompt: "explicit zeros are not defaults",
			ImageSettings: schemas.ImageSettings{
				NegativePrompt: new(""), TrueCFGScale: new(0.0),
				Rollout: schemas.Rollout{SDEType: "ode", NoiseLevel: new(0.0)},
			},
			Seed:       new(int64(0)),
			Routing:    schemas.Routing{Priority: new(int64(0)), MinPolicyVersion: new(int64(0))},
			Validation: true,
			Reward:     []schemas.RewardSpec{{Name: "ocr", Weight: new(1.0), Required: new(false)}, {Name: "length", Weight: new(0.0)}},
		}},
		{"prompt-start-latents", &schemas.Prompt{Prompt: "x", GroupSize: new(int64(2)), ImageSettings: schemas.ImageSettings{Start: &schemas.Start{Latents: states(true)}}}},
		{"prompt-segment", &schemas.Prompt{
			Prompt: "x", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{Start: &schemas.Start{Latents: states(true), StepIndex: new(int64(3))}, Stop: &schemas.Stop{StepIndex: new(int64(5)), Decode: true}},
		}},
		{"prompt-segment-sigma", &schemas.Prompt{
			Prompt: "x", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{Start: &schemas.Start{Latents: states(false), Sigma: new(0.75)}, Stop: &schemas.Stop{Sigma: new(0.25)}},
		}},
		{"prompt-branch", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Start: &schemas.Start{Branch: &schemas.Branch{Run: "run-0", UID: "p3", SampleIndex: 2, StepIndex: 5}}}}},
		{"request-branch", func() *schemas.Request {
			r := fullRequest(t)
			from := &schemas.Branch{Run: "run-0", UID: "p3", SampleIndex: 2, StepIndex: 1}
			r.Start, r.ReturnStepIndices = &schemas.SegmentStart{StepIndex: 1, Branch: from}, []int64{1, 2}
			return r
		}()},
		{"group-accepted", &schemas.GroupRecord{
			Run: "run-1", UID: "p17", GroupSize: 8, PromptDigest: digestOf("prompt"), Prompt: "a blue sign that says \"4071\"", NegativePrompt: " ", Lane: "tiny",
			SampleSeed: math.MaxUint64, NoiseSeed: 7, ScheduleDigest: digestOf("schedule"), Group: policyGroup(t),
		}},
		{"group-refused", &schemas.GroupRecord{
			Run: "run-1", UID: "p18", GroupSize: 1, Error: "height: 100; must be a multiple of 16", Group: schemas.Group{Batch: "p18"},
		}},
		{"request-full", fullRequest(t)},
		{"prompt-checkpoint", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{CheckpointEvery: new(int64(5))}}}},
		{"request-checkpoint", func() *schemas.Request {
			r := fullRequest(t)
			r.ReturnStepIndices, r.CheckpointStepIndices = []int64{}, []int64{1, 3}
			return r
		}()},
		{"request-segment", func() *schemas.Request {
			r := fullRequest(t)
			r.GroupSize, r.SampleIndex = 2, 1
			r.Start, r.Stop = segment(1, 3)
			r.ReturnStepIndices = []int64{1, 2, 3}
			return r
		}()},
		{"prompt-truncate", &schemas.Prompt{Prompt: strings.Repeat("very ", 600) + "long", ImageSettings: schemas.ImageSettings{TruncatePrompt: true}}},
		{"request-truncate", func() *schemas.Request {
			r := fullRequest(t)
			r.TruncatePrompt = true
			return r
		}()},
		{"trajectory-truncated", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.TruncatePrompt, e.TruncatedTokens = true, 107
			return e
		}()},
		{"request-extremes", extremeRequest(t)},
	}
}

func rolloutSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"step-sde", sdeStep()},
		{"step-ode", &schemas.Step{
			Stage: schemas.StageMain,
			Run:   "run-1", UID: "p17", SampleIndex: 0, Attempt: "a1", StepIndex: 0, NumInferenceSteps: 2,
			Transition: "ode", Sigma: 1, SigmaNext: 0.5, Timestep: 1000, LogProbKind: "density", ElementCount: 8,
			ScheduleDigest: digestOf("schedule"),
		}},
		{"step-last", lastStep()},
		{"step-segment-end", func() *schemas.Step {
			e := sdeStep()
			e.Latents = append(e.Latents, schemas.IndexedTensor{Index: 3, Tensor: latents("F32", 4)})
			return e
		}()},
		{"step-parts-and-refs", partsStep()},
		{"step-checkpoint", func() *schemas.Step {
			e := sdeStep()
			e.Latents, e.Checkpoint, e.Seal = nil, new(latents("F32", 4)), digestOf("seal")
			return e
		}()},
		{"step-tracks", tracksStep()},
		{"step-tracks-ode", odeTracksStep()},
		{"trajectory-tracks", tracksTrajectory(t)},
		{"advantage-credits", creditsAdvantage(t)},
		{"trajectory-completed", completedTrajectory(t)},
		{"trajectory-inline-image", inlineTrajectory(t)},
		{"trajectory-segment", segmentTrajectory(t)},
		{"trajectory-resumed", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.Steps[0].Attempt = "gpu1-7"
			return e
		}()},
		{"trajectory-segment-decoded", func() *schemas.Trajectory {
			e := segmentTrajectory(t)
			e.Stop.Decode, e.Media = true, inlineTrajectory(t).Media
			return e
		}()},
		{"trajectory-failed", &schemas.Trajectory{
			Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "run-1", UID: "p17", SampleIndex: 7, GroupSize: 8, Lane: "tiny"},
			Provenance: schemas.Provenance{Attempt: "gpu0-3"},
			Outcome:    schemas.Outcome{StopReason: "failed", Error: "model gave NaN at step 3"},
			Group:      schemas.Group{Batch: "p17"},
		}},
	}
}

func resultSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"reward-scored", &schemas.Reward{
			Run: "run-1", UID: "p17", SampleIndex: 3, GroupSize: 8, Status: "scored", Reward: new(0.75),
			Scores: []schemas.Score{
				{Name: "ocr", Version: "1", Weight: 1, Status: "scored", Value: new(0.75), DurationNS: 1_500_000},
				{Name: "aesthetic", Version: "2-b", Weight: 0.5, Status: "failed", Error: "time limit", DurationNS: 2_000_000_000},
			},
			TrajectorySeq: 41, Trained: schemas.Trained{TrainedSteps: 2, ScheduleDigest: digestOf("schedule"), PolicyVersionMin: 5, PolicyVersionMax: 6},
			Group: fullGroup(t), Scored: 1_763_690_400_123_456_789,
		}},
		{"reward-failed", &schemas.Reward{
			Run: "run-1", UID: "p17", SampleIndex: 7, GroupSize: 8, Status: "failed", Error: "trajectory failed: model gave NaN at step 3",
			Scores: []schemas.Score{}, TrajectorySeq: math.MaxUint64, Group: schemas.Group{Batch: "p17"},
		}},
		{"reward-remote", &schemas.Reward{
			Run: "run-1--ocr", UID: "p17", SampleIndex: 3, GroupSize: 8, Status: "scored", Reward: new(1.75),
			Scores: []schemas.Score{
				{Name: "ocr", Version: "1-5.3", Weight: 1, Status: "scored", Value: new(0.75), DurationNS: 1_500_000, Detail: "4O71"},
				{Name: "external:human", Version: "1", Weight: 0.5, Status: "scored", Value: new(2.0)},
			},
			TrajectorySeq: 41, Trained: schemas.Trained{TrainedSteps: 2, ScheduleDigest: digestOf("schedule")}, Group: policyGroup(t),
			Scored: 1_763_690_400_123_456_789, SampleStarted: 1_763_690_390_000_000_000, SampleFinished: 1_763_690_392_500_000_000,
		}},
		{"prompt-policies", &schemas.Prompt{
			Prompt: "a blue sign that says \"4071\"", Reward: []schemas.RewardSpec{{Name: "http:clip"}, {Name: "external"}},
			Advantage: schemas.AdvantageSpec{Estimator: "diffusion_nft", Mode: "positive_only", AdvClipMax: new(5.0), Gamma: new(1.0)},
			Batch:     &schemas.BatchSpec{ID: "b3", Groups: 48, Step: new(int64(12)), Epoch: new(int64(0))},
			GroupPolicy: &schemas.GroupPolicy{
				ZeroStd: "refill", Failed: "refill", RefillRounds: new(int64(2)), MaxPolicySpan: new(int64(3)), MixedSchedules: true,
			},
			Refill: &schemas.Refill{Root: "p17", Round: 1},
		}},
		{"verdict", &schemas.Verdict{
			Run: "run-1", UID: "p17", SampleIndex: 3, Name: "human", Value: new(0.5), Comment: "the 7 looks like a 1", Author: "lin",
			At: 1_763_690_400_000_000_000,
		}},
		{"verdict-none", &schemas.Verdict{Run: "run-1", UID: "p17", Name: "external", Error: "the rater skipped it"}},
		{"advantage-filtered", &schemas.Advantage{
			Run: "run-1", UID: "p19", Batch: "b3", Status: "filtered", GroupSize: 2,
			Members: []schemas.Member{{SampleIndex: 0, Status: "scored", Reward: new(1.0), TrajectorySeq: 9}, {SampleIndex: 1, Status: "scored", Reward: new(1.0), TrajectorySeq: 10}},
			Mean:    new(1.0), Std: new(0.0), Scale: "global", StdBasis: "sample", Estimator: "flow_grpo", Epsilon: 1e-4, RefilledBy: "p19-r1",
		}},
		{"advantage-steps", &schemas.Advantage{
			Run: "run-1", UID: "p19-r1", Batch: "b3", Status: "complete", GroupSize: 1,
			Members: []schemas.Member{{SampleIndex: 0, Status: "scored", Reward: new(1.0), Advantage: new(0.75), StepAdvantages: []float64{0.5, 1}, TrajectorySeq: 9}},
			Mean:    new(1.0), Std: new(0.5), Scale: "none", StdBasis: "expanded", Estimator: "reinforce_plus_plus", TrainedSteps: 2,
			Gamma: new(0.9), AdvClipMax: new(5.0), Mode: "x", BatchSamples: 16, Refill: &schemas.Refill{Root: "p19", Round: 1}, Validation: true, SourceRun: "run-0", Metadata: metadata(t),
		}},
		{"prompt-singleton", &schemas.Prompt{
			V: schemas.Version, UID: "p20", Prompt: "a sign", GroupSize: new(int64(1)), Advantage: schemas.AdvantageSpec{Estimator: "rloo", Singleton: "zero"},
		}},
		{"advantage-singleton", &schemas.Advantage{
			Run: "run-1", UID: "p20", Batch: "p20", Status: "complete", GroupSize: 1,
			Members: []schemas.Member{{SampleIndex: 0, Status: "scored", Reward: new(0.5), Advantage: new(0.5), TrajectorySeq: 11}},
			Mean:    new(0.5), Std: new(0.0), Scale: "none", StdBasis: "sample", Estimator: "rloo", Singleton: "reward",
		}},
		{"batch-short", &schemas.Batch{
			Run: "run-1", Batch: "b3", Groups: 1, UIDs: []schemas.UID{"p17"}, Samples: 8, Mean: new(0.5), Std: new(0.25), StdBasis: "sample", Metrics: []schemas.Metric{{Name: "critic/rewards/mean", Value: 0.5}},
			Status: "short", Expected: 2, Refills: 3, Dropped: []schemas.UID{"p19", "p19-r1"}, Step: new(int64(12)), Epoch: new(int64(1)),
		}},
		{"policy-reward", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "signs", Model: "signs", LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 128, NumInferenceSteps: 10, MaxPixels: 1 << 20,
			Reward: []string{"glyph"},
		}},
	}
}

func policySamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"prompt-base", &schemas.Prompt{Prompt: "x", Routing: schemas.Routing{Model: "tiny", BaseDigest: digestOf("weights")}}},
		{"request-base", func() *schemas.Request {
			r := fullRequest(t)
			r.BaseDigest = digestOf("weights")
			return r
		}()},
		{"group-base", &schemas.GroupRecord{
			Run: "run-1", UID: "p17", GroupSize: 8, PromptDigest: digestOf("prompt"), Lane: "tiny", BaseDigest: digestOf("weights"),
			ScheduleDigest: digestOf("schedule"), Group: policyGroup(t),
		}},
		{"policy-pushed", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Model: "tiny-sign", Family: "qwen-image", PolicyVersion: 13, WeightsDigest: digestOf("adapted"), BaseDigest: digestOf("weights"),
			Adapter: &schemas.PolicyAdapter{
				File:   schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("adapter"), Size: 1184},
				Config: []byte(`{"peft_type": "LORA", "r": 4, "lora_alpha": 4}`), Scale: 0.5,
			},
			Modules: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("modules"), Size: 240},
			Parent:  new(int64(12)), Rollback: new(int64(9)), Rule: "switch", By: "trainer-0", Note: "update 13",
			LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 128, NumInferenceSteps: 8, TrueCFGScale: 1,
			MaxPixels: 1 << 20, Announced: 1_763_690_301_000_000_000,
		}},
		{"policy-weights", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Model: "tiny-sign", Family: "qwen-image", PolicyVersion: 14, WeightsDigest: digestOf("whole"), BaseDigest: digestOf("weights"),
			Weights: []schemas.WeightsFile{
				{Bucket: schemas.BlobBucket, Digest: digestOf("shard 1"), Size: 4096},
				{Path: "run-7/transformer/model-00002-of-00002.safetensors", Digest: digestOf("shard 2"), Size: 40 << 30},
			},
			Tensors:        &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("tensors"), Size: 240},
			LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 128, NumInferenceSteps: 8, TrueCFGScale: 1,
			MaxPixels: 1 << 20, Announced: 1_763_690_303_000_000_000,
		}},
		{"applied", &schemas.Applied{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Instance: "sampler-k3", PolicyVersion: 13, State: "applied", Serving: 13, WeightsDigest: digestOf("adapted"),
			Canary: &schemas.Canary{Digest: digestOf("canary"), Norm: 12.5}, Backend: "cpu/avx512", LoadNS: 80_000_000, At: 1_763_690_301_100_000_000,
		}},
		{"applied-refused", &schemas.Applied{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Instance: "sampler-k3", PolicyVersion: 14, State: "refused", Error: "adapter: module x: the transformer has none",
			Serving: 13, WeightsDigest: digestOf("adapted"), Backend: "cpu/avx512", At: 1_763_690_302_000_000_000,
		}},
	}
}

func groupSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"advantage-complete", completeAdvantage(t)},
		{"advantage-failed", &schemas.Advantage{
			Run: "run-1", UID: "p18", Batch: "p18", Status: "failed", Error: "no sample was scored", GroupSize: 2,
			Members:   []schemas.Member{{SampleIndex: 0, Status: "failed", TrajectorySeq: 9}, {SampleIndex: 1, Status: "missing"}},
			Scale:     "none",
			StdBasis:  "population",
			Estimator: "rloo",
		}},
		{"batch-closed", &schemas.Batch{
			Run: "run-1", Batch: "b0", Groups: 2, UIDs: []schemas.UID{"p17", "p18"}, Samples: 9, Mean: new(0.5), Std: new(0.25),
			StdBasis: "sample", Metrics: []schemas.Metric{{Name: "critic/rewards/max", Value: 1}, {Name: "critic/rewards/mean", Value: 0.5}},
			Closed: 1_763_690_460_000_000_000,
		}},
		{"batch-empty", &schemas.Batch{Run: "run-1", Batch: "b1", Groups: 1, UIDs: []schemas.UID{}, StdBasis: "sample", Metrics: []schemas.Metric{}}},
		{"policy", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Model: "tiny-sign", Family: "qwen-image", PolicyVersion: 12, WeightsDigest: digestOf("weights"),
			SchedulerConfig: []byte(`{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0}`),
			LatentChannels:  64, PixelsPerToken: 16, Height: 64, Width: 128, NumInferenceSteps: 8, TrueCFGScale: 1,
			MaxPixels: 1 << 20, Announced: 1_763_690_300_000_000_000,
		}},
		{"policy-negative", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "tiny", Model: "tiny", Family: "other", LatentChannels: 16, PixelsPerToken: 8, Height: 64, Width: 64,
			NumInferenceSteps: 8, TrueCFGScale: 4, NegativePrompt: "blurry", MaxPixels: 1 << 20,
		}},
		{"dead-refused", &schemas.Dead{
			Service: "intake", Code: "invalid", Reason: "group_size: 0; must be between 1 and 1024", Run: "run-1", UID: "p19",
			OriginalSubject: "mdr.v1.prompt.run-1", Stream: "MDR_PROMPTS", StreamSeq: 19, Deliveries: 1,
			Headers: []schemas.Header{{Name: "Mdr-Type", Value: "prompt/1"}}, Data: []byte{0x80}, At: 1_763_690_401_000_000_000,
		}},
		{"update", &schemas.Update{
			Run: "run-1", Lane: "tiny", Tenant: schemas.TenantMain, Trainer: "night", Step: 3, Batches: []string{"step-3"}, Groups: new(int64(2)), Samples: new(int64(16)), RatioMax: new(1.5),
			BatchDigest: schemas.BLAKE3.Text(schemas.BLAKE3.Sum([]byte("batch"))), PolicyVersion: 4, WeightsDigest: digestOf("weights"),
			Loss: new(-0.25), Ratio: new(1.0), ClipShare: new(0.125), KL: new(0.001), LearningRate: new(1e-4), GradNorm: new(0.5),
			Staleness: new(int64(1)), Evaluation: []schemas.Metric{{Name: "held_out/accuracy", Value: 0.75}}, At: 1763690401000000000,
		}},
		{"alarm", &schemas.Alarm{
			Run: "run-1", Rule: schemas.RuleReader, Of: "ocr", Value: 0.41, Limit: 0.05, Says: "ocr fell", Paused: true, At: 1763690401000000000,
		}},
		{"update-bare", &schemas.Update{Run: "run-1", Lane: "tiny", Tenant: schemas.TenantMain, Trainer: "main", Step: 1}},
		{"dead-bare", &schemas.Dead{Service: "sampler", Code: "decode", Reason: "malformed event: empty", OriginalSubject: "mdr.v1.request.a.b.c.0"}},
		{"receipt-accepted", &schemas.Receipt{
			Accepted: true, Run: "run-1", UID: "p17", Samples: 8, NumInferenceSteps: 10, SDEStepIndices: []int64{3, 4},
		}},
	}
}

func digestOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func metadata(t testing.TB) schemas.Metadata {
	t.Helper()
	m, err := schemas.MetadataFrom(map[string]any{
		"split": "train", "index": 12, "weight": 0.5, "raw": []byte{0, 255}, "none": nil, "yes": true,
		"nested": map[string]any{"tags": []any{"a", "b"}}, "negative": -40_000,
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func rewardSpecs() []schemas.RewardSpec {
	return []schemas.RewardSpec{
		{
			Name: "ocr", Weight: new(1.0), Required: new(true), GroundTruth: "4071",
			Params: map[string]string{"lang": "eng", "charset": "0123456789", "blank": ""},
		},
		{Name: "aesthetic", Weight: new(0.5), Required: new(false)},
	}
}

func fullGroup(t testing.TB) schemas.Group {
	return schemas.Group{
		Batch: "b0", BatchGroups: 2, Reward: rewardSpecs(),
		Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo", Std: "global", StdBasis: "sample", Epsilon: new(1e-4)},
		Deadline:  1_763_690_700_000_000_000, Validation: false, Metadata: metadata(t), PromptSeq: 17, Created: 1_763_690_390_000_000_000,
	}
}

func fullPrompt(t testing.TB) *schemas.Prompt {
	return &schemas.Prompt{
		V: schemas.Version, UID: "p17", Prompt: "a blue sign that says \"4071\"",
		ImageSettings: schemas.ImageSettings{
			NegativePrompt: new("blurry"),
			Height:         new(int64(64)), Width: new(int64(128)),
			NumInferenceSteps: new(int64(4)), TrueCFGScale: new(4.0), Sigmas: []float64{1, 0.75, 0.5, 0.25},
			Rollout: schemas.Rollout{
				SDEType: "sde", NoiseLevel: new(0.7), SDEStepIndices: []int64{0, 2}, ReturnStepIndices: []int64{0, 1, 2, 3, 4},
				LogProbKind: "density", Solver: "heun", Debug: []string{"noise", "mean", "std", "model_output"}, LatentsDType: "BF16",
			},
			InitialNoise: "shared",
		},
		Routing: schemas.Routing{
			Model: "tiny", Priority: new(int64(-3)), MinPolicyVersion: new(int64(5)),
		},
		GroupSize: new(int64(8)), Seed: new(int64(math.MaxInt64)),
		Reward:    rewardSpecs(),
		Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo", Std: "global", StdBasis: "sample", Epsilon: new(1e-4)},
		Metadata:  metadata(t), Batch: &schemas.BatchSpec{ID: "b0", Groups: 2}, Deadline: new(int64(1_763_690_700_000_000_000)),
	}
}

func fullRequest(t testing.TB) *schemas.Request {
	r := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "run-1", UID: "p17", SampleIndex: 3, GroupSize: 8, Lane: "tiny"},
		Sampling: schemas.Sampling{
			SampleSeed: math.MaxUint64, NoiseSeed: 1 << 63,
			Prompt: "a blue sign that says \"4071\"", NegativePrompt: " ", Height: 64, Width: 128, TrueCFGScale: 4,
			Sigmas: []float32{1, 0.75, 0.5, 0.25, 0}, Transitions: []string{"sde", "ode", "cps", "dance_sde"}, NoiseLevel: 0.7,
			LogProbKind: "density", Solver: "euler", LatentsDType: "F32",
		},
		Outputs:  schemas.Outputs{ReturnStepIndices: []int64{0, 1, 2, 3}, Debug: []string{"mean"}},
		Priority: -3, MinPolicyVersion: 5, Group: fullGroup(t),
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	return r
}

// extremeRequest has the longest schedule and the most rewards there may be.
func extremeRequest(t testing.TB) *schemas.Request {
	r := fullRequest(t)
	r.GroupSize, r.SampleIndex = schemas.MaxGroupSize, schemas.MaxGroupSize-1
	r.Run, r.UID = schemas.Run(strings.Repeat("r", schemas.MaxToken)),
		schemas.UID(strings.Repeat("u", schemas.MaxToken))
	r.Height, r.Width = schemas.MaxSide, 16
	r.Prompt = strings.Repeat("ab\u00e9", schemas.MaxPromptBytes/4)
	r.Sigmas, r.Transitions, r.ReturnStepIndices, r.Debug = nil, nil, nil, nil
	for i := range schemas.MaxSteps {
		r.Sigmas = append(r.Sigmas, 1-float32(i)/schemas.MaxSteps)
		r.Transitions = append(r.Transitions, "sde")
		r.ReturnStepIndices = append(r.ReturnStepIndices, int64(i))
	}
	r.Sigmas = append(r.Sigmas, 0)
	r.ReturnStepIndices = append(r.ReturnStepIndices, schemas.MaxSteps)
	r.Group = schemas.Group{Batch: string(r.UID), Metadata: largestMetadata(t)}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	return r
}

// largestMetadata has exactly as many bytes and levels as allowed.
func largestMetadata(t testing.TB) schemas.Metadata {
	t.Helper()
	m := schemas.Metadata{0x82, 0xa1, 'd', 0x91, 0x91, 0x81, 0xa1, 'x', 1, 0xa1, 'p', 0xda}
	rest := schemas.MaxMetadataBytes - len(m) - 2
	m = append(m, byte(rest>>8), byte(rest))
	m = append(m, bytes.Repeat([]byte{'p'}, rest)...)
	if err := m.Validate(); err != nil || len(m) != schemas.MaxMetadataBytes {
		t.Fatalf("largest metadata of %d bytes: %v", len(m), err)
	}
	return m
}

func latents(dtype string, size int) schemas.Tensor {
	data := make([]byte, 8*size)
	for i := range data {
		data[i] = byte(7 * i)
	}
	return schemas.Tensor{DType: dtype, Shape: []int64{2, 4}, Data: data}
}

// states are those that two samples of eight elements begin with, inline or as a blob.
func states(inline bool) *schemas.Tensor {
	x := &schemas.Tensor{DType: "F32", Shape: []int64{2, 2, 4}}
	if inline {
		x.Data = append(latents("F32", 4).Data, latents("F32", 4).Data...)
	} else {
		x.Ref = &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("x_T"), Size: 64}
	}
	return x
}

// segment is one of a schedule that is longer, of two samples.
func segment(begin, end int64) (*schemas.SegmentStart, *schemas.SegmentStop) {
	return &schemas.SegmentStart{StepIndex: begin, Latents: states(false)}, &schemas.SegmentStop{StepIndex: end}
}

// segmentTrajectory ran the steps 1 and 2 of four.
func segmentTrajectory(t testing.TB) *schemas.Trajectory {
	e := inlineTrajectory(t)
	e.GroupSize, e.SampleIndex = 2, 1
	e.Start, e.Stop = segment(1, 3)
	e.LogProbs[0], e.LogProbs[3] = nil, nil
	e.LatentStepIndices, e.Steps, e.Media = []int64{1, 3}, e.Steps[1:3], nil
	return e
}

func sdeStep() *schemas.Step {
	return &schemas.Step{
		Stage: schemas.StageMain,
		Run:   "run-1", UID: "p17", SampleIndex: 3, Attempt: "gpu0-3", StepIndex: 2, NumInferenceSteps: 5, Transition: "sde",
		NoiseLevel: 0.7, Sigma: 0.6, SigmaNext: 0.4, Timestep: 600, StdDevT: 0.8573214099741122, NoiseStd: 0.38340579025361615,
		LogProb: new(-0.6515271871029717), LogProbKind: "density", LogProbSum: new(-5.2122174968237736), ElementCount: 8,
		Latents:       []schemas.IndexedTensor{{Index: 2, Tensor: latents("F32", 4)}},
		Debug:         []schemas.NamedTensor{{Name: "std", Tensor: schemas.Tensor{DType: "F32", Shape: []int64{}, Data: []byte{0, 0, 128, 63}}}},
		PolicyVersion: 5, WeightsDigest: digestOf("weights"), ScheduleDigest: digestOf("schedule"), Sampler: "gpu0", Backend: "cpu",
		DeviceNS: 123_456,
	}
}

func lastStep() *schemas.Step {
	s := sdeStep()
	s.StepIndex, s.Sigma, s.SigmaNext, s.Timestep = 4, 0.2, 0, 200
	s.Latents = []schemas.IndexedTensor{{Index: 4, Tensor: latents("BF16", 2)}, {Index: 5, Tensor: latents("F16", 2)}}
	s.Debug = []schemas.NamedTensor{}
	return s
}

func partsStep() *schemas.Step {
	s := lastStep()
	s.Latents = []schemas.IndexedTensor{
		{Index: 4, Tensor: schemas.Tensor{
			DType: "F32", Shape: []int64{4096, 64},
			Parts: &schemas.Parts{First: 0, Count: 2, Size: 1 << 20, Digest: digestOf("latents")},
		}},
		{Index: 5, Tensor: schemas.Tensor{
			DType: "F32", Shape: []int64{4096, 64}, Ref: &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("final"), Size: 1 << 20},
		}},
	}
	return s
}

func completedTrajectory(t testing.TB) *schemas.Trajectory {
	r := fullRequest(t)
	return &schemas.Trajectory{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, GroupSize: r.GroupSize, Lane: r.Lane},
		Provenance: schemas.Provenance{
			Attempt:       "gpu0-3",
			WeightsDigest: digestOf("weights"), PolicyVersionMin: 5, PolicyVersionMax: 6,
			Sampler: "gpu0", Backend: "cpu",
			Timings: schemas.SampleTimings{
				Received: 1_763_690_391_000_000_000, Started: 1_763_690_391_500_000_000, Finished: 1_763_690_395_000_000_000,
				EncodeNS: 1_000_000, DenoiseNS: 3_000_000_000, DecodeNS: 90_000_000,
			},
		},
		Outcome: schemas.Outcome{StopReason: "completed"},
		Sampling: schemas.Sampling{
			Prompt: r.Prompt, NegativePrompt: r.NegativePrompt, Height: 64, Width: 128,
			TrueCFGScale: 4, SampleSeed: r.SampleSeed, NoiseSeed: r.NoiseSeed,
			Sigmas: r.Sigmas, Transitions: r.Transitions,
			LogProbKind: "density", NoiseLevel: 0.7, Solver: "euler",
			LatentsDType: "F32",
		},
		Denoised: schemas.Denoised{
			CFGRule:           "rescaled",
			Timesteps:         []float32{1000, 750, 500, 250, 0},
			LogProbs:          []*float64{new(-1.25351358926594), nil, new(0.0), new(12.5)},
			LatentStepIndices: r.ReturnStepIndices, LatentsShape: []int64{32, 64},
			Conditioning: []schemas.NamedTensor{{Name: "prompt_embeds", Tensor: schemas.Tensor{
				DType: "BF16", Shape: []int64{12, 128}, Ref: &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("embeds"), Size: 3_072},
			}}},
		},
		Steps: []schemas.StepRef{
			{Seq: 1, Digest: digestOf("0")}, {Seq: 200, Digest: digestOf("1")}, {Seq: 70_000, Digest: digestOf("2")}, {Seq: 1 << 40, Digest: digestOf("3")},
		},
		ContentDigest: digestOf("content"),
		Media: []schemas.Medium{{
			Kind: "image", Format: "png", Width: 128, Height: 64, Digest: digestOf("pixels"),
			Ref: &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("png"), Size: 5_432},
		}},
		ScheduleDigest: r.ScheduleDigest,
		Group:          r.Group,
	}
}

func inlineTrajectory(t testing.TB) *schemas.Trajectory {
	e := completedTrajectory(t)
	e.Media[0].Ref, e.Media[0].Data = nil, []byte("\x89PNG\r\n\x1a\n")
	e.Conditioning = []schemas.NamedTensor{}
	e.Group.Metadata = nil
	return e
}

func completeAdvantage(t testing.TB) *schemas.Advantage {
	return &schemas.Advantage{
		Run: "run-1", UID: "p17", Batch: "b0", Status: "partial", GroupSize: 3,
		Members: []schemas.Member{
			{SampleIndex: 0, Reward: new(1.0), Advantage: new(0.7070567847218314), Status: "scored", TrajectorySeq: 40},
			{SampleIndex: 1, Reward: new(0.0), Advantage: new(-0.7070567847218314), Status: "scored", TrajectorySeq: 41},
			{SampleIndex: 2, Status: "missing"},
		},
		Mean: new(0.5), Std: new(0.7071067811865476), Scale: "group", StdBasis: "sample", Estimator: "flow_grpo", Epsilon: 1e-4,
		TrainedSteps: 2, ScheduleDigest: digestOf("schedule"), PolicyVersionMin: 5, PolicyVersionMax: 6, Metadata: metadata(t),
		Opened: 1_763_690_400_000_000_000, Closed: 1_763_690_410_000_000_000,
	}
}

// policyGroup is a group with every policy set.
func policyGroup(t testing.TB) schemas.Group {
	t.Helper()
	g := fullGroup(t)
	g.GroupPolicy = &schemas.GroupPolicy{
		ZeroStd: "drop", Failed: "keep", RefillRounds: new(int64(0)), MaxPolicySpan: new(int64(1)),
	}
	g.Refill = &schemas.Refill{Root: "p16", Round: 2}
	g.BatchStep, g.BatchEpoch, g.SourceRun = new(int64(4)), new(int64(1)), "run-1"
	return g
}
