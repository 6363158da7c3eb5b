package lm_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
)

// folder is a model's folder with nothing but a config.json.
func folder(t *testing.T, config string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "sums")
	err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, lm.ConfigFile), []byte(config), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

var errOpened = errors.New("opened")

func TestRegistry(t *testing.T) {
	var opened []string
	family := func(class string) lm.Family {
		return lm.Family{
			Name: class, Class: class,
			Open: func(dir string, o lm.Options) (lm.Model, error) {
				opened = append(opened, class, dir)
				if o.Threads != 3 {
					t.Errorf("opened with %d threads", o.Threads)
				}
				return nil, errOpened
			},
			Language: func(dir string) (lm.Language, error) {
				opened = append(opened, class, dir)
				return nil, errOpened
			},
		}
	}
	known := lm.Registry{family("Qwen2ForCausalLM"), family("LlamaForCausalLM")}
	dir := folder(t, `{"architectures": ["Other", "LlamaForCausalLM"], "more": 1}`)
	if found, f, err := known.Find(dir); found != dir || f.Class != "LlamaForCausalLM" || err != nil {
		t.Errorf("found %q of %q, %v", found, f.Class, err)
	}
	_, open := known.Open(dir, lm.Options{Options: model.Options{Threads: 3}})
	_, language := known.Language(dir)
	if !errors.Is(open, errOpened) || !errors.Is(language, errOpened) ||
		!slices.Equal(opened, []string{"LlamaForCausalLM", dir, "LlamaForCausalLM", dir}) {
		t.Errorf("opened %q: %v, %v", opened, open, language)
	}
	// A name is looked for in the folder of models.
	t.Setenv("MEANDER_MODELS", filepath.Dir(dir))
	if found, _, err := known.Find("sums"); found != dir || err != nil {
		t.Errorf("by its name: %q, %v", found, err)
	}
}

func TestRegistry_Unknown(t *testing.T) {
	known := lm.Registry{{Class: "Qwen2ForCausalLM"}, {Class: "LlamaForCausalLM"}}
	bert, faulty := folder(t, `{"architectures": ["BertModel"]}`), folder(t, `{"architectures": "one"}`)
	for want, name := range map[string]string{
		"no such model":    t.TempDir(),
		"read config.json": faulty,
		`architectures: ["BertModel"]; must be one of Qwen2ForCausalLM, LlamaForCausalLM`: bert,
	} {
		_, _, find := known.Find(name)
		_, open := known.Open(name, lm.Options{})
		_, language := known.Language(name)
		for _, err := range []error{find, open, language} {
			unknown := want != "read config.json"
			if err == nil || !strings.Contains(err.Error(), want) || errors.Is(err, model.ErrUnknown) != unknown {
				t.Errorf("%v; want an error with %q", err, want)
			}
		}
	}
}
