package remote

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"weak"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

var _ model.RecipeModel = (*Model)(nil)

// maxSends is how often conditions are sent again for one call: others may share the worker, and its memory.
const maxSends = 4

// recipeArgs returns a recipe as it is sent, and its conditions by their digests.
func recipeArgs(r *model.Recipe) (*wire.RecipeArgs, map[string]*model.Condition) {
	args := &wire.RecipeArgs{
		EncodeArgs: wire.EncodeArgs{Prompts: [][]string{r.Texts}, Truncate: r.Truncate}, SizeArgs: sizeArgs(r.Size),
		Conditions: map[string][]string{}, Arguments: r.Arguments, Guidance: r.Guidance,
		Steps: r.Steps,
	}
	by := map[string]*model.Condition{}
	for i := range r.Conditions {
		c := &r.Conditions[i]
		by[c.Digest] = c
		args.Conditions[c.Name] = append(args.Conditions[c.Name], c.Digest)
	}
	return args, by
}

// EncodeRecipe has the worker begin with a recipe; equal ones share a conditioning.
func (m *Model) EncodeRecipe(ctx context.Context, r *model.Recipe) (*model.Conditioning, error) {
	select {
	case m.encoding <- struct{}{}:
		defer func() { <-m.encoding }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	args, by := recipeArgs(r)
	b, err := json.Marshal(args)
	if err != nil {
		return nil, fmt.Errorf("recipe: %w", err)
	}
	key := promptKey(sha256.Sum256(b))
	if c, ok := m.prompts.Get(key); ok {
		return c, nil
	}
	var of wire.EncodeResult
	var tensors []wire.Tensor
	if err := m.withConditions(ctx, by, func() (err error) {
		tensors, err = m.call(ctx, oneWork(key[:], wire.CallEncode, key), wire.CallEncode, args, nil, &of)
		return err
	}); err != nil {
		return nil, fmt.Errorf("prompt %.80q: %w", r.Texts[0], explain(err))
	}
	if len(of.Items) != 1 || of.Items[0].Handle == "" {
		return nil, fmt.Errorf("prompt %.80q: the worker gives %d items; must be 1", r.Texts[0], len(of.Items))
	}
	c := &model.Conditioning{Prompt: r.Texts[0], Cut: of.Items[0].Cut, Recipe: r}
	size := len(b)
	for _, t := range tensors {
		if t.DType != wire.F32 || t.Name == "" {
			return nil, fmt.Errorf("prompt %.80q: tensor %q of the worker in %s; must have a name, in %s", r.Texts[0],
				t.Name, t.DType, wire.F32)
		}
		size += len(t.Data)
		c.Tensors = append(c.Tensors, tensorOf(&t))
	}
	m.remember(c, of.Items[0].Handle)
	for _, cond := range r.Conditions {
		size += len(cond.Data)
	}
	m.prompts.Put(key, c, size)
	return c, nil
}

// remember notes by which handle the worker knows a conditioning, as long as that is used.
func (s *shared) remember(c *model.Conditioning, handle string) {
	key := weak.Make(c)
	s.handles.Store(key, handle)
	runtime.AddCleanup(c, func(key weak.Pointer[model.Conditioning]) { s.handles.Delete(key) }, key)
}

// withConditions makes a call, and sends the conditions that the worker says that it lacks before it makes it again.
func (m *Model) withConditions(ctx context.Context, by map[string]*model.Condition, call func() error) error {
	for sends := 0; ; sends++ {
		err := call()
		if faultOf(err) != wire.ClassCond || sends == maxSends {
			return err
		}
		fault, _ := errors.AsType[*wire.Fault](err)
		for _, digest := range fault.Conditions {
			c := by[digest]
			if c == nil {
				return fmt.Errorf("condition %.16s, which is not one of the prompt: %w", digest, err)
			}
			channels := len(c.Data) / max(1, c.Frames*c.Height*c.Width)
			body := wire.Tensor{
				Name: "condition", DType: wire.U8, Shape: []int{c.Frames, c.Height, c.Width, channels}, Data: c.Data,
			}
			args := wire.CondArgs{Digest: digest, Type: c.Type, SizeArgs: sizeArgs(c.Size)}
			if len(c.Data) > m.limits.BodyBytes {
				return fmt.Errorf("condition %s: %w: %d bytes; must be at most %d, the limit of the worker", c.Name,
					model.ErrPrompt, len(c.Data), m.limits.BodyBytes)
			}
			if _, err := m.call(ctx, nil, wire.CallCond, args, []wire.Tensor{body}, nil); err != nil {
				return fmt.Errorf("condition %s: %w", c.Name, err)
			}
		}
	}
}

// put sends a conditioning that the worker lacks.
func (m *Model) put(ctx context.Context, c *model.Conditioning) error {
	handle := m.handleOf(c)
	var of wire.PutResult
	var err error
	if c.Recipe == nil {
		_, err = m.call(ctx, nil, wire.CallPut, wire.PutArgs{}, tensorsOf(c), &of)
	} else {
		args, by := recipeArgs(c.Recipe)
		err = m.withConditions(ctx, by, func() error {
			_, err := m.call(ctx, nil, wire.CallPut, wire.PutArgs{Recipe: args}, nil, &of)
			return err
		})
	}
	if err == nil && of.Handle != handle {
		err = fmt.Errorf("put: handle %.16s of the worker; must be %.16s", of.Handle, handle)
	}
	return err
}

// DecodeRecipe has the worker end a rollout: with the pipeline that begun with the recipe.
func (m *Model) DecodeRecipe(ctx context.Context, latents []float32, size model.Size, of *model.Conditioning,
) (model.Media, error) {
	return m.decode(ctx, latents, size, of)
}

// others are the further components of model_index.json, sorted by name: networks and processors of pipelines that are
// not known here. A safety checker is not loaded.
func others(index map[string]json.RawMessage) (names []string) {
	for name, value := range index {
		var class []*string
		if json.Unmarshal(value, &class) == nil && len(class) == 2 && class[0] != nil && class[1] != nil &&
			!slices.Contains([]string{"scheduler", "safety_checker"}, name) && !slices.Contains(parts, name) &&
			!slices.Contains(tokenizers, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
