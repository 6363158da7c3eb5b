package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// heldConditionings is how many stored tensors are cached for the next samples.
const heldConditionings = 16

// checkConditioning compares the stored tensors of the encoded prompts, if the sample has some, with those that the
// model makes. If all are stored, the velocities are computed from the stored ones. Differences are faults; an error
// is of the server.
func (s *sample) checkConditioning(ctx context.Context) error {
	if len(s.t.Conditioning) == 0 {
		return nil
	}
	var negative *model.Conditioning
	if len(s.conds) == 2 {
		negative = s.conds[1]
	}
	made := images.Conditioning(s.image.Card(), s.conds[0], negative)
	if len(made) != len(s.t.Conditioning) {
		s.fault(-1, "conditioning: %d tensors; the model makes %d of the texts", len(s.t.Conditioning), len(made))
		return nil
	}
	stored := map[string][]float32{}
	for i, want := range made {
		x, err := s.storedConditioning(ctx, &s.t.Conditioning[i], &want)
		if err != nil {
			return err
		}
		if x != nil {
			stored[want.Name] = x
		}
	}
	if len(stored) < len(made) || s.conds[0].Recipe != nil {
		return nil // the rest is counted or a fault; the tensors that the model makes are used, of a recipe none
	}
	for k, c := range s.conds {
		c := *c
		c.Tensors = slices.Clone(c.Tensors)
		for i := range c.Tensors {
			c.Tensors[i].Data = stored[images.ConditioningName(c.Tensors[i].Name, k == 1)]
		}
		s.conds[k] = &c
	}
	return nil
}

// storedConditioning loads one stored tensor and compares it with the one that the model makes (want). It returns nil
// if the tensor is gone or differs in kind, which it reports. An error is of the server.
func (s *sample) storedConditioning(ctx context.Context, got, want *schemas.NamedTensor) ([]float32, error) {
	t := &got.Tensor
	if got.Name != want.Name || t.Ref == nil || t.DType != want.Tensor.DType ||
		!slices.Equal(t.Shape, want.Tensor.Shape) {
		s.fault(-1, "conditioning: %s, %s %v; must be a blob of %s, %s %v", got.Name, t.DType, t.Shape, want.Name,
			want.Tensor.DType, want.Tensor.Shape)
		return nil, nil
	}
	data, ok := s.encoded[t.Ref.Digest]
	if !ok {
		var err error
		data, err = s.bus.GetBlob(ctx, *t.Ref)
		switch {
		case errors.Is(err, bus.ErrNotFound):
			s.report.ConditioningGone++
			return nil, nil
		case errors.Is(err, bus.ErrCorrupt):
			s.fault(-1, "conditioning: %s: %v", got.Name, err)
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("load %s: %w", got.Name, err)
		}
		if len(s.encoded) >= heldConditionings {
			clear(s.encoded)
		}
		s.encoded[t.Ref.Digest] = data
	}
	x, made := elements(t.DType, data), elements(t.DType, want.Tensor.Data)
	if len(x) != len(made) {
		s.fault(-1, "conditioning: %s: %d bytes of %s %v", got.Name, len(data), t.DType, t.Shape)
		return nil, nil
	}
	s.report.Conditionings++
	if by := s.inexactServer(); by != nil {
		s.recordServed(by, Deviation{StepIndex: -1, Quantity: "relative distance of " + got.Name}, distance(x, made), 0)
	} else {
		s.report.MaxConditioning = max(s.report.MaxConditioning, Difference(distance(x, made)))
	}
	return x, nil
}

// elements decodes a tensor of dtype F32 or U8 to float32; nil if its bytes are not valid.
func elements(dtype string, data []byte) []float32 {
	if dtype == "U8" {
		x := make([]float32, len(data))
		for i, b := range data {
			x[i] = float32(b)
		}
		return x
	}
	x := make([]float32, len(data)/4)
	if tensor.F32.DecodeFloats(x, data) != nil {
		return nil
	}
	return x
}
