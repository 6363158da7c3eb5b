package sampler_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/services/sampler"
)

func TestCompute_Validate(t *testing.T) {
	for _, tt := range []struct {
		c    sampler.Compute
		want string
	}{
		{sampler.Compute{Device: "auto", DType: "auto"}, ""},
		{sampler.Compute{Device: "auto", DType: "bf16"}, ""},
		{sampler.Compute{Device: "tpu", DType: "auto"}, `device: "tpu"`},
		{sampler.Compute{Device: "cuda:99", DType: "auto"}, "device: cuda:99: "},
		{sampler.Compute{Device: "cpu", DType: "bf16"}, `dtype: "bf16"; must be auto or f32: the CPU computes in float32`},
		{sampler.Compute{Device: "auto", DType: "fp8"}, `dtype: "fp8"; must be auto, f32 or bf16`},
		{sampler.Compute{Device: "auto", DType: "auto", Threads: -1}, "threads: -1"},
	} {
		err := tt.c.Validate()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%+v: %v, want %q", tt.c, err, tt.want)
		}
	}
}

func TestCompute_Open(t *testing.T) {
	places, err := sampler.Compute{Device: "cpu", DType: "auto"}.Open(sampler.Registry{Images: families.All()}, "synthetic", model.Options{}, false)
	if err != nil {
		t.Fatal(err)
	}
	if places.IDs() != "cpu" || places.Workers() < 1 || places.All[0].Network.Images.Card().Family != "synthetic" {
		t.Errorf("places %s, %d workers", places.IDs(), places.Workers())
	}
	if err := places.Close(); err != nil {
		t.Error(err)
	}
}
