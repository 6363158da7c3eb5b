package lora_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// recorded is what deploy/golden/make_lora.py has of PEFT.
type recorded struct {
	Fields map[string]json.RawMessage
	Cases  []struct {
		Name   string
		Config json.RawMessage
		File   []byte
		Deltas map[string][]byte
	}
}

func readRecorded(t *testing.T) (r recorded) {
	t.Helper()
	data, err := os.ReadFile("testdata/peft.json")
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// What an adapter adds to weights is what PEFT adds, or the field is named for which it is refused.
func TestPEFT_Deltas(t *testing.T) {
	refused := map[string]string{
		"init pissa": "init_lora_weights", "init pissa_niter_4": "init_lora_weights", "init olora": "init_lora_weights",
		"init corda": "init_lora_weights", "init lora_ga": "init_lora_weights",
		"dora": "use_dora", "bias of lora_B": "lora_bias", "biases": "bias", "saved modules": "modules_to_save",
	}
	for _, c := range readRecorded(t).Cases {
		a, err := lora.Parse(c.Name, c.File, c.Config)
		if field := refused[c.Name]; field != "" {
			if err == nil || !strings.Contains(err.Error(), "\n"+field) && !strings.Contains(err.Error(), ": "+field) {
				t.Errorf("%s: %v; want it refused by %s", c.Name, err, field)
			}
			delete(refused, c.Name)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		if got, want := a.Modules(), slices.Sorted(maps.Keys(c.Deltas)); !slices.Equal(got, want) {
			t.Errorf("%s: modules %v, want %v", c.Name, got, want)
			continue
		}
		for module, data := range c.Deltas {
			p := a.Product(module)
			want := make([]float32, p.N*p.K)
			if err := tensor.F32.DecodeFloats(want, data); err != nil {
				t.Fatalf("%s: %s: %v", c.Name, module, err)
			}
			for i, w := range want {
				// PEFT adds it to a weight in float32, and the weight was taken away from the sum.
				if got := delta(p, i); math.Abs(got-float64(w)) > 3e-7 {
					t.Errorf("%s: %s: element %d is %v, want %v", c.Name, module, i, got, w)
					break
				}
			}
		}
		checkSaved(t, a)
	}
	if len(refused) > 0 {
		t.Errorf("not recorded: %v", refused)
	}
}

// delta is element i of what a product adds to a weight.
func delta(p *lora.Product, i int) (sum float64) {
	for r := range p.R {
		sum += p.Scale * float64(p.B[i/p.K*p.R+r]) * float64(p.A[r*p.K+i%p.K])
	}
	return sum
}

// checkSaved saves an adapter at half its strength: read again it adds half as much, and all modules are of one rank.
func checkSaved(t *testing.T, a *lora.Adapter) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "saved")
	for range 2 { // the second finds it there
		if err := (lora.Weighted{Adapter: a, Weight: 0.5}).Save(dir); err != nil {
			t.Fatal(err)
		}
	}
	b, err := lora.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	rank := 0
	for _, module := range a.Modules() {
		was, is := a.Product(module), b.Product(module)
		if is == nil || rank != 0 && is.R != rank || is.R < was.R {
			t.Fatalf("%s: %s: %+v", a.Name(), module, is)
		}
		rank = is.R
		for i := range was.N * was.K {
			// Each of the products of B is rounded once to float32.
			if got, want := delta(is, i), delta(was, i)/2; math.Abs(got-want) > 1e-6*(1+math.Abs(want)) {
				t.Errorf("%s: %s: element %d is %v, want %v", a.Name(), module, i, got, want)
				break
			}
		}
	}
}

// Every field of PEFT's LoraConfig is applied, changes nothing here, or is refused by its name where it is set. So is a
// field that PEFT does not have yet.
func TestPEFT_Fields(t *testing.T) {
	applied := []string{
		"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights",
	}
	// they say which modules have an adapter, which the tensors show, how it was trained, or whose it is
	harmless := []string{
		"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "loftq_config",
		"eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config",
		"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
	}
	file := file(t, nil, pair(t, "m.lora_A.weight", "m.lora_B.weight")...)
	parse := func(field string, value json.RawMessage) error {
		config := map[string]json.RawMessage{
			"lora_alpha": json.RawMessage("4"), "r": json.RawMessage("1"),
			field: value,
		}
		data, err := json.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		_, err = lora.Parse("a", file, data)
		return err
	}
	fields := readRecorded(t).Fields
	fields["use_something_new"] = json.RawMessage("false")
	for field, value := range fields {
		if field == "r" {
			continue // 8, and the file has 1
		}
		if err := parse(field, value); err != nil {
			t.Errorf("%s: the default %s: %v", field, value, err)
		}
		err := parse(field, json.RawMessage(`true`))
		switch {
		case slices.Contains(applied, field): // by the other tests
		case slices.Contains(harmless, field) && err != nil:
			t.Errorf("%s: %v", field, err)
		case !slices.Contains(harmless, field) && (err == nil ||
			!strings.Contains(err.Error(), field+": not supported")):
			t.Errorf("%s: %v; want it refused by its name", field, err)
		}
	}
	for _, field := range slices.Concat(applied, harmless) {
		if fields[field] == nil {
			t.Errorf("%s: PEFT has no such field", field)
		}
	}
	for _, way := range []string{"pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "a new one"} {
		err := parse("init_lora_weights", json.RawMessage(fmt.Sprintf("%q", way)))
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("init_lora_weights: %q", way)) {
			t.Errorf("init_lora_weights %q: %v; want it refused", way, err)
		}
	}
}
