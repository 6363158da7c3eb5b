package lora_test

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// low is a LoRA of a module of n x k, of which lora_B counts up.
func low(t testing.TB, name, down, up string, n, k, r int) []safetensors.Tensor {
	t.Helper()
	a, b := make([]float32, r*k), make([]float32, n*r)
	for i := range a {
		a[i] = float32(i%7) - 2
	}
	for i := range b {
		b[i] = float32(i + 1)
	}
	return []safetensors.Tensor{
		matrix(t, name+down, tensor.F32, r, k, a...), matrix(t, name+up, tensor.F32, n, r, b...),
	}
}

func parsed(t testing.TB, tensors ...safetensors.Tensor) (lora.Weighted, error) {
	t.Helper()
	a, err := lora.Parse("test", file(t, nil, tensors...), nil)
	return lora.Weighted{Adapter: a, Weight: 1}, err
}

const block = "transformer_blocks.3.attn."

// trained are names that trainers give, and the modules that they mean.
var (
	qkv = []string{block + "to_q", block + "to_k", block + "to_v"}
	mlp = []string{
		"single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_k",
		"single_transformer_blocks.0.attn.to_v", "single_transformer_blocks.0.proj_mlp",
	}
	trained = map[string][]string{
		block + "to_q":                                        qkv[:1],
		"base_model.model." + block + "to_q":                  qkv[:1],
		"module.transformer." + block + "to_q":                qkv[:1],
		"_orig_mod.module." + block + "to_q":                  qkv[:1],
		"transformer_blocks.3._fsdp_wrapped_module.attn.to_q": qkv[:1],
		"base_model.model._orig_mod.transformer_blocks.3._checkpoint_wrapped_module.attn.to_q": qkv[:1],
		"diffusion_model." + block + "to_q":                                                    qkv[:1],
		"lora_unet_transformer_blocks_3_attn_to_q":                                             qkv[:1],
		"lora_transformer_transformer_blocks_3_attn_to_out_0":                                  {block + "to_out.0"},
		"lycoris_transformer_blocks_3_attn_to_k":                                               qkv[1:2],
		"lora_unet_double_blocks_3_img_attn_qkv":                                               qkv,
		"diffusion_model.double_blocks.3.img_attn.qkv":                                         qkv,
		"diffusion_model.double_blocks.3.img_attn_qkv":                                         qkv,
		"lora_unet_single_blocks_0_linear1":                                                    mlp,
		"transformer.single_blocks.0.linear1":                                                  mlp,
		"lora_unet_blocks_0_cross_attn_q":                                                      {"blocks.0.attn2.to_q"},
		"diffusion_model.blocks.0.cross_attn.q":                                                {"blocks.0.attn2.to_q"},
		"lora_unet_noise_refiner_0_attention_out":                                              {"noise_refiner.0.attention.to_out.0"},
		"lora_unet_final_layer_adaLN_modulation_1":                                             {"norm_out.linear"},
		"diffusion_model.final_layer.adaLN_modulation.1":                                       {"norm_out.linear"},
	}
)

// Modules have the names of diffusers, whatever trainers call them.
func TestFit_Names(t *testing.T) {
	table := lora.Table{
		block + "to_q": {4, 6}, block + "to_k": {4, 6}, block + "to_v": {4, 6}, block + "to_out.0": {6, 4},
		"single_transformer_blocks.0.attn.to_q": {4, 6}, "single_transformer_blocks.0.attn.to_k": {4, 6},
		"single_transformer_blocks.0.attn.to_v": {4, 6}, "single_transformer_blocks.0.proj_mlp": {10, 6},
		"norm_out.linear": {8, 6}, "time_text_embed.timestep_embedder.linear_1": {6, 6},
		"blocks.0.attn2.to_q": {4, 6}, "noise_refiner.0.attention.to_out.0": {6, 4},
	}
	for name, want := range trained {
		rows, k := 0, table[want[0]][1]
		for _, m := range want {
			rows += table[m][0]
		}
		for _, forms := range [][2]string{
			{".lora_A.weight", ".lora_B.weight"},
			{".lora_down.weight", ".lora_up.weight"},
			{"._orig_mod.lora_A.weight", "._orig_mod.lora_B.weight"},
			{".lora_A.default._fsdp_wrapped_module.weight", ".lora_B.default._fsdp_wrapped_module.weight"},
		} {
			w, err := parsed(t, low(t, name, forms[0], forms[1], rows, k, 2)...)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			fitting, err := table.Fit(w)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			a := fitting[0].Adapter
			if got := a.Modules(); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
				t.Errorf("%s: is %v; want %v", name, got, want)
				continue
			}
			at := 0
			for _, m := range want {
				p := a.Product(m)
				first := float32(at*2 + 1)
				if strings.Contains(name, "final_layer") { // the halves change places
					first = float32(rows + 1)
				}
				if p.N != table[m][0] || p.K != k || len(p.B) != 2*p.N || p.B[0] != first {
					t.Errorf("%s: %s: %d x %d, lora_B begins with %v; want %v", name, m, p.N, p.K, p.B[0], first)
				}
				at += p.N
			}
			prefixed := strings.HasPrefix(name, "base_model.model.") ||
				strings.Contains(name+forms[0], "module.") || strings.Contains(forms[0], "_orig_mod.") ||
				strings.HasPrefix(name, "diffusion_model.") || strings.HasPrefix(name, "transformer.")
			if note := w.Adapter.Note(); prefixed != (note != "") {
				t.Errorf("%s: note %q", name, note)
			}
		}
	}
	twice, err := parsed(t, append(low(t, "lora_unet_double_blocks_3_img_attn_qkv", ".lora_down.weight",
		".lora_up.weight", 12, 6, 2), low(t, block+"to_k", ".lora_A.weight", ".lora_B.weight", 4, 6, 2)...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Check(twice); err == nil || !strings.Contains(err.Error(), "changed under another name") {
		t.Error(err)
	}
}

// A tensor or a setting that is not used is refused by its name, with the tool that helps.
func TestParse_NothingUnread(t *testing.T) {
	good := pair(t, "m.lora_A.weight", "m.lora_B.weight")
	for name, want := range map[string]string{
		"m.dora_scale": "DoRA", "m.lora_magnitude_vector": "merge_and_unload", "m.hada_w1_a": "LoHa",
		"m.lora_magnitude_vector.default.weight": "DoRA", "m.lokr_w1": "LoKr", "m.lora_mid.weight": "LyCORIS",
		"m.diff_b": "whole change", "m.lora_B.bias": "bias", "text_encoder.text_model.q.lora_A.weight": "fuse_lora",
		"lora_te1_text_model_q.lora_down.weight": "text encoder", "lora_te_text_model_q.alpha": "text encoder",
		"base_model.model.text_model.q.lora_A.weight": "text encoder", "m.oft_R.weight": "another kind",
		"m.base_layer.weight": "out of target_modules", "m.weight": "no tensor of a LoRA", "x": "no tensor of a LoRA", "lora_A.weight": "no tensor of a LoRA",
		string(rune('a'+rand.IntN(26))) + ".some.thing": "no tensor of a LoRA",
	} {
		_, err := parsed(t, append(slices.Clone(good), matrix(t, name, tensor.F32, 1, 1, 1))...)
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want it refused by name, with %q", name, err, want)
		}
	}
}

// The rank may be above the smaller side of a weight: what such a product adds is what is saved for servers.
func TestParse_RankAboveItsWeight(t *testing.T) {
	for _, shape := range [][2]int{{2, 5}, {5, 2}} {
		w, err := parsed(t, low(t, "m", ".lora_A.weight", ".lora_B.weight", shape[0], shape[1], 7)...)
		if err != nil {
			t.Fatal(err)
		}
		if err := (lora.Table{"m": shape}).Check(w); err != nil {
			t.Error(err)
		}
		dir := filepath.Join(t.TempDir(), "saved")
		if err := w.Save(dir); err != nil {
			t.Fatal(err)
		}
		again, err := lora.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		p := again.Product("m")
		for i := range shape[0] * shape[1] {
			if got, want := delta(p, i), delta(w.Adapter.Product("m"), i); p.R != 2 || math.Abs(got-want) > 1e-4 {
				t.Errorf("rank %d: element %d is %v, want %v", p.R, i, got, want)
			}
		}
	}
}

// The Python client has the same names.
func TestNames_AreThoseOfPython(t *testing.T) {
	own, err := os.ReadFile("names.json")
	if err != nil {
		t.Fatal(err)
	}
	python, err := os.ReadFile("../../client/python/meander/data/lora_names.json")
	if err != nil || !bytes.Equal(own, python) {
		t.Errorf("%v, or it is another file: run make generate", err)
	}
	var fields struct {
		Harmless map[string]string `json:"fields_without_effect"`
	}
	if err := json.Unmarshal(own, &fields); err != nil {
		t.Fatal(err)
	}
	for name, why := range fields.Harmless {
		if why == "" {
			t.Errorf("%s: no reason", name)
		}
	}
}
