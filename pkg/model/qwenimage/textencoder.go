package qwenimage

import (
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/model/tokenizer"
	"github.com/meander-rl/meander/pkg/tensor"
)

// The prompt template of the pipeline and the tokens of its fixed part, whose hidden
// states are dropped. The template is a contract with the published weights.
const (
	promptPrefix = "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, " +
		"text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
	promptSuffix        = "<|im_end|>\n<|im_start|>assistant\n"
	promptTokensDropped = 34
	// promptTokensLimit is the longest conditioning of the pipeline.
	promptTokensLimit = 1024
)

// textEncoder is the language model of Qwen2.5-VL on text alone: grouped-query attention
// with biases on q, k and v, rotary embeddings in the half-split form, RMS norms before
// each half of a layer, SwiGLU. Its vision tower is not loaded.
type textEncoder struct {
	config *textConfig
	embed  tensor.Matrix // [vocabulary, D]
	layers []textLayer
	norm   tensor.Vector
	rope   *nn.RopeTable
}

type textLayer struct {
	attnNorm, mlpNorm tensor.Vector
	qkv               nn.Linear // [(heads + 2*kvHeads) * headDim, D]
	out               nn.Linear
	gateUp            nn.Linear // [2*intermediate, D]
	down              nn.Linear
}

// textPrefixes are where checkpoints of different ages keep the language model.
var textPrefixes = []string{"model.language_model.", "language_model.model.", "model."}

func loadTextEncoder(l *nn.Loader, c *textConfig) *textEncoder {
	for _, l.Prefix = range textPrefixes {
		if l.Has("embed_tokens.weight") {
			break
		}
	}
	l.Ignored = func(name string) bool {
		// The vision tower and the output head play no part in reading a prompt.
		return strings.HasPrefix(name, "visual.") || strings.HasPrefix(name, "model.visual.") ||
			strings.HasPrefix(name, "vision_tower.") || strings.HasSuffix(name, "lm_head.weight")
	}
	d := c.Width
	hd := d / c.Heads
	t := &textEncoder{config: c, layers: make([]textLayer, c.Layers)}
	t.embed = l.Table("embed_tokens.weight", c.Vocabulary, d)
	for i := range t.layers {
		name := fmt.Sprintf("layers.%d.", i)
		t.layers[i] = textLayer{
			attnNorm: l.Vector(name+"input_layernorm.weight", d),
			mlpNorm:  l.Vector(name+"post_attention_layernorm.weight", d),
			qkv: l.Linear(d, true, nn.Out(name+"self_attn.q_proj", d),
				nn.Out(name+"self_attn.k_proj", c.KVHeads*hd), nn.Out(name+"self_attn.v_proj", c.KVHeads*hd)),
			out:    l.Linear(d, false, nn.Out(name+"self_attn.o_proj", d)),
			gateUp: l.Linear(d, false, nn.Out(name+"mlp.gate_proj", c.Intermediate), nn.Out(name+"mlp.up_proj", c.Intermediate)),
			down:   l.Linear(c.Intermediate, false, nn.Out(name+"mlp.down_proj", d)),
		}
	}
	t.norm = l.Vector("norm.weight", d)
	if !l.Holds() { // a table for the sizes of a configuration that nothing bears out
		return t
	}
	t.rope = textRope(c.Theta, hd, promptTokensLimit+promptTokensDropped)
	return t
}

func (t *textEncoder) bytes() int {
	n := 4*t.embed.Rows*t.embed.Cols + nn.VectorBytes(t.norm)
	for i := range t.layers {
		l := &t.layers[i]
		n += l.qkv.Bytes() + l.out.Bytes() + l.gateUp.Bytes() + l.down.Bytes() + nn.VectorBytes(l.attnNorm, l.mlpNorm)
	}
	return n
}

// forward writes the last hidden states, after the final norm, to dst [L, D].
func (t *textEncoder) forward(s tensor.Session, dst tensor.Matrix, ids []int32) {
	c := t.config
	d, n := c.Width, len(ids)
	hd := d / c.Heads
	kv := c.KVHeads * hd
	eps := float32(c.Epsilon)
	x, y := tensor.NewMatrix(s, n, d), tensor.NewFactors(s, n, d)
	qkv := tensor.NewFactors(s, n, d+2*kv)
	gateUp := tensor.NewFactors(s, n, 2*c.Intermediate)
	hidden := tensor.NewFactors(s, n, c.Intermediate)

	cos, sin := t.rope.Load(s, n)
	s.Gather(x, t.embed, ids)
	for i := range t.layers {
		l := &t.layers[i]
		s.RMSNorm(y, x, l.attnNorm, eps)
		l.qkv.Apply(s, qkv, y, tensor.Epilogue{})
		qk := qkv.SliceCols(0, d+kv) // heads of q, then of k
		s.RopeHalves(qk, qk, cos, sin, nil)
		s.Attention(y, qkv.SliceCols(0, d), qkv.SliceCols(d, d+kv), qkv.SliceCols(d+kv, d+2*kv),
			tensor.Attention{Heads: c.Heads, KVHeads: c.KVHeads, Causal: true})
		l.out.Apply(s, x, y, tensor.Epilogue{Residual: x})

		s.RMSNorm(y, x, l.mlpNorm, eps)
		l.gateUp.Apply(s, gateUp, y, tensor.Epilogue{})
		s.SiLUMul(hidden, gateUp.SliceCols(0, c.Intermediate), gateUp.SliceCols(c.Intermediate, 2*c.Intermediate))
		l.down.Apply(s, x, hidden, tensor.Epilogue{Residual: x})
	}
	s.RMSNorm(dst, x, t.norm, eps)
}

// promptIDs returns the tokens of a prompt in the template. The whole is tokenized at
// once, as the pipeline does: white space at the ends of the prompt joins the template's.
//
// Of more than limit tokens after the template's beginning those behind are dropped, the
// template's end first, and cut is how many. The pipeline drops their hidden states
// instead, which is the same: no token sees those behind it.
func promptIDs(tok *tokenizer.Tokenizer, prompt string, limit int) (ids []int32, cut int, err error) {
	if ids, err = tok.Encode(promptPrefix + prompt + promptSuffix); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", model.ErrPrompt, err)
	}
	kept := len(ids) - promptTokensDropped
	if kept <= 0 {
		return nil, 0, fmt.Errorf("%w: the template makes %d tokens; must be more than %d", model.ErrPrompt, len(ids), promptTokensDropped)
	}
	if cut = kept - limit; cut > 0 {
		return ids[:promptTokensDropped+limit], cut, nil
	}
	return ids, 0, nil
}
