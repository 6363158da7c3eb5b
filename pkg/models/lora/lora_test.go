package lora_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// matrix is a tensor of a file, its elements given row by row.
func matrix(t testing.TB, name string, d tensor.DType, rows, columns int, x ...float32) safetensors.Tensor {
	t.Helper()
	m, err := safetensors.FloatTensor(name, d, []int{rows, columns}, x)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func file(t testing.TB, metadata map[string]string, tensors ...safetensors.Tensor) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := safetensors.Write(&b, tensors, metadata); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// pair is a LoRA of rank 1 of the module "m", 2 x 3, under a name of its own.
func pair(t testing.TB, a, b string) []safetensors.Tensor {
	t.Helper()
	return []safetensors.Tensor{matrix(t, a, tensor.F32, 1, 3, 1, 2, 3), matrix(t, b, tensor.F32, 2, 1, 4, 5)}
}

const config = `{"peft_type": "LORA", "r": 1, "lora_alpha": 4}`

// The names that PEFT, diffusers and others give to the two matrices, and the ways to say the scale.
func TestParse_Forms(t *testing.T) {
	alpha, err := safetensors.FloatTensor("m.alpha", tensor.F32, nil, []float32{8})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		tensors  []safetensors.Tensor
		metadata map[string]string
		config   string
		scale    float64
	}{
		"peft": {pair(t, "base_model.model.m.lora_A.weight", "base_model.model.m.lora_B.weight"), nil, config, 4},
		"peft, named": {
			pair(t, "base_model.model.m.lora_A.default.weight", "base_model.model.m.lora_B.default.weight"), nil,
			config, 4,
		},
		"diffusers": {
			pair(t, "transformer.m.lora_A.weight", "transformer.m.lora_B.weight"),
			map[string]string{"lora_adapter_metadata": `{"transformer.r": 1, "transformer.lora_alpha": 2}`},
			"", 2,
		},
		"down and up": {
			append(pair(t, "diffusion_model.m.lora_down.weight", "diffusion_model.m.lora_up.weight"), alpha),
			nil, "", 8,
		},
		"alpha counts": {append(pair(t, "m.lora_A.weight", "m.lora_B.weight"), alpha), nil, config, 8},
		"no word":      {pair(t, "m.lora_A.weight", "m.lora_B.weight"), nil, "", 1},
		"of a module": {
			pair(t, "m.lora_A.weight", "m.lora_B.weight"), nil,
			`{"lora_alpha": 4, "alpha_pattern": {"m": 6, "n": 7}}`, 6,
		},
	} {
		a, err := lora.Parse(name, file(t, c.metadata, c.tensors...), []byte(c.config))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		p := a.Product("m")
		if !slices.Equal(a.Modules(), []string{"m"}) || p == nil {
			t.Errorf("%s: modules %v", name, a.Modules())
			continue
		}
		if p.R != 1 || p.N != 2 || p.K != 3 || p.Scale != c.scale || !slices.Equal(p.A, []float32{1, 2, 3}) ||
			!slices.Equal(p.B, []float32{4, 5}) {
			t.Errorf("%s: %+v; want scale %g", name, p, c.scale)
		}
	}
}

// The scale falls with the rank, or with its root, and halves are widened.
func TestParse_Rank(t *testing.T) {
	tensors := []safetensors.Tensor{
		matrix(t, "m.lora_A.weight", tensor.BF16, 4, 5, slices.Repeat([]float32{0.5}, 20)...),
		matrix(t, "m.lora_B.weight", tensor.F16, 6, 4, slices.Repeat([]float32{-2}, 24)...),
	}
	for text, scale := range map[string]float64{
		`{"lora_alpha": 2}`: 0.5, `{"lora_alpha": 2, "use_rslora": true}`: 1,
	} {
		a, err := lora.Parse("halves", file(t, nil, tensors...), []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if p := a.Product("m"); p.R != 4 || p.Scale != scale || p.A[19] != 0.5 || p.B[23] != -2 {
			t.Errorf("%s: rank %d, scale %g, %v, %v; want 4, %g", text, p.R, p.Scale, p.A[19], p.B[23], scale)
		}
	}
}

// Whatever cannot be used is refused by name.
func TestParse_Refused(t *testing.T) {
	good := pair(t, "m.lora_A.weight", "m.lora_B.weight")
	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	whole := file(t, nil, good...)
	huge := bytes.Clone(whole)
	binary.LittleEndian.PutUint64(huge, 1<<40)
	number, err := safetensors.FloatTensor("m.alpha", tensor.F32, nil, []float32{nan})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		file   []byte
		config string
		want   string
	}{
		"nothing":         {nil, "", "safetensors"},
		"truncated":       {whole[:len(whole)-3], "", "truncated"},
		"header of a TiB": {huge, "", "header"},
		"no tensors":      {file(t, nil), "", "no tensors"},
		"other tensors": {
			file(t, nil, append(good, matrix(t, "m.weight", tensor.F32, 1, 1, 0))...), "",
			"m.weight: no tensor of a LoRA",
		},
		"no lora_B":  {file(t, nil, good[0]), "", "module m: lora_A or lora_B is missing"},
		"only alpha": {file(t, nil, number), "", "module m: lora_A or lora_B is missing"},
		"ranks differ": {
			file(t, nil, good[0], matrix(t, "m.lora_B.weight", tensor.F32, 2, 2, 1, 2, 3, 4)), "",
			"module m: lora_A [1 3] and lora_B [2 2] do not fit",
		},
		"twice": {
			file(t, nil, append(good, pair(t, "transformer.m.lora_A.weight",
				"transformer.m.lora_B.weight")...)...), "",
			"module m: m.lora_A.weight and transformer.m.lora_A.weight; must be one of them",
		},
		"NaN": {
			file(t, nil, good[0], matrix(t, "m.lora_B.weight", tensor.F32, 2, 1, 1, nan)), "",
			"module m: not finite",
		},
		"infinity": {
			file(t, nil, matrix(t, "m.lora_A.weight", tensor.F32, 1, 3, 1, inf, 2), good[1]), "",
			"module m: not finite",
		},
		"alpha NaN":       {file(t, nil, append(good, number)...), "", "module m: alpha"},
		"no JSON":         {whole, "{", "adapter configuration"},
		"no alpha":        {whole, `{"r": 1}`, "lora_alpha: missing"},
		"another kind":    {whole, `{"peft_type": "LOHA", "lora_alpha": 1}`, `peft_type: "LOHA"; must be LORA`},
		"DoRA":            {whole, `{"lora_alpha": 1, "use_dora": true}`, "use_dora"},
		"bias":            {whole, `{"lora_alpha": 1, "bias": "all"}`, "bias"},
		"bias of LoRA":    {whole, `{"lora_alpha": 1, "lora_bias": true}`, "lora_bias"},
		"transposed":      {whole, `{"lora_alpha": 1, "fan_in_fan_out": true}`, "fan_in_fan_out"},
		"saved modules":   {whole, `{"lora_alpha": 1, "modules_to_save": ["proj_out"]}`, "modules_to_save"},
		"look-ahead":      {whole, `{"lora_alpha": 1, "alpha_pattern": {"m(?!n)": 3}}`, `alpha_pattern: "m(?!n)": a form`},
		"Python's repeat": {whole, `{"lora_alpha": 1, "rank_pattern": {"m{,2}": 1}}`, `rank_pattern: "m{,2}": a form`},
		"no pattern":      {whole, `{"lora_alpha": 1, "alpha_pattern": {"m(": 3}}`, `alpha_pattern: "m(": error`},
		"no value":        {whole, `{"lora_alpha": 1, "alpha_pattern": {"m": null}}`, `alpha_pattern: "m": must be a number`},
		"another rank":    {whole, `{"lora_alpha": 1, "r": 8}`, "module m: rank 1; the adapter configuration has 8"},
		"a rank pattern": {
			whole, `{"lora_alpha": 1, "r": 1, "rank_pattern": {"m": 2}}`,
			"module m: rank 1; the adapter configuration has 2",
		},
		"a field to come":  {whole, `{"lora_alpha": 1, "use_lora_3": true}`, "use_lora_3: not supported"},
		"a number of text": {whole, `{"lora_alpha": "1"}`, "lora_alpha"},
		"faults together": {
			whole, `{"use_dora": true, "lora_bias": true}`,
			"lora_alpha: missing; must be a number\nlora_bias: not supported; must be unset: merge the adapter",
		},
	} {
		if a, err := lora.Parse("bad", c.file, []byte(c.config)); a != nil || err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
	}
}

// A folder as PEFT or as diffusers writes it, or a file; what is not there is said with its path.
func TestOpen(t *testing.T) {
	weights := file(t, nil, pair(t, "m.lora_A.weight", "m.lora_B.weight")...)
	dir := t.TempDir()
	for path, data := range map[string][]byte{
		"peft/adapter_model.safetensors": weights, "peft/adapter_config.json": []byte(config),
		"diffusers/pytorch_lora_weights.safetensors": weights, "one.safetensors": weights, "empty/readme": {},
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"peft": "peft", "peft/adapter_model.safetensors": "adapter_model", "diffusers": "diffusers", "one.safetensors": "one", "peft/": "peft",
	} {
		a, err := lora.Open(filepath.Join(dir, name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		scale := 1.
		if strings.HasPrefix(name, "peft") {
			scale = 4
		}
		if a.Name() != want || !bytes.Equal(a.File(), weights) || a.Product("m").Scale != scale ||
			len(a.Config()) > 0 != (scale == 4) {
			t.Errorf("%s: %s, scale %g, config %q; want %s, %g", name, a.Name(), a.Product("m").Scale, a.Config(), want,
				scale)
		}
	}
	for _, name := range []string{"nowhere", "empty", "empty/readme"} {
		if _, err := lora.Open(filepath.Join(dir, name)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Digests name weights and configuration, wherever it is read from; these are those of the Python client.
func TestWeightsDigest(t *testing.T) {
	weights := file(t, nil, pair(t, "m.lora_A.weight", "m.lora_B.weight")...)
	parse := func(config string) *lora.Adapter {
		a, err := lora.Parse("a", weights, []byte(config))
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	plain, scaled := parse(""), parse(config)
	if plain.Digest() == scaled.Digest() {
		t.Error("the configuration is not in the digest")
	}
	if got := lora.WeightsDigest("base"); got != "base" {
		t.Errorf("no adapters: %q", got)
	}
	const want = "3e95918fd3ae3d8d816aad2ef8a59d832df53184016d66297a52e6e7aad2bc82"
	if got := lora.WeightsDigest("base", lora.Weighted{Adapter: scaled, Weight: 0.5}); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	seen := map[string]bool{}
	for _, list := range [][]lora.Weighted{
		{{plain, 1}},
		{{plain, -1}},
		{{scaled, 1}},
		{{plain, 1}, {scaled, 1}},
		{{scaled, 1}, {plain, 1}},
	} {
		if d := lora.WeightsDigest("base", list...); seen[d] {
			t.Errorf("%v: the digest of others", list)
		} else {
			seen[d] = true
		}
	}
}

// A table says of each module that it does not have, or has in another shape; to encode it and
// read that again changes nothing.
func TestTable(t *testing.T) {
	table := lora.Table{"m": {2, 3}, "other": {4, 5}}
	data, err := table.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := lora.ParseTable(data)
	if err != nil || len(again) != 2 || again["m"] != [2]int{2, 3} || again["other"] != [2]int{4, 5} {
		t.Errorf("%s became %v, %v", data, again, err)
	}
	for _, bad := range []string{"", "[]", `{"m": [0, 3]}`, `{"m": [2]}`, `{"": [1, 1]}`, `{"m": "2x3"}`} {
		if got, err := lora.ParseTable([]byte(bad)); err == nil {
			t.Errorf("%q is taken for %v", bad, got)
		}
	}
	adapter := func(modules ...string) lora.Weighted {
		var tensors []safetensors.Tensor
		for _, m := range modules {
			tensors = append(tensors, pair(t, m+".lora_A.weight", m+".lora_B.weight")...)
		}
		a, err := lora.Parse("test", file(t, nil, tensors...), nil)
		if err != nil {
			t.Fatal(err)
		}
		return lora.Weighted{Adapter: a, Weight: 1}
	}
	of := func(config string, a, b float32) lora.Weighted {
		tensors := []safetensors.Tensor{
			matrix(t, "m.lora_A.weight", tensor.F32, 1, 3, 0, a, a),
			matrix(t, "m.lora_B.weight", tensor.F32, 2, 1, 0, b),
			matrix(t, "other.lora_A.weight", tensor.F32, 1, 5, 0, 0, 0, 0, 0),
			matrix(t, "other.lora_B.weight", tensor.F32, 4, 1, 1, 1, 1, 1),
		}
		parsed, err := lora.Parse("test", file(t, nil, tensors...), []byte(config))
		if err != nil {
			t.Fatal(err)
		}
		return lora.Weighted{Adapter: parsed, Weight: 1}
	}
	if err := table.Check(of("", 1, 4)); err != nil { // one of its modules changes something
		t.Error(err)
	}
	if err := table.Check(adapter("m")); err != nil {
		t.Error(err)
	}
	many := make([]string, 40)
	for i := range many {
		many[i] = "n" + string(rune('A'+i))
	}
	for name, c := range map[string]struct {
		with lora.Weighted
		want string
	}{
		"none":      {lora.Weighted{}, "adapter 0: none"},
		"no module": {adapter("m", "nothing"), "adapter test: module nothing: the transformer has none"},
		"shape":     {adapter("other"), "module other: changes a weight of 2 x 3, here 4 x 5"},
		"scale":     {lora.Weighted{Adapter: adapter("m").Adapter, Weight: math.Inf(1)}, "scale: +Inf"},
		"many":      {adapter(many...), "and perhaps more"},
		"no weight": {lora.Weighted{Adapter: adapter("m").Adapter}, "adapter test: changes nothing"},
		"alpha 0":   {of(`{"lora_alpha": 0}`, 1, 4), "changes nothing"},
		"lora_A 0":  {of("", 0, 4), "changes nothing"},
		"lora_B 0":  {of("", 1, 0), "changes nothing"},
	} {
		if err := table.Check(c.with); err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2000 {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
	}
}

// Whatever bytes come, Parse returns; what it takes can be used.
func FuzzParse(f *testing.F) {
	f.Add(file(f, nil, pair(f, "m.lora_A.weight", "m.lora_B.weight")...), []byte(config))
	f.Add(file(f, map[string]string{"lora_adapter_metadata": `{"lora_alpha": 1}`},
		pair(f, "transformer.m.lora_down.weight", "m.lora_up.weight")...), []byte(nil))
	f.Fuzz(func(t *testing.T, data, config []byte) {
		a, err := lora.Parse("fuzz", data, config)
		if err != nil {
			return
		}
		for _, m := range a.Modules() {
			if p := a.Product(m); len(p.A) != p.R*p.K || len(p.B) != p.N*p.R || p.R < 1 || p.R > min(p.N, p.K) ||
				p.Scale-p.Scale != 0 {
				t.Errorf("module %s: %+v", m, p)
			}
		}
	})
}

// Whole weights of a variant are opened from their folder in both layouts that diffusers has written, or by their
// index; of several variants one has to be named.
func TestOpenFull_Variants(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "model")
	put := func(name string, data []byte) string {
		name = filepath.Join(dir, "transformer", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	check := func(name string, want ...string) {
		t.Helper()
		full, err := lora.OpenFull(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := full.Archive().Names(); !slices.Equal(got, want) || len(full.Paths()) != len(want) {
			t.Errorf("%s: tensors %v of %v; want %v", name, got, full.Paths(), want)
		}
		if err := full.Close(); err != nil {
			t.Error(err)
		}
	}
	shards := func(format, index string) string {
		for i, name := range []string{"a", "b"} {
			put(fmt.Sprintf(format, i+1), file(t, nil, matrix(t, name, tensor.BF16, 1, 1, 1)))
		}
		return put(index, fmt.Appendf(nil, `{"weight_map": {"a": %q, "b": %q}}`, fmt.Sprintf(format, 1),
			fmt.Sprintf(format, 2)))
	}
	index := shards("diffusion_pytorch_model.fp16-%05d-of-00002.safetensors",
		"diffusion_pytorch_model.safetensors.index.fp16.json")
	check(dir, "a", "b")
	check(index, "a", "b")
	other := shards("diffusion_pytorch_model-%05d-of-00002.bf16.safetensors",
		"diffusion_pytorch_model.safetensors.bf16.index.json")
	if _, err := lora.OpenFull(dir); err == nil || !strings.Contains(err.Error(), "several variants") ||
		!strings.Contains(err.Error(), "bf16, fp16; must be one") {
		t.Error(err)
	}
	check(other, "a", "b")
	put("diffusion_pytorch_model.safetensors", file(t, nil, matrix(t, "plain", tensor.BF16, 1, 1, 1)))
	check(dir, "plain")
}
