// Package qwenimage is the Qwen-Image family: Qwen2.5-VL as text encoder, the MMDiT
// transformer and the autoencoder of the published checkpoints, from folders in the
// layout of diffusers.
package qwenimage

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// Bounds of two caches: timestep modulations (one per sigma, so that those of a schedule fit) and position tables
// (one per image size).
const (
	modulationCacheRows = 64
	leastSpare          = 4 // that cache grows while the device has so many times its limit to spare
	ropeCacheBytes      = 32 << 20
)

// Model is a checkpoint of the family, computed in float32.
//
// The bits of a result depend only on the weights and the arguments: not on threads,
// kernels, or the other rows of a call.
//
// Its memory holds the weights in the type that the device keeps them in: see tensor.Device.Weight. Each thread
// needs more, as much as its largest request: for Velocity 40 D bytes per token, image and
// text, of the rows that the thread computes together, with D the transformer's width; for
// Decode five images of the autoencoder's largest stage, which has the full size and twice
// base_dim channels, so 40 base_dim bytes per pixel. MemoryBytes returns the sum.
type Model struct {
	*shared
	card        model.Card
	transformer *mmdit
	modulations nn.LRU[float32, tensor.Matrix] // on the device, by sigma
	closed      sync.Once
}

// shared is what a model shares with the models derived from it by adapters.
type shared struct {
	users      atomic.Int32
	base       *mmdit // without adapters
	baseDigest string
	tokenizer  *tokenizer.Tokenizer
	text       *nn.Decoder
	vae        *autoencoder
	device     tensor.Device
	ownDevice  bool          // closed with the last model
	textDevice tensor.Device // of the text encoder: device, or a CPU if that is too small
	indices    sync.Pool
	prompts    nn.LRU[[sha256.Size]byte, *model.Conditioning]
	ropes      nn.LRU[[2]int, *nn.RopeTable]
}

var _ model.Model = (*Model)(nil)

// Card describes the model.
func (m *Model) Card() model.Card { return m.card }

// Close frees the model. The threads end with the last of the models that share them: a
// model and those made from it by WithAdapters.
func (m *Model) Close() error {
	var err error
	m.closed.Do(func() {
		if m.users.Add(-1) == 0 {
			err = m.closeDevices()
		}
	})
	return err
}

// MemoryBytes returns the memory of the weights, and of everything else that is kept between
// calls: activations of the largest request of each thread, conditionings, position tables
// and modulations.
func (m *Model) MemoryBytes() (weights, working int) {
	weights = m.transformer.bytes() + m.text.Bytes() + m.vae.bytes()
	working = m.device.WorkingBytes() + m.prompts.Bytes() + m.ropes.Bytes() + m.modulations.Bytes()
	return weights, working
}

// Encode returns the prompt embeddings that the pipeline gives to its transformer: the
// last hidden states of the prompt in its template, without the template's beginning.
func (m *Model) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.encode(ctx, prompts, false)
}

// EncodeTruncated is Encode for the first MaxPromptTokens tokens of each prompt, as in the pipeline.
func (m *Model) EncodeTruncated(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.encode(ctx, prompts, true)
}

// encode is Encode, or EncodeTruncated if truncate is true. It computes each prompt that is not cached once, and
// adds it to the cache.
func (m *Model) encode(ctx context.Context, prompts []string, truncate bool) ([]*model.Conditioning, error) {
	tooLong := func(prompt string, cut int) error {
		limit := m.card.MaxPromptTokens
		return fmt.Errorf("prompt %.80q: %w: %d tokens; must be at most %d", prompt, model.ErrPrompt, limit+cut, limit)
	}
	out := make([]*model.Conditioning, len(prompts))
	first := make(map[string]int, len(prompts)) // where a prompt that is not cached comes first
	var missing []int
	for i, prompt := range prompts {
		if c, ok := m.prompts.Get(sha256.Sum256([]byte(prompt))); ok {
			if out[i] = c; c.Cut > 0 && !truncate {
				return nil, tooLong(prompt, c.Cut)
			}
		} else if _, ok := first[prompt]; !ok {
			first[prompt] = i
			missing = append(missing, i)
		}
	}
	ids, cut := make([][]int32, len(missing)), make([]int, len(missing))
	for k, i := range missing {
		var err error
		if ids[k], cut[k], err = promptIDs(m.tokenizer, prompts[i], m.card.MaxPromptTokens); err != nil {
			return nil, fmt.Errorf("prompt %.80q: %w", prompts[i], err)
		}
		if cut[k] > 0 && !truncate {
			return nil, tooLong(prompts[i], cut[k])
		}
	}
	if len(missing) > 0 {
		err := nn.Split(ctx, m.textDevice, len(missing), func(s tensor.Session, from, to int) error {
			for k := from; k < to; k++ {
				if err := ctx.Err(); err != nil {
					return err
				}
				i := missing[k]
				out[i] = m.encodeOne(s, prompts[i], ids[k])
				out[i].Cut = cut[k]
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("encode prompts: %w", err)
		}
	}
	for _, i := range missing {
		c := out[i]
		m.prompts.Put(sha256.Sum256([]byte(c.Prompt)), c, 4*len(c.Tensors[0].Data)+len(c.Prompt))
	}
	for i, prompt := range prompts {
		if out[i] == nil {
			out[i] = out[first[prompt]]
		}
	}
	return out, nil
}

// encodeOne computes the conditioning of a prompt from its tokens.
func (m *Model) encodeOne(s tensor.Session, prompt string, ids []int32) *model.Conditioning {
	d := m.text.Config.Width
	hidden := tensor.NewMatrix(s, len(ids), d)
	m.text.Forward(s, hidden, ids)
	m.text.Norm(s, hidden, hidden)
	embeds := make([]float32, (len(ids)-promptTokensDropped)*d)
	s.CopyOut(embeds, hidden.SliceRows(promptTokensDropped, len(ids)))
	shape := []int{len(ids) - promptTokensDropped, d}
	return &model.Conditioning{Prompt: prompt, Tensors: []model.Tensor{{
		Name: promptEmbeds, Shape: shape,
		Data: embeds,
	}}}
}

// Decode turns latents [S, C] into an image. Latents that are not finite are an error.
func (m *Model) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	pixels, err := m.DecodePixels(ctx, latents, size)
	if err != nil {
		return model.Media{}, err
	}
	return media.Of(toNRGBA(pixels, size.Height, size.Width)), nil
}

// DecodePixels is Decode without the rounding to bytes: pixels [height, width, 3] in
// [-1, 1].
func (m *Model) DecodePixels(ctx context.Context, latents []float32, size model.Size) ([]float32, error) {
	tokens, err := m.card.Tokens(size)
	if err != nil {
		return nil, err
	}
	if len(latents) != tokens*m.card.LatentChannels {
		return nil, fmt.Errorf("decode: latents of %d elements; must be %d x %d", len(latents), tokens,
			m.card.LatentChannels)
	}
	var pixels []float32
	err = m.device.Run(ctx, true, func(s tensor.Session) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		pixels = m.vae.decode(s, latents, size.Height, size.Width)
		for _, p := range pixels {
			if p != p {
				return fmt.Errorf("decode: %w: pixels that are not numbers", model.ErrLatents)
			}
		}
		return nil
	})
	return pixels, err
}

// EncodeMedia returns the latents [S, C] of an image: the mode of the autoencoder's
// posterior, normalized as the transformer sees them. Transparency is ignored.
func (m *Model) EncodeMedia(ctx context.Context, sample model.Media) ([]float32, error) {
	tokens, err := m.card.Tokens(sample.Size())
	if err != nil {
		return nil, err
	}
	img := sample.Frames[0]
	r := img.Rect
	pixels := make([]float32, 3*r.Dx()*r.Dy())
	for y := range r.Dy() {
		for x := range r.Dx() {
			px := img.Pix[img.PixOffset(r.Min.X+x, r.Min.Y+y):]
			for c := range 3 {
				pixels[3*(y*r.Dx()+x)+c] = float32(px[c])/255*2 - 1
			}
		}
	}
	latents := make([]float32, tokens*m.card.LatentChannels)
	err = m.device.Run(ctx, true, func(s tensor.Session) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.vae.encode(s, latents, pixels, r.Dy(), r.Dx())
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("encode image: %w", err)
	}
	return latents, nil
}
