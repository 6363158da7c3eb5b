package intake

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// qwen is a lane with Qwen-Image's scheduler.
func qwen() *schemas.Policy {
	return &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "q", Model: "q", Family: "qwen-image", PolicyVersion: 3, LatentChannels: 64, PixelsPerToken: 16,
		SchedulerConfig: []byte(`{"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": true, "base_shift": 0.5, "max_shift": 0.9,
			"base_image_seq_len": 256, "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential"}`),
		Height: 512, Width: 512, NumInferenceSteps: 10, TrueCFGScale: 4, NegativePrompt: " ", MaxPixels: 1 << 20,
	}
}

func resolved(t *testing.T, p *schemas.Prompt) []*schemas.Request {
	t.Helper()
	rs, err := Resolve("run", p, qwen(), Origin{Seq: 7, Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func TestResolve_Defaults(t *testing.T) {
	rs := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"})
	r := rs[0]
	if len(rs) != 8 || len(r.Sigmas) != 11 || r.Height != 512 || r.NoiseLevel != 0.7 || r.LatentsDType != "F32" ||
		r.NegativePrompt != " " || r.Group.Batch != "u" || *r.Group.Reward[0].Weight != 1 ||
		r.Group.Advantage.Estimator != "flow_grpo" {
		t.Errorf("%d requests, first %+v", len(rs), r)
	}
	// T=10, 512x512, terminal 0.02: the second sigma of the published schedule.
	if d := r.Sigmas[1] - 0.92896963544178; d > 1e-6 || d < -1e-6 {
		t.Errorf("sigma 1 = %v, want 0.92896963544178", r.Sigmas[1])
	}
	seeds := map[uint64]bool{}
	for i, r := range rs {
		if r.SampleIndex != int64(i) || r.ScheduleDigest != rs[0].ScheduleDigest || r.NoiseSeed != r.SampleSeed {
			t.Errorf("request %d: %+v", i, r)
		}
		seeds[r.SampleSeed] = true
	}
	if len(seeds) != 8 {
		t.Errorf("%d distinct seeds, want 8", len(seeds))
	}
}

// Guidance is the lane's by default, and refused for a network without such an input.
func TestResolve_Guidance(t *testing.T) {
	p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{Guidance: new(2.5)}}
	policy := qwen()
	resolve := func(p *schemas.Prompt) (*schemas.Request, error) {
		rs, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil {
			return nil, err
		}
		return rs[0], nil
	}
	const want = `guidance: 2.5; must be absent, the network of model "q" has no such input`
	if _, err := resolve(p); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	plain, err := resolve(&schemas.Prompt{UID: "u", Prompt: "a"})
	if err != nil || plain.Guidance != 0 {
		t.Fatalf("%+v, %v", plain, err)
	}
	policy.Guidance = 3.5
	byDefault, err1 := resolve(&schemas.Prompt{UID: "u", Prompt: "a"})
	own, err2 := resolve(p)
	if err1 != nil || err2 != nil || byDefault.Guidance != 3.5 || own.Guidance != 2.5 {
		t.Fatalf("guidance %+v and %+v, %v, %v; want 3.5 and 2.5", byDefault, own, err1, err2)
	}
	if own.ScheduleDigest == byDefault.ScheduleDigest || plain.ScheduleDigest == byDefault.ScheduleDigest {
		t.Error("another guidance must have another schedule digest")
	}
}

// Shares of steps with guidance are kept where they say more than absent ones, and refused where they leave no step.
func TestResolve_CFGShares(t *testing.T) {
	for _, c := range []struct {
		from, until, scale  float64
		wantFrom, wantUntil float64
		guided              int64
		fault               string
	}{
		{0, 0.3, 4, 0, 0.3, 3, ""},
		{0, 0.39, 4, 0, 0.39, 3, ""},
		{0, 1, 4, 0, 0, 10, ""},
		{0, 0.5, 1, 0, 0, 0, ""},
		{0, 0.09, 4, 0, 0, 0, "cfg_from, cfg_until: 0, 0.09; must have a whole one of the 10 steps between them, 0.1 of all"},
		{0.3, 1, 4, 0.3, 0, 7, ""},
		{0.3, 0.7, 4, 0.3, 0.7, 4, ""},
		{0.3, 0.7, 1, 0, 0, 0, ""},
		{0.7, 0.3, 4, 0, 0, 0, "cfg_from: 0.7; must be below cfg_until, 0.3"},
		{0.5, 0.5, 4, 0, 0, 0, "cfg_from: 0.5; must be below cfg_until, 0.5"},
		{0.31, 0.45, 4, 0, 0, 0, "cfg_from, cfg_until: 0.31, 0.45; must have a whole one of the 10 steps"},
	} {
		p := &schemas.Prompt{UID: "u", Prompt: "a"}
		p.CFGFrom, p.CFGUntil, p.TrueCFGScale = &c.from, &c.until, &c.scale
		rs, err := Resolve("run", p, qwen(), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if c.fault != "" {
			if err == nil || !strings.Contains(err.Error(), c.fault) {
				t.Errorf("%+v: %v; want %q", c, err, c.fault)
			}
			continue
		}
		if err != nil || rs[0].CFGFrom != c.wantFrom || rs[0].CFGUntil != c.wantUntil ||
			rs[0].GuidedSteps() != c.guided {
			t.Errorf("%+v: %v", c, err)
		}
	}
	p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{
		CFGUntil: new(0.5), ScheduledSampling: &schemas.ScheduledSampling{},
	}}
	const want = "cfg_from, cfg_until: 0, 0.5; must be absent with scheduled_sampling"
	_, err := Resolve("run", p, qwen(), Origin{Created: time.Unix(1, 0)})
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
}

// A share of rescaling is kept under guidance, and refused without: it would have no effect.
func TestResolve_GuidanceRescale(t *testing.T) {
	p := &schemas.Prompt{UID: "u", Prompt: "a"}
	p.TrueCFGScale, p.GuidanceRescale = new(4.0), new(0.7)
	if r := resolved(t, p)[0]; r.GuidanceRescale != 0.7 {
		t.Errorf("guidance_rescale %g; want 0.7", r.GuidanceRescale)
	}
	p.TrueCFGScale = new(1.0)
	_, err := Resolve("run", p, qwen(), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	if want := "guidance_rescale: 0.7; must be absent with true_cfg_scale 1"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
}

// A second scale of guidance is for models with two networks, under guidance; it is kept where it says more than an
// absent one.
func TestResolve_TrueCFGScale2(t *testing.T) {
	for _, c := range []struct {
		boundary, scale, second float64
		want                    float64
		guided                  int64
		fault                   string
	}{
		{0.875, 4, 3, 3, 10, ""},
		{0.875, 4, 4, 0, 10, ""},
		{0.875, 4, 1, 1, 2, ""},
		{0.875, 1, 3, 0, 0, "true_cfg_scale_2: 3; must be absent with true_cfg_scale 1, which is without guidance"},
		{0, 4, 3, 0, 0, `true_cfg_scale_2: 3; must be absent, model "q" has no second network`},
	} {
		policy, p := qwen(), &schemas.Prompt{UID: "u", Prompt: "a"}
		policy.BoundaryRatio, p.TrueCFGScale, p.TrueCFGScale2 = c.boundary, &c.scale, &c.second
		rs, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if c.fault != "" {
			if err == nil || !strings.Contains(err.Error(), c.fault) {
				t.Errorf("%+v: %v; want %q", c, err, c.fault)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		s := rs[0].Sampling
		if s.TrueCFGScale2 != c.want || (s.BoundaryRatio > 0) != (c.want > 0) || s.GuidedSteps() != c.guided {
			t.Errorf("%+v: scale %g below %g, %d guided steps of %v", c, s.TrueCFGScale2, s.BoundaryRatio,
				s.GuidedSteps(), s.Sigmas)
		}
	}
	absent, err := Resolve("run", &schemas.Prompt{UID: "u", Prompt: "a"}, func() *schemas.Policy {
		p := qwen()
		p.BoundaryRatio = 0.875
		return p
	}(), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	if err != nil || absent[0].BoundaryRatio != 0 {
		t.Errorf("without a second scale: %+v, %v", absent, err)
	}
}

// Further texts are for models with as many text encoders.
func TestResolve_Texts(t *testing.T) {
	for _, c := range []struct {
		prompts       int64
		second, third string
		want          []string
		fault         string
	}{
		{0, "", "", []string{"a"}, ""},
		{0, "b", "", nil, `prompt_2: given; must be absent, model "q" takes 1 of the texts`},
		{2, "b", "", []string{"a", "b"}, ""},
		{2, "", "c", nil, `prompt_3: given; must be absent, model "q" takes 2 of the texts`},
		{3, "", "c", []string{"a", "a", "c"}, ""},
		{3, "b", "a", []string{"a", "b"}, ""},
		{3, "a", "a", []string{"a"}, ""},
	} {
		policy := qwen()
		policy.Prompts = c.prompts
		p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{
			Prompt2: c.second, Prompt3: c.third,
		}}
		rs, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		switch {
		case c.fault != "":
			if err == nil || !strings.Contains(err.Error(), c.fault) {
				t.Errorf("%v; want %q", err, c.fault)
			}
		case err != nil || !slices.Equal(rs[0].Texts(), c.want):
			t.Errorf("%q and %q: %v; want %q", c.second, c.third, err, c.want)
		}
	}
}

// The grid of the lane's policy decides the sigmas, and a prompt's own stand in for it.
func TestResolve_GridOfThePolicy(t *testing.T) {
	sigmas := func(grid string, given []float64) []float32 {
		t.Helper()
		policy := qwen()
		policy.SchedulerConfig, policy.Grid = []byte(`{"shift": 3.0}`), grid
		p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{
			Sigmas: given, NumInferenceSteps: new(int64(4)),
		}}
		rs, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil {
			t.Fatal(err)
		}
		return rs[0].Sigmas
	}
	if got := sigmas("", nil); !slices.Equal(got, []float32{1, 0.9, 0.75, 0.5, 0}) {
		t.Errorf("linspace: %v", got)
	}
	if got := sigmas("scheduler", nil); got[0] != 1 || got[3] > 0.00893 || got[3] < 0.00892 {
		t.Errorf("scheduler: %v; want the last step to begin at 0.008929", got)
	}
	if got := sigmas("scheduler", []float64{1, 0.75, 0.5, 0.25}); !slices.Equal(got, []float32{1, 0.9, 0.75, 0.5, 0}) {
		t.Errorf("the prompt's own: %v", got)
	}
}

func TestResolve_Steps(t *testing.T) {
	for _, c := range []struct {
		name       string
		rollout    schemas.Rollout
		validation bool
		sde, kept  []int64
	}{
		{"all", schemas.Rollout{}, false, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		{"list", schemas.Rollout{SDEStepIndices: []int64{5, 2}}, false, []int64{2, 5}, []int64{2, 3, 5, 6}},
		{"adjacent", schemas.Rollout{SDEStepIndices: []int64{2, 3}}, false, []int64{2, 3}, []int64{2, 3, 4}},
		{"empty list", schemas.Rollout{SDEStepIndices: []int64{}}, false, []int64{}, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		{"nothing kept", schemas.Rollout{ReturnStepIndices: []int64{}}, false, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, []int64{}},
		{"window of one place", schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 3, Range: []int64{4, 7}}}, false, []int64{4, 5, 6}, []int64{4, 5, 6, 7}},
		{"progressive", schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 2, Range: []int64{0, 5}, Strategy: "progressive", Iteration: 3, ItersPerGroup: 2}}, false, []int64{2, 3}, []int64{2, 3, 4}},
		{"ode", schemas.Rollout{SDEType: "ode"}, false, []int64{}, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		{"validation", schemas.Rollout{SDEStepIndices: []int64{1}}, true, []int64{}, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(t, &schemas.Prompt{
				UID: "u", Prompt: "a",
				ImageSettings: schemas.ImageSettings{Rollout: c.rollout}, Validation: c.validation,
			})[0]
			if got := r.StochasticSteps(); !slices.Equal(got, c.sde) {
				t.Errorf("stochastic steps %v, want %v", got, c.sde)
			}
			if !slices.Equal(r.ReturnStepIndices, c.kept) {
				t.Errorf("kept latents %v, want %v", r.ReturnStepIndices, c.kept)
			}
		})
	}
}

// A random window is one draw per batch: equal for all samples of all its groups, whatever
// their seeds, and for a redelivery. Prompts without a batch have that of their run.
func TestResolve_WindowIsTheBatchs(t *testing.T) {
	window := func(t *testing.T, run schemas.Run, uid schemas.UID, batch string, seed, windowSeed *int64) []string {
		t.Helper()
		p := &schemas.Prompt{
			UID: uid, Prompt: "a", GroupSize: new(int64(4)), Seed: seed,
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 2, Range: []int64{0, 9}, Seed: windowSeed}}},
		}
		if batch != "" {
			p.Batch = &schemas.BatchSpec{ID: batch, Groups: 8}
		}
		requests, err := Resolve(run, p, qwen(), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range requests {
			if !slices.Equal(r.Transitions, requests[0].Transitions) {
				t.Errorf("sample %d has another window", r.SampleIndex)
			}
		}
		return requests[0].Transitions
	}
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for _, batch := range []string{"", "b0", "b1"} {
		want := window(t, "r", "a", batch, nil, nil)
		for i, uid := range names {
			if got := window(t, "r", schemas.UID(uid), batch, new(int64(i)), nil); !slices.Equal(got, want) {
				t.Errorf("batch %q: group %q has the steps %v, another has %v", batch, uid, got, want)
			}
		}
	}
	places := func(draw func(name string) []string) int {
		seen := map[string]bool{}
		for _, name := range names {
			seen[fmt.Sprint(draw(name))] = true
		}
		return len(seen)
	}
	if n := places(func(batch string) []string { return window(t, "r", "a", batch, nil, nil) }); n < 2 {
		t.Error("eight batches all have the same window")
	}
	if n := places(func(run string) []string { return window(t, schemas.Run(run), "a", "", nil, nil) }); n < 2 {
		t.Error("eight runs all have the same window")
	}
	seed := new(int64(7))
	if n := places(func(run string) []string {
		return window(t, schemas.Run(run), schemas.UID(run), "b0", nil, seed)
	}); n != 1 {
		t.Errorf("a window with a seed has %d places in eight runs", n)
	}
	if n := places(func(batch string) []string { return window(t, "r", "a", batch, nil, seed) }); n < 2 {
		t.Error("a seed gives eight batches the same window")
	}
}

func TestResolve_SeedsAndSharedNoise(t *testing.T) {
	seeded := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a", Seed: new(int64(7))})
	again, err := Resolve("another-run", &schemas.Prompt{UID: "u", Prompt: "a", Seed: new(int64(7))}, qwen(),
		Origin{Created: time.Unix(2, 0), Reward: []string{"synthetic"}})
	if err != nil {
		t.Fatal(err)
	}
	if seeded[3].SampleSeed != again[3].SampleSeed {
		t.Error("the seed does not fix the sample seeds")
	}
	if unseeded := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"}); unseeded[3].SampleSeed == seeded[3].SampleSeed {
		t.Error("without a seed the run must seed")
	}
	shared := resolved(t, &schemas.Prompt{
		UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{InitialNoise: "shared"},
	})
	if shared[0].NoiseSeed != shared[5].NoiseSeed || shared[0].SampleSeed == shared[5].SampleSeed {
		t.Error("shared noise is one x_T and a seed of its own per sample")
	}
}

func TestTokens(t *testing.T) {
	policy := qwen()
	for _, c := range []struct {
		height, width int64
		want          int
		fault         string
	}{
		{512, 768, 32 * 48, ""},
		{16, 16, 1, ""},
		{1000, 512, 0, `height: 1000; must be a multiple of 16 for model "q", such as 992 or 1008`},
		{512, 8, 0, `width: 8; must be a multiple of 16 for model "q", such as 16`},
		{2048, 2048, 0, `height x width: 2048 x 2048; model "q" serves at most 1048576 pixels`},
	} {
		got, err := Tokens(media.ImageSize(c.height, c.width), policy)
		if got != c.want || (err == nil) != (c.fault == "") || err != nil && err.Error() != c.fault {
			t.Errorf("%dx%d: %d, %v; want %d, %q", c.height, c.width, got, err, c.want, c.fault)
		}
	}
}

func TestTokens_frames(t *testing.T) {
	video := qwen()
	video.Frames, video.MaxFrames, video.FramesPerToken, video.FPS, video.MaxPixels = 9, 33, 4, 8, 8192*8192
	for _, c := range []struct {
		policy *schemas.Policy
		size   media.Size
		want   int
		fault  string
	}{
		{
			qwen(),
			media.Size{Frames: 5, Height: 64, Width: 64},
			0,
			`frames: 5; must be 1, the model makes images, for model "q"`,
		},
		{video, media.Size{Frames: 1, Height: 64, Width: 96}, 4 * 6, ""},
		{video, media.Size{Frames: 33, Height: 64, Width: 96}, 9 * 4 * 6, ""},
		{
			video,
			media.Size{Frames: 32, Height: 64, Width: 96},
			0,
			`frames: 32; must be 1 more than a multiple of 4, such as 29 or 33, for model "q"`,
		},
		{video, media.Size{Frames: 37, Height: 64, Width: 96}, 0, `frames: 37; must be at most 33, for model "q"`},
		{
			video,
			media.Size{Frames: 33, Height: 8192, Width: 8192},
			0,
			`frames x height x width: 33 x 8192 x 8192; must be at most 1073741824 pixels`,
		},
	} {
		got, err := Tokens(c.size, c.policy)
		if got != c.want || (err == nil) != (c.fault == "") || err != nil && err.Error() != c.fault {
			t.Errorf("%v: %d, %v; want %d, %q", c.size, got, err, c.want, c.fault)
		}
	}
	video.LatentChannels = 65536
	if _, err := Tokens(media.Size{Frames: 17, Height: 4096, Width: 4096}, video); err == nil ||
		!strings.Contains(err.Error(), "must be at most 1024") {
		t.Errorf("a state of 80 GiB: %v", err)
	}
}

// An image is the same sample whether or not a prompt says that it has one frame; the default of a lane of videos is
// the lane's.
func TestResolve_Frames(t *testing.T) {
	policy := qwen()
	policy.Frames, policy.MaxFrames, policy.FramesPerToken, policy.FPS = 9, 33, 4, 8
	resolve := func(frames *int64, policy *schemas.Policy) *schemas.Request {
		t.Helper()
		p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{Frames: frames}}
		list, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil {
			t.Fatal(err)
		}
		return list[0]
	}
	for _, c := range []struct {
		asked  *int64
		policy *schemas.Policy
		want   int64
	}{{nil, qwen(), 0}, {new(int64(1)), qwen(), 0}, {nil, policy, 9}, {new(int64(1)), policy, 0}, {
		new(int64(13)),
		policy, 13,
	}} {
		if got := resolve(c.asked, c.policy).Frames; got != c.want {
			t.Errorf("frames %d, want %d", got, c.want)
		}
	}
	if resolve(nil, qwen()).ScheduleDigest != resolve(new(int64(1)), policy).ScheduleDigest ||
		resolve(nil, policy).ScheduleDigest == resolve(new(int64(13)), policy).ScheduleDigest {
		t.Error("schedule digests: an image must have one, videos of other lengths another")
	}
}

// Resolve reads its prompt and changes nothing of it, in whatever struct a default is missing.
func TestResolve_LeavesThePromptAlone(t *testing.T) {
	prompt := func() *schemas.Prompt {
		return &schemas.Prompt{
			UID: "u", Prompt: "a", GroupPolicy: &schemas.GroupPolicy{ZeroStd: schemas.GroupDrop}, Reward: []schemas.RewardSpec{{Name: "synthetic"}},
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 1}}},
		}
	}
	p := prompt()
	requests, err := Resolve("run", p, qwen(), Origin{Created: time.Unix(1, 0)})
	if err != nil {
		t.Fatal(err)
	}
	if want := prompt(); !reflect.DeepEqual(p, want) {
		t.Errorf("prompt %+v, want %+v", p, want)
	}
	if n := len(requests); n != 8 {
		t.Errorf("%d requests, want the default of group_size, 8", n)
	}
	g := requests[0].Group
	if g.GroupPolicy.Failed != schemas.GroupKeep || *g.GroupPolicy.RefillRounds != 3 || *g.Reward[0].Weight != 1 ||
		!*g.Reward[0].Required {
		t.Errorf("group %+v with %+v, want the defaults", g, g.GroupPolicy)
	}
}

// The lane of a model that predicts epsilon has the timesteps of its network; what would ask it elsewhere is refused.
func TestResolve_Diffusion(t *testing.T) {
	policy := qwen()
	policy.Grid = schemas.GridDiffusion
	policy.SchedulerConfig = []byte(`{"_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012,
		"beta_schedule": "scaled_linear", "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1}`)
	resolve := func(change func(*schemas.Prompt)) ([]*schemas.Request, error) {
		p := &schemas.Prompt{
			UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4))},
		}
		change(p)
		return Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	}
	rs, err := resolve(func(*schemas.Prompt) {})
	if err != nil {
		t.Fatal(err)
	}
	r := rs[0]
	if want := []float32{751, 501, 251, 1}; !slices.Equal(r.NetworkTimesteps, want) {
		t.Errorf("timesteps %v; want %v", r.NetworkTimesteps, want)
	}
	if last := r.Sigmas[4]; last < 0.028 || last > 0.029 || r.InitialStd < 0.7 || r.InitialStd > 1 {
		t.Errorf("it ends at %v and begins with a deviation of %v", last, r.InitialStd)
	}
	for want, change := range map[string]func(*schemas.Prompt){
		"sigmas: given; must be absent":            func(p *schemas.Prompt) { p.Sigmas = []float64{1, 0.7, 0.5, 0.2} },
		"solver: heun; must be one of":             func(p *schemas.Prompt) { p.Rollout.Solver = "heun" },
		"num_inference_steps: 1000; must be fewer": func(p *schemas.Prompt) { p.NumInferenceSteps = new(int64(1000)) },
	} {
		if _, err := resolve(change); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	policy.Grid = ""
	if _, err := resolve(func(*schemas.Prompt) {}); err == nil ||
		!strings.Contains(err.Error(), "scheduled_sampling: null") {
		t.Errorf("without the grid of a whole pipeline: %v", err)
	}
}

// States are rounded to what the model computes in, where that is BF16, unless the prompt says another type.
func TestResolve_LatentsDType(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ model, prompt, want string }{
		{"", "", "F32"}, {"BF16", "", "BF16"}, {"BF16", "F32", "F32"}, {"", "F16", "F16"},
	} {
		p, lane := &schemas.Prompt{UID: "u", Prompt: "a fox"}, qwen()
		p.Rollout.LatentsDType, lane.LatentsDType = test.prompt, test.model
		requests, err := Resolve("r", p, lane, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil || requests[0].LatentsDType != test.want {
			t.Errorf("%+v: %v, %v", test, requests, err)
		}
	}
}
