package safetensors_test

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
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
		{
			"diffusion_pytorch_model.fp16-00001-of-00001.safetensors": right,
			"diffusion_pytorch_model.safetensors.index.fp16.json": index(
				"diffusion_pytorch_model.fp16-00001-of-00001.safetensors"),
		},
		{
			"diffusion_pytorch_model-00001-of-00001.fp16.safetensors": right,
			"diffusion_pytorch_model.safetensors.fp16.index.json": index(
				"diffusion_pytorch_model-00001-of-00001.fp16.safetensors"),
		},
		{
			"model.bf16-00001-of-00002.safetensors": right, "model.bf16-00002-of-00002.safetensors": other,
			"model.safetensors.index.bf16.json": index("model.bf16-00001-of-00002.safetensors"),
		},
		{"model.fp16.safetensors": right, "model.safetensors.bf16.index.json": nil, "model.fp16-00001-of-00002.safetensors": other},
		{
			"diffusion_pytorch_model-00001-of-00001.safetensors":      right,
			"diffusion_pytorch_model.fp16-00001-of-00001.safetensors": other,
			"diffusion_pytorch_model.safetensors.index.json":          index("diffusion_pytorch_model-00001-of-00001.safetensors"),
			"diffusion_pytorch_model.safetensors.index.fp16.json": index(
				"diffusion_pytorch_model.fp16-00001-of-00001.safetensors"),
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

// Of several variants none is meant: they are named. So are shards whose index is not there.
func TestFolder_ArchiveOfSeveralVariants(t *testing.T) {
	for want, files := range map[string][]string{
		"several variants and none without a name: bf16, fp16; must be one": {
			"model.fp16.safetensors", "model.bf16.safetensors",
		},
		"several variants and none without a name: bf16, int8; must be one": {
			"diffusion_pytorch_model.safetensors.index.int8.json", "diffusion_pytorch_model.safetensors.bf16.index.json",
		},
		"several files and no index: model-00001-of-00002.fp16.safetensors, model-00002-of-00002.fp16.safetensors": {
			"model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors",
		},
	} {
		dir := t.TempDir()
		for _, name := range files {
			writeFile(t, filepath.Join(dir, name), nil)
		}
		if _, err := openDir(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
}
