package qwenimage

import (
	"encoding/json"
	"fmt"
	"math"
	"path"
	"reflect"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// The classes of the pipeline and its parts.
const (
	pipelineClass    = "QwenImagePipeline"
	textEncoderClass = "Qwen2_5_VLForConditionalGeneration"
	transformerClass = "QwenImageTransformer2DModel"
	autoencoderClass = "AutoencoderKLQwenImage"
	textType         = "qwen2_5_vl_text"
)

// indexConfig is model_index.json: the class of each part of a pipeline.
type indexConfig struct {
	Class       string   `json:"_class_name"`
	Scheduler   []string `json:"scheduler"`
	TextEncoder []string `json:"text_encoder"`
	Tokenizer   []string `json:"tokenizer"`
	Transformer []string `json:"transformer"`
	Autoencoder []string `json:"vae"`
}

// readIndexConfig reads model_index.json and checks the class of each part.
func readIndexConfig(folder *safetensors.Folder) (*indexConfig, error) {
	const name = "model_index.json"
	c := new(indexConfig)
	if err := nn.ReadJSON(folder, name, partUnused, c); err != nil {
		return nil, err
	}
	var f nn.Faults
	f.Check(c.Class == pipelineClass, "_class_name: %q; must be %s", c.Class, pipelineClass)
	class := func(field string, got []string, want ...string) {
		ok := len(got) == 2
		if ok {
			ok = false
			for _, w := range want {
				ok = ok || got[1] == w
			}
		}
		f.Check(ok, "%s: %.80q; must be %s", field, got, want[0])
	}
	// Settings of a schedule that are not supported are refused when scheduler_config.json is parsed.
	class("scheduler", c.Scheduler,
		"FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
	class("text_encoder", c.TextEncoder, textEncoderClass)
	class("tokenizer", c.Tokenizer, "Qwen2Tokenizer", "Qwen2TokenizerFast")
	class("transformer", c.Transformer, transformerClass)
	class("vae", c.Autoencoder, autoencoderClass)
	if err := f.Of(name); err != nil {
		return nil, err
	}
	return c, nil
}

// partUnused are the keys of diffusers that every file may have.
var partUnused = strictjson.Unused{
	"_diffusers_version": "who wrote the file", "_name_or_path": "where it was",
	"_use_default_values": "which settings the writer left out",
}

// textUnused are the keys of text_encoder/config.json, besides those of its language model, that change no embedding of
// a text.
var textUnused = nn.DecoderUnused.With(strictjson.Unused{
	"architectures":         "model_index.json names the class",
	"eos_token_id":          "no tokens are drawn",
	"vision_config":         "prompts are texts",
	"image_token_id":        "prompts are texts",
	"video_token_id":        "prompts are texts",
	"vision_token_id":       "prompts are texts",
	"vision_start_token_id": "prompts are texts",
	"vision_end_token_id":   "prompts are texts",
})

// newTextConfig returns the defaults of Qwen2_5_VLTextConfig of transformers, for fields that a file leaves out.
func newTextConfig() *nn.DecoderConfig {
	return &nn.DecoderConfig{
		Vocabulary: 152064, Width: 8192, Intermediate: 29568, Layers: 80, Heads: 64, KVHeads: 8, MaxPositions: 32768,
		Epsilon: 1e-5, Theta: 1e6, Activation: "silu",
	}
}

// readTextConfig reads and checks the fields of text_encoder/config.json that text needs.
func readTextConfig(folder *safetensors.Folder, dir string) (*nn.DecoderConfig, error) {
	name := path.Join(dir, "config.json")
	// The fields are nested in text_config, or at the top in older files, or in both.
	var file struct {
		Text  json.RawMessage `json:"text_config"`
		Type  string          `json:"model_type"`
		Quant any             `json:"quantization_config"`
	}
	c := newTextConfig()
	if err := nn.ReadJSON(folder, name, textUnused, c, &file); err != nil {
		return nil, err
	}
	var f nn.Faults
	if len(file.Text) > 0 && string(file.Text) != "null" {
		var text struct {
			Type  string `json:"model_type"`
			Quant any    `json:"quantization_config"`
		}
		nested := newTextConfig()
		if err := strictjson.Unmarshal(file.Text, textUnused, nested, &text); err != nil {
			return nil, fmt.Errorf("read %s: text_config: %w", name, err)
		}
		f.Check(text.Type == "" || text.Type == textType, "text_config.model_type: %q; must be %s", text.Type, textType)
		f.Check(text.Quant == nil, "text_config.quantization_config: not supported")
		// What stands at the top, too, must be the same: transformers reads text_config.
		both := *nested
		both.Rope, both.Scaling = nil, nil
		if err := nn.ReadJSON(folder, name, nn.Elsewhere, &both); err != nil {
			return nil, err
		}
		both.Tied = nested.Tied // there is no head
		if both.Rope == nil {
			both.Rope = nested.Rope
		}
		if both.Scaling == nil {
			both.Scaling = nested.Scaling
		}
		f.Check(reflect.DeepEqual(&both, nested), "text_config: other values than at the top; must be the same")
		c = nested
	}
	f.Check(file.Type == "qwen2_5_vl", "model_type: %q; must be qwen2_5_vl", file.Type)
	f.Check(file.Quant == nil, "quantization_config: not supported")
	c.Check(&f, promptTokensLimit+promptTokensDropped)
	if err := f.Of(name); err != nil {
		return nil, err
	}
	return c, nil
}

// transformerConfig is transformer/config.json.
type transformerConfig struct {
	Class          string `json:"_class_name"`
	PatchSize      int    `json:"patch_size"`
	In             int    `json:"in_channels"`
	Out            int    `json:"out_channels"`
	Layers         int    `json:"num_layers"`
	HeadDim        int    `json:"attention_head_dim"`
	Heads          int    `json:"num_attention_heads"`
	TextWidth      int    `json:"joint_attention_dim"`
	GuidanceEmbeds bool   `json:"guidance_embeds"`
	Axes           []int  `json:"axes_dims_rope"`
	ZeroCondT      bool   `json:"zero_cond_t"`
	AdditionalT    bool   `json:"use_additional_t_cond"`
	Layer3DRope    bool   `json:"use_layer3d_rope"`
	Quantization   any    `json:"quantization_config"`
}

func (c *transformerConfig) width() int { return c.Heads * c.HeadDim }

// readTransformerConfig reads transformer/config.json and checks that this package implements it exactly.
func readTransformerConfig(folder *safetensors.Folder, dir string) (*transformerConfig, error) {
	name := path.Join(dir, "config.json")
	// The defaults of the class, for files that leave fields out.
	c := &transformerConfig{
		PatchSize: 2, In: 64, Out: 16, Layers: 60, HeadDim: 128, Heads: 24, TextWidth: 3584, Axes: []int{16, 56, 56},
	}
	unused := partUnused.With(strictjson.Unused{"pooled_projection_dim": "the class has no such setting"})
	if err := nn.ReadJSON(folder, name, unused, c); err != nil {
		return nil, err
	}
	var f nn.Faults
	f.Check(c.Class == transformerClass, "_class_name: %q; must be %s", c.Class, transformerClass)
	f.Check(c.PatchSize == 2, "patch_size: %d; must be 2", c.PatchSize)
	f.Within("in_channels", c.In, 4, 4096)
	f.Check(c.Out > 0 && c.Out <= 4096 && c.In == 4*c.Out, "in_channels: %d; must be 4 * out_channels = 4 * %d", c.In,
		c.Out)
	f.Within("num_layers", c.Layers, 1, nn.MaxDepth)
	f.Within("num_attention_heads", c.Heads, 1, nn.MaxDepth)
	f.Within("attention_head_dim", c.HeadDim, 2, 1024)
	f.Within("joint_attention_dim", c.TextWidth, 1, nn.MaxWidth)
	sum, even := 0, true
	for _, d := range c.Axes {
		even = even && d > 0 && d%2 == 0 && d <= 1024
		sum += d
	}
	f.Check(len(c.Axes) == 3 && even && sum == c.HeadDim,
		"axes_dims_rope: %s; must be three even numbers that add up to attention_head_dim = %d", brief(c.Axes),
		c.HeadDim)
	f.Check(!c.GuidanceEmbeds, "guidance_embeds: not supported")
	f.Check(!c.ZeroCondT, "zero_cond_t: not supported")
	f.Check(!c.AdditionalT, "use_additional_t_cond: not supported")
	f.Check(!c.Layer3DRope, "use_layer3d_rope: not supported")
	f.Check(c.Quantization == nil, "quantization_config: not supported")
	if err := f.Of(name); err != nil {
		return nil, err
	}
	return c, nil
}

// vaeConfig is vae/config.json.
type vaeConfig struct {
	Class      string    `json:"_class_name"`
	Base       int       `json:"base_dim"`
	Latents    int       `json:"z_dim"`
	Mult       []int     `json:"dim_mult"`
	ResBlocks  int       `json:"num_res_blocks"`
	AttnScales []float64 `json:"attn_scales"`
	Temporal   []bool    `json:"temperal_downsample"` // the file spells it so
	Channels   int       `json:"input_channels"`
	Mean       []float64 `json:"latents_mean"`
	Std        []float64 `json:"latents_std"`
}

// readVAEConfig reads vae/config.json and checks that this package implements it exactly.
func readVAEConfig(folder *safetensors.Folder, dir string) (*vaeConfig, error) {
	name := path.Join(dir, "config.json")
	// The defaults of the class, for files that leave fields out.
	c := &vaeConfig{
		Base: 96, Latents: 16, Mult: []int{1, 2, 4, 4}, ResBlocks: 2, Temporal: []bool{false, true, true}, Channels: 3,
		Mean: []float64{
			-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
			0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
		},
		Std: []float64{
			2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
			3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
		},
	}
	unused := partUnused.With(strictjson.Unused{"dropout": "of training"})
	if err := nn.ReadJSON(folder, name, unused, c); err != nil {
		return nil, err
	}
	var f nn.Faults
	f.Check(c.Class == autoencoderClass, "_class_name: %q; must be %s", c.Class, autoencoderClass)
	f.Within("base_dim", c.Base, 2, 4096)
	f.Check(c.Base%2 == 0, "base_dim: %d; must be an even number", c.Base)
	f.Within("z_dim", c.Latents, 1, 1024)
	f.Within("num_res_blocks", c.ResBlocks, 1, 64)
	f.Check(c.Channels == 3, "input_channels: %d; must be 3", c.Channels)
	f.Check(len(c.AttnScales) == 0, "attn_scales: not supported")
	ok := len(c.Mult) >= 2 && len(c.Mult) <= 6
	for _, m := range c.Mult {
		ok = ok && m >= 1 && m <= 64
	}
	f.Check(ok, "dim_mult: %s; must be 2 to 6 numbers from 1 to 64", brief(c.Mult))
	f.Check(len(c.Temporal) == len(c.Mult)-1, "temperal_downsample: %d values; must be one fewer than dim_mult",
		len(c.Temporal))
	ok = len(c.Mean) == c.Latents && len(c.Std) == c.Latents
	for i := 0; ok && i < c.Latents; i++ {
		ok = !math.IsNaN(c.Mean[i]) && !math.IsInf(c.Mean[i], 0) && c.Std[i] > 0 && !math.IsInf(c.Std[i], 0)
	}
	f.Check(ok, "latents_mean, latents_std: %d and %d values; must be z_dim = %d finite numbers each, standard "+
		"deviations above 0",
		len(c.Mean), len(c.Std), c.Latents)
	if err := f.Of(name); err != nil {
		return nil, err
	}
	return c, nil
}

// levels returns how often the autoencoder halves an image.
func (c *vaeConfig) levels() int { return len(c.Mult) - 1 }

// brief formats a list for an error, with at most eight of its numbers.
func brief(numbers []int) string {
	const most = 8
	if len(numbers) > most {
		return fmt.Sprintf("%v and %d more", numbers[:most], len(numbers)-most)
	}
	return fmt.Sprint(numbers)
}
