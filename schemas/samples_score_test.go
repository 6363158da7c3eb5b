package schemas_test

import (
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func scoreSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"score_request", &schemas.ScoreRequest{
			Name: "pickscore", Prompt: "a red fox", Params: map[string]string{"layer": "12"}, ScoreSample: pngSample(),
		}},
		{"score_request-metadata", &schemas.ScoreRequest{
			Name: "geneval", Prompt: "a fox", Params: map[string]string{}, Metadata: metadata(t), ScoreSample: pngSample(),
		}},
		{"score_request-conditions", &schemas.ScoreRequest{
			Name: "edit", Prompt: "make it red", Params: map[string]string{}, ScoreSample: schemas.ScoreSample{
				Image: []byte("\x89PNG"), ImageFormat: "png",
				Conditions: []schemas.ScoreCondition{
					{Name: "image", Type: "image", File: []byte("\x89PNG 1")}, {Name: "mask_image", Type: "mask", File: []byte("\x89PNG 2")},
				},
			},
		}},
		{"score_request-audio", &schemas.ScoreRequest{
			Name: "clap", Prompt: "a drum", Params: map[string]string{}, ScoreSample: schemas.ScoreSample{Audio: []byte("RIFF")},
		}},
		{"score_request-group", &schemas.ScoreRequest{
			Name: "rank", Prompt: "a red fox", Params: map[string]string{}, GroupSize: 3,
			Members: []schemas.ScoreMember{
				{SampleIndex: 0, ScoreSample: pngSample()}, {SampleIndex: 2, ScoreSample: schemas.ScoreSample{Text: new("a fox")}},
			},
			Missing: []schemas.ScoreMissing{{SampleIndex: 1, Why: "trajectory failed: no memory"}},
		}},
		{"score_request-blob", &schemas.ScoreRequest{
			Name: "rank", Prompt: "a red fox", Params: map[string]string{}, GroupSize: 1,
			Members: []schemas.ScoreMember{{Ref: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("member"), Size: 3 << 20}}},
		}},
		{"score_reply-scores", &schemas.ScoreReply{Scores: []schemas.MemberScore{{SampleIndex: 2, Score: new(0.5), Detail: "second"}, {SampleIndex: 0, Error: "all black"}}}},
		{"score_reply-preferences", &schemas.ScoreReply{Preferences: []schemas.Preference{{A: 0, B: 2, P: 0.75}}}},
		{"rating", &schemas.Rating{
			Run: "run-1", UID: "p17", Function: 1, Name: "nats:rank", Version: "nats-1", GroupSize: 3, DurationNS: 1_000_000, At: 1_763_690_300_000_000_000,
			Members: []schemas.RatedMember{{SampleIndex: 0, TrajectorySeq: 9, Value: new(0.5), Detail: "won 1 of 2"}, {SampleIndex: 2, TrajectorySeq: 11, Error: "all black"}},
		}},
		{"rating-preferences", &schemas.Rating{
			Run: "run-1", UID: "p17", Name: "nats:duel", Version: "nats-1", GroupSize: 2, At: 1_763_690_300_000_000_000,
			Members:     []schemas.RatedMember{{SampleIndex: 0, TrajectorySeq: 9, Value: new(0.75)}, {SampleIndex: 1, TrajectorySeq: 10, Value: new(0.25)}},
			Preferences: []schemas.Preference{{A: 0, B: 1, P: 0.75}},
		}},
		{"step_reward", &schemas.StepReward{
			Run: "run-1", UID: "p17", SampleIndex: 2, GroupSize: 3, StepIndex: 4, Status: schemas.StatusScored, Reward: new(0.5),
			Scores:        []schemas.Score{{Name: "nats:look", Version: "nats-1", Weight: 1, Status: schemas.StatusScored, Value: new(0.5)}},
			Latents:       &schemas.Tensor{DType: "F32", Shape: []int64{1, 2}, Data: make([]byte, 8)},
			ContentDigest: schemas.StepsDigest(nil), Scored: 1_763_690_300_000_000_000,
		}},
		{"selection", &schemas.Selection{
			Run: "run-1", UID: "p17", GroupSize: 3, StepIndex: 4, Rule: schemas.Prune{StepIndex: 4, Keep: new(int64(1))}, SavedEvaluations: 12, At: 1_763_690_300_000_000_000,
			Members: []schemas.SelectedMember{{SampleIndex: 0, Reward: new(0.25), Stopped: "step 4: reward 0.25; 1 of 2 go on, by highest"}, {SampleIndex: 1}, {SampleIndex: 2, Reward: new(0.5)}},
		}},
		{"score_request-latents", &schemas.ScoreRequest{
			Name: "look", Prompt: "a red fox", Params: map[string]string{},
			ScoreSample: schemas.ScoreSample{StepIndex: 4, Latents: &schemas.Tensor{DType: "F32", Shape: []int64{1, 2}, Data: make([]byte, 8)}},
		}},
		{"score_reply", &schemas.ScoreReply{Score: new(0.27), Detail: "a fox, mostly red"}},
		{"score_reply-error", &schemas.ScoreReply{Error: "out of memory", Retry: true}},
	}
}

func pngSample() schemas.ScoreSample {
	return schemas.ScoreSample{Image: []byte{0x89, 'P', 'N', 'G'}, ImageFormat: "png"}
}
