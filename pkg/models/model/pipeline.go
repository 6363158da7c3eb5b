package model

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/models/media"
)

// CFGInside is the CFGRule of a model that guides inside: Velocity is called for the prompt alone.
const CFGInside = "inside"

// Pipeline is what a model says of itself that computes with a whole pipeline of diffusers. Its guidance is inside, and
// it is conditioned on a Recipe.
type Pipeline struct {
	// Class is that of the pipeline, Prediction what its network gives: flow, epsilon, v_prediction or sample.
	Class      string `json:"class" msgpack:"class"`
	Prediction string `json:"prediction" msgpack:"prediction"`
	// RandomAccess says in which order steps may be evaluated: exact (any), after_previous or in_order; empty: that is
	// not known before the weights are read.
	RandomAccess string `json:"random_access" msgpack:"random_access"`
	// Conditions are what it takes besides texts, Arguments what else it is called with.
	Conditions []Input `json:"conditions,omitempty" msgpack:"conditions"`
	Arguments  []Input `json:"arguments,omitempty" msgpack:"arguments"`
	// Guidance is the argument that a prompt's scale of guidance sets; empty: none.
	Guidance string `json:"guidance" msgpack:"guidance"`
	// BesideNegative are the arguments, scales of guidance, that have no effect without a negative prompt.
	BesideNegative []string `json:"beside_negative,omitempty" msgpack:"beside_negative"`
	// Tracks are the parts of a state, in order, at the default size.
	Tracks []Track `json:"tracks,omitempty" msgpack:"tracks"`
	// Admitted is the size at which it was tested before it was served; 0: not yet.
	Admitted Size `json:"admitted,omitzero" msgpack:"admitted"`
	// Sigmas are those of rollouts [T+1], for some numbers of steps T, where the card's grid is GridPipeline;
	// SigmasTokens is the only number of latent tokens that they are for, 0: any.
	Sigmas       [][]float64 `json:"sigmas,omitempty" msgpack:"sigmas"`
	SigmasTokens int         `json:"sigmas_tokens,omitempty" msgpack:"sigmas_tokens"`
	// Media are the kinds of files that it makes: image (of several frames a video), audio; empty: that is not known
	// before the weights are read.
	Media []string `json:"media,omitempty" msgpack:"media"`
	// Encodes says whether images and videos can be encoded to start from.
	Encodes bool `json:"encodes,omitempty" msgpack:"encodes"`
	// Notes say where samples are not made as by the pipeline's own scheduler.
	Notes []string `json:"notes,omitempty" msgpack:"notes"`
}

// Input is a condition or an argument of a pipeline.
type Input struct {
	Name     string `json:"name" msgpack:"name"`
	Type     string `json:"type" msgpack:"type"`
	Required bool   `json:"required,omitempty" msgpack:"required"`
	// Default is what an argument is where nothing is given; nil: the pipeline decides.
	Default any `json:"default,omitempty" msgpack:"default"`
}

// Track is one part of a state.
type Track struct {
	Name     string `json:"name" msgpack:"name"`
	Elements int    `json:"elements" msgpack:"elements"`
	Shape    []int  `json:"shape" msgpack:"shape"`
}

// Types of inputs. Images is several images; text and number are those of conditions that are given as arguments are.
const (
	InputImage   = "image"
	InputImages  = "images"
	InputMask    = "mask"
	InputVideo   = "video"
	InputAudio   = "audio"
	InputText    = "text"
	InputNumber  = "number"
	InputInteger = "integer"
	InputBoolean = "boolean"
)

// Orders in which the steps of a pipeline can be evaluated.
const (
	AccessExact         = "exact"
	AccessAfterPrevious = "after_previous"
	AccessInOrder       = "in_order"
)

// NegativePrompt is the argument that a prompt's negative prompt sets.
const NegativePrompt = "negative_prompt"

// isMedia says whether inputs of a type are files.
func isMedia(kind string) bool {
	return oneOf(kind, InputImage, InputImages, InputMask, InputVideo, InputAudio)
}

// validate joins what is wrong with a pipeline.
func (p *Pipeline) validate() error {
	var errs []error
	if !oneOf(p.RandomAccess, "", AccessExact, AccessAfterPrevious, AccessInOrder) {
		errs = append(errs, fmt.Errorf("pipeline: random_access: %q; must be %s, %s or %s", p.RandomAccess, AccessExact,
			AccessAfterPrevious, AccessInOrder))
	}
	names := map[string]bool{}
	for i, in := range slices.Concat(p.Conditions, p.Arguments) {
		scalar := oneOf(in.Type, InputText, InputNumber, InputInteger, InputBoolean)
		switch {
		case in.Name == "" || in.Name != NameOf(in.Name) || names[in.Name]:
			errs = append(errs, fmt.Errorf("pipeline: input %q; must be letters, digits, _ and -, each name once",
				in.Name))
		case !scalar && (i >= len(p.Conditions) || !isMedia(in.Type)):
			errs = append(errs, fmt.Errorf("pipeline: input %s: type %q; must be one that is known", in.Name, in.Type))
		}
		names[in.Name] = true
	}
	return errors.Join(errs...)
}

// scalars are the inputs that Values reads.
func (p *Pipeline) scalars() []Input {
	list := slices.Clone(p.Arguments)
	for _, c := range p.Conditions {
		if !isMedia(c.Type) {
			list = append(list, c)
		}
	}
	return list
}

// HasArgument says whether the pipeline takes an argument.
func (p *Pipeline) HasArgument(name string) bool {
	return slices.ContainsFunc(p.Arguments, func(in Input) bool { return in.Name == name })
}

// Values reads arguments that are given as texts, by the types of the pipeline's inputs: float64, int64, bool or
// string. The error names each that the pipeline does not take, and each that it lacks.
func (p *Pipeline) Values(given map[string]string) (map[string]any, error) {
	values, inputs, errs := map[string]any{}, p.scalars(), []error(nil)
	for _, name := range slices.Sorted(maps.Keys(given)) {
		i := slices.IndexFunc(inputs, func(in Input) bool { return in.Name == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("arguments: %s; must be one that %s takes: %s", name, p.Class,
				namesOf(inputs)))
			continue
		}
		text := given[name]
		var v any
		var err error
		switch inputs[i].Type {
		case InputNumber:
			x, bad := strconv.ParseFloat(text, 64)
			if v, err = x, bad; bad == nil && x-x != 0 {
				err = errors.New("not finite")
			}
		case InputInteger:
			v, err = strconv.ParseInt(text, 10, 64)
		case InputBoolean:
			v, err = text == "true", nil
			if text != "true" && text != "false" {
				err = errors.New("neither true nor false")
			}
		default:
			v = text
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("arguments: %s: %.100q; must be of type %s", name, text, inputs[i].Type))
		}
		values[name] = v
	}
	for _, in := range inputs {
		if _, there := values[in.Name]; in.Required && !there {
			errs = append(errs, fmt.Errorf("arguments: %s: absent; must be given, %s needs it", in.Name, p.Class))
		}
	}
	return values, errors.Join(errs...)
}

// Canonical writes a value of Values as a text, the same one for equal values.
func Canonical(v any) string {
	if x, ok := v.(float64); ok {
		return strconv.FormatFloat(x, 'g', -1, 64)
	}
	return fmt.Sprint(v)
}

// TypeOf returns the type of a condition that is given as a file; empty if the pipeline takes none of that name.
func (p *Pipeline) TypeOf(name string) string {
	for _, c := range p.Conditions {
		if c.Name == name && isMedia(c.Type) {
			return c.Type
		}
	}
	return ""
}

// CheckConditions checks how many files are given by each name: the error names each condition that the pipeline does
// not take, each that it lacks, and each that is given several times and is one.
func (p *Pipeline) CheckConditions(given map[string]int) error {
	var errs []error
	var files []Input
	for _, c := range p.Conditions {
		n := given[c.Name]
		switch {
		case !isMedia(c.Type) && n > 0:
			errs = append(errs, fmt.Errorf("conditions: %s: a file; must be a %s, given as an argument", c.Name,
				c.Type))
		case !isMedia(c.Type):
		case n == 0 && c.Required:
			errs = append(errs, fmt.Errorf("conditions: %s: absent; must be given, %s needs %s", c.Name, p.Class,
				article(c.Type)))
		case n > 1 && c.Type != InputImages:
			errs = append(errs, fmt.Errorf("conditions: %s: %d files; must be one %s", c.Name, n, c.Type))
		}
		files = append(files, c)
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.ContainsFunc(files, func(c Input) bool { return c.Name == name }) {
			errs = append(errs, fmt.Errorf("conditions: %s; must be one that %s takes: %s", name, p.Class,
				namesOf(files)))
		}
	}
	return errors.Join(errs...)
}

// article returns a type of conditions with its article, for errors.
func article(kind string) string {
	switch kind {
	case InputImage, InputAudio:
		return "an " + kind
	case InputImages:
		return kind
	}
	return "a " + kind
}

// namesOf returns the names of inputs as a list for errors; "none" of none.
func namesOf(inputs []Input) string {
	var names []string
	for _, in := range inputs {
		names = append(names, in.Name)
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ", ")
}

// Recipe is all that a pipeline is conditioned on.
type Recipe struct {
	// Texts are those of the prompt; Truncate cuts what is too long.
	Texts    Texts
	Truncate bool
	// Conditions may be several of one name, in their order.
	Conditions []Condition
	// Arguments are of the types of Pipeline.Values.
	Arguments map[string]any
	// Size is that of the samples, Steps their number of inference steps; 0: the card's. Guidance is the value of the
	// argument that the card's Guidance names.
	Size     Size
	Steps    int
	Guidance float64
}

// Condition is a file of a recipe, decoded: of an image u8 [height, width, 3], of a video that for each frame, of a
// mask u8 [height, width].
type Condition struct {
	Name string
	Type string
	media.Size
	Data []byte
	// Digest is the SHA-256 in hex over type, size and data: the name that workers know it by.
	Digest string
}

// NewCondition returns a decoded file without the name that a recipe gives it.
func NewCondition(kind string, size media.Size, data []byte) Condition {
	h := sha256.New()
	fmt.Fprintf(h, "%s %d %d %d 0\n", kind, size.Frames, size.Height, size.Width) // 0 is the rate, of sound
	h.Write(data)
	return Condition{Type: kind, Size: size, Data: data, Digest: hex.EncodeToString(h.Sum(nil))}
}

// Probe adds an input that stands for any: a grey image of the recipe's size, all of a mask, an empty text, or 0.
func (r *Recipe) Probe(in Input) {
	size, value, channels := media.ImageSize(r.Size.Height, r.Size.Width), byte(127), 3
	switch in.Type {
	case InputText:
		r.Arguments[in.Name] = ""
		return
	case InputNumber:
		r.Arguments[in.Name] = 0.0
		return
	case InputMask:
		value, channels = 255, 1
	case InputVideo:
		size = r.Size
	}
	data := bytes.Repeat([]byte{value}, channels*size.Frames*size.Height*size.Width)
	c := NewCondition(ItemType(in.Type), size, data)
	c.Name = in.Name
	r.Conditions = append(r.Conditions, c)
}

// ItemType returns the type of one file of a condition.
func ItemType(kind string) string {
	if kind == InputImages {
		return InputImage
	}
	return kind
}

// RecipeModel is a model whose card has a Pipeline.
type RecipeModel interface {
	Model
	// EncodeRecipe returns the conditioning of a recipe. Its tensors, of any number, are what the pipeline encodes of
	// the texts, by its own names: they are kept where a sample returns them, and nothing is computed of them.
	EncodeRecipe(ctx context.Context, r *Recipe) (*Conditioning, error)
	// DecodeRecipe is Decode at the end of a rollout with that conditioning.
	DecodeRecipe(ctx context.Context, latents []float32, size Size, of *Conditioning) (Media, error)
}

// EncodeRecipe encodes a recipe with a model whose card has a Pipeline.
func EncodeRecipe(ctx context.Context, m Model, r *Recipe) (*Conditioning, error) {
	if p, ok := m.(RecipeModel); ok && m.Card().Pipeline != nil {
		return p.EncodeRecipe(ctx, r)
	}
	return nil, fmt.Errorf("%w: a recipe; the model %s takes texts alone", ErrPrompt, m.Card().Name)
}

// Decode decodes latents [S, C] that a model has made with a conditioning.
func Decode(ctx context.Context, m Model, latents []float32, size Size, of *Conditioning) (Media, error) {
	if r, ok := m.(RecipeModel); ok && m.Card().Pipeline != nil {
		return r.DecodeRecipe(ctx, latents, size, of)
	}
	return m.Decode(ctx, latents, size)
}
