package nn

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Bounds of configurations, far above published models (the largest image family has 60 blocks of
// 24 heads of 128, text width 3584). They keep products of any two within an int.
const (
	MaxDepth = 1024
	MaxWidth = 1 << 17
	maxRows  = 1 << 21 // of an embedding
)

// DecoderConfig holds the fields of a config.json of transformers for a decoder of the Qwen2 kind.
type DecoderConfig struct {
	Vocabulary    int     `json:"vocab_size"`
	Width         int     `json:"hidden_size"`
	Intermediate  int     `json:"intermediate_size"`
	Layers        int     `json:"num_hidden_layers"`
	Heads         int     `json:"num_attention_heads"`
	KVHeads       int     `json:"num_key_value_heads"`
	HeadDim       int     `json:"head_dim"`
	Epsilon       float64 `json:"rms_norm_eps"`
	Activation    string  `json:"hidden_act"`
	SlidingWindow bool    `json:"use_sliding_window"`
	// LayerTypes are the kinds of attention, layer by layer; nil: all full.
	LayerTypes   []string `json:"layer_types"`
	MaxPositions int      `json:"max_position_embeddings"`
	Tied         bool     `json:"tie_word_embeddings"`
	// transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
	Theta   float64     `json:"rope_theta"`
	Rope    *ropeConfig `json:"rope_parameters"`
	Scaling *ropeConfig `json:"rope_scaling"`
}

type ropeConfig struct {
	Type     string  `json:"rope_type"`
	Older    string  `json:"type"`
	Theta    float64 `json:"rope_theta"`
	Sections []int   `json:"mrope_section"`
}

// DecoderUnused are the keys of such a config.json that change no result.
var DecoderUnused = func() strictjson.Unused {
	u := strictjson.Unused{
		"transformers_version":         "who wrote the file",
		"_name_or_path":                "where it was",
		"_attn_implementation_autoset": "who chose the implementation of attention",
		"attn_implementation":          "implementations of attention are equal but for rounding",
		"torch_dtype":                  "tensors say their types",
		"dtype":                        "as torch_dtype",
		"attention_dropout":            "of training",
		"initializer_range":            "of training",
		"use_cache":                    "a cache changes no result",
		"chunk_size_feed_forward":      "of memory, not results",
		"sliding_window":               "use_sliding_window must be false, and layer_types full",
		"max_window_layers":            "as sliding_window",
		"bos_token_id":                 "no prompt is empty",
		"pad_token_id":                 "rows are not padded",
		"output_attentions":            "what transformers returns",
		"output_hidden_states":         "as output_attentions",
		"return_dict":                  "as output_attentions",
		"use_mrope":                    "no class of transformers reads it",
		"unsloth_fixed":                "no class of transformers reads it",
		"unsloth_version":              "no class of transformers reads it",
	}
	for _, key := range []string{
		"is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder",
		"decoder_start_token_id", "sep_token_id", "id2label", "label2id", "problem_type", "finetuning_task",
		"task_specific_params", "pruned_heads", "torchscript", "use_bfloat16", "tf_legacy_loss", "tokenizer_class",
		"prefix",
	} {
		u[key] = "transformers writes it for every model; decoders do not read it"
	}
	for _, key := range []string{
		"max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
		"temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
		"encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
		"return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
		"exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
	} {
		u[key] = "of drawing tokens: read by language models without a generation_config.json"
	}
	for _, rope := range []string{"rope_scaling", "rope_parameters"} {
		for _, key := range []string{
			"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
			"mscale_all_dim", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "truncate",
		} {
			u[rope+"."+key] = "of a rope_type that is refused"
		}
	}
	return u
}()

// UnmarshalJSON keeps the values of fields that are missing in the file: they are the defaults of the class. If
// num_key_value_heads is null, it becomes num_attention_heads (see Check).
func (c *DecoderConfig) UnmarshalJSON(data []byte) error {
	type plain DecoderConfig
	file := struct {
		*plain
		KVHeads *int `json:"num_key_value_heads"`
	}{plain: (*plain)(c), KVHeads: &c.KVHeads}
	err := json.Unmarshal(data, &file)
	if file.KVHeads == nil {
		c.KVHeads = 0
	}
	return err
}

// Check sets the fields that follow from others and notes faults. positions is how many positions the decoder needs
// at least.
func (c *DecoderConfig) Check(f *Faults, positions int) {
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	for _, r := range []*ropeConfig{c.Rope, c.Scaling} {
		if r != nil && r.Theta != 0 {
			c.Theta = r.Theta
		}
	}
	before := len(*f)
	f.Within("vocab_size", c.Vocabulary, 1, maxRows)
	f.Within("hidden_size", c.Width, 1, MaxWidth)
	f.Within("intermediate_size", c.Intermediate, 1, MaxWidth)
	f.Within("num_hidden_layers", c.Layers, 1, MaxDepth)
	f.Within("num_attention_heads", c.Heads, 1, MaxDepth)
	f.Within("num_key_value_heads", c.KVHeads, 1, MaxDepth)
	f.Within("max_position_embeddings", c.MaxPositions, positions, math.MaxInt32)
	if len(*f) == before {
		f.Check(c.Width%(2*c.Heads) == 0, "hidden_size: %d; must be a multiple of twice num_attention_heads = %d",
			c.Width, c.Heads)
		f.Check(c.Heads%c.KVHeads == 0, "num_attention_heads: %d; must be a multiple of num_key_value_heads = %d",
			c.Heads, c.KVHeads)
		f.Check(c.HeadDim == 0 || c.HeadDim*c.Heads == c.Width,
			"head_dim: %d; must be hidden_size / num_attention_heads", c.HeadDim)
	}
	f.Check(c.Epsilon > 0 && c.Epsilon < 1, "rms_norm_eps: %g; must be 0 to 1", c.Epsilon)
	f.Check(c.Theta > 1 && c.Theta < 1e12, "rope_theta: %g; must be more than 1", c.Theta)
	f.Check(c.Activation == "silu", "hidden_act: %q; must be silu", c.Activation)
	f.Check(!c.SlidingWindow, "use_sliding_window: not supported")
	if c.LayerTypes == nil && len(*f) == before {
		c.LayerTypes = slices.Repeat([]string{"full_attention"}, c.Layers)
	}
	full := c.LayerTypes == nil || len(c.LayerTypes) == c.Layers
	for _, kind := range c.LayerTypes {
		full = full && kind == "full_attention"
	}
	f.Check(full, "layer_types: %.80q; must be full_attention for each of num_hidden_layers = %d", c.LayerTypes,
		c.Layers)
	for _, r := range []*ropeConfig{c.Rope, c.Scaling} {
		if r != nil {
			kind := r.Type
			if kind == "" {
				kind = r.Older
			}
			// For text only, the multi-axis form equals the ordinary one.
			f.Check(kind == "" || kind == "default" || kind == "mrope", "rope_type: %q; must be default", kind)
		}
	}
}

// kv returns the number of columns of the keys, and of the values, of a layer.
func (c *DecoderConfig) kv() int { return c.KVHeads * (c.Width / c.Heads) }

// CacheCols returns the number of columns of a cache: keys and values of a token, of all layers.
func (c *DecoderConfig) CacheCols() int { return 2 * c.kv() * c.Layers }

// PassBytes returns a bound of the memory that Forward allocates in a session for so many tokens, with
// factors of factorBytes per element.
func (c *DecoderConfig) PassBytes(tokens, factorBytes int) int {
	return tokens * (2*4*c.Width + factorBytes*(2*c.Width+2*c.kv()+3*c.Intermediate))
}

// Decoder is the body of a Qwen2 language model: grouped-query attention with biases on q,
// k and v, rotary embeddings in the half-split form, RMS norms before each half of a layer,
// SwiGLU.
type Decoder struct {
	Config   *DecoderConfig
	Embed    tensor.Matrix // [vocabulary, width]
	layers   []decoderLayer
	norm     tensor.Vector
	cos, sin tensor.Matrix // [positions, head width / 2]
}

type decoderLayer struct {
	attnNorm, mlpNorm tensor.Vector
	qkv               Linear // [(heads + 2*kvHeads) * headDim, D]
	out               Linear
	gateUp            Linear // [2*intermediate, D]
	down              Linear
}

// Decoder reads the tensors embed_tokens, layers and norm for so many positions.
func (l *Loader) Decoder(c *DecoderConfig, positions int) *Decoder {
	d := c.Width
	t := &Decoder{Config: c, layers: make([]decoderLayer, c.Layers)}
	t.Embed = l.Table("embed_tokens.weight", c.Vocabulary, d)
	for i := range t.layers {
		name := fmt.Sprintf("layers.%d.", i)
		t.layers[i] = decoderLayer{
			attnNorm: l.Vector(name+"input_layernorm.weight", d),
			mlpNorm:  l.Vector(name+"post_attention_layernorm.weight", d),
			qkv: l.Linear(d, true, Out(name+"self_attn.q_proj", d),
				Out(name+"self_attn.k_proj", c.kv()), Out(name+"self_attn.v_proj", c.kv())),
			out: l.Linear(d, false, Out(name+"self_attn.o_proj", d)),
			gateUp: l.Linear(d, false, Out(name+"mlp.gate_proj", c.Intermediate),
				Out(name+"mlp.up_proj", c.Intermediate)),
			down: l.Linear(c.Intermediate, false, Out(name+"mlp.down_proj", d)),
		}
	}
	t.norm = l.Vector("norm.weight", d)
	if !l.Holds() { // no table for sizes of a configuration that the files do not confirm
		return t
	}
	rope := NewRopeTable(positions, d/c.Heads/2)
	freqs := RopeFrequencies(c.Theta, d/c.Heads)
	for i := range positions {
		rope.Fill(i, 0, i, freqs)
	}
	t.cos, t.sin = l.table(rope.cos, positions), l.table(rope.sin, positions)
	return t
}

// Bytes returns the memory of the weights.
func (t *Decoder) Bytes() int {
	n := 4*t.Embed.Rows*t.Embed.Cols + VectorBytes(t.norm)
	for i := range t.layers {
		l := &t.layers[i]
		n += l.qkv.Bytes() + l.out.Bytes() + l.gateUp.Bytes() + l.down.Bytes() + VectorBytes(l.attnNorm, l.mlpNorm)
	}
	return n
}

// Past is the cache for the tokens of a pass: the keys and values of the tokens before them,
// and the rows for their own. The tokens of a sequence in the pass are its last ones.
type Past struct {
	Cache     tensor.Matrix // [rows, CacheCols], see tensor.Device.Cache
	Rows      []int32       // of the cache, for each token of the pass
	Positions []int32       // of each token in its sequence
	Queries   [][]int32     // tokens of the pass, by sequence
	Keys      [][]int32     // rows of the cache, by sequence, those of the pass included
	From      int           // its first token of the pass; those of the next past follow
}

// Forward writes the hidden states of tokens after the last layer, before the final norm, to x [L, width]. Without
// a past the tokens are one sequence from its beginning; a pass may have several pasts, with a cache each. The bits of
// a token depend neither on the other sequences of a pass, nor on how a sequence is split into passes.
func (t *Decoder) Forward(s tensor.Session, x tensor.Matrix, ids []int32, pasts ...Past) {
	c := t.Config
	d, n, kv := c.Width, len(ids), c.kv()
	eps := float32(c.Epsilon)
	y := tensor.NewFactors(s, n, d)
	qkv := tensor.NewFactors(s, n, d+2*kv)
	gateUp := tensor.NewFactors(s, n, 2*c.Intermediate)
	hidden := tensor.NewFactors(s, n, c.Intermediate)
	attention := tensor.Attention{Heads: c.Heads, KVHeads: c.KVHeads, Causal: true}
	var positions []int32
	for _, p := range pasts {
		positions = append(positions, p.Positions...)
	}
	s.Gather(x, t.Embed, ids)
	for i := range t.layers {
		l := &t.layers[i]
		s.RMSNorm(y, x, l.attnNorm, eps)
		l.qkv.Apply(s, qkv, y, tensor.Epilogue{})
		qk := qkv.SliceCols(0, d+kv) // heads of q, then of k
		s.RopeHalves(qk, qk, t.cos, t.sin, positions)
		keys := qkv.SliceCols(d, d+2*kv) // and values
		attend := func() {
			s.Attention(y, qkv.SliceCols(0, d), keys.SliceCols(0, kv), keys.SliceCols(kv, 2*kv), attention)
		}
		if len(pasts) == 0 {
			attend()
		}
		new := keys
		for _, p := range pasts {
			keys, attention.Sequences, attention.Keys = p.Cache.SliceCols(2*kv*i, 2*kv*(i+1)), p.Queries, p.Keys
			s.Scatter(keys, new.SliceRows(p.From, p.From+len(p.Rows)), p.Rows)
			attend()
		}
		l.out.Apply(s, x, y, tensor.Epilogue{Residual: x})
		s.RMSNorm(y, x, l.mlpNorm, eps)
		l.gateUp.Apply(s, gateUp, y, tensor.Epilogue{})
		s.SiLUMul(hidden, gateUp.SliceCols(0, c.Intermediate), gateUp.SliceCols(c.Intermediate, 2*c.Intermediate))
		l.down.Apply(s, x, hidden, tensor.Epilogue{Residual: x})
	}
}

// Norm computes the final norm; dst may alias x.
func (t *Decoder) Norm(s tensor.Session, dst, x tensor.Matrix) {
	s.RMSNorm(dst, x, t.norm, float32(t.Config.Epsilon))
}

// MixDecoders returns a decoder for a pass in which tokens up to ends[i] are of of[i]: all are adapted from one.
func MixDecoders(of []*Decoder, ends []int) *Decoder {
	if len(of) == 1 {
		return of[0]
	}
	t := of[0].Clone()
	lists := make([][]*Linear, len(of))
	for i, o := range of {
		lists[i] = o.linears()
	}
	Mix(t.linears(), lists, ends)
	return t
}

// linears returns every matrix of weights, with its bias.
func (t *Decoder) linears() (all []*Linear) {
	for i := range t.layers {
		l := &t.layers[i]
		all = append(all, &l.qkv, &l.out, &l.gateUp, &l.down)
	}
	return all
}

// Clone returns a decoder whose projections may be replaced.
func (t *Decoder) Clone() *Decoder {
	n := *t
	n.layers = append([]decoderLayer(nil), t.layers...)
	return &n
}

// Modules returns the table of what adapters can change of a decoder of the configuration, which Check has passed.
// prefix is what names of modules begin with.
func (c *DecoderConfig) Modules(prefix string) lora.Table {
	return Table((&Decoder{Config: c, layers: make([]decoderLayer, c.Layers)}).Projections(prefix))
}

// Projections returns all projections by their names in a checkpoint, which begin with prefix.
func (t *Decoder) Projections(prefix string) map[string]Projection {
	c := t.Config
	d, kv, m := c.Width, c.kv(), c.Intermediate
	p := map[string]Projection{}
	for i := range t.layers {
		l, name := &t.layers[i], fmt.Sprintf("%slayers.%d.", prefix, i)
		p[name+"self_attn.q_proj"] = Projection{In: &l.qkv, N: d, K: d}
		p[name+"self_attn.k_proj"] = Projection{In: &l.qkv, From: d, N: kv, K: d}
		p[name+"self_attn.v_proj"] = Projection{In: &l.qkv, From: d + kv, N: kv, K: d}
		p[name+"self_attn.o_proj"] = Projection{In: &l.out, N: d, K: d}
		p[name+"mlp.gate_proj"] = Projection{In: &l.gateUp, N: m, K: d}
		p[name+"mlp.up_proj"] = Projection{In: &l.gateUp, From: m, N: m, K: d}
		p[name+"mlp.down_proj"] = Projection{In: &l.down, N: d, K: m}
	}
	return p
}

// RopeFrequencies returns theta^(-2i/dim) for 0 <= i < dim/2, rounded to float32 at the same
// places as in the reference.
func RopeFrequencies(theta float64, dim int) []float32 {
	f := make([]float32, dim/2)
	for i := range f {
		f[i] = 1 / float32(math.Pow(theta, float64(float32(2*i)/float32(dim))))
	}
	return f
}

// RopeTable holds cos and sin [positions, D/2] of rotary embeddings, on the host.
type RopeTable struct {
	positions, pairs int
	cos, sin         []float32
}

// NewRopeTable returns an empty table; Fill sets its rows.
func NewRopeTable(positions, pairs int) *RopeTable {
	n := positions * pairs
	return &RopeTable{positions: positions, pairs: pairs, cos: make([]float32, n), sin: make([]float32, n)}
}

// Load copies the rows of the first positions to a session.
func (t *RopeTable) Load(s tensor.Session, positions int) (cos, sin tensor.Matrix) {
	cos, sin = tensor.NewMatrix(s, positions, t.pairs), tensor.NewMatrix(s, positions, t.pairs)
	s.CopyIn(cos, t.cos[:positions*t.pairs])
	s.CopyIn(sin, t.sin[:positions*t.pairs])
	return cos, sin
}

// Bytes returns the memory of the table.
func (t *RopeTable) Bytes() int { return 4 * (len(t.cos) + len(t.sin)) }

// Fill sets columns from..from+len(freqs) of row to a position. Angles are float32
// products, as in the reference; their cos and sin are rounded once.
func (t *RopeTable) Fill(row, from, position int, freqs []float32) {
	cos, sin := t.cos[row*t.pairs+from:], t.sin[row*t.pairs+from:]
	for i, f := range freqs {
		angle := float64(float32(position) * f)
		cos[i], sin[i] = float32(math.Cos(angle)), float32(math.Sin(angle))
	}
}
