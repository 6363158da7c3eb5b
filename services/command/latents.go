package command

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// readLatents is the only tensor of a safetensors file, or the one called latents, as
// the map of an event.
func readLatents(path string) (map[string]any, error) {
	a, err := safetensors.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--initial-latents: %w", err)
	}
	defer func() { _ = a.Close() }() // mapped for reading
	name := "latents"
	if names := a.Names(); len(names) == 1 {
		name = names[0]
	}
	info, ok := a.Info(name)
	if !ok {
		return nil, fmt.Errorf("--initial-latents: %s has the tensors %q; needs one, or one called latents", path, a.Names())
	}
	data, err := a.Bytes(name)
	if err != nil {
		return nil, fmt.Errorf("--initial-latents: %w", err)
	}
	shape := make([]int64, len(info.Shape))
	for i, d := range info.Shape {
		shape[i] = int64(d)
	}
	return map[string]any{"dtype": string(info.DType), "shape": shape, "data": append([]byte(nil), data...)}, nil
}

// maxInlineLatents is how much of x_T a prompt carries itself.
const maxInlineLatents = 64 << 10

// offload moves large initial latents of a prompt to a blob.
func (p prompt) offload(ctx context.Context, b *bus.Bus) error {
	t, ok := p.body["initial_latents"].(map[string]any)
	if !ok {
		return nil
	}
	data, ok := t["data"].([]byte)
	if !ok || len(data) <= maxInlineLatents {
		return nil
	}
	ref, err := b.PutBlob(ctx, data)
	if err != nil {
		return fmt.Errorf("store initial latents: %w", err)
	}
	delete(t, "data")
	t["ref"] = map[string]any{"bucket": ref.Bucket, "digest": ref.Digest, "size": ref.Size}
	return nil
}

// saveLatents writes every kept state of the run to a safetensors file: per group and
// index a tensor [n, S, C] in F32, called "<uid>.latents.<index>", or "latents.<index>"
// for a single group. Only completed groups have all their samples.
func (r *results) saveLatents(ctx context.Context, b *bus.Bus, path string) error {
	var out []safetensors.Tensor
	for _, g := range r.Groups {
		prefix := "latents."
		if len(r.Groups) > 1 {
			prefix = g.UID + ".latents."
		}
		tensors, err := groupLatents(ctx, b, g, prefix)
		if err != nil {
			return fmt.Errorf("save latents of %s: %w", g.UID, err)
		}
		out = append(out, tensors...)
	}
	if err := safetensors.WriteFile(path, out, map[string]string{"run": r.Summary.Run, "format": "packed [n, S, C], index i is before step i"}); err != nil {
		return fmt.Errorf("save latents: %w", err)
	}
	return nil
}

func groupLatents(ctx context.Context, b *bus.Bus, g *groupResult, prefix string) ([]safetensors.Tensor, error) {
	byIndex := map[int64][]float32{}
	var order, shape []int64
	for i := range g.Members {
		t := g.Members[i].trajectory
		if t == nil || t.StopReason != schemas.StopCompleted {
			return nil, fmt.Errorf("sample %d did not complete", g.Members[i].SampleIndex)
		}
		shape, order = t.LatentsShape, t.LatentStepIndices
		kept, err := client.New(b).Latents(ctx, t)
		if err != nil {
			return nil, err
		}
		for index, x := range kept {
			byIndex[index] = append(byIndex[index], x...)
		}
	}
	var out []safetensors.Tensor
	for _, index := range order {
		t, err := safetensors.FloatTensor(fmt.Sprintf("%s%d", prefix, index), tensor.F32,
			[]int{len(g.Members), int(shape[0]), int(shape[1])}, byIndex[index])
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}
