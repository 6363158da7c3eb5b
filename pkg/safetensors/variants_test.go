package safetensors_test

import (
	"maps"
	"path/filepath"
	"slices"
	"testing"
)

// Of several checkpoints the one is opened that transformers or diffusers opens.
func TestFolder_ArchiveOfVariants(t *testing.T) {
	right, other := archiveBytes(t, nil, floats(t, "a", nil, 1)), archiveBytes(t, nil, floats(t, "b", nil, 1))
	index := func(shard string) []byte { return []byte(`{"weight_map":{"a":"` + shard + `"}}`) }
	for _, files := range []map[string][]byte{
		{"model.safetensors": right, "model.fp16.safetensors": other, "model.safetensors.index.fp16.json": nil},
		{"diffusion_pytorch_model.safetensors": right, "diffusion_pytorch_model.fp16.safetensors": other},
		{"model.safetensors": right, "model.safetensors.index.json": nil},
		{
			"diffusion_pytorch_model.safetensors": other, "diffusion_pytorch_model-00001-of-00001.safetensors": right,
			"diffusion_pytorch_model.safetensors.index.json": index("diffusion_pytorch_model-00001-of-00001.safetensors"),
		},
		{
			"model-00001-of-00001.safetensors": right, "model.fp16.safetensors": other,
			"model.safetensors.index.json": index("model-00001-of-00001.safetensors"),
		},
	} {
		dir := t.TempDir()
		for name, b := range files {
			writeFile(t, filepath.Join(dir, name), b)
		}
		a, err := openDir(dir)
		if err != nil {
			t.Errorf("%v: %v", slices.Sorted(maps.Keys(files)), err)
			continue
		}
		if !slices.Equal(a.Names(), []string{"a"}) {
			t.Errorf("%v: tensors %q", slices.Sorted(maps.Keys(files)), a.Names())
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
