package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// negativePrefix is put before the names of the negative prompt's tensors, as in diffusers.
const negativePrefix = "negative_"

// ConditioningName returns the name that events have for a tensor of a family, by the family's own name.
func ConditioningName(name string, negative bool) string {
	if negative {
		return negativePrefix + name
	}
	return name
}

// Conditioning returns encoded texts as events have them: the tensors of the prompt in F32 and, unless negative is
// nil, those of the negative prompt. Where the card names a mask that is no tensor of the family, it is [tokens] of
// ones in U8.
func Conditioning(card model.Card, cond, negative *model.Conditioning) []schemas.NamedTensor {
	list := namedTensors(card, cond, false)
	if negative != nil {
		list = append(list, namedTensors(card, negative, true)...)
	}
	return list
}

// namedTensors returns the tensors of one encoded text, with masks of ones if the model family gives none.
func namedTensors(card model.Card, c *model.Conditioning, negative bool) (list []schemas.NamedTensor) {
	has := map[string]bool{}
	for _, t := range c.Tensors {
		has[t.Name] = true
	}
	for _, t := range c.Tensors {
		x := schemas.Tensor{DType: string(tensor.F32), Data: tensor.F32.AppendFloats(nil, t.Data)}
		for _, n := range t.Shape {
			x.Shape = append(x.Shape, int64(n))
		}
		list = append(list, schemas.NamedTensor{Name: ConditioningName(t.Name, negative), Tensor: x})
		if mask := card.MaskOf(t); mask != "" && !has[mask] && len(t.Shape) > 0 {
			has[mask] = true // several tensors may share one
			list = append(list, schemas.NamedTensor{Name: ConditioningName(mask, negative), Tensor: schemas.Tensor{
				DType: "U8", Shape: []int64{int64(t.Shape[0])}, Data: bytes.Repeat([]byte{1}, t.Shape[0]),
			}})
		}
	}
	return list
}

// Blobs loads a stored file.
type Blobs = func(ctx context.Context, ref schemas.Ref) ([]byte, error)

// ErrCondition says that a condition of a sample is gone, or no file that its pipeline takes.
var ErrCondition = errors.New("a condition that cannot be used")

const (
	heldFiles     = 256 << 20 // bounds the decoded bytes of files that are kept for the next samples
	filesTogether = 4         // files that are fetched and decoded at once, each of the largest size
)

// Files reads the files that samples are conditioned on, a few side by side, and keeps the last ones decoded: samples
// of one prompt have the same. It is safe for concurrent use.
type Files struct {
	blobs   Blobs
	room    chan struct{} // of filesTogether: has one for each file that is read
	decoded nn.LRU[fileKey, model.Condition]
	mu      sync.Mutex
	reading map[fileKey]chan struct{} // closed once the file is read: samples that come together read it once
}

// fileKey is a file as a condition of a type.
type fileKey struct{ digest, kind string }

// NewFiles returns Files that blobs loads; nil: a sample with files is refused.
func NewFiles(blobs Blobs) *Files {
	f := &Files{blobs: blobs, room: make(chan struct{}, filesTogether), reading: map[fileKey]chan struct{}{}}
	f.decoded.Limit = heldFiles
	return f
}

// read returns the file of a condition, decoded.
func (f *Files) read(ctx context.Context, c *schemas.Condition) (model.Condition, error) {
	key := fileKey{c.Ref.Digest, c.Type}
	for {
		f.mu.Lock()
		read, held := f.decoded.Get(key)
		done, busy := f.reading[key]
		if !held && !busy {
			done = make(chan struct{})
			f.reading[key] = done
		}
		f.mu.Unlock()
		if held || !busy {
			var err error
			if !held {
				read, err = f.load(ctx, c)
				f.mu.Lock()
				delete(f.reading, key)
				f.mu.Unlock()
				close(done)
			}
			read.Name = c.Name
			return read, err
		}
		select {
		case <-done: // it is held, or this caller tries itself
		case <-ctx.Done():
			return model.Condition{}, ctx.Err()
		}
	}
}

// load fetches and decodes the file of a condition, and keeps it.
func (f *Files) load(ctx context.Context, c *schemas.Condition) (model.Condition, error) {
	if f.blobs == nil {
		return model.Condition{}, fmt.Errorf("%w: no store of files here", ErrCondition)
	}
	select {
	case f.room <- struct{}{}:
		defer func() { <-f.room }()
	case <-ctx.Done():
		return model.Condition{}, ctx.Err()
	}
	file, err := f.blobs(ctx, *c.Ref)
	if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrCorrupt) {
		err = fmt.Errorf("%w: %w", ErrCondition, err)
	}
	if err != nil {
		return model.Condition{}, err
	}
	read, err := readCondition(c.Type, file)
	if err != nil {
		return read, fmt.Errorf("%w: %w", ErrCondition, err)
	}
	f.decoded.Put(fileKey{c.Ref.Digest, c.Type}, read, len(read.Data))
	return read, nil
}

// Encode makes the conditioning of a sample's prompt and, with guidance, of its negative prompt; of a pipeline that of
// its recipe alone, with its files.
func Encode(ctx context.Context, m model.Model, s *schemas.Sampling, files *Files) ([]*model.Conditioning, error) {
	if m.Card().Pipeline != nil {
		r, err := recipeOf(ctx, m.Card().Pipeline, s, files)
		if err != nil {
			return nil, err
		}
		c, err := model.EncodeRecipe(ctx, m, r)
		return []*model.Conditioning{c}, err
	}
	prompts := []model.Texts{s.Texts()}
	if s.TrueCFGScale > 1 {
		prompts = append(prompts, model.Texts{s.NegativePrompt})
	}
	return model.Encode(ctx, m, prompts, s.TruncatePrompt)
}

// recipeOf returns what a sample conditions a pipeline on, with its files read.
func recipeOf(ctx context.Context, p *model.Pipeline, s *schemas.Sampling, files *Files) (*model.Recipe, error) {
	values, err := p.Values(s.Arguments)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCondition, err)
	}
	r := &model.Recipe{
		Texts: s.Texts(), Truncate: s.TruncatePrompt, Arguments: values, Size: sampling.SizeOf(s),
	}
	if s.ScheduledSampling == nil {
		r.Steps = len(s.Transitions)
	}
	if p.Guidance != "" {
		r.Guidance = s.TrueCFGScale
	}
	if !s.NoNegativePrompt && p.HasArgument(model.NegativePrompt) {
		values[model.NegativePrompt] = s.NegativePrompt
	}
	given := map[string]int{}
	for _, c := range s.Conditions {
		given[c.Name]++
	}
	if err := p.CheckConditions(given); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCondition, err)
	}
	for _, c := range s.Conditions {
		read, err := files.read(ctx, &c)
		if err != nil {
			return nil, fmt.Errorf("conditions: %s: %w", c.Name, err)
		}
		r.Conditions = append(r.Conditions, read)
	}
	return r, nil
}

// readCondition reads a file of a type.
func readCondition(kind string, file []byte) (model.Condition, error) {
	m, err := media.DecodeInput(file)
	if err != nil {
		return model.Condition{}, err
	}
	data := m.RGB()
	if kind == model.InputMask {
		data = m.Luma()
	}
	return model.NewCondition(kind, m.Size(), data), nil
}
