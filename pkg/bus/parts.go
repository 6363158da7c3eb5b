package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

const (
	// partType is the header Mdr-Type of a part, which is no event but bytes of one.
	partType = "part/1"
	// stepOverhead is more than a step takes besides its tensors' elements.
	stepOverhead = 4 << 10
)

// tensors returns every tensor of a step, which is copied as far as needed so that
// changing them leaves the original alone.
func tensors(step *schemas.Step) []*schemas.Tensor {
	step.Latents, step.Debug = slices.Clone(step.Latents), slices.Clone(step.Debug)
	var out []*schemas.Tensor
	if step.Checkpoint != nil {
		step.Checkpoint = new(*step.Checkpoint)
		out = append(out, step.Checkpoint)
	}
	for i := range step.Latents {
		out = append(out, &step.Latents[i].Tensor)
	}
	for i := range step.Debug {
		out = append(out, &step.Debug[i].Tensor)
	}
	return out
}

// inlineSize is the bytes of the tensors that travel inside the step.
func inlineSize(step *schemas.Step) int {
	n := 0
	if step.Checkpoint != nil {
		n += len(step.Checkpoint.Data)
	}
	for i := range step.Latents {
		n += len(step.Latents[i].Tensor.Data)
	}
	for i := range step.Debug {
		n += len(step.Debug[i].Tensor.Data)
	}
	return n
}

// SplitParts moves tensors out of step, largest first, until it encodes to at most
// limit bytes, and returns what was moved in the order of the part numbers. Each part
// has at most schemas.MaxPartBytes (and at most limit) bytes and aliases the tensor.
// A step that fits is left alone, with no parts. The tensors of the step are replaced,
// their slices not modified.
func SplitParts(step *schemas.Step, limit int) [][]byte {
	size := inlineSize(step)
	if size <= limit-stepOverhead {
		return nil
	}
	var parts [][]byte
	chunk := max(1, min(schemas.MaxPartBytes, limit))
	ts := tensors(step)
	slices.SortStableFunc(ts, func(a, b *schemas.Tensor) int { return len(b.Data) - len(a.Data) })
	for _, t := range ts {
		if size <= limit-stepOverhead || len(t.Data) == 0 {
			break
		}
		size -= len(t.Data)
		sum := sha256.Sum256(t.Data)
		p := &schemas.Parts{First: int64(len(parts)), Size: int64(len(t.Data)), Digest: hex.EncodeToString(sum[:])}
		for part := range slices.Chunk(t.Data, chunk) {
			parts = append(parts, part)
		}
		p.Count = int64(len(parts)) - p.First
		t.Data, t.Parts = nil, p
	}
	return parts
}

// JoinParts puts the elements back into the tensors of step. part returns the bytes of
// a part by its number. Sizes and digests are checked; a mismatch is ErrCorrupt.
func JoinParts(step *schemas.Step, part func(k int64) ([]byte, error)) error {
	for _, t := range tensors(step) {
		p := t.Parts
		if p == nil {
			continue
		}
		if p.First < 0 || p.Count < 1 || p.First > schemas.MaxParts-p.Count {
			return fmt.Errorf("join parts: %d parts from %d; must be 1 to %d in all", p.Count, p.First, schemas.MaxParts)
		}
		if p.Size < 0 || p.Size > schemas.MaxTensorBytes || p.Size > p.Count*schemas.MaxPartBytes {
			return fmt.Errorf("join parts: %d bytes in %d parts; a part has at most %d", p.Size, p.Count, schemas.MaxPartBytes)
		}
		// The declared size is not trusted: the buffer grows with what arrives.
		var data bytes.Buffer
		for k := p.First; k < p.First+p.Count; k++ {
			b, err := part(k)
			if err != nil {
				return fmt.Errorf("part %d: %w", k, err)
			}
			if int64(data.Len()+len(b)) > p.Size {
				return fmt.Errorf("part %d: %w: more than the %d bytes declared", k, ErrCorrupt, p.Size)
			}
			data.Write(b)
		}
		if int64(data.Len()) != p.Size || digestOf(data.Bytes()) != p.Digest {
			return fmt.Errorf("parts %d to %d: %w", p.First, p.First+p.Count-1, ErrCorrupt)
		}
		t.Data, t.Parts = data.Bytes(), nil
	}
	return nil
}

// LoadStep decodes and validates a stored step and fetches what travelled beside it.
// The tensors of a step that travelled whole alias m.Data.
func (b *Bus) LoadStep(ctx context.Context, m *Message) (*schemas.Step, error) {
	if schemas.IsPart(m.Subject) {
		return nil, fmt.Errorf("load step %q: it is a part of one", m.Subject)
	}
	step := &schemas.Step{}
	if err := schemas.DecodeValid(m.Data, step); err != nil {
		return nil, fmt.Errorf("load step %q: %w", m.Subject, err)
	}
	err := JoinParts(step, func(k int64) ([]byte, error) {
		part, err := b.Last(ctx, schemas.StreamSteps, schemas.PartSubject(m.Subject, k))
		if err != nil {
			return nil, err
		}
		return part.Data, nil
	})
	if err == nil {
		err = b.loadRefs(ctx, step)
	}
	if err != nil {
		return nil, fmt.Errorf("load step %q: %w", m.Subject, err)
	}
	return step, nil
}

// loadRefs fetches tensors that are in the object store.
func (b *Bus) loadRefs(ctx context.Context, step *schemas.Step) error {
	for _, t := range tensors(step) {
		if t.Ref == nil {
			continue
		}
		if t.Ref.Size > schemas.MaxTensorBytes {
			return errors.New("tensor in the object store is too large")
		}
		data, err := b.GetBlob(ctx, *t.Ref)
		if err != nil {
			return err
		}
		t.Data, t.Ref = data, nil
	}
	return nil
}

// LoadStepRef gets the step that a trajectory points to and checks its digest
// (ErrCorrupt) before it is decoded.
func (b *Bus) LoadStepRef(ctx context.Context, ref schemas.StepRef) (*schemas.Step, error) {
	m, err := b.Get(ctx, schemas.StreamSteps, ref.Seq)
	if err != nil {
		return nil, err
	}
	return b.loadNamed(ctx, m, ref)
}

// LoadStepOf is LoadStepRef of step i of those that a trajectory names. It asks by the step's subject,
// so that the server can tell whether we may read that run.
func (b *Bus) LoadStepOf(ctx context.Context, t *schemas.Trajectory, i int) (*schemas.Step, error) {
	m, err := b.Last(ctx, schemas.StreamSteps, t.StepSubject(i))
	if err != nil {
		return nil, err
	}
	return b.loadNamed(ctx, m, t.Steps[i])
}

func (b *Bus) loadNamed(ctx context.Context, m *Message, ref schemas.StepRef) (*schemas.Step, error) {
	if got := digestOf(m.Data); got != ref.Digest {
		return nil, fmt.Errorf("load step %q: %w: stored %s, named %s", m.Subject, ErrCorrupt, got, ref.Digest)
	}
	return b.LoadStep(ctx, m)
}
