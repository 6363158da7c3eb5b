package models_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/services/sampler/models"
)

func TestCompute_Validate(t *testing.T) {
	for _, tt := range []struct {
		c    models.Compute
		want string
	}{
		{models.Compute{Device: "auto", DType: "auto"}, ""},
		{models.Compute{Device: "auto", DType: "bf16"}, ""},
		{models.Compute{Device: "tpu", DType: "auto"}, `device: "tpu"`},
		{models.Compute{Device: "cuda:99", DType: "auto"}, "device: cuda:99: "},
		{models.Compute{Device: "cpu", DType: "bf16"}, `dtype: "bf16"; must be auto or f32: the CPU computes in float32`},
		{models.Compute{Device: "auto", DType: "fp8"}, `dtype: "fp8"; must be auto, f32 or bf16`},
	} {
		err := tt.c.Validate()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%+v: %v, want %q", tt.c, err, tt.want)
		}
	}
}

func TestCompute_Open(t *testing.T) {
	opened, err := models.Compute{Device: "cpu", DType: "auto"}.Open(models.Registry{Images: families.All()},
		"synthetic", model.Options{}, false)
	if err != nil {
		t.Fatal(err)
	}
	if opened.IDs() != "cpu" || opened.Workers() < 1 || opened.All[0].Network.Policy().Family != "synthetic" {
		t.Errorf("devices %s, %d workers", opened.IDs(), opened.Workers())
	}
	if err := opened.Close(); err != nil {
		t.Error(err)
	}
	_, err = models.Compute{Device: "auto", DType: "bf16"}.Open(models.Registry{Images: families.All()}, "synthetic",
		model.Options{}, false)
	if gpus, _ := devices.Open("auto", devices.Options{}); gpus != nil && gpus.Devices[0].ID == devices.CPU &&
		(err == nil || !strings.Contains(err.Error(), `dtype: "bf16"; must be auto or f32: the CPU computes in float32`)) {
		t.Errorf("bf16 on the CPU: %v", err)
	}
}

// An address is checked against the kinds of servers that there are.
func TestServer_Check(t *testing.T) {
	for address, want := range map[string]string{
		"vllm=http://127.0.0.1:8000/":        "",
		"sglang=https://host":                "",
		"foo=http://127.0.0.1:8000":          "NAME=URL[,URL ...], NAME one of sglang, sglang-diffusion, vllm",
		"vllm":                               "URL that of a server, such as vllm=http://127.0.0.1:8000",
		"vllm=ftp://host":                    "URL that of a server",
		"vllm=http://a,http://b":             "",
		"sglang-diffusion=http://a,http://b": "",
		"sglang-diffusion=http://a,http://a": "twice",
	} {
		err := models.Server{Engine: address}.Check()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", address, err, want)
		}
		_, dialled := models.Server{Engine: address}.Dial(t.Context(), models.Registry{}, "x", zerolog.Nop())
		if dialled == nil {
			t.Errorf("%s: a server of no model is dialled", address)
		}
	}
}

// A sample is computed again with the dtype of its worker and, where that encoded on the CPU, on it; not on a GPU that
// the machine of the sampler had.
func TestTorchOf(t *testing.T) {
	for backend, want := range map[string]models.Torch{
		"torch-2.9.1/cuda/bf16/diffusers-0.42.1/encoders-cpu:0/nondeterministic": {
			Compute: models.Compute{DType: "bf16"}, TorchOptions: models.TorchOptions{Options: remote.Options{TextEncoderDevice: "cpu"}},
		},
		"torch-2.9.1/cuda/f32/encoders-cuda:1/vae-tiling/deterministic": {
			Compute: models.Compute{DType: "f32", Deterministic: true}, TorchOptions: models.TorchOptions{Options: remote.Options{VAETiling: true}},
		},
		"torch-2.13.0/cpu/f32/diffusers-0.40.0/vllm-omni-0.30.0/nondeterministic": {
			Compute: models.Compute{DType: "f32"}, TorchOptions: models.TorchOptions{Options: remote.Options{Network: "vllm-omni"}},
		},
	} {
		want.Engine = "torch"
		if got, ok := models.TorchOf(backend, models.Compute{}); !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", backend, got, want)
		}
	}
	if _, ok := models.TorchOf("cuda/H200/bf16", models.Compute{}); ok {
		t.Error("a worker of torch for what the sampler computed")
	}
}

// What a model announces is known without its weights; an unknown name is refused with those that there are.
func TestRegistry_PolicyOf(t *testing.T) {
	t.Parallel()
	r := models.Registry{Images: families.All()}
	p, problems, err := r.PolicyOf("synthetic")
	if err != nil || len(problems) > 0 || p.Lane != "synthetic" {
		t.Errorf("%+v, %v, %v", p, problems, err)
	}
	if _, _, err := r.PolicyOf("sythetic"); err == nil ||
		!strings.Contains(err.Error(), "must be one of signs, synthetic, synthetic-epsilon") {
		t.Errorf("%v", err)
	}
}

// Settings of workers that have no effect, or cannot be, are refused by name.
func TestTorch_Check(t *testing.T) {
	t.Parallel()
	for says, torch := range map[string]models.Torch{
		"":                            models.TorchAt("torch", "", models.Compute{}),
		"must be torch, torch=unix:":  models.TorchAt("torch=", "", models.Compute{}),
		"engine_key: set":             models.TorchAt("torch", "key", models.Compute{}),
		"device: set; must be absent": models.TorchAt("torch=a:1", "", models.Compute{Device: "cuda:0"}),
	} {
		if err := torch.Check(); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
}
