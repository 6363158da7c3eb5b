package schemas_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func textSettings() schemas.TextRequest {
	return schemas.TextRequest{
		Messages: []schemas.Message{{Role: "system", Content: ""}, {Role: "user", Content: "347+58=?"}}, MaxNewTokens: 8, Temperature: 0.7, TopK: 20, TopP: 0.9, MinP: 0.05,
		Stop: []string{"\n"}, StopTokenIDs: []int64{2}, Logits: &schemas.Logits{Form: "topk", K: new(int64(2)), DType: "F16", Kind: "raw"},
		TokensPerEvent: 2, Vocabulary: 32,
	}
}

func textRequest(t testing.TB) *schemas.Request {
	s := textSettings()
	r := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "run-1", UID: "p17", SampleIndex: 3, GroupSize: 8, Lane: "sums"},
		Sampling: schemas.Sampling{
			SampleSeed: math.MaxUint64, NoiseSeed: math.MaxUint64, Prompt: "347+58=?",
		},
		Text: &s, Group: fullGroup(t),
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	return r
}

// vector is a tensor of numbers.
func vector(dtype string, shape []int64, values ...float64) *schemas.Tensor {
	t := &schemas.Tensor{DType: dtype, Shape: shape}
	for _, x := range values {
		switch dtype {
		case "F32":
			t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(float32(x)))
		case "I32", "U32":
			t.Data = binary.LittleEndian.AppendUint32(t.Data, uint32(int64(x)))
		case "U8":
			t.Data = append(t.Data, byte(x))
		default: // bits
			t.Data = binary.LittleEndian.AppendUint16(t.Data, uint16(x))
		}
	}
	return t
}

func textTrajectory(t testing.TB) *schemas.Trajectory {
	r := textRequest(t)
	n := []int64{3}
	return &schemas.Trajectory{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, GroupSize: r.GroupSize, Lane: r.Lane},
		Provenance: schemas.Provenance{
			Attempt:       "cpu0-3",
			WeightsDigest: "w",
			Sampler:       "s", Backend: "cpu",
		},
		Outcome:        schemas.Outcome{StopReason: "completed"},
		Sampling:       schemas.Sampling{Prompt: r.Prompt, SampleSeed: r.SampleSeed, NoiseSeed: r.NoiseSeed},
		ScheduleDigest: r.ScheduleDigest, Group: r.Group,
		Text: &schemas.TextResult{
			Settings: *r.Text, IDs: vector("I32", n, 5, 7, 2), Mask: vector("U8", n, 0, 1, 1), LogProbs: vector("F32", n, 0, -0.5, -0.25),
			ProcessedLogProbs: vector("F32", n, 0, -0.375, 0), Entropies: vector("F32", n, 0, 1.5, 0.5), TopLogProbs: vector("F32", n, 0, -0.5, -0.25),
			Turns: []schemas.Turn{{End: 1}, {Begin: 1, End: 3, Generated: true, FinishReason: "stop", Text: "4"}},
		},
		Steps: []schemas.StepRef{{Seq: 1, Digest: digestOf("0")}, {Seq: 200, Digest: digestOf("1")}}, ContentDigest: digestOf("content"),
	}
}

// conversation is a sample of two answers, with what was said between them.
func conversation(t testing.TB) *schemas.Trajectory {
	e := textTrajectory(t)
	x, n := e.Text, []int64{6}
	x.Settings.Interaction = &schemas.Interaction{Name: "tutor", MaxTurns: new(int64(2)), TimeoutMS: new(int64(30000))}
	x.IDs, x.Mask = vector("I32", n, 5, 7, 2, 9, 8, 2), vector("U8", n, 0, 1, 1, 0, 1, 1)
	x.LogProbs, x.ProcessedLogProbs = vector("F32", n, 0, -0.5, -0.25, 0, -1, -2),
		vector("F32", n, 0, -0.375, 0, 0, -1, -2)
	x.Entropies, x.TopLogProbs = vector("F32", n, 0, 1.5, 0.5, 0, 1, 1), vector("F32", n, 0, -0.5, -0.25, 0, -1, -1)
	x.Turns = []schemas.Turn{
		{End: 1},
		{Begin: 1, End: 3, Generated: true, FinishReason: "stop", Text: "4", Score: new(0.0), Reply: "too low", Metadata: metadata(t)},
		{Begin: 3, End: 4},
		{Begin: 4, End: 6, Generated: true, FinishReason: "stop", Text: "405", Score: new(1.0)},
	}
	x.Conversation = "terminated"
	return e
}

func tokensEvent() *schemas.Tokens {
	return &schemas.Tokens{
		Stage: schemas.StageMain,
		Run:   "run-1", UID: "p17", SampleIndex: 3, Attempt: "cpu0-3", N: 1, Turn: 1, Position: 1, Generated: true, IDs: []int64{7, 2},
		LogProbs: []float32{-0.5, -0.25}, ProcessedLogProbs: []float32{-0.375, 0}, LogSumExps: []float32{2.5, 3}, Entropies: []float32{1.5, 0.5}, TopLogProbs: []float32{-0.5, -0.25},
		LogitsKind: "raw", Vocabulary: 32, Temperature: 0.7, TopK: 20, TopP: 0.9, MinP: 0.05, FinishReason: "stop", PolicyVersion: 3, WeightsDigest: "w",
		ScheduleDigest: digestOf("schedule"), Sampler: "s", Backend: "cpu", DeviceNS: 17,
		Logits: &schemas.TokenLogits{Form: "topk", IDs: vector("U32", []int64{2, 2}, 7, 9, 2, 3), Values: *vector("F32", []int64{2, 2}, 2, 1.5, 2.75, 0)},
	}
}

// partsEvent is an event of one token whose logits are in parts.
func partsEvent() *schemas.Tokens {
	e := tokensEvent()
	e.IDs, e.LogProbs, e.ProcessedLogProbs = e.IDs[:1], e.LogProbs[:1], e.ProcessedLogProbs[:1]
	e.LogSumExps, e.Entropies, e.TopLogProbs = e.LogSumExps[:1], e.Entropies[:1], e.TopLogProbs[:1]
	e.Vocabulary, e.FinishReason = 151936, ""
	parts := &schemas.Parts{Count: 2, Size: 607744, Digest: digestOf("logits")}
	e.Logits = &schemas.TokenLogits{
		Form: "full", Values: schemas.Tensor{DType: "F32", Shape: []int64{1, 151936}, Parts: parts},
	}
	return e
}

// emptyEvent is the end of a text whose tokens have all been sent.
func emptyEvent() *schemas.Tokens {
	e := tokensEvent()
	e.IDs, e.LogProbs, e.ProcessedLogProbs, e.LogSumExps = []int64{}, nil, nil, nil
	e.Entropies, e.TopLogProbs, e.Logits, e.FinishReason = nil, nil, nil, "length"
	return e
}

func textSamples(t testing.TB) []sample {
	t.Helper()
	return []sample{
		{"prompt-text", &schemas.Prompt{
			Prompt:  "347+58=?",
			Routing: schemas.Routing{Model: "sums"},
			Text: &schemas.Text{
				MaxNewTokens: new(int64(8)), Temperature: new(0.7), TopK: new(int64(0)), TopP: new(0.9), MinP: new(0.0), Stop: []string{"\n"}, StopTokenIDs: []int64{2},
				Logits: &schemas.Logits{Form: "ids", IDs: []int64{7, 9}, DType: "BF16", Kind: "processed"}, TokensPerEvent: new(int64(4)),
			},
		}},
		{"prompt-messages", &schemas.Prompt{Messages: []schemas.Message{{Role: "user", Content: "1+1=?"}, {Role: "assistant", Content: "3"}, {Role: "user", Content: "too high"}}}},
		{"request-text", textRequest(t)},
		{"tokens-given", &schemas.Tokens{Stage: schemas.StageMain, Run: "run-1", UID: "p17", Attempt: "a1", IDs: []int64{5}, LogitsKind: "raw", Vocabulary: 32, TopP: 1, ScheduleDigest: digestOf("schedule")}},
		{"tokens-topk", tokensEvent()},
		{"tokens-parts", partsEvent()},
		{"tokens-empty", emptyEvent()},
		{"trajectory-text", textTrajectory(t)},
		{"trajectory-text-failed", func() *schemas.Trajectory {
			e := textTrajectory(t)
			e.StopReason, e.Error, e.Steps, e.ContentDigest = "failed", "prompt: 70 tokens; the model has room for 64",
				nil, ""
			e.Text = &schemas.TextResult{Settings: e.Text.Settings}
			return e
		}()},
		{"prompt-interaction", &schemas.Prompt{
			Prompt:  "347+58=?",
			Routing: schemas.Routing{Model: "sums"},
			Text: &schemas.Text{
				Interaction: &schemas.Interaction{Name: "tutor", MaxTurns: new(int64(4)), TimeoutMS: new(int64(5000)), Params: map[string]string{"level": "2"}},
				Logits:      &schemas.Logits{Form: "full", Answers: []int64{0, 2}},
			},
		}},
		{"request-interaction", func() *schemas.Request {
			r := textRequest(t)
			r.Text.Interaction = &schemas.Interaction{
				Name: "tutor", MaxTurns: new(int64(4)),
				TimeoutMS: new(int64(5000)), Params: map[string]string{"level": "2"},
			}
			r.Text.Logits.Answers = []int64{3}
			r.ScheduleDigest = r.ComputeScheduleDigest()
			return r
		}()},
		{"trajectory-interaction", conversation(t)},
		{"interact_request", &schemas.InteractRequest{
			Stage: schemas.StageMain,
			Name:  "tutor", Params: map[string]string{"level": "2"}, Run: "run-1", UID: "p17", SampleIndex: 3, Attempt: "cpu0-3", Answer: 1, MaxTurns: 4,
			Messages: []schemas.Message{{Role: "user", Content: "347+58=?"}, {Role: "assistant", Content: "4"}}, FinishReason: "stop", GroundTruth: "405", Metadata: metadata(t),
			IDs: []int64{7}, LogProbs: []float32{-0.5}, ProcessedLogProbs: []float32{-0.375}, LogSumExps: []float32{2.5}, Entropies: []float32{1.5}, LogitsKind: "raw",
			Logits: &schemas.TokenLogits{Form: "topk", IDs: vector("U32", []int64{1, 2}, 7, 9), Values: *vector("F32", []int64{1, 2}, 2, 1.5)},
			Events: "mdr.v1.tokens.run-1.p17.3.main.cpu0-3.*", FirstEvent: 3, EventCount: 1,
		}},
		{"interact_reply", &schemas.InteractReply{Content: "too low", Score: new(0.5), Metadata: metadata(t)}},
		{"interact_reply-end", &schemas.InteractReply{Terminate: true, Score: new(1.0)}},
		{"interact_reply-error", &schemas.InteractReply{Error: "out of memory", Retry: true}},
		{"teacher_request", &schemas.TeacherRequest{Stage: schemas.StageMain, Name: "big", Run: "run-1", UID: "p17", SampleIndex: 3, TopK: 2}},
		{"teacher_reply-text", &schemas.TeacherReply{
			Model: "sums", WeightsDigest: digestOf("teacher"), Backend: "cpu/avx512",
			LogProbs: vector("F32", []int64{2}, 0, -0.5), ProcessedLogProbs: vector("F32", []int64{2}, 0, -0.375),
			LogSumExps: vector("F32", []int64{2}, 0, 2.5), Entropies: vector("F32", []int64{2}, 0, 1.5),
			TopIDs: vector("I32", []int64{2, 1}, 0, 7), TopLogits: vector("F32", []int64{2, 1}, 0, 2),
		}},
		{"teacher_reply-image", &schemas.TeacherReply{
			Model: "signs", WeightsDigest: digestOf("teacher"), Backend: "cpu/avx512", LogProbKind: "density",
			StepIndices: []int64{1, 3}, StepLogProbs: []float64{1.25, -0.5}, StepsLeftOut: []int64{2},
		}},
		{"teacher_request-velocities", &schemas.TeacherRequest{Stage: schemas.StageMain, Name: "fine", Run: "run-1", UID: "p17", SampleIndex: 3, Substeps: 5}},
		{"teacher_reply-velocities", &schemas.TeacherReply{
			Model: "signs", WeightsDigest: digestOf("teacher"), Backend: "cpu/avx512", LogProbKind: "density",
			StepIndices: []int64{0}, StepLogProbs: []float64{1.25}, Velocities: vector("F32", []int64{1, 2, 1}, 0.5, -2),
		}},
		{"teacher_reply-error", &schemas.TeacherReply{Error: "sample 3 of group p17 of run run-1: no trajectory is stored", Code: "unknown_sample"}},
		{"policy-text", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "sums", Model: "sums", Family: "qwen2", WeightsDigest: "w", Announced: 1,
			Text: &schemas.TextPolicy{Vocabulary: 32, MaxTokens: 64, MaxNewTokens: 16, Temperature: 1, TopP: 1},
		}},
	}
}

// The turns of a conversation are those that an interaction makes of it.
func TestConversation_Validate(t *testing.T) {
	if err := conversation(t).Validate(); err != nil {
		t.Fatal(err)
	}
	if got, want := conversation(t).Text.Messages(), 4; len(got) != want ||
		got[3] != (schemas.Message{Role: "user", Content: "too low"}) {
		t.Errorf("messages %+v", got)
	}
	for want, change := range map[string]func(*schemas.TextResult){
		"text.conversation: \"\"; must be terminated":        func(x *schemas.TextResult) { x.Conversation = "" },
		"text.conversation: \"timeout\"; must be terminated": func(x *schemas.TextResult) { x.Conversation = "timeout" },
		"text.conversation: \"max_turns\"; must be another": func(x *schemas.TextResult) {
			x.Conversation, x.Settings.Interaction.MaxTurns = "max_turns", new(int64(3))
		},
		"text.conversation: \"terminated\"; must be absent":       func(x *schemas.TextResult) { x.Settings.Interaction = nil; x.Turns = x.Turns[:2] },
		"text.turns: 4; must be 1 to 1 answers":                   func(x *schemas.TextResult) { x.Settings.Interaction.MaxTurns = new(int64(1)) },
		"text.turns[0].reply: \"hm\"; must be absent":             func(x *schemas.TextResult) { x.Turns[0].Reply = "hm" },
		"text.turns[2].generated: true; must be false":            func(x *schemas.TextResult) { x.Turns[2].Generated, x.Turns[2].FinishReason = true, "stop" },
		"text.turns[1].score: NaN; must be finite":                func(x *schemas.TextResult) { x.Turns[1].Score = new(math.NaN()) },
		"text.settings.interaction.timeout_ms: null; must be":     func(x *schemas.TextResult) { x.Settings.Interaction.TimeoutMS = nil },
		"text.settings.logits.answers: 2; must be below 2, the m": func(x *schemas.TextResult) { x.Settings.Logits.Answers = []int64{0, 2} },
	} {
		e := conversation(t)
		change(e.Text)
		if err := e.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}

// Each fault names its field and says what it must be.
func TestTokens_Validate(t *testing.T) {
	f16 := func(bits ...float64) func(*schemas.Tokens) {
		return func(e *schemas.Tokens) { e.Logits.Values = *vector("F16", []int64{2, 2}, bits...) }
	}
	for name, c := range map[string]struct {
		change func(*schemas.Tokens)
		want   string
	}{
		"NaN":               {f16(0x3c00, 0x7e01, 1, 1), "logits.values[0]: NaN"},
		"overflow of F16":   {f16(0x3c00, 0x3c00, 0x7c00, 1), "logits.values[1]: +inf"},
		"all zero":          {f16(0, 0x8000, 1, 1), "logits.values[0]: all zero"},
		"-inf not counted":  {func(e *schemas.Tokens) { f16(0x3c00, 0xfc00, 1, 1)(e); e.LogitsKind = "processed" }, "logits.masked: 0; must be 1"},
		"-inf of raw ones":  {func(e *schemas.Tokens) { f16(0x3c00, 0xfc00, 1, 1)(e); e.Logits.Masked = 1 }, "logits.masked: 1; must be 0 of raw logits"},
		"log-prob above 0":  {func(e *schemas.Tokens) { e.LogProbs[0] = 0.1 }, "log_probs[0]: 0.1"},
		"log-prob NaN":      {func(e *schemas.Tokens) { e.LogProbs[0] = float32(math.NaN()) }, "log_probs[0]: NaN"},
		"no log-sum-exp":    {func(e *schemas.Tokens) { e.LogSumExps = nil }, "log_sum_exps: 0 items; must be 2, one a token"},
		"given, log-probs":  {func(e *schemas.Tokens) { e.Generated, e.FinishReason, e.Logits = false, "", nil }, "log_probs: 2 items; must be 0"},
		"no token":          {func(e *schemas.Tokens) { e.Vocabulary = 7 }, "ids[0]: 7; must be below the vocabulary, 7"},
		"shape":             {func(e *schemas.Tokens) { e.Logits.Values.Shape = []int64{4, 1} }, "logits.values.shape: [4 1]; must be [2, 2]"},
		"none of a turn":    {func(e *schemas.Tokens) { e.IDs, e.FinishReason = nil, "" }, "ids: 0 items; must be at least 1"},
		"full has no ids":   {func(e *schemas.Tokens) { e.Logits.Form = "full" }, "logits.ids"},
		"given has no end":  {func(e *schemas.Tokens) { e.Generated = false }, "finish_reason"},
		"another dtype":     {func(e *schemas.Tokens) { e.Logits.Values.DType = "I32" }, "logits.values[0]: I32"},
		"more than a float": {func(e *schemas.Tokens) { e.Entropies[1] = float32(math.Inf(1)) }, "entropies[1]: +Inf"},
	} {
		e := tokensEvent()
		c.change(e)
		if err := e.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	processed := tokensEvent()
	f16(0x3c00, 0xfc00, 1, 1)(processed)
	processed.LogitsKind, processed.Logits.Masked = "processed", 1
	if err := processed.Validate(); err != nil {
		t.Errorf("processed logits with one masked: %v", err)
	}
}

func TestPrompt_Validate_text(t *testing.T) {
	for want, p := range map[string]*schemas.Prompt{
		"prompt: \"x\"; must be empty beside messages":         {Prompt: "x", Messages: []schemas.Message{{Role: "user"}}},
		"messages[0].role: \"human\"; must be one of":          {Messages: []schemas.Message{{Role: "human"}}},
		"messages[1].role: \"assistant\"; must be another":     {Messages: []schemas.Message{{Role: "user"}, {Role: "assistant"}}},
		"messages[0].content: 16385 bytes; must be at most":    {Messages: []schemas.Message{{Role: "user", Content: strings.Repeat("x", schemas.MaxPromptBytes+1)}}},
		"messages[0].content: 524289 bytes; must be at most":   {Messages: []schemas.Message{{Role: "user", Content: strings.Repeat("x", schemas.MaxAnswerBytes+1)}, {Role: "user"}}},
		"height: given; must be absent beside text":            {ImageSettings: schemas.ImageSettings{Height: new(int64(64))}, Text: &schemas.Text{}},
		"rollout.solver: given; must be absent beside text":    {ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{Solver: "euler"}}, Text: &schemas.Text{}},
		"tree: given; must be absent beside text":              {ImageSettings: schemas.ImageSettings{Tree: &schemas.Tree{Branches: []schemas.BranchPoint{{Width: 2, StepIndex: 2}}}}, Text: &schemas.Text{}},
		"text.top_p: 0; must be above 0 and at most 1":         {Text: &schemas.Text{TopP: new(0.0)}},
		"text.temperature: -1; must be between 0 and 100":      {Text: &schemas.Text{Temperature: new(-1.0)}},
		"text.logits.k: 5; must be absent":                     {Text: &schemas.Text{Logits: &schemas.Logits{K: new(int64(5))}}},
		"text.logits.ids: 0 items; must be at least 1":         {Text: &schemas.Text{Logits: &schemas.Logits{Form: "ids"}}},
		"text.logits.form: \"all\"; must be one of none, topk": {Text: &schemas.Text{Logits: &schemas.Logits{Form: "all"}}},
		"text.logits.kind: \"processed\"; must be raw":         {Text: &schemas.Text{Temperature: new(0.0), Logits: &schemas.Logits{Form: "topk", Kind: "processed"}}},
		"text.tokens_per_event: 2; must be 1":                  {Text: &schemas.Text{TokensPerEvent: new(int64(2)), Logits: &schemas.Logits{Form: "full"}}},
		"text.stop[0]: 0 bytes; must be between 1 and 1024":    {Text: &schemas.Text{Stop: []string{""}}},
	} {
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// What vectors take, by vocabulary and type, and how many fit one message of 1 MiB.
func TestTextRequest_LogitsBytes(t *testing.T) {
	for _, c := range []struct{ vocabulary, f32, f16, fit16, fit32 int64 }{
		{128256, 513024, 256512, 4, 2},
		{151936, 607744, 303872, 3, 1},
		{151643, 606572, 303286, 3, 1},
		{32000, 128000, 64000, 16, 8},
		{50257, 201028, 100514, 10, 5},
		{262144, 1048576, 524288, 2, 1},
	} {
		for dtype, want := range map[string]int64{"F32": c.f32, "F16": c.f16, "BF16": c.f16} {
			r := schemas.TextRequest{Logits: &schemas.Logits{Form: "full", DType: dtype}, Vocabulary: c.vocabulary}
			fit := c.fit16
			if dtype == "F32" {
				fit = c.fit32
			}
			if got := r.LogitsBytes(); got != want || 1<<20/got != fit {
				t.Errorf("V %d, %s: %d bytes, %d in 1 MiB; want %d, %d", c.vocabulary, dtype, got, 1<<20/got, want, fit)
			}
		}
	}
	for k, want := range map[int64][2]int64{
		1: {6, 8}, 5: {30, 40}, 20: {120, 160}, 64: {384, 512}, 256: {1536, 2048},
		1024: {6144, 8192},
	} {
		for i, dtype := range []string{"F16", "F32"} {
			r := schemas.TextRequest{Logits: &schemas.Logits{Form: "topk", K: &k, DType: dtype}, Vocabulary: 128256}
			if got := r.LogitsBytes(); got != want[i] {
				t.Errorf("top %d, %s: %d bytes; want %d", k, dtype, got, want[i])
			}
		}
	}
	mib := func(tokens, samples int64, dtype string) string {
		r := schemas.TextRequest{Logits: &schemas.Logits{Form: "full", DType: dtype}, Vocabulary: 128256}
		return fmt.Sprintf("%.2f", float64(tokens*samples*r.LogitsBytes())/(1<<20))
	}
	for want, got := range map[string]string{
		"4.89": mib(10, 1, "F32"), "2.45": mib(10, 1, "F16"), "48.93": mib(100, 1, "F32"), "391.41": mib(100, 8, "F32"),
		"125.25": mib(512, 1, "F16"), "250.50": mib(1024, 1, "F16"), "2004.00": mib(8192, 1, "F16"), "64128.00": mib(512, 32*16, "F16"), // 62.62 GiB
	} {
		if got != want {
			t.Errorf("%s MiB, want %s", got, want)
		}
	}
}

func TestTokens_ContentDigest_fields(t *testing.T) {
	checkFields(t, tokensEvent(), entering[schemas.Tokens](),
		func(e *schemas.Tokens) (any, error) { return schemas.ContentDigest(e) })
}
