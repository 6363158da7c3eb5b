package remotetest

import (
	"encoding/json"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// condition keeps a condition, whose name must be that of its bytes.
func (w *Worker) condition(m *wire.Message) *wire.Message {
	args, bad := decode[wire.CondArgs](m)
	if bad != nil {
		return bad
	}
	c := model.NewCondition(args.Type, media.Size{Frames: args.Frames, Height: args.Height, Width: args.Width},
		m.Tensors[0].Data)
	if c.Digest != args.Digest {
		return fault(wire.ClassProtocol, "condition %.16s; must be %.16s", args.Digest, c.Digest)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.given[args.Digest] = c.Data
	return result(struct{}{})
}

// begin keeps what velocities of a recipe depend on, under the digest of it: its text as embeddings, and values of the
// digest, and of the first pixels of its conditions, as a pooled one.
func (w *Worker) begin(r *wire.RecipeArgs, bad *wire.Message) (handle string, _ *wire.Message) {
	if bad != nil {
		return "", bad
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var lacks []string
	for _, digests := range r.Conditions {
		for _, d := range digests {
			if w.given[d] == nil {
				lacks = append(lacks, d)
			}
		}
	}
	if lacks != nil {
		f := fault(wire.ClassCond, "%d conditions that are not here", len(lacks))
		f.Error.Conditions = lacks
		return "", f
	}
	b, err := json.Marshal(r)
	if err != nil {
		return "", fault(wire.ClassProtocol, "recipe: %v", err)
	}
	handle = digest(b)
	text := fmt.Sprint(r.Prompts[0])
	embeds, pooled := make([]float32, len(text)), make([]float32, Channels)
	for i := range text {
		embeds[i] = float32(text[i]) / 256
	}
	for i, d := range []byte(handle)[:Channels] {
		pooled[i] = float32(d) / 256
	}
	for _, d := range r.Conditions["image"] {
		for i := range min(Channels, len(w.given[d])) {
			pooled[i] += float32(w.given[d][i]) / 128
		}
	}
	w.handles[handle] = []wire.Tensor{
		floats("prompt_embeds", embeds, len(text), 1), floats("pooled_prompt_embeds", pooled, Channels),
	}
	return handle, nil
}

// putRecipe begins with a recipe again.
func (w *Worker) putRecipe(r *wire.RecipeArgs, bad *wire.Message) *wire.Message {
	handle, bad := w.begin(r, bad)
	if bad != nil {
		return bad
	}
	return result(wire.PutResult{Handle: handle})
}
