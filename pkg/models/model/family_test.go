package model_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
)

// named is a model that is nothing but its card.
type named struct {
	model.Model
	card   model.Card
	closed *int
}

func (m named) Card() model.Card { return m.card }
func (m named) Close() error     { *m.closed++; return nil }

// registry is three families: two of folders, the second with a faulty card, and one of
// none. closed counts what they had to close.
func registry() (r model.Registry, closed *int) {
	closed = new(int)
	family := func(name, class string, card model.Card) model.Family {
		card.Family = name
		return model.Family{
			Name: name, Class: class,
			Open: func(dir string, _ model.Options) (model.Model, error) {
				card.Name = model.NameOf(dir)
				return named{card: card, closed: closed}, nil
			},
			Inspect: func(dir string) (*model.Info, error) {
				card.Name = model.NameOf(dir)
				return &model.Info{Card: card}, nil
			},
		}
	}
	faulty := good()
	faulty.CFGRule = ""
	return model.Registry{
		family("a", "APipeline", good()), family("b", "BPipeline", faulty),
		family("none", "", good()),
	}, closed
}

// folder is a model folder of a class.
func folder(t *testing.T, name, index string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := errors.Join(os.Mkdir(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "model_index.json"), []byte(index), 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestRegistry_Open(t *testing.T) {
	r, closed := registry()
	dir := folder(t, "tiny.v2", `{"_class_name": "APipeline"}`)
	t.Setenv("MEANDER_MODELS", filepath.Dir(dir))
	for name, family := range map[string]string{dir: "a", "tiny.v2": "a", "none": "none"} {
		m, err := r.Open(name, model.Options{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		info, err := r.Inspect(name)
		if err != nil || m.Card().Family != family || info.Name != m.Card().Name {
			t.Errorf("%s: family %s, want %s; info %+v, %v", name, m.Card().Family, family, info, err)
		}
	}
	faulty := folder(t, "faulty", `{"_class_name": "BPipeline"}`)
	if _, err := r.Open(faulty, model.Options{}); err == nil || !strings.Contains(err.Error(), "card: cfg_rule") ||
		*closed != 1 {
		t.Errorf("a faulty card: %v, %d closed; want the field and the model closed", err, *closed)
	}
}

func TestRegistry_Open_unknown(t *testing.T) {
	r, _ := registry()
	for _, tt := range []struct{ name, want string }{
		{
			folder(t, "x", `{"_class_name": "CPipeline"}`),
			`model_index.json: _class_name: "CPipeline"; must be one of APipeline, BPipeline`,
		},
		{folder(t, "x", `{}`), `_class_name: ""; must be one of APipeline, BPipeline`},
		{"nobody", `must be one of none, signs, or a folder with a model_index.json; looked in nobody`},
		{"", `must be one of none, signs, or a folder`},
	} {
		_, opened := r.Open(tt.name, model.Options{})
		_, inspected := r.Inspect(tt.name)
		for _, err := range []error{opened, inspected} {
			if !errors.Is(err, model.ErrUnknown) || !strings.Contains(fmt.Sprint(err), tt.want) {
				t.Errorf("%s: %v; want an ErrUnknown with %q", tt.name, err, tt.want)
			}
		}
	}
	if _, err := r.Open(folder(t, "x", `{`), model.Options{}); err == nil ||
		!strings.Contains(err.Error(), "model_index.json") {
		t.Errorf("an index that is no JSON: %v", err)
	}
}

func TestNameOf(t *testing.T) {
	for path, want := range map[string]string{
		"signs": "signs", "deploy/models/signs/": "signs", "/m/Tiny Model.v2": "Tiny-Model-v2",
		"/cache/models--org--some--name/snapshots/4f2a": "name",
	} {
		if got := model.NameOf(path); got != want {
			t.Errorf("NameOf(%q) = %q, want %q", path, got, want)
		}
	}
}

// The root of a Hugging Face cache folder, or its folder of snapshots, means the snapshot that refs/main names.
func TestRegistry_FindsSnapshots(t *testing.T) {
	t.Parallel()
	r, _ := registry()
	for name, c := range map[string]struct {
		snapshots []string
		main      string
		want, err string
	}{
		"one":                {[]string{"aa"}, "", "aa", ""},
		"one and its name":   {[]string{"aa"}, "aa\n", "aa", ""},
		"two and a name":     {[]string{"aa", "bb"}, "bb", "bb", ""},
		"two without a name": {[]string{"aa", "bb"}, "", "", "no refs/main and the snapshots aa, bb"},
		"another name":       {[]string{"aa", "bb"}, "cc", "", `refs/main names "cc", there are the snapshots aa, bb`},
		"one, another name":  {[]string{"aa"}, "cc", "", `refs/main names "cc"`},
	} {
		root := filepath.Join(t.TempDir(), "models--org--tiny-image")
		dirs := []string{"blobs", "refs"}
		for _, s := range c.snapshots {
			dirs = append(dirs, filepath.Join("snapshots", s))
		}
		for _, dir := range dirs {
			if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range c.snapshots {
			index := filepath.Join(root, "snapshots", s, "model_index.json")
			if err := os.WriteFile(index, []byte(`{"_class_name": "APipeline"}`), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if c.main != "" {
			if err := os.WriteFile(filepath.Join(root, "refs", "main"), []byte(c.main), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, of := range []string{root, root + "/", filepath.Join(root, "snapshots")} {
			dir, _, err := r.Find(of)
			want := filepath.Join(root, "snapshots", c.want)
			switch {
			case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
				t.Errorf("%s, %s: %v; want %q", name, of, err, c.err)
			case c.err == "" && (err != nil || dir != want || model.NameOf(dir) != "tiny-image"):
				t.Errorf("%s, %s: %q, %v; want %q", name, of, dir, err, want)
			}
		}
	}
}
