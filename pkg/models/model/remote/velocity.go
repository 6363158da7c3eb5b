package remote

import (
	"context"
	"errors"
	"fmt"
	"image"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Velocity has the worker evaluate rows, from then on in halves where its memory is too small.
func (m *Model) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	tokens, err := m.card.CheckRows(rows, size)
	if err != nil {
		return err
	}
	elements := tokens * m.card.LatentChannels
	fit := m.limits.BodyBytes / (4 * elements)
	if fit < 1 {
		return fmt.Errorf("velocity: a row of %d bytes; must be at most %d, the limit of the worker", 4*elements,
			m.limits.BodyBytes)
	}
	type answer struct {
		rows []model.Row
		v    []byte
	}
	var answers []answer // of all calls: after an error no row has a result
	for at := 0; at < len(rows); {
		n := min(len(rows)-at, m.limits.Rows, fit, m.rowsWithin(size))
		v, err := m.evaluate(ctx, rows[at:at+n], size, tokens)
		if faultOf(err) == wire.ClassMemory && n > 1 && !errors.Is(err, model.ErrWeights) {
			m.mu.Lock()
			m.most[size] = n / 2
			m.mu.Unlock()
			m.link.cfg.log(Event{Text: fmt.Sprintf("the worker's memory is too small for %d rows of %v; they are "+
				"sent by %d", n, size, n/2), Err: err})
			continue
		}
		if err != nil {
			return fmt.Errorf("velocity: %w", explain(err))
		}
		answers = append(answers, answer{rows[at : at+n], v})
		at += n
	}
	for _, a := range answers {
		for i, r := range a.rows {
			_ = tensor.F32.DecodeFloats(r.Dst, a.v[4*i*elements:4*(i+1)*elements]) // the lengths agree
		}
		wire.Recycle(a.v)
	}
	return nil
}

// rowsWithin returns for how many rows of a size the worker's memory is enough, as far as is known.
func (s *shared) rowsWithin(size model.Size) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.most[size]; ok {
		return n
	}
	return s.limits.Rows
}

// maxReloads is how often weights are loaded again for one call.
const maxReloads = 4

// evaluate makes one call and returns the bytes of [n, S, C], for wire.Recycle. What the worker lacks is sent.
func (m *Model) evaluate(ctx context.Context, rows []model.Row, size model.Size, tokens int) ([]byte, error) {
	args := wire.VelocityArgs{Frames: size.Frames, Height: size.Height, Width: size.Width}
	if m.change != nil {
		args.Weights = m.card.WeightsDigest
	}
	x := wire.Tensor{Name: "x", DType: wire.F32}
	states := map[*float32]int{}
	for _, r := range rows {
		if _, ok := states[&r.X[0]]; !ok {
			states[&r.X[0]] = len(states)
			x.Rest = append(x.Rest, tensor.F32Bytes(r.X))
		}
		args.States = append(args.States, states[&r.X[0]])
		args.Sigmas, args.Guidance = append(args.Sigmas, r.Sigma), append(args.Guidance, r.Guidance)
		args.Handles = append(args.Handles, m.handleOf(r.Conditioning))
	}
	x.Shape = []int{len(states), tokens, m.card.LatentChannels}
	if len(states) == len(rows) {
		args.States = nil
	}
	sent, samples := map[string]int{}, velocityWork(&args, x)
	for on := m.link.worker(); ; {
		answer, err := m.call(ctx, samples, wire.CallVelocity, args, []wire.Tensor{x}, nil)
		if now := m.link.worker(); now != on {
			clear(sent) // another worker lacks all of it
			on = now
		}
		switch class := faultOf(err); {
		case class == wire.ClassHandle && sent[class] == 0:
			err = m.putAll(ctx, rows)
			sent[class]++
		// Of a worker that others share the weights may be gone again.
		case class == wire.ClassWeights && m.change != nil && sent[class] < maxReloads:
			if !m.use(m.change) {
				return nil, errClosed
			}
			defer m.drop(m.change) // the model may be closed meanwhile
			err = m.reload(ctx, m.change)
			sent[class]++
		case class == wire.ClassWeights && m.change != nil:
			err = fmt.Errorf("%w: %w; other hosts share the worker, and it has no room for all of their versions",
				model.ErrWeights, explain(err))
		case err == nil:
			return only(answer, "v", wire.F32, len(rows), tokens, m.card.LatentChannels)
		}
		if err != nil {
			return nil, err
		}
	}
}

// only returns the data of the one tensor that an answer must have.
func only(answer []wire.Tensor, name, dtype string, shape ...int) ([]byte, error) {
	if len(answer) != 1 || answer[0].Name != name || answer[0].DType != dtype || !slices.Equal(answer[0].Shape, shape) {
		return nil, fmt.Errorf("the worker answers with %d tensors; must be one %s, %s %v", len(answer), name, dtype,
			shape)
	}
	return answer[0].Data, nil
}

// putAll sends the conditionings of rows, each once.
func (m *Model) putAll(ctx context.Context, rows []model.Row) error {
	put := map[string]bool{}
	for _, r := range rows {
		handle := m.handleOf(r.Conditioning)
		if put[handle] {
			continue
		}
		put[handle] = true
		if err := m.put(ctx, r.Conditioning); err != nil {
			return err
		}
	}
	return nil
}

// sizeArgs returns a size as it is sent.
func sizeArgs(size model.Size) wire.SizeArgs {
	return wire.SizeArgs{Frames: size.Frames, Height: size.Height, Width: size.Width}
}

// Decode has the worker turn latents [S, C] into an image or a video.
func (m *Model) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	return m.decode(ctx, latents, size, nil)
}

// decode is Decode; of is the conditioning of a pipeline, else nil.
func (m *Model) decode(ctx context.Context, latents []float32, size model.Size, of *model.Conditioning,
) (model.Media, error) {
	tokens, err := m.card.Tokens(size)
	if err != nil {
		return model.Media{}, err
	}
	if len(latents) != tokens*m.card.LatentChannels {
		return model.Media{}, fmt.Errorf("decode: latents of %d elements; must be %d x %d", len(latents), tokens,
			m.card.LatentChannels)
	}
	x := wire.Tensor{
		Name: "x", DType: wire.F32, Shape: []int{tokens, m.card.LatentChannels},
		Data: tensor.F32.AppendFloats(nil, latents),
	}
	args := wire.DecodeArgs{SizeArgs: sizeArgs(size)}
	if of != nil {
		args.Handle = m.handleOf(of)
	}
	work := oneWork(x.Data, wire.CallDecode, size, args.Handle)
	var sound wire.Sound
	answer, err := m.call(ctx, work, wire.CallDecode, args, []wire.Tensor{x}, &sound)
	if faultOf(err) == wire.ClassHandle && of != nil {
		if err = m.put(ctx, of); err == nil {
			answer, err = m.call(ctx, work, wire.CallDecode, args, []wire.Tensor{x}, &sound)
		}
	}
	if faultOf(err) == wire.ClassMemory && !strings.Contains(m.card.Backend, "/vae-tiling/") {
		return model.Media{}, fmt.Errorf("decode: %w; with --vae-tiling a worker decodes in tiles, which needs less",
			explain(err))
	}
	if err != nil {
		return model.Media{}, fmt.Errorf("decode: %w", explain(err))
	}
	made, err := mediaOf(answer, size, sound.Rate)
	if err != nil {
		err = fmt.Errorf("decode: %w", err)
	}
	return made, err
}

// mediaOf returns the media of an answer: frames of a size, or a sound, or both.
func mediaOf(answer []wire.Tensor, size model.Size, rate int) (made model.Media, err error) {
	if n := len(answer) - 1; n >= 0 && answer[n].Name == "sound" {
		x := answer[n]
		if len(x.Shape) != 2 || x.DType != wire.F32 || x.Shape[0] < 1 || x.Shape[1] < 1 || rate < 1 {
			return made, fmt.Errorf("the worker answers with a sound %s %v of %d Hz; must be F32 [samples, channels]",
				x.DType, x.Shape, rate)
		}
		made.Sound = media.Sound{Values: make([]float32, x.Shape[0]*x.Shape[1]), Channels: x.Shape[1], Rate: rate}
		if err := tensor.F32.DecodeFloats(made.Sound.Values, x.Data); err != nil {
			return made, fmt.Errorf("the worker answers with a sound %v: %w", x.Shape, err)
		}
		if answer = answer[:n]; n == 0 {
			return made, nil
		}
	}
	pixels, err := only(answer, "media", wire.U8, size.Frames, size.Height, size.Width, 3)
	if err != nil {
		return made, err
	}
	made.Frames = make([]*image.NRGBA, size.Frames)
	for k := range made.Frames {
		img := image.NewNRGBA(image.Rect(0, 0, size.Width, size.Height))
		for i := range size.Height * size.Width {
			copy(img.Pix[4*i:], pixels[3*i:3*i+3])
			img.Pix[4*i+3] = 255
		}
		made.Frames[k], pixels = img, pixels[3*size.Height*size.Width:]
	}
	return made, nil
}

// EncodeMedia has the worker turn an image or a video into latents [S, C].
func (m *Model) EncodeMedia(ctx context.Context, sample model.Media) ([]float32, error) {
	size := sample.Size()
	tokens, err := m.card.Tokens(size)
	if err != nil {
		return nil, err
	}
	elements := 3 * size.Frames * size.Height * size.Width
	if elements > m.limits.BodyBytes/4 {
		return nil, fmt.Errorf("encode image: %w: %v has %d bytes in f32; must be at most %d, the limit of the "+
			"worker: take fewer frames or a smaller size", model.ErrLatents, size, 4*elements, m.limits.BodyBytes)
	}
	pixels := make([]float32, 0, elements)
	for _, img := range sample.Frames {
		for y := range size.Height {
			for x := range size.Width {
				px := img.Pix[img.PixOffset(img.Rect.Min.X+x, img.Rect.Min.Y+y):]
				for _, channel := range px[:3] {
					pixels = append(pixels, float32(channel)/255*2-1)
				}
			}
		}
	}
	x := wire.Tensor{
		Name: "media", DType: wire.F32, Shape: []int{size.Frames, size.Height, size.Width, 3},
		Data: tensor.F32.AppendFloats(nil, pixels),
	}
	answer, err := m.call(ctx, oneWork(x.Data, wire.CallEncodeM, size), wire.CallEncodeM, sizeArgs(size),
		[]wire.Tensor{x}, nil)
	if err != nil {
		return nil, fmt.Errorf("encode image: %w", explain(err))
	}
	latents, err := only(answer, "x", wire.F32, tokens, m.card.LatentChannels)
	if err != nil {
		return nil, fmt.Errorf("encode image: %w", err)
	}
	return floatsOf(latents), nil
}
