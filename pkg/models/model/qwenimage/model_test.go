package qwenimage_test

import (
	"encoding/json"
	"errors"
	"image"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

func TestOpen_card(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{Height: 64, Width: 128, Steps: 20})
	m, err := qwenimage.Open(dir, qwenimage.Options{MaxPromptTokens: 300})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := m.Card()
	if c.Name != "tiny" || c.Family != qwenimage.Family().Name || c.LatentChannels != 64 || c.PixelsPerToken != 16 {
		t.Errorf("card %+v", c)
	}
	if c.Height != 64 || c.Width != 128 || c.NumInferenceSteps != 20 || c.TrueCFGScale != 1 ||
		c.MaxPromptTokens != 300 {
		t.Errorf("defaults: meander.json, then options, not kept: %+v", c)
	}
	want, err := os.ReadFile(filepath.Join(dir, "scheduler", "scheduler_config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if string(c.SchedulerConfig) != string(want) {
		t.Error("scheduler configuration is not the file's bytes")
	}
	if len(c.WeightsDigest) != 64 {
		t.Errorf("digest %q", c.WeightsDigest)
	}
}

func TestOpen_digest(t *testing.T) {
	digest := func(c checkpoint.Config) string {
		m, err := qwenimage.Open(checkpoint.Dir(t, c), qwenimage.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		return m.Card().WeightsDigest
	}
	one := digest(checkpoint.Config{Seed: 1})
	if two := digest(checkpoint.Config{Seed: 1}); one != two {
		t.Error("the same checkpoint in another folder has another digest")
	}
	for _, c := range []checkpoint.Config{{Seed: 2}, {Seed: 1, DType: tensor.BF16}, {Seed: 1, Depth: 2}} {
		if digest(c) == one {
			t.Errorf("%+v has the digest of another checkpoint", c)
		}
	}
}

// In a Hugging Face cache every file is a link to a blob of the repository.
func TestOpen_huggingFaceCache(t *testing.T) {
	plain := checkpoint.Dir(t, checkpoint.Config{})
	repository := filepath.Join(t.TempDir(), "models--meander--tiny.v2")
	snapshot, blobs := filepath.Join(repository, "snapshots", "4f2a"), filepath.Join(repository, "blobs")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		t.Fatal(err)
	}
	n := 0
	err := filepath.WalkDir(plain, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		blob := filepath.Join(blobs, strconv.Itoa(n))
		link := filepath.Join(snapshot, strings.TrimPrefix(name, plain))
		target, err := filepath.Rel(filepath.Dir(link), blob)
		return errors.Join(err, os.Rename(name, blob), os.MkdirAll(filepath.Dir(link), 0o755), os.Symlink(target, link))
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := qwenimage.Open(snapshot, qwenimage.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	same, err := qwenimage.Open(checkpoint.Dir(t, checkpoint.Config{}), qwenimage.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer same.Close()
	if got, want := m.Card(), same.Card(); got.Name != "tiny-v2" || got.WeightsDigest != want.WeightsDigest {
		t.Errorf("model %s with digest %s, want tiny-v2 with %s", got.Name, got.WeightsDigest, want.WeightsDigest)
	}
	if info, err := qwenimage.Inspect(snapshot); err != nil || len(info.Problems) > 0 {
		t.Errorf("info %v, %v", info, err)
	}
}

func TestOpen_halfPrecision(t *testing.T) {
	for _, d := range []tensor.DType{tensor.F16, tensor.BF16} {
		m, err := qwenimage.Open(checkpoint.Dir(t, checkpoint.Config{DType: d}), qwenimage.Options{})
		if err != nil {
			t.Fatal(err)
		}
		b := newBench(t, m, 1)
		for _, v := range b.run(t, m, 0, 1)[0] {
			if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
				t.Fatalf("%s: velocity %v", d, v)
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// edit changes one field of a JSON file.
func edit(t *testing.T, name string, change func(map[string]any)) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(b, &fields); err != nil {
		t.Fatal(err)
	}
	change(fields)
	if b, err = json.Marshal(fields); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// retensor rewrites a checkpoint.
func retensor(t *testing.T, name string, change func(map[string]safetensors.Tensor)) {
	t.Helper()
	a, err := safetensors.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	tensors := map[string]safetensors.Tensor{}
	for _, n := range a.Names() {
		info, _ := a.Info(n)
		b, err := a.Bytes(n)
		if err != nil {
			t.Fatal(err)
		}
		tensors[n] = safetensors.Tensor{Name: n, DType: info.DType, Shape: info.Shape, Data: append([]byte(nil), b...)}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	change(tensors)
	var list []safetensors.Tensor
	for _, x := range tensors {
		list = append(list, x)
	}
	if err := safetensors.WriteFile(name, list, nil); err != nil {
		t.Fatal(err)
	}
}

// refusal is a way to break a checkpoint, and what the error must say.
type refusal struct {
	name   string
	change func(t *testing.T, dir string)
	want   []string
}

// set changes one field of a configuration.
func set(file, field string, v any) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		edit(t, filepath.Join(dir, file), func(m map[string]any) { m[field] = v })
	}
}

const (
	transformer = "transformer/config.json"
	vae         = "vae/config.json"
	text        = "text_encoder/config.json"
	weights     = "transformer/diffusion_pytorch_model.safetensors"
)

var brokenConfigs = []refusal{
	{
		"other pipeline", set("model_index.json", "_class_name", "FluxPipeline"),
		[]string{"model_index.json", "FluxPipeline"},
	},
	{
		"other scheduler", set("model_index.json", "scheduler", []string{"diffusers", "DDIMScheduler"}),
		[]string{"scheduler", "DDIMScheduler"},
	},
	{"guidance", set(transformer, "guidance_embeds", true), []string{transformer, "guidance_embeds"}},
	{"layered positions", set(transformer, "use_layer3d_rope", true), []string{"use_layer3d_rope"}},
	{"absurd depth", set(transformer, "num_layers", 1<<40), []string{transformer, "num_layers: 1099511627776"}},
	{"negative width", set(transformer, "attention_head_dim", -8), []string{"attention_head_dim: -8"}},
	{"odd axes", set(transformer, "axes_dims_rope", []int{3, 3, 2}), []string{"axes_dims_rope: [3 3 2]; must"}},
	{"levels", set(vae, "dim_mult", []int{1, 99}), []string{"dim_mult: [1 99]; must"}},
	{"many levels", set(vae, "dim_mult", make([]int, 5000)), []string{"dim_mult: [0 0 0 0 0 0 0 0] and 4992 more; must"}},
	{"quantized", set(transformer, "quantization_config", map[string]any{"bits": 4}), []string{"quantization_config"}},
	{
		"deeper than the file", set(transformer, "num_layers", 3),
		[]string{"load transformer", "missing", "transformer_blocks.1.attn"},
	},
	{
		"wider than the file", set(transformer, "joint_attention_dim", 32),
		[]string{"joint_attention_dim: 32", "hidden_size = 16"},
	},
	{"attention in the autoencoder", set(vae, "attn_scales", []float64{1}), []string{vae, "attn_scales"}},
	{"no deviation", set(vae, "latents_std", make([]float64, 16)), []string{vae, "latents_std"}},
	{"short mean", set(vae, "latents_mean", []float64{0}), []string{vae, "latents_mean"}},
	{"other activation", set(text, "hidden_act", "gelu"), []string{text, "hidden_act"}},
	{"other rope", set(text, "rope_scaling", map[string]any{"type": "yarn"}), []string{text, "rope_type: \"yarn\""}},
	{"zero theta", set(text, "rope_theta", 0), []string{"rope_theta"}},
	{"small vocabulary", set(text, "vocab_size", 100), []string{"vocab_size 100"}},
	{"defaults", set("meander.json", "height", 30), []string{"multiples of 16"}},
	{"text as number", set(transformer, "num_layers", "two"), []string{transformer}},
}

var brokenFiles = []refusal{
	{"several faults at once", func(t *testing.T, dir string) {
		set(transformer, "patch_size", 1)(t, dir)
		set(vae, "input_channels", 4)(t, dir)
	}, []string{"patch_size: 1", "input_channels: 4"}},
	{"tensors missing, unexpected, mis-shaped", func(t *testing.T, dir string) {
		retensor(t, filepath.Join(dir, weights), func(m map[string]safetensors.Tensor) {
			delete(m, "img_in.bias")
			delete(m, "proj_out.weight")
			m["extra.weight"] = safetensors.Tensor{
				Name: "extra.weight", DType: tensor.F32, Shape: []int{1}, Data: make([]byte, 4),
			}
			x := m["txt_in.weight"]
			x.Shape = []int{x.Shape[1], x.Shape[0] * 1}
			x.Shape[0], x.Shape[1] = x.Shape[0]*2, x.Shape[1]/2
			m["txt_in.weight"] = x
		})
	}, []string{
		"2 tensors missing: img_in.bias, proj_out.weight", "1 tensors unexpected: extra.weight",
		"1 tensors of another shape: txt_in.weight: [32 8]; must be [16 16]",
	}},
	{"integers", func(t *testing.T, dir string) {
		retensor(t, filepath.Join(dir, weights), func(m map[string]safetensors.Tensor) {
			x := m["img_in.bias"]
			x.DType = tensor.I32
			m["img_in.bias"] = x
		})
	}, []string{"img_in.bias has type I32"}},
	{"truncated shard", func(t *testing.T, dir string) {
		name := filepath.Join(dir, weights)
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(name, info.Size()-100); err != nil {
			t.Fatal(err)
		}
	}, []string{"diffusion_pytorch_model.safetensors"}},
	{"no weights", func(t *testing.T, dir string) {
		if err := os.Remove(filepath.Join(dir, weights)); err != nil {
			t.Fatal(err)
		}
	}, []string{"transformer"}},
	{"no scheduler", func(t *testing.T, dir string) {
		if err := os.RemoveAll(filepath.Join(dir, "scheduler")); err != nil {
			t.Fatal(err)
		}
	}, []string{"scheduler/scheduler_config.json"}},
	{"no folder", func(t *testing.T, dir string) {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}, []string{"no such file"}},
}

func TestOpen_refuses(t *testing.T) {
	for _, tt := range slices.Concat(brokenConfigs, brokenFiles) {
		t.Run(tt.name, func(t *testing.T) {
			dir := checkpoint.Dir(t, checkpoint.Config{})
			tt.change(t, dir)
			m, err := qwenimage.Open(dir, qwenimage.Options{})
			if err == nil {
				m.Close()
				t.Fatal("no error")
			}
			info, inspectErr := qwenimage.Inspect(dir)
			if inspectErr == nil && len(info.Problems) == 0 {
				t.Error("inspection finds no problem")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error without %q:\n%v", want, err)
				}
			}
		})
	}
}

func TestOpen_refusesOptions(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{})
	for name, of := range map[string]struct {
		o        qwenimage.Options
		defaults string
	}{
		"Threads":           {o: qwenimage.Options{Options: model.Options{Threads: -1}}},
		"MaxPromptTokens":   {o: qwenimage.Options{MaxPromptTokens: 5000}},
		"Height":            {defaults: `{"height": 1048576}`},
		"TrueCFGScale":      {defaults: `{"true_cfg_scale": 0}`},
		"MaxPixels":         {defaults: `{"height": 32768, "width": 32768}`},
		"NumInferenceSteps": {defaults: `{"num_inference_steps": -2}`},
	} {
		dir, o := dir, of.o
		if of.defaults != "" {
			dir = checkpoint.Dir(t, checkpoint.Config{})
			if err := os.WriteFile(filepath.Join(dir, "meander.json"), []byte(of.defaults), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if m, err := qwenimage.Open(dir, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
			if m != nil {
				m.Close()
			}
		}
	}
}

func conditioning(shape []int, embeds []float32) *model.Conditioning {
	return &model.Conditioning{Tensors: []model.Tensor{{Name: "prompt_embeds", Shape: shape, Data: embeds}}}
}

func TestModel_refusesArguments(t *testing.T) {
	m := openModel(t, "full", qwenimage.Options{MaxPromptTokens: 40})
	b := newBench(t, m, 1)
	nan := float32(math.NaN())
	embeds := b.cond[0].Tensors[0]
	tokens, width := embeds.Shape[0], embeds.Shape[1]
	with := func(tensors ...model.Tensor) func(r *model.Row) {
		return func(r *model.Row) { r.Conditioning = &model.Conditioning{Tensors: tensors} }
	}
	prompt := func(shape []int, embeds []float32) func(r *model.Row) {
		return func(r *model.Row) { r.Conditioning = conditioning(shape, embeds) }
	}
	same := func(*model.Row) {}
	for _, tt := range []struct {
		name       string
		change     func(r *model.Row)
		h, w       int
		wantErrHas string
	}{
		{"size", same, 47, 80, "multiples of 16"},
		{"too large", same, 1 << 14, 1 << 14, "at most"},
		{"latents", func(r *model.Row) { r.X = r.X[1:] }, 48, 80, "must be 960"},
		{"results", func(r *model.Row) { r.Dst = nil }, 48, 80, "must be 960"},
		{"sigma", func(r *model.Row) { r.Sigma = 1.5 }, 48, 80, "sigma: 1.5"},
		{"not a number", func(r *model.Row) { r.Sigma = nan }, 48, 80, "sigma: NaN"},
		{"guidance", func(r *model.Row) { r.Guidance = 4 }, 48, 80, "guidance: 4"},
		{"no conditioning", func(r *model.Row) { r.Conditioning = nil }, 48, 80, "conditioning: none"},
		{"other width", prompt([]int{2 * tokens, width / 2}, embeds.Data), 48, 80, "must be 1 to 40 tokens"},
		{"short embeds", prompt(embeds.Shape, embeds.Data[1:]), 48, 80, "prompt_embeds: "},
		{"flat embeds", prompt([]int{tokens * width}, embeds.Data), 48, 80, "must be 1 to 40 tokens"},
		{"other tensor", with(model.Tensor{Name: "embeds"}), 48, 80, "must be prompt_embeds"},
		{"no tensor", with(), 48, 80, "must be prompt_embeds"},
	} {
		row := model.Row{X: b.x[0], Sigma: b.sigma[0], Conditioning: b.cond[0], Dst: make([]float32, len(b.x[0]))}
		tt.change(&row)
		err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(tt.h, tt.w))
		if err == nil || !strings.Contains(err.Error(), tt.wantErrHas) {
			t.Errorf("%s: got %v, want an error with %q", tt.name, err, tt.wantErrHas)
		}
	}
	if err := m.Velocity(t.Context(), nil, media.ImageSize(48, 80)); err != nil {
		t.Errorf("no rows: %v", err)
	}
	if _, err := m.Decode(t.Context(), b.x[0][1:], media.ImageSize(48, 80)); err == nil {
		t.Error("Decode takes short latents")
	}
	broken := append([]float32(nil), b.x[0]...)
	broken[7] = nan
	if _, err := m.Decode(t.Context(), broken, media.ImageSize(48, 80)); !errors.Is(err, model.ErrLatents) ||
		!strings.Contains(err.Error(), "not numbers") {
		t.Errorf("Decode of latents that are not numbers: %v", err)
	}
	if _, err := m.EncodeMedia(t.Context(), media.Of(image.NewNRGBA(image.Rect(0, 0, 17, 16)))); err == nil {
		t.Error("EncodeMedia takes any size")
	}
	if _, err := m.Encode(t.Context(), []string{"ok", strings.Repeat("long ", 50)}); !errors.Is(err, model.ErrPrompt) ||
		!strings.Contains(err.Error(), "at most 40") {
		t.Errorf("a long prompt: %v", err)
	}
	if _, err := m.Encode(t.Context(), []string{"a\xff"}); !errors.Is(err, model.ErrPrompt) {
		t.Error("Encode takes invalid UTF-8")
	}
}

func TestInspect(t *testing.T) {
	for _, name := range []string{"full", "half"} {
		info, err := qwenimage.Inspect(filepath.Join(golden, name))
		if err != nil {
			t.Fatal(err)
		}
		if len(info.Problems) > 0 || len(info.Parts) != 3 || info.Vocabulary == 0 {
			t.Errorf("%s: %+v", name, info)
		}
		m := openModel(t, name, qwenimage.Options{})
		memory := 0
		for _, p := range info.Parts {
			memory += p.MemoryBytes
		}
		// Packing rounds the columns of a weight up to 16, which counts in tiny models.
		if weights, _ := m.MemoryBytes(); memory > weights || 2*memory < weights {
			t.Errorf("%s: inspection says %d bytes, the model %d", name, memory, weights)
		}
	}
	if _, err := qwenimage.Inspect(t.TempDir()); err == nil {
		t.Error("an empty folder is a model")
	}
}
