// Package qwen2test writes small language models with random weights, for tests and measurements.
package qwen2test

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tokenizer/tokenizertest"
)

// Random describes a folder of random weights. Zero fields have the defaults.
type Random struct {
	Seed           uint64
	DType          tensor.DType // of the file: F32 (default), F16 or BF16
	Width, Layers  int          // default 32 and 2
	Intermediate   int          // default 3 times Width
	Heads, KVHeads int          // default 4 and 2
	Vocabulary     int          // rows of the embedding; default, and at least, the tokenizer's 259
	MaxPositions   int          // default 512
	Untied         bool         // a head of its own
	Shards         int          // files; default 1
	Temperature    float64      // default 1
	Template       string       // chat template; default ChatML
	Scale          float64      // of the logits, about their standard deviation; default 2
}

// ChatML is the plain template of the family's turns.
const ChatML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + " +
	"'<|im_end|>' + '\\n'}}" +
	"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

// setDefaults replaces zero fields by their defaults.
func (r *Random) setDefaults() {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&r.Width, 32)
	set(&r.Layers, 2)
	set(&r.Intermediate, 3*r.Width)
	set(&r.Heads, 4)
	set(&r.KVHeads, max(1, r.Heads/2))
	set(&r.MaxPositions, 512)
	set(&r.Shards, 1)
	r.Vocabulary = max(r.Vocabulary, 259)
	if r.DType == "" {
		r.DType = tensor.F32
	}
	if r.Temperature == 0 {
		r.Temperature = 1
	}
	if r.Scale == 0 {
		r.Scale = 2
	}
	if r.Template == "" {
		r.Template = ChatML
	}
}

// Write writes the folder of a model with random weights. transformers can load it, too. Ids 0 to 255 are bytes, then
// come <|endoftext|>, <|im_start|> and <|im_end|>. A file that cannot be written is an error.
func (r Random) Write(dir string) error {
	r.setDefaults()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	vocab, added := tokenizertest.Vocabulary()
	for name, content := range map[string]any{
		"config.json": map[string]any{
			"architectures": []string{"Qwen2ForCausalLM"}, "model_type": "qwen2", "vocab_size": r.Vocabulary, "hidden_size": r.Width,
			"intermediate_size": r.Intermediate, "num_hidden_layers": r.Layers, "num_attention_heads": r.Heads,
			"num_key_value_heads":     r.KVHeads,
			"max_position_embeddings": r.MaxPositions, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
			"hidden_act":          "silu",
			"tie_word_embeddings": !r.Untied, "eos_token_id": 258, "bos_token_id": nil, "use_sliding_window": false,
			"torch_dtype": map[tensor.DType]string{
				tensor.F32: "float32", tensor.F16: "float16",
				tensor.BF16: "bfloat16",
			}[r.DType],
		},
		"generation_config.json": map[string]any{
			"do_sample": true, "temperature": r.Temperature, "top_k": 0, "top_p": 1.0,
			"eos_token_id": 258, "pad_token_id": 256, "max_new_tokens": 16,
		},
		"vocab.json": vocab,
		"tokenizer_config.json": map[string]any{
			"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": false,
			"chat_template": r.Template, "added_tokens_decoder": added,
			"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": nil, "bos_token": nil,
		},
	} {
		b, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "merges.txt"), []byte("#version: 0.2\n"), 0o644); err != nil {
		return err
	}
	return r.writeWeights(dir)
}

// writeWeights writes the tensors to one or several files, one after the other. No tensor is in
// memory as a whole. A file that cannot be written is an error.
func (r *Random) writeWeights(dir string) error {
	d, kv := r.Width, r.Width/r.Heads*r.KVHeads
	var tensors []safetensors.Tensor
	add := func(name string, mean, std float64, shape ...int) {
		seed := uint64(len(tensors))
		tensors = append(tensors, safetensors.Tensor{
			Name: name, DType: r.DType, Shape: shape,
			Source: func(w io.Writer) error {
				return r.writeNormals(w, rand.New(rand.NewPCG(r.Seed, seed)), mean, std, shape)
			},
		})
	}
	linear := func(name string, bias bool, n, k int) {
		add(name+".weight", 0, 1/math.Sqrt(float64(k)), n, k)
		if bias {
			add(name+".bias", 0, 0.1, n)
		}
	}
	head := r.Scale / math.Sqrt(float64(d)) // the final norm's output has squares of 1
	if r.Untied {
		add("model.embed_tokens.weight", 0, 1, r.Vocabulary, d)
		add("lm_head.weight", 0, head, r.Vocabulary, d)
	} else {
		add("model.embed_tokens.weight", 0, head, r.Vocabulary, d)
	}
	add("model.norm.weight", 1, 0.1, d)
	for i := range r.Layers {
		name := fmt.Sprintf("model.layers.%d.", i)
		add(name+"input_layernorm.weight", 1, 0.1, d)
		add(name+"post_attention_layernorm.weight", 1, 0.1, d)
		linear(name+"self_attn.q_proj", true, d, d)
		linear(name+"self_attn.k_proj", true, kv, d)
		linear(name+"self_attn.v_proj", true, kv, d)
		linear(name+"self_attn.o_proj", false, d, d)
		linear(name+"mlp.gate_proj", false, r.Intermediate, d)
		linear(name+"mlp.up_proj", false, r.Intermediate, d)
		linear(name+"mlp.down_proj", false, d, r.Intermediate)
	}
	if r.Shards == 1 {
		return writeTensors(filepath.Join(dir, "model.safetensors"), tensors)
	}
	index := map[string]string{}
	for i := range r.Shards {
		file := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, r.Shards)
		part := tensors[i*len(tensors)/r.Shards : (i+1)*len(tensors)/r.Shards]
		for _, t := range part {
			index[t.Name] = file
		}
		if err := writeTensors(filepath.Join(dir, file), part); err != nil {
			return err
		}
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": index})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), b, 0o644)
}

// writeNormals writes the elements of a tensor of this shape, normal numbers with mean and std from
// rng, a piece at a time. The error is that of w.
func (r *Random) writeNormals(w io.Writer, rng *rand.Rand, mean, std float64, shape []int) error {
	n := 1
	for _, d := range shape {
		n *= d
	}
	x, piece := make([]float32, 1<<14), []byte(nil)
	for ; n > 0; n -= len(x) {
		x = x[:min(n, len(x))]
		for i := range x {
			x[i] = float32(mean + std*rng.NormFloat64())
		}
		piece = r.DType.AppendFloats(piece[:0], x)
		if _, err := w.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

// writeTensors writes a safetensors file of these tensors. A file that cannot be written is an
// error; what there is of it stays.
func writeTensors(name string, tensors []safetensors.Tensor) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := safetensors.Write(f, tensors, map[string]string{"format": "pt"}); err != nil {
		_ = f.Close()
		return fmt.Errorf("write %s: %w", name, err)
	}
	return f.Close()
}
