package model_test

import (
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
)

// good is a card without a fault.
func good() model.Card {
	return model.Card{
		Name: "a-model_1", Family: "a", LatentChannels: 64, PixelsPerToken: 16, Size: media.ImageSize(64,
			128), NumInferenceSteps: 10,
		TrueCFGScale: 1, MaxPixels: 1024 * 2048, MaxPromptTokens: 8, CFGRule: model.CFGPlain,
		Conditioning:    []string{"prompt_embeds"},
		IndependentRows: true, ConditioningBytes: 8 * 16, ConditioningTokenBytes: 16,
	}
}

func TestCard_Tokens(t *testing.T) {
	card := good()
	tests := []struct {
		name          string
		height, width int
		want          int
		fault         string
	}{
		{"one token", 16, 16, 1, ""},
		{"wide", 64, 128, 32, ""},
		{"largest", 1024, 2048, 8192, ""},
		{"zero", 0, 64, 0, "positive"},
		{"negative", 64, -16, 0, "positive"},
		{"not a multiple", 64, 65, 0, "multiples of 16"},
		{"too many pixels", 1040, 2048, 0, "at most 2097152 pixels"},
		{"product beyond int", math.MaxInt &^ 15, math.MaxInt &^ 15, 0, "at most 2097152 pixels"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := card.Tokens(media.ImageSize(tt.height, tt.width))
			if got != tt.want || (err == nil) != (tt.fault == "") || err != nil &&
				!strings.Contains(err.Error(), tt.fault) {
				t.Errorf("Tokens(%d, %d) = %d, %v; want %d, %q", tt.height, tt.width, got, err, tt.want, tt.fault)
			}
		})
	}
	if _, err := card.Tokens(model.Size{Frames: 2, Height: 64, Width: 64}); err == nil ||
		!strings.Contains(err.Error(), "frames: 2") {
		t.Errorf("Tokens of a video: %v", err)
	}
	card.MaxFrames, card.FramesPerToken, card.FPS = 81, 4, 16
	if n, err := card.Tokens(model.Size{Frames: 81, Height: 64, Width: 128}); n != 21*32 || err != nil {
		t.Errorf("Tokens of 81 frames: %d, %v", n, err)
	}
	for _, frames := range []int{-4, 0, 2, 82, 85} {
		if _, err := card.Tokens(model.Size{Frames: frames, Height: 64, Width: 128}); err == nil {
			t.Errorf("Tokens of %d frames: no error", frames)
		}
	}
}

func TestCard_Validate(t *testing.T) {
	if err := good().Validate(); err != nil {
		t.Error(err)
	}
	for _, tt := range []struct {
		change func(*model.Card)
		want   string
	}{
		{func(c *model.Card) { c.Name = "a model" }, `name: "a model"`},
		{func(c *model.Card) { c.Family = "" }, "family"},
		{func(c *model.Card) { c.LatentChannels = 0 }, "latent_channels: 0"},
		{func(c *model.Card) { c.PixelsPerToken = 0 }, "pixels_per_token: 0"},
		{func(c *model.Card) { c.Height = 65 }, "default height x width: 65 x 128"},
		{func(c *model.Card) { c.NumInferenceSteps = 0 }, "num_inference_steps: 0"},
		{func(c *model.Card) { c.TrueCFGScale = math.NaN() }, "true_cfg_scale: NaN"},
		{func(c *model.Card) { c.MaxPromptTokens = 0 }, "max_prompt_tokens: 0"},
		{func(c *model.Card) { c.CFGRule = "zero_star" }, `cfg_rule: "zero_star"; must be rescaled, plain or plain_clamped`},
		{func(c *model.Card) { c.Prompts = 4 }, "prompts: 4; must be 1 to 3"},
		{func(c *model.Card) { c.Masks = map[string]string{"pooled": ""} }, `masks: "pooled": ""; must be a tensor of prompt_embeds`},
		{func(c *model.Card) { c.Masks = map[string]string{"prompt_embeds": "prompt_embeds"} }, `masks: "prompt_embeds"`},
		{func(c *model.Card) { c.Grid = "cosine" }, `grid: "cosine"; must be linspace, linspace_torch, scheduler, uni_flow, diffusion or pipeline`},
		{func(c *model.Card) { c.Mu = "cubic" }, `mu: "cubic"; must be linear, none, flux2 or constant`},
		{func(c *model.Card) { c.ConstantMu = 0.5 }, "mu_constant: 0.5; must be finite with mu constant, else 0"},
		{func(c *model.Card) { c.Conditioning = nil }, "conditioning: none"},
		{func(c *model.Card) { c.IndependentRows = false }, "tolerance: 0"},
	} {
		c := good()
		tt.change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want one fault with %q", err, tt.want)
		}
	}
}
