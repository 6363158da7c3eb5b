package qwenimage

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// What a file leaves out is what the classes of transformers and diffusers have, recorded by
// deploy/golden/make_defaults.py.
func TestConfig_Defaults(t *testing.T) {
	data, err := os.ReadFile("testdata/defaults.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct{ Classes map[string]map[string]any }
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	text := golden.Classes["Qwen2_5_VLTextConfig"]
	rope, ok := text["rope_parameters"].(map[string]any)
	if !ok {
		t.Fatalf("rope_parameters: %v", text["rope_parameters"])
	}
	text["rope_theta"] = rope["rope_theta"]
	delete(text, "rope_parameters")
	for name, c := range map[string]struct {
		file   string
		fields int
		read   func(*safetensors.Folder, string) (any, error)
	}{
		"Qwen2_5_VLTextConfig": {
			`{"model_type": "qwen2_5_vl", "text_config": {}}`, 11,
			func(f *safetensors.Folder, dir string) (any, error) { return readTextConfig(f, dir) },
		},
		"QwenImageTransformer2DModel": {
			fmt.Sprintf(`{"_class_name": %q}`, transformerClass), 12,
			func(f *safetensors.Folder, dir string) (any, error) { return readTransformerConfig(f, dir) },
		},
		"AutoencoderKLQwenImage": {
			fmt.Sprintf(`{"_class_name": %q}`, autoencoderClass), 9,
			func(f *safetensors.Folder, dir string) (any, error) { return readVAEConfig(f, dir) },
		},
	} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "part"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "part", "config.json"), []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		folder, err := safetensors.OpenFolder(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = folder.Close() }()
		config, err := c.read(folder, "part")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if data, err = json.Marshal(config); err != nil {
			t.Fatal(err)
		}
		var got map[string]any
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		compared := 0
		for field, value := range got {
			want, ok := golden.Classes[name][field]
			if !ok {
				continue
			}
			compared++
			if list, ok := want.([]any); ok && len(list) == 0 && value == nil {
				continue
			}
			if !reflect.DeepEqual(value, want) {
				t.Errorf("%s: %s: %v, want %v", name, field, value, want)
			}
		}
		if compared < c.fields {
			t.Errorf("%s: %d fields compared, want %d", name, compared, c.fields)
		}
	}
}
