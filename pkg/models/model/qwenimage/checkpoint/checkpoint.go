// Package checkpoint writes random checkpoints of the Qwen-Image family, with the layout and
// the names of the published ones: small ones, so that tests run the real loading and
// sampling code, and one of the published size, for measurements. Their images are noise.
package checkpoint

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tokenizer/tokenizertest"
)

// Config describes a checkpoint. Zero fields have the defaults.
type Config struct {
	Seed      uint64       // of the weights
	DType     tensor.DType // of the files: F32 (default), F16 or BF16
	TextWidth int          // of the text encoder; default 16; a multiple of 4, at least 12
	TextDepth int          // default 1
	Heads     int          // of the transformer; default 2
	HeadDim   int          // default 8; a multiple of 4, at least 8
	Depth     int          // of the transformer; default 1
	Base      int          // narrowest width of the autoencoder; default 4
	// Mult are the widths of the autoencoder's levels in units of Base; default 1, 1, 2, 2. It
	// halves an image between each two: a token covers 2 << (len(Mult)-1) pixels each way.
	Mult []int
	// Height, Width and Steps are the defaults in meander.json: 32, 32 and 4. The
	// default guidance scale there is 1.
	Height, Width, Steps int

	// Vocabulary is the rows of the text encoder's embedding, at least and by default the
	// tokens of the tokenizer, a few hundred.
	Vocabulary int
	// TextHeads, of which TextKVHeads have keys, share TextWidth; default 2 and 1.
	// TextHidden is the width between the halves of its MLPs, default twice TextWidth.
	TextHeads, TextKVHeads, TextHidden int
	Axes                               []int   // of rotary positions; default half of HeadDim, and a quarter each
	ResBlocks                          int     // of each level of the autoencoder; default 1
	Temporal                           []bool  // levels of the autoencoder with a convolution over time
	Scale                              float64 // guidance, default 1
	// ShardBytes bounds the size of a file with more than one tensor; 0 is no bound.
	ShardBytes int
	// Hollow writes large tensors as holes in the files: they read as zeros and need no disk space.
	Hollow bool
	// Progress, unless nil, is called before each file is written.
	Progress func(file string, bytes int)
}

// Published returns the config of the published checkpoint: a transformer of 20 billion
// parameters and a text encoder of 7 billion, in bf16.
func Published() Config {
	return Config{
		DType: tensor.BF16, Vocabulary: 152064, TextWidth: 3584, TextDepth: 28,
		TextHeads: 28, TextKVHeads: 4, TextHidden: 18944,
		Heads: 24, HeadDim: 128, Depth: 60, Axes: []int{16, 56, 56},
		Base: 96, Mult: []int{1, 2, 4, 4}, ResBlocks: 2, Temporal: []bool{false, true, true},
		Height: 1024, Width: 1024, Steps: 50, Scale: 4, ShardBytes: 5 << 30,
	}
}

// setDefaults replaces zero fields by their defaults.
func (c *Config) setDefaults() {
	for _, f := range []struct {
		v *int
		d int
	}{
		{&c.TextWidth, 16},
		{&c.TextDepth, 1},
		{&c.Heads, 2},
		{&c.HeadDim, 8},
		{&c.Depth, 1},
		{&c.Base, 4},
		{&c.Height, 32},
		{&c.Width, 32},
		{&c.Steps, 4},
		{&c.TextHeads, 2},
		{&c.TextKVHeads, 1},
		{&c.TextHidden, 2 * max(c.TextWidth, 16)},
		{&c.ResBlocks, 1},
	} {
		if *f.v == 0 {
			*f.v = f.d
		}
	}
	if c.Mult == nil {
		c.Mult = []int{1, 1, 2, 2}
	}
	if c.DType == "" {
		c.DType = tensor.F32
	}
	if c.Axes == nil {
		sections := c.HeadDim / 8 * 4 // the axes must be even
		c.Axes = []int{c.HeadDim - sections, sections / 2, sections / 2}
	}
	if c.Temporal == nil {
		c.Temporal = make([]bool, len(c.Mult)-1)
	}
	if c.Scale == 0 {
		c.Scale = 1
	}
}

// test is the part of testing.TB that Dir needs. This package is also used outside of tests, so it does not import
// testing.
type test interface {
	Helper()
	TempDir() string
	Fatal(args ...any)
}

// Dir writes a checkpoint to a temporary folder of the test and returns the folder.
func Dir(t test, c Config) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tiny")
	if err := Write(dir, c); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Write makes the folder dir and writes a checkpoint to it.
func Write(dir string, c Config) error {
	c.setDefaults()
	vocab, special := tokenizertest.Vocabulary()
	tokens := max(c.Vocabulary, len(vocab)+len(special))
	files := configs(c, tokens)
	files["tokenizer/vocab.json"] = vocab
	files["tokenizer/tokenizer_config.json"] = map[string]any{
		"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": false,
		"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "added_tokens_decoder": special,
	}
	for name, v := range files {
		text, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return err
		}
		if err := write(dir, name, text); err != nil {
			return err
		}
	}
	if err := write(dir, "tokenizer/merges.txt", []byte("#version: 0.2\n")); err != nil {
		return err
	}
	b := &builder{rng: rand.New(rand.NewPCG(c.Seed, 0x6d65616e646572)), dtype: c.DType, hollow: c.Hollow}
	for _, p := range []struct {
		file  string // without its ending
		build func(Config)
	}{
		{"text_encoder/model", func(c Config) { b.textEncoder(c, tokens) }},
		{"transformer/diffusion_pytorch_model", b.transformer},
		{"vae/diffusion_pytorch_model", b.autoencoder},
	} {
		b.tensors = nil
		p.build(c)
		if b.err != nil {
			return b.err
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, p.file)), 0o755); err != nil {
			return err
		}
		if err := writeShards(dir, p.file, b.tensors, c); err != nil {
			return err
		}
	}
	return nil
}

// configs returns all JSON files except the tokenizer's, by name, for a vocabulary of so many tokens.
func configs(c Config, tokens int) map[string]any {
	pairs := c.TextWidth / c.TextHeads / 2 // of a head of the text encoder
	return map[string]any{
		"model_index.json": map[string]any{
			"_class_name": "QwenImagePipeline", "_diffusers_version": "0.42.1",
			"scheduler":    []string{"diffusers", "FlowMatchEulerDiscreteScheduler"},
			"text_encoder": []string{"transformers", "Qwen2_5_VLForConditionalGeneration"},
			"tokenizer":    []string{"transformers", "Qwen2Tokenizer"},
			"transformer":  []string{"diffusers", "QwenImageTransformer2DModel"},
			"vae":          []string{"diffusers", "AutoencoderKLQwenImage"},
		},
		"meander.json": map[string]any{
			"height": c.Height, "width": c.Width, "num_inference_steps": c.Steps, "true_cfg_scale": c.Scale,
		},
		"scheduler/scheduler_config.json": map[string]any{
			"_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
			"max_image_seq_len": 8192, "max_shift": 0.9, "num_train_timesteps": 1000, "shift": 1.0,
			"shift_terminal": 0.02, "time_shift_type": "exponential", "use_dynamic_shifting": true,
		},
		"text_encoder/config.json": map[string]any{
			"architectures": []string{"Qwen2_5_VLForConditionalGeneration"}, "model_type": "qwen2_5_vl",
			"vocab_size": tokens, "hidden_size": c.TextWidth, "intermediate_size": c.TextHidden,
			"num_hidden_layers": c.TextDepth, "num_attention_heads": c.TextHeads, "num_key_value_heads": c.TextKVHeads,
			"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 4096,
			"rope_scaling": map[string]any{
				"type":          "mrope",
				"mrope_section": []int{pairs - 2*(pairs/3), pairs / 3, pairs / 3},
			},
			"tie_word_embeddings": true,
		},
		"transformer/config.json": map[string]any{
			"_class_name": "QwenImageTransformer2DModel", "patch_size": 2, "in_channels": 64, "out_channels": 16,
			"num_layers": c.Depth, "attention_head_dim": c.HeadDim, "num_attention_heads": c.Heads,
			"joint_attention_dim": c.TextWidth, "guidance_embeds": false,
			"axes_dims_rope": c.Axes,
		},
		"vae/config.json": map[string]any{
			"_class_name": "AutoencoderKLQwenImage", "base_dim": c.Base, "z_dim": 16, "dim_mult": c.Mult,
			"num_res_blocks": c.ResBlocks, "attn_scales": []int{}, "temperal_downsample": c.Temporal,
			"latents_mean": make([]float32, 16), "latents_std": ones(16),
		},
	}
}

func write(dir, name string, b []byte) error {
	name = filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, b, 0o644)
}

// builder makes random tensors.
type builder struct {
	rng     *rand.Rand
	dtype   tensor.DType
	tensors []safetensors.Tensor
	err     error
	hollow  bool
	normals []float32 // of large tensors
}

// add adds a tensor of normal numbers with that mean and standard deviation.
func (b *builder) add(name string, mean, std float64, shape ...int) {
	n := 1
	for _, d := range shape {
		n *= d
	}
	if n > normalCount || b.hollow && n > 1<<12 {
		b.tensors = append(b.tensors, b.largeTensor(name, mean, std, n, shape))
		return
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(mean + std*b.rng.NormFloat64())
	}
	t, err := safetensors.FloatTensor(name, b.dtype, shape, x)
	if err != nil && b.err == nil {
		b.err = err
	}
	b.tensors = append(b.tensors, t)
}

// weight draws a matrix or kernel that keeps the scale of its input, norm a weight near 1.
func (b *builder) weight(name string, shape ...int) {
	fan := 1
	for _, d := range shape[1:] {
		fan *= d
	}
	b.add(name+".weight", 0, 1/math.Sqrt(float64(fan)), shape...)
}

func (b *builder) linear(name string, shape ...int) {
	b.weight(name, shape...)
	b.add(name+".bias", 0, 0.1, shape[0])
}

func (b *builder) norm(name string, shape ...int) { b.add(name, 1, 0.1, shape...) }

// textEncoder adds the tensors of the text encoder.
func (b *builder) textEncoder(c Config, vocab int) {
	d := c.TextWidth
	kv := d / c.TextHeads * c.TextKVHeads
	b.add("model.embed_tokens.weight", 0, 1, vocab, d)
	for i := range c.TextDepth {
		name := fmt.Sprintf("model.layers.%d.", i)
		b.norm(name+"input_layernorm.weight", d)
		b.linear(name+"self_attn.q_proj", d, d)
		b.linear(name+"self_attn.k_proj", kv, d)
		b.linear(name+"self_attn.v_proj", kv, d)
		b.weight(name+"self_attn.o_proj", d, d)
		b.norm(name+"post_attention_layernorm.weight", d)
		b.weight(name+"mlp.gate_proj", c.TextHidden, d)
		b.weight(name+"mlp.up_proj", c.TextHidden, d)
		b.weight(name+"mlp.down_proj", d, c.TextHidden)
	}
	b.norm("model.norm.weight", d)
}

// transformer adds the tensors of the transformer.
func (b *builder) transformer(c Config) {
	d := c.Heads * c.HeadDim
	b.linear("img_in", d, 64)
	b.norm("txt_norm.weight", c.TextWidth)
	b.linear("txt_in", d, c.TextWidth)
	b.linear("time_text_embed.timestep_embedder.linear_1", d, 256)
	b.linear("time_text_embed.timestep_embedder.linear_2", d, d)
	for i := range c.Depth {
		name := fmt.Sprintf("transformer_blocks.%d.", i)
		for _, p := range []string{
			"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj",
			"to_add_out",
		} {
			b.linear(name+"attn."+p, d, d)
		}
		for _, p := range []string{"norm_q", "norm_k", "norm_added_q", "norm_added_k"} {
			b.norm(name+"attn."+p+".weight", c.HeadDim)
		}
		for _, s := range []string{"img", "txt"} {
			b.linear(name+s+"_mod.1", 6*d, d)
			b.linear(name+s+"_mlp.net.0.proj", 4*d, d)
			b.linear(name+s+"_mlp.net.2", d, 4*d)
		}
	}
	b.linear("norm_out.linear", 2*d, d)
	b.linear("proj_out", 64, d)
}

// resBlock adds the tensors of a residual block of the autoencoder, from in to out channels, under
// the prefix name.
func (b *builder) resBlock(name string, in, out int) {
	b.norm(name+"norm1.gamma", in, 1, 1, 1)
	b.linear(name+"conv1", out, in, 3, 3, 3)
	b.norm(name+"norm2.gamma", out, 1, 1, 1)
	b.linear(name+"conv2", out, out, 3, 3, 3)
	if in != out {
		b.linear(name+"conv_shortcut", out, in, 1, 1, 1)
	}
}

func (b *builder) middle(name string, d int) {
	b.resBlock(name+"resnets.0.", d, d)
	b.norm(name+"attentions.0.norm.gamma", d, 1, 1)
	b.linear(name+"attentions.0.to_qkv", 3*d, d, 1, 1)
	b.linear(name+"attentions.0.proj", d, d, 1, 1)
	b.resBlock(name+"resnets.1.", d, d)
}

// autoencoder adds the tensors of the encoder and the decoder of images.
func (b *builder) autoencoder(c Config) {
	const z = 16
	last := len(c.Mult) - 1
	in, index := c.Base, 0
	b.linear("encoder.conv_in", in, 3, 3, 3, 3)
	for i, m := range c.Mult {
		for range c.ResBlocks {
			b.resBlock(fmt.Sprintf("encoder.down_blocks.%d.", index), in, c.Base*m)
			in = c.Base * m
			index++
		}
		if i < last {
			name := fmt.Sprintf("encoder.down_blocks.%d.", index)
			b.linear(name+"resample.1", in, in, 3, 3)
			if c.Temporal[i] {
				b.linear(name+"time_conv", in, in, 3, 1, 1)
			}
			index++
		}
	}
	b.middle("encoder.mid_block.", in)
	b.norm("encoder.norm_out.gamma", in, 1, 1, 1)
	b.linear("encoder.conv_out", 2*z, in, 3, 3, 3)
	b.linear("quant_conv", 2*z, 2*z, 1, 1, 1)
	b.linear("post_quant_conv", z, z, 1, 1, 1)
	b.linear("decoder.conv_in", in, z, 3, 3, 3)
	b.middle("decoder.mid_block.", in)
	for i := range c.Mult {
		out := c.Base * c.Mult[last-i]
		name := fmt.Sprintf("decoder.up_blocks.%d.", i)
		for j := range c.ResBlocks + 1 {
			b.resBlock(fmt.Sprintf("%sresnets.%d.", name, j), in, out)
			in = out
		}
		if i < last {
			b.linear(name+"upsamplers.0.resample.1", out/2, out, 3, 3)
			if c.Temporal[last-1-i] {
				b.linear(name+"upsamplers.0.time_conv", 2*out, out, 3, 1, 1)
			}
			out /= 2
		}
		in = out
	}
	b.norm("decoder.norm_out.gamma", in, 1, 1, 1)
	b.linear("decoder.conv_out", 3, in, 3, 3, 3)
}

func ones(n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = 1
	}
	return x
}
