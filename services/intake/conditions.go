package intake

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

// pipelineOf returns the pipeline that a lane announces; nil: its model takes texts alone.
func pipelineOf(policy *schemas.Policy) (*model.Pipeline, error) {
	if len(policy.Pipeline) == 0 {
		return nil, nil
	}
	p := &model.Pipeline{}
	if err := json.Unmarshal(policy.Pipeline, p); err != nil {
		return nil, fmt.Errorf("pipeline of model %q: %w", policy.Model, err)
	}
	return p, nil
}

// storeConditions checks the files that a group is conditioned on, stores them as blobs, and replaces them in p by
// references. It refuses (a terminal error) what the lane's pipeline does not take: every sample would fail.
func (s *service) storeConditions(ctx context.Context, p *schemas.Prompt, policy *schemas.Policy, put putBlob) error {
	pipeline, err := pipelineOf(policy)
	if err == nil && pipeline != nil {
		p.Conditions = slices.Clone(p.Conditions)
		err = checkConditions(pipeline, p.Conditions)
	}
	if err != nil {
		return bus.Terminal(schemas.CodeInvalid, err)
	}
	if pipeline == nil {
		return nil // Resolve refuses conditions
	}
	var sizes conditionSizes
	for i := range p.Conditions {
		c := &p.Conditions[i]
		if c.Stage != "" { // it is not made yet
			continue
		}
		data := c.Data
		if c.Ref != nil {
			if c.Ref.Size > maxImage {
				return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("conditions: %s: ref.size: %d; must be at most %d",
					c.Name, c.Ref.Size, maxImage))
			}
			if data, err = s.bus.GetBlob(ctx, *c.Ref); err != nil {
				return blobError("conditions: "+c.Name, err)
			}
		}
		if err := sizes.check(c, data); err != nil {
			return bus.Terminal(schemas.CodeInvalid, err)
		}
		if c.Ref == nil {
			ref, err := put(ctx, data)
			if err != nil {
				return fmt.Errorf("store the condition %s: %w", c.Name, err)
			}
			c.Ref, c.Data = &ref, nil
		}
	}
	return nil
}

// checkConditions checks names and numbers of conditions, gives each its type, and sorts them by name.
func checkConditions(pipeline *model.Pipeline, list []schemas.Condition) error {
	given := map[string]int{}
	for _, c := range list {
		given[c.Name]++
	}
	if err := pipeline.CheckConditions(given); err != nil {
		return err
	}
	for i := range list {
		c := &list[i]
		kind := model.ItemType(pipeline.TypeOf(c.Name))
		if c.Type != "" && c.Type != kind {
			return fmt.Errorf("conditions: %s: type: %s; must be %s, or absent", c.Name, c.Type, kind)
		}
		c.Type = kind
	}
	slices.SortStableFunc(list, func(a, b schemas.Condition) int { return cmp.Compare(a.Name, b.Name) })
	return nil
}

// conditionTypes lists the types of a prompt's conditions by the pipeline of its lane.
func conditionTypes(p *schemas.Prompt, policy *schemas.Policy) (types []string) {
	if pipeline, err := pipelineOf(policy); err == nil && pipeline != nil {
		for _, c := range p.Conditions {
			types = append(types, model.ItemType(pipeline.TypeOf(c.Name)))
		}
	}
	return types
}

// conditionSizes checks files of conditions, one after the other: a mask must have the size of the images before or
// after it.
type conditionSizes struct{ image, mask media.Size }

// check refuses a file that is not of its condition's type, or too large to be read.
func (x *conditionSizes) check(c *schemas.Condition, file []byte) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("conditions: "+c.Name+": "+format, args...)
	}
	if c.Type == model.InputAudio {
		return refuse("sound; must be absent, this version gives none to a pipeline")
	}
	size, err := media.ReadInput(file)
	switch {
	case err != nil:
		return refuse("%w; must be a PNG", err)
	case c.Type != model.InputVideo && size.Frames > 1:
		return refuse("a video of %d frames; must be one %s", size.Frames, c.Type)
	case c.Type == model.InputVideo && size.Frames == 1:
		return refuse("one image; must be a video, an animated PNG")
	case c.Type == model.InputImage && x.image == (media.Size{}):
		x.image = size
	case c.Type == model.InputMask:
		x.mask = size
	}
	if x.image != (media.Size{}) && x.mask != (media.Size{}) && x.image != x.mask {
		return refuse("the mask has %v; must have those of the image, %v", x.mask, x.image)
	}
	return nil
}

// resolvePipeline checks conditions and arguments against the pipeline of the lane, and refuses settings that have no
// effect beside one. What a prompt carries inline is named by its digest.
func resolvePipeline(x *imageSettings, p *schemas.Prompt, policy *schemas.Policy) error {
	s := &x.sampling
	pipeline, err := pipelineOf(policy)
	switch {
	case err != nil:
		return err
	case pipeline == nil && len(s.Conditions) > 0:
		return fmt.Errorf("conditions: %s; must be absent, the network of model %q takes none", s.Conditions[0].Name,
			policy.Model)
	case pipeline == nil && len(s.Arguments) > 0:
		return fmt.Errorf("arguments: %s; must be absent, model %q is no pipeline that is called as a whole",
			slices.Sorted(maps.Keys(s.Arguments))[0], policy.Model)
	case pipeline == nil:
		return nil
	}
	s.Conditions = slices.Clone(s.Conditions)
	if err := checkConditions(pipeline, s.Conditions); err != nil {
		return err
	}
	var sizes conditionSizes
	for i := range s.Conditions {
		if c := &s.Conditions[i]; c.Ref == nil && c.Stage == "" { // of an estimate: nothing is stored
			if err := sizes.check(c, c.Data); err != nil {
				return err
			}
			ref, _ := refOf(context.Background(), c.Data)
			c.Ref, c.Data = &ref, nil
		}
	}
	if err := resolveArguments(s, pipeline, p); err != nil {
		return err
	}
	return errors.Join(checkBeside(x, pipeline, p, policy), checkAccess(pipeline, p))
}

// resolveArguments reads arguments by their types, and writes them in one form. The argument of the scale of guidance
// is that scale.
func resolveArguments(s *schemas.Sampling, pipeline *model.Pipeline, p *schemas.Prompt) error {
	if _, given := s.Arguments[model.NegativePrompt]; given {
		return errors.New("arguments: negative_prompt; must be absent: give the prompt's negative_prompt")
	}
	beside, err := scalesBeside(s, pipeline, p)
	if err != nil {
		return err
	}
	values, err := pipeline.Values(s.Arguments)
	if err != nil {
		return err
	}
	if pipeline.Guidance == "" {
		s.TrueCFGScale = 1
	}
	if v, given := values[pipeline.Guidance]; given {
		scale, ok := v.(float64)
		if n, whole := v.(int64); whole {
			scale, ok = float64(n), true
		}
		if !ok {
			return fmt.Errorf("arguments: %s: %v; must be a number", pipeline.Guidance, v)
		}
		if p.TrueCFGScale != nil && *p.TrueCFGScale != scale {
			return fmt.Errorf("arguments: %s: %g; must be absent beside true_cfg_scale %g, which it is",
				pipeline.Guidance, scale, *p.TrueCFGScale)
		}
		s.TrueCFGScale = scale
		delete(values, pipeline.Guidance)
	}
	if p.NegativePrompt == nil && pipeline.HasArgument(model.NegativePrompt) {
		s.NegativePrompt, s.NoNegativePrompt = "", true
		if err := resolveUnguided(s, pipeline, p, values); err != nil {
			return err
		}
	}
	if beside != "" && pipeline.Guidance != "" && s.TrueCFGScale <= 1 {
		return fmt.Errorf("%s: given; must be absent with true_cfg_scale %g, which is without guidance", beside,
			s.TrueCFGScale)
	}
	s.Arguments = nil
	for name, v := range values {
		if s.Arguments == nil {
			s.Arguments = map[string]string{}
		}
		s.Arguments[name] = model.Canonical(v)
	}
	return nil
}

// scalesBeside gives the settings of guidance that a pipeline has as arguments of its own to those, and returns one of
// them that has no effect without guidance.
func scalesBeside(s *schemas.Sampling, pipeline *model.Pipeline, p *schemas.Prompt) (beside string, err error) {
	s.Arguments = maps.Clone(s.Arguments)
	for _, x := range []struct {
		field, argument string
		given           *float64
		resolved        *float64
	}{
		{"guidance", "guidance_scale", p.Guidance, &s.Guidance},
		{"guidance_rescale", "guidance_rescale", p.GuidanceRescale, &s.GuidanceRescale},
		{"true_cfg_scale_2", "guidance_scale_2", p.TrueCFGScale2, &s.TrueCFGScale2},
	} {
		if x.given == nil || x.argument == pipeline.Guidance || !pipeline.HasArgument(x.argument) {
			continue
		}
		if _, twice := s.Arguments[x.argument]; twice {
			return "", fmt.Errorf("arguments: %s; must be absent beside %s, which it is", x.argument, x.field)
		}
		if s.Arguments == nil {
			s.Arguments = map[string]string{}
		}
		s.Arguments[x.argument] = model.Canonical(*x.given)
		*x.resolved = 0
		if x.field != "guidance" {
			beside = x.field
		}
	}
	return beside, nil
}

// resolveUnguided refuses scales of guidance that have no effect because no negative prompt is given, and has the
// pipeline's own say that samples are made without guidance. values are the arguments of a prompt.
func resolveUnguided(s *schemas.Sampling, pipeline *model.Pipeline, p *schemas.Prompt, values map[string]any) error {
	for _, name := range pipeline.BesideNegative {
		field, scale, given := "arguments: "+name, any(nil), false
		if name == pipeline.Guidance {
			field, scale, given = "true_cfg_scale", s.TrueCFGScale, p.TrueCFGScale != nil || p.Arguments[name] != ""
			s.TrueCFGScale = min(s.TrueCFGScale, 1)
		} else {
			scale, given = values[name]
		}
		if x, ok := scale.(float64); given && ok && x > 1 {
			return fmt.Errorf("%s: %g; must have a negative_prompt beside it, which may be empty: without one %s is "+
				"not guided", field, x, pipeline.Class)
		}
	}
	return nil
}

// checkBeside refuses settings of a prompt that are not for a model which guides inside.
func checkBeside(
	x *imageSettings, pipeline *model.Pipeline, p *schemas.Prompt, policy *schemas.Policy,
) error {
	var errs []error
	refuse := func(field, why string) {
		errs = append(errs, fmt.Errorf("%s: given; must be absent, model %q is the pipeline %s: %s", field,
			policy.Model, pipeline.Class, why))
	}
	v := reflect.ValueOf(&x.sampling).Elem()
	for _, f := range schemas.Fields(v.Type()) {
		guides := f.Through == "cfg_scales" && pipeline.Guidance == "" || f.Name == "guidance_rescale"
		if guides && f.Name != "true_cfg_scale" && !f.In(v).IsZero() {
			refuse(f.Name, "no argument of it is one; a pipeline of your own may have it (family)")
		}
	}
	for _, f := range []struct {
		field string
		given bool
		why   string
	}{
		{"true_cfg_scale", p.TrueCFGScale != nil && pipeline.Guidance == "", "no argument of it is one"},
		{
			"negative_prompt", p.NegativePrompt != nil && *p.NegativePrompt != "" &&
				!pipeline.HasArgument(model.NegativePrompt), "it takes none",
		},
		{
			"rollout.return_conditioning", x.outputs.ReturnConditioning && pipeline.RandomAccess != "" &&
				policy.ConditioningBytes == 0,
			"it encodes no texts that it names: prompt, conditions and arguments give the same again",
		},
		{
			"start.data.images", p.Start != nil && p.Start.Data != nil && len(p.Start.Data.Images) > 0 &&
				!pipeline.Encodes && pipeline.RandomAccess != "",
			"it encodes none; give start.data.latents",
		},
	} {
		if f.given {
			refuse(f.field, f.why)
		}
	}
	return errors.Join(errs...)
}

// checkAccess refuses what evaluates steps in another order than the pipeline can.
func checkAccess(pipeline *model.Pipeline, p *schemas.Prompt) error {
	if p.ScheduledSampling != nil && pipeline.RandomAccess != model.AccessExact && pipeline.RandomAccess != "" {
		return fmt.Errorf("scheduled_sampling: given; must be absent, the steps of %s can be evaluated %s only",
			pipeline.Class, pipeline.RandomAccess)
	}
	if pipeline.RandomAccess != model.AccessInOrder {
		return nil
	}
	switch {
	case p.Start != nil:
		return fmt.Errorf("start: given; must be absent, the steps of %s depend on those before", pipeline.Class)
	case p.Tree != nil:
		return fmt.Errorf("tree: given; must be absent, the steps of %s depend on those before", pipeline.Class)
	case p.Prune.BranchesOff():
		return fmt.Errorf("prune.then: branch; must be end, the steps of %s depend on those before", pipeline.Class)
	}
	return nil
}
