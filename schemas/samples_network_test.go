package schemas_test

import (
	"slices"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// networkSamples have what only some networks take, and what only some trainers tell.
func networkSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"update-ledger", &schemas.Update{
			Run: "run-1", Lane: "tiny", Tenant: schemas.TenantMain, Trainer: "main", Step: 2, WeightsDigest: digestOf("weights"),
			WeightsBefore: digestOf("before"), AverageDigest: digestOf("average"), Settings: `{"lr": 0.002}`, Code: "meander-rl 0.1.0, torch 2.8.0",
			State: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("state"), Size: 4096},
		}},
		{"policy-guidance", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "flux", Model: "flux", Family: "flux1", LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 64,
			NumInferenceSteps: 8, TrueCFGScale: 1, Guidance: 3.5, MaxPixels: 1 << 20,
		}},
		{"policy-schedule", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "flux", Model: "flux", Family: "flux2", SchedulerConfig: []byte(`{"use_dynamic_shifting": true}`), Grid: "scheduler", Mu: "constant",
			MuConstant: 0.485, LatentChannels: 128, PixelsPerToken: 16, Height: 64, Width: 64, NumInferenceSteps: 8, TrueCFGScale: 1, MaxPixels: 1 << 20,
		}},
		{"prompt-texts", &schemas.Prompt{
			Prompt: "a fox", ImageSettings: schemas.ImageSettings{Prompt2: "a red fox in the snow", Prompt3: "a red fox, oil on canvas"},
		}},
		{"policy-texts", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "sd35", Model: "sd35", Family: "sd3", LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 64,
			NumInferenceSteps: 28, TrueCFGScale: 7, Grid: "scheduler", Prompts: 3, MaxPixels: 1 << 20,
		}},
		{"request-texts", func() *schemas.Request {
			r := fullRequest(t)
			r.Prompt2, r.Prompt3 = "a red fox in the snow", "a red fox, oil on canvas"
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-texts", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.Prompt3 = "a red fox, oil on canvas"
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
		{"prompt-frames", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Frames: new(int64(33))}}},
		{"policy-frames", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "wan", Model: "wan", Family: "wan", LatentChannels: 64, PixelsPerToken: 16, Height: 480, Width: 832,
			NumInferenceSteps: 20, TrueCFGScale: 5, MaxPixels: 1 << 20, Frames: 81, MaxFrames: 129, FramesPerToken: 4, FPS: 16,
		}},
		{"request-frames", func() *schemas.Request {
			r := fullRequest(t)
			r.Frames = 33
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-video", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.Frames = 33
			e.Media = append(e.Media, schemas.Medium{
				Kind: schemas.KindVideo, Format: schemas.VideoAPNG, Frames: 33, Height: e.Height, Width: e.Width, FPS: 16,
				Digest: digestOf("frames"), Ref: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("file"), Size: 4096},
			}, sound())
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
	}
}

// diffusionSamples are of a network that knows its own timesteps.
func diffusionSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"request-no-negative-prompt", func() *schemas.Request {
			r := fullRequest(t)
			r.NegativePrompt, r.NoNegativePrompt = "", true
			return r
		}()},
		{"request-diffusion", func() *schemas.Request {
			r := fullRequest(t)
			own := []float32{999, 749, 499, 249, 124}
			r.NetworkTimesteps, r.InitialStd = own[:len(r.Transitions)], 0.95
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"step-diffusion", func() *schemas.Step {
			e := sdeStep()
			e.Timestep, e.OwnTimestep = 641, true
			return e
		}()},
		{"trajectory-diffusion", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			n := len(e.Transitions)
			e.Sigmas, e.InitialStd = slices.Clone(e.Sigmas), 0.95
			e.Sigmas[n] = 0.01
			e.NetworkTimesteps = []float32{999, 749, 499, 249, 124}[:n]
			e.Timesteps = append(slices.Clone(e.NetworkTimesteps), 0)
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
	}
}

// versionSamples ask for a version of the weights.
func versionSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"prompt-at-version", &schemas.Prompt{Prompt: "x", Routing: schemas.Routing{PolicyVersion: new(int64(3))}}},
		{"request-at-version", func() *schemas.Request {
			r := fullRequest(t)
			r.MinPolicyVersion, r.PolicyVersion = 0, new(int64(3))
			return r
		}()},
	}
}

// guidanceSamples have settings of guidance that only some networks take.
func guidanceSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"prompt-guidance", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Guidance: new(3.5)}}},
		{"prompt-cfg-until", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{CFGUntil: new(0.5)}}},
		{"request-cfg-until", func() *schemas.Request {
			r := fullRequest(t)
			r.CFGUntil = 0.75
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-cfg-until", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.CFGUntil, e.CFGRule = 0.75, schemas.CFGPlainClamped
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
		{"prompt-cfg-from", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{CFGFrom: new(0.25)}}},
		{"request-cfg-from", func() *schemas.Request {
			r := fullRequest(t)
			r.CFGFrom, r.CFGUntil = 0.25, 0.75
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-cfg-from", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.CFGFrom, e.CFGUntil = 0.25, 0.75
			e.CFGScales = e.StepScales()
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
		{"prompt-cfg-scale-2", &schemas.Prompt{
			Prompt: "x", ImageSettings: schemas.ImageSettings{TrueCFGScale: new(4.0), TrueCFGScale2: new(3.0)},
		}},
		{"prompt-guidance-rescale", &schemas.Prompt{
			Prompt: "x", ImageSettings: schemas.ImageSettings{TrueCFGScale: new(3.0), GuidanceRescale: new(0.7)},
		}},
		{"request-guidance-rescale", func() *schemas.Request {
			r := fullRequest(t)
			r.GuidanceRescale = 0.7
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-guidance-rescale", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.GuidanceRescale = 0.7
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
		{"policy-two-networks", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "wan", Model: "wan", Family: "wan", LatentChannels: 64, PixelsPerToken: 16, Height: 480, Width: 832,
			NumInferenceSteps: 20, TrueCFGScale: 4, BoundaryRatio: 0.875, MaxPixels: 1 << 20,
		}},
		{"request-cfg-scale-2", func() *schemas.Request {
			r := fullRequest(t)
			r.TrueCFGScale2, r.BoundaryRatio = 3, 0.875
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-cfg-scale-2", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.TrueCFGScale2, e.BoundaryRatio = 3, 0.875
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
		{"request-guidance", func() *schemas.Request {
			r := fullRequest(t)
			r.Guidance = 3.5
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-guidance", func() *schemas.Trajectory {
			e := completedTrajectory(t)
			e.Guidance = 3.5
			e.ScheduleDigest = e.ComputeScheduleDigest()
			return e
		}()},
	}
}

// presenceSamples are what services say of themselves, and answers of intake.
func presenceSamples() []sample {
	return []sample{
		{"receipt-waiting", &schemas.Receipt{Run: "run-1", UID: "p17", Waiting: "model: no sampler serves \"flux\" now"}},
		{"presence-starting", &schemas.Presence{
			Service: schemas.ServiceStarting, Instance: "starting-a", Lane: "sums",
			Waiting: "waiting for the engine", At: 9,
		}},
		{"presence-sampler", &schemas.Presence{Service: "sampler", Instance: "sampler-k3", Lane: "tiny", At: 1_763_690_400_000_000_000}},
		{"presence-loads", &schemas.Presence{
			Service: "sampler", Instance: "sampler-k3", Lane: "tiny", PolicyVersion: new(int64(12)), WeightsDigest: digestOf("weights"),
			Loading: new(int64(13)), At: 1_763_690_400_000_000_000,
		}},
		{"presence-room", &schemas.Presence{
			Service: "sampler", Instance: "sampler-k3", Lane: "tiny", Draining: true,
			Room: &schemas.Room{Held: 31_000_000, Wants: 62_000_000, Turn: 812, Waiting: 4, Need: 15_500_000, Since: 1_763_690_398_000_000_000, Disk: true},
			At:   1_763_690_400_000_000_000,
		}},
		{"presence-evaluation", &schemas.Presence{
			Service: "sampler", Instance: "sampler-k3", Lane: "tiny", At: 1_763_690_400_000_000_000,
			Backend: "cpu/avx2", Evaluation: &schemas.Evaluation{Samples: 6, Places: 8, TookNS: 31_000_000, At: 1_763_690_399_000_000_000},
		}},
		{"presence-reward", &schemas.Presence{
			Service: "reward", Instance: "reward-k4", Reward: []string{"jpeg_compressibility", "http:clip"},
			Missing: []schemas.MissingReward{{Name: "ocr", Reason: "tesseract is not installed"}}, At: 1_763_690_400_000_000_000,
		}},
		{"receipt-warnings", &schemas.Receipt{
			Accepted: true, Run: "run-1", UID: "p17", Samples: 8, NumInferenceSteps: 10, SDEStepIndices: []int64{2},
			Warnings: []string{"gruop_size: unknown field; did you mean group_size?"},
		}},
		{"prompt-unknown-fields", &schemas.Prompt{Prompt: "x", UnknownFields: "warn"}},
		{"receipt-segment", &schemas.Receipt{
			Accepted: true, Run: "run-1", UID: "p17", Samples: 8, NumInferenceSteps: 10, SDEStepIndices: []int64{5}, StartStepIndex: 4, StopStepIndex: 7,
		}},
		{"receipt-refused", &schemas.Receipt{Run: "run-1", Code: "unknown_model", Error: "no sampler serves \"flux\""}},
	}
}
