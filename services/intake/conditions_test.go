package intake

import (
	"bytes"
	"encoding/json"
	pixels "image"
	"image/color"
	"image/png"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

// editor is a lane of a pipeline that edits an image.
func editor(t *testing.T, access string) *schemas.Policy {
	t.Helper()
	p := qwen()
	p.ConditioningBytes, p.ConditioningTokenBytes = 0, 0
	var err error
	p.Pipeline, err = json.Marshal(&model.Pipeline{
		Class: "EditPipeline", RandomAccess: access, Guidance: "scale",
		Conditions: []model.Input{
			{Name: "image", Type: model.InputImage, Required: true},
			{Name: "mask", Type: model.InputMask},
			{Name: "clip", Type: model.InputVideo},
			{Name: "song", Type: model.InputAudio},
			{Name: "more", Type: model.InputImages},
		},
		Arguments: []model.Input{{Name: "scale", Type: model.InputNumber}, {Name: "strength", Type: model.InputNumber}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// pngOf is a grey PNG.
func pngOf(t *testing.T, width, height int) []byte {
	t.Helper()
	file, err := media.EncodePNG(pixels.NewNRGBA(pixels.Rect(0, 0, width, height)))
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// given is a condition whose file is inline.
func given(name string, file []byte) schemas.Condition {
	return schemas.Condition{Name: name, DataImage: schemas.DataImage{Data: file}}
}

// Conditions get their type and are sorted; arguments are written in one form, and that of guidance is its scale.
func TestResolve_Conditions(t *testing.T) {
	file := pngOf(t, 8, 8)
	resolve := func(p schemas.Prompt) *schemas.Request {
		t.Helper()
		p.UID, p.Prompt = "u", "make it red"
		rs, err := Resolve("run", &p, editor(t, model.AccessExact),
			Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err != nil {
			t.Fatal(err)
		}
		return rs[0]
	}
	var p schemas.Prompt
	p.Conditions = []schemas.Condition{given("mask", file), given("image", file)}
	p.Arguments = map[string]string{"strength": "0.50", "scale": "2.5"}
	r := resolve(p)
	if r.Conditions[0].Name != "image" || r.Conditions[0].Type != "image" || r.Conditions[1].Type != "mask" ||
		r.Conditions[0].Ref == nil || r.Arguments["strength"] != "0.5" || len(r.Arguments) != 1 ||
		r.TrueCFGScale != 2.5 {
		t.Errorf("%+v %v %g", r.Conditions, r.Arguments, r.TrueCFGScale)
	}
	p.Conditions = []schemas.Condition{given("image", file), given("mask", file)}
	p.Arguments = map[string]string{"strength": "5e-1", "scale": "2.5"}
	if again := resolve(p); again.ScheduleDigest != r.ScheduleDigest {
		t.Error("the order of conditions, or the form of a number, changes the digest")
	}
	p.Conditions = []schemas.Condition{given("image", pngOf(t, 8, 16))}
	if other := resolve(p); other.ScheduleDigest == r.ScheduleDigest {
		t.Error("another image has the same digest")
	}
}

// What a pipeline does not take is refused by name.
func TestResolve_ConditionsRefused(t *testing.T) {
	file := pngOf(t, 8, 8)
	deep := pixels.NewNRGBA64(pixels.Rect(0, 0, 8, 8))
	deep.Set(0, 0, color.NRGBA64{R: 1, A: 65535})
	var wide bytes.Buffer
	if err := png.Encode(&wide, deep); err != nil {
		t.Fatal(err)
	}
	bomb := append([]byte{}, pngOf(t, 8, 8)...)
	copy(bomb[16:], []byte{0, 1, 0, 0, 0, 1, 0, 0})
	type P = schemas.Prompt
	with := func(c ...schemas.Condition) func(*P) { return func(p *P) { p.Conditions = c } }
	arguments := func(name, value string) func(*P) {
		return func(p *P) {
			p.Conditions, p.Arguments = []schemas.Condition{given("image", file)}, map[string]string{name: value}
		}
	}
	also := func(set func(*P)) func(*P) {
		return func(p *P) {
			p.Conditions = []schemas.Condition{given("image", file)}
			set(p)
		}
	}
	for _, c := range []struct {
		name, access string
		set          func(*P)
		want         string
	}{
		{"missing", "", with(), "conditions: image: absent; must be given"},
		{"unknown", "", with(given("image", file), given("depth", file)), "conditions: depth; must be one that EditPipeline takes: image"},
		{"two", "", with(given("image", file), given("image", file)), "conditions: image: 2 files; must be one image"},
		{"kind", "", with(schemas.Condition{Name: "image", Type: "video", DataImage: schemas.DataImage{Data: file}}), "conditions: image: type: video; must be image"},
		{"no png", "", with(given("image", []byte("GIF89a"))), "conditions: image: "},
		{"16 bits", "", with(given("image", wide.Bytes())), "16 bits for each colour; must be 8"},
		{"bomb", "", with(given("image", bomb)), "conditions: image: "},
		{"mask of another size", "", with(given("image", file), given("mask", pngOf(t, 16, 8))), "conditions: mask: the mask has 16x8 pixels; must have those of the image, 8x8 pixels"},
		{"image as a video", "", with(given("image", file), given("clip", file)), "conditions: clip: one image; must be a video"},
		{"sound", "", with(given("image", file), given("song", file)), "conditions: song: sound; must be absent"},
		{"unknown argument", "", arguments("callback", "f"), "arguments: callback; must be one that EditPipeline takes: scale, strength"},
		{"type of an argument", "", arguments("strength", "much"), `arguments: strength: "much"; must be of type number`},
		{"negative prompt", "", arguments("negative_prompt", "x"), "arguments: negative_prompt; must be absent"},
		{"two scales", "", also(func(p *P) { p.TrueCFGScale, p.Arguments = new(3.), map[string]string{"scale": "2"} }), "arguments: scale: 2; must be absent beside true_cfg_scale 3"},
		{"a second scale", "", also(func(p *P) { p.GuidanceRescale = new(0.5) }), "guidance_rescale: given; must be absent"},
		{"a second network", "", also(func(p *P) { p.TrueCFGScale2 = new(2.) }), "true_cfg_scale_2: 2; must be absent, model "},
		{"an input of the network", "", also(func(p *P) { p.Guidance = new(2.) }), "guidance: 2; must be absent, the network of model "},
		{"negative", "", also(func(p *P) { p.NegativePrompt = new("blur") }), "negative_prompt: given; must be absent"},
		{"a reward that sees a mask", "", also(func(p *P) { p.Reward = []schemas.RewardSpec{{Name: "unchanged"}} }), `reward[0]: name: "unchanged"; sees the conditions image and mask: the prompt must have a condition of type mask`},
		{"conditioning", "", also(func(p *P) { p.Rollout.ReturnConditioning = true }), "rollout.return_conditioning: given; must be absent"},
		{"scheduled sampling", model.AccessAfterPrevious, also(func(p *P) { p.ScheduledSampling = &schemas.ScheduledSampling{} }), "scheduled_sampling: given; must be absent"},
		{"images", model.AccessExact, also(func(p *P) { p.Start = &schemas.Start{Data: &schemas.Data{Images: []schemas.DataImage{{Data: file}}}} }), "start.data.images: given; must be absent"},
		{"start", model.AccessInOrder, also(func(p *P) { p.Start = &schemas.Start{} }), "start: given; must be absent"},
		{"prune", model.AccessInOrder, also(func(p *P) { p.Prune = &schemas.Prune{Then: "branch"} }), "prune.then: branch; must be end"},
		{"tree", model.AccessInOrder, also(func(p *P) { p.Tree = &schemas.Tree{} }), "tree: given; must be absent"},
	} {
		p := &P{UID: "u", Prompt: "make it red"}
		if c.access == "" {
			c.access = model.AccessExact
		}
		c.set(p)
		_, err := Resolve("run", p, editor(t, c.access),
			Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; must be %q", c.name, err, c.want)
		}
	}
	p := &P{UID: "u", Prompt: "a"}
	p.Arguments = map[string]string{"strength": "1"}
	if _, err := Resolve("run", p, qwen(), Origin{Reward: []string{"synthetic"}}); err == nil ||
		!strings.Contains(err.Error(), "arguments: strength; must be absent") {
		t.Errorf("a network alone: %v", err)
	}
}

// Intake stores the files of a group as blobs, and refuses those that no sample could read.
func TestConditions_Stored(t *testing.T) {
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), editor(t, model.AccessExact), nil); err != nil {
		t.Fatal(err)
	}
	p.sampler(t, qwen().Lane)
	p.serve(t)
	file := pngOf(t, 8, 8)
	r := receipt(t, p.publish(t, "r", prompt("u", "make it red",
		func(p *schemas.Prompt) { p.Conditions = []schemas.Condition{given("image", file)} })))
	if !r.Accepted {
		t.Fatalf("%+v", r)
	}
	ref, err := refOf(t.Context(), file)
	if err == nil {
		err = p.HasBlob(t.Context(), ref)
	}
	if err != nil {
		t.Errorf("the image is not stored: %v", err)
	}
	missing := ref
	missing.Digest = strings.Repeat("0", 64)
	r = receipt(t, p.publish(t, "r", prompt("v", "make it red", func(p *schemas.Prompt) {
		p.Conditions = []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Ref: &missing}}}
	})))
	if r.Accepted || !strings.Contains(r.Error, "conditions: image.ref") {
		t.Errorf("a blob that is not stored: %+v", r)
	}
}

// Settings of guidance are the arguments that a pipeline has for them, by its own names.
func TestResolve_GuidanceByArguments(t *testing.T) {
	policy := qwen()
	inputs := []model.Input{{Name: "true_cfg_scale", Type: model.InputNumber}}
	for _, name := range []string{"guidance_scale", "guidance_rescale", "guidance_scale_2"} {
		inputs = append(inputs, model.Input{Name: name, Type: model.InputNumber})
	}
	var err error
	policy.Pipeline, err = json.Marshal(&model.Pipeline{
		Class: "FluxPipeline", Guidance: "true_cfg_scale", Arguments: inputs,
	})
	if err != nil {
		t.Fatal(err)
	}
	resolve := func(scale float64, arguments map[string]string) ([]*schemas.Request, error) {
		p := &schemas.Prompt{UID: "u", Prompt: "a fox"}
		p.TrueCFGScale, p.Guidance, p.Arguments = new(scale), new(3.5), arguments
		p.GuidanceRescale, p.TrueCFGScale2 = new(0.7), new(2.)
		return Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	}
	list, err := resolve(4, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"guidance_scale": "3.5", "guidance_rescale": "0.7", "guidance_scale_2": "2"}
	if r := list[0]; !maps.Equal(r.Arguments, want) || r.TrueCFGScale != 4 || r.Guidance != 0 ||
		r.GuidanceRescale != 0 || r.TrueCFGScale2 != 0 || r.BoundaryRatio != 0 {
		t.Errorf("%v, %+v; want %v and nothing beside", r.Arguments, r.Sampling, want)
	}
	if _, err := resolve(4, map[string]string{"guidance_scale": "2"}); err == nil ||
		!strings.Contains(err.Error(), "arguments: guidance_scale; must be absent beside guidance, which it is") {
		t.Errorf("both: %v", err)
	}
	if _, err := resolve(1, nil); err == nil ||
		!strings.Contains(err.Error(), "true_cfg_scale_2: given; must be absent with true_cfg_scale 1") {
		t.Errorf("without guidance: %v", err)
	}
}

// A negative prompt that is not given stays absent, an empty one is given; scales that would have no effect without one
// are refused, or are 1 where they are the pipeline's own.
func TestResolve_NoNegativePrompt(t *testing.T) {
	type P = schemas.Prompt
	policy := qwen()
	var err error
	policy.NegativePrompt = ""
	policy.Pipeline, err = json.Marshal(&model.Pipeline{
		Class: "ImagePipeline", Guidance: "scale", BesideNegative: []string{"scale", "second_scale"},
		Arguments: []model.Input{
			{Name: "scale", Type: model.InputNumber},
			{Name: "second_scale", Type: model.InputNumber},
			{Name: "negative_prompt", Type: model.InputText},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	argument := func(name, value string) func(*P) {
		return func(p *P) { p.Arguments = map[string]string{name: value} }
	}
	for _, c := range []struct {
		name   string
		set    func(*P)
		absent bool
		text   string
		scale  float64
		want   string
	}{
		{"absent", func(*P) {}, true, "", 1, ""},
		{"empty", func(p *P) { p.NegativePrompt = new("") }, false, "", 4, ""},
		{"given", func(p *P) { p.NegativePrompt = new("grey") }, false, "grey", 4, ""},
		{"given without guidance", func(p *P) { p.NegativePrompt, p.TrueCFGScale = new("grey"), new(1.) }, false, "grey", 1, ""},
		{"scale", func(p *P) { p.TrueCFGScale = new(3.) }, false, "", 0, "true_cfg_scale: 3; must have a negative_prompt"},
		{"scale by its name", argument("scale", "3"), false, "", 0, "true_cfg_scale: 3; must have a negative_prompt"},
		{"other scale", argument("second_scale", "2"), false, "", 0, "arguments: second_scale: 2; must have a negative_prompt"},
		{"scales without guidance", argument("second_scale", "1"), true, "", 1, ""},
	} {
		p := &P{UID: "u", Prompt: "a fox"}
		c.set(p)
		list, err := Resolve("run", p, policy, Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v; must be %q", c.name, err, c.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		s := list[0].Sampling
		if s.NoNegativePrompt != c.absent || s.NegativePrompt != c.text || s.TrueCFGScale != c.scale {
			t.Errorf("%s: absent %t, %q, scale %g; must be %t, %q, %g", c.name, s.NoNegativePrompt, s.NegativePrompt,
				s.TrueCFGScale, c.absent, c.text, c.scale)
		}
	}
}
