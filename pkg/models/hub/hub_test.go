package hub_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/hub/hubtest"
)

// pipeline are the files of a pipeline of diffusers, with what a download leaves out.
func pipeline() map[string][]byte {
	weights := bytes.Repeat([]byte("meander "), 1<<16)
	return map[string][]byte{
		"model_index.json": []byte(`{"_class_name": "X", "transformer": ["diffusers", "T"], "vae": ["diffusers", "V"],
			"image_encoder": [null, null], "scheduler": ["diffusers", "S"]}`),
		"README.md": []byte("# a card"), "whole.safetensors": weights, "sample.png": []byte("png"),
		"scheduler/scheduler_config.json":                                []byte("{}"),
		"transformer/config.json":                                        []byte("{}"),
		"transformer/diffusion_pytorch_model.safetensors.index.json":     []byte(`{"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors", "b": "diffusion_pytorch_model-00002-of-00002.safetensors"}}`),
		"transformer/diffusion_pytorch_model-00001-of-00002.safetensors": weights,
		"transformer/diffusion_pytorch_model-00002-of-00002.safetensors": weights[8:],
		"transformer/diffusion_pytorch_model.fp16.safetensors":           weights[16:],
		"vae/config.json":                         []byte(`{"v": 1}`),
		"vae/diffusion_pytorch_model.safetensors": weights[24:],
		"vae/diffusion_pytorch_model.bin":         weights[32:],
		"safety_checker/model.safetensors":        weights[40:],
		"text/original.txt":                       []byte("x"),
	}
}

// heard is what a Watcher was told.
type heard struct {
	plans []hub.Plan
	got   int64
	lines []string
	ends  int
}

func (h *heard) watcher() hub.Watcher {
	return hub.Watcher{
		Plan: func(p hub.Plan) { h.plans = append(h.plans, p) }, Got: func(n int64) { h.got += n },
		Say: func(line string) { h.lines = append(h.lines, line) }, End: func(error) { h.ends++ },
	}
}

func snapshotFiles(t *testing.T, dir string) (names []string) {
	t.Helper()
	_ = filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			rel, _ := filepath.Rel(dir, p)
			names = append(names, rel)
		}
		return err
	})
	slices.Sort(names)
	return names
}

// A download gets what the family needs, into the layout of huggingface_hub; the second time nothing is asked.
func TestFetch(t *testing.T) {
	for _, plain := range []bool{false, true} {
		h := hubtest.Start(t)
		r := &hubtest.Repo{Files: pipeline(), Plain: plain}
		h.Repos["models/org/tiny"] = r
		var told heard
		dir, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, told.watcher())
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			"model_index.json", "scheduler/scheduler_config.json", "transformer/config.json",
			"transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
			"transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
			"transformer/diffusion_pytorch_model.safetensors.index.json", "vae/config.json",
			"vae/diffusion_pytorch_model.safetensors",
		}
		if got := snapshotFiles(t, dir); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		if at := filepath.Join(hub.Cache(), "models--org--tiny", "snapshots", r.Commit()); dir != at {
			t.Errorf("folder %s, want %s", dir, at)
		}
		if ref, _ := os.ReadFile(filepath.Join(hub.Cache(), "models--org--tiny", "refs",
			"main")); string(ref) != r.Commit() {
			t.Errorf("refs/main %q, want %q", ref, r.Commit())
		}
		link, err := os.Readlink(filepath.Join(dir, "vae/diffusion_pytorch_model.safetensors"))
		if err != nil || !strings.HasPrefix(link, "../../../blobs/") {
			t.Errorf("link %q, %v", link, err)
		}
		if len(told.plans) != 1 || told.plans[0].Bytes != told.got || told.plans[0].Name != "org/tiny@"+r.Commit() ||
			told.ends != 1 {
			t.Errorf("told %+v", told)
		}
		h.Asked()
		if again, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{}); again != dir || err != nil ||
			len(h.Asked()) > 0 {
			t.Errorf("again %s, %v, asked", again, err)
		}
		if s := hub.Source(dir); s != "org/tiny@"+r.Commit() {
			t.Errorf("source %q", s)
		}
		// A snapshot that lacks a shard is made whole.
		gone := filepath.Join(dir, want[3])
		target, _ := filepath.EvalSymlinks(gone)
		if err := errors.Join(os.Remove(gone), os.Remove(target)); err != nil {
			t.Fatal(err)
		}
		t.Setenv("HF_HUB_OFFLINE", "1")
		_, err = hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{})
		if err == nil || !strings.Contains(err.Error(), "HF_HUB_OFFLINE=1 forbids downloads") ||
			!strings.Contains(err.Error(), "00001-of-00002") {
			t.Errorf("offline and not whole: %v", err)
		}
		t.Setenv("HF_HUB_OFFLINE", "")
		if _, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{}); err != nil ||
			len(snapshotFiles(t, dir)) != len(want) {
			t.Errorf("mended: %v", err)
		}
	}
}

// A description has no weights, an adapter nothing else; a description becomes a model later.
func TestFetch_Wants(t *testing.T) {
	h := hubtest.Start(t)
	h.Repos["models/org/text"] = &hubtest.Repo{Files: map[string][]byte{
		"config.json": []byte("{}"), "tokenizer.json": []byte("{}"), "model.safetensors": []byte("weights"),
		"pytorch_model.bin": []byte("pickle"), "original/params.json": []byte("{}"), "merges.txt": []byte("a b"),
	}}
	h.Repos["models/org/lora"] = &hubtest.Repo{Files: map[string][]byte{
		"adapter_config.json": []byte("{}"), "adapter_model.safetensors": []byte("lora"), "optimizer.bin": []byte("x"),
	}}
	for _, c := range []struct {
		name  string
		want  hub.Want
		files []string
	}{
		{"org/text", hub.Description, []string{"config.json", "merges.txt", "tokenizer.json"}},
		{"org/text", hub.Model, []string{"config.json", "merges.txt", "model.safetensors", "tokenizer.json"}},
		{"org/lora", hub.Adapter, []string{"adapter_config.json", "adapter_model.safetensors"}},
	} {
		dir, err := hub.Fetch(t.Context(), c.name, c.want, hub.Watcher{})
		if got := snapshotFiles(t, dir); err != nil || !slices.Equal(got, c.files) {
			t.Errorf("%s: got %q, %v", c.name, got, err)
		}
	}
	if _, err := hub.Fetch(t.Context(), "org/text", hub.Adapter, hub.Watcher{}); !errors.Is(err, hub.ErrName) {
		t.Errorf("a model as adapter: %v", err)
	}
}

// What is cut off goes on: within a call after a pause, and in the next call from the bytes that are there.
func TestFetch_CutOff(t *testing.T) {
	h := hubtest.Start(t)
	r := &hubtest.Repo{Files: pipeline(), CutAfter: 100_000, Cuts: 1}
	h.Repos["models/org/tiny"] = r
	var told heard
	dir, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, told.watcher())
	asked := strings.Join(h.Asked(), "\n")
	if err != nil || !strings.Contains(asked, "bytes=100000-") || len(told.lines) != 1 ||
		told.got != told.plans[0].Bytes {
		t.Fatalf("%v, told %+v, asked\n%s", err, told, asked)
	}
	for name, b := range r.Files {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err == nil && !bytes.Equal(got, b) {
			t.Errorf("%s has other bytes", name)
		}
	}

	// Ended in the middle: the context of the first call ends with the first bytes.
	h.Repos["models/org/other"] = &hubtest.Repo{Files: map[string][]byte{
		"config.json": []byte("{}"), "model.safetensors": bytes.Repeat([]byte("x"), 3<<20),
	}, CutAfter: 1 << 20, Cuts: 1}
	ctx, cancel := context.WithCancel(t.Context())
	_, err = hub.Fetch(ctx, "org/other", hub.Model, hub.Watcher{Say: func(string) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("ended: %v", err)
	}
	h.Asked()
	told = heard{}
	if _, err := hub.Fetch(t.Context(), "org/other", hub.Model, told.watcher()); err != nil ||
		told.plans[0].Have != 1<<20 ||
		!slices.ContainsFunc(h.Asked(), func(s string) bool { return strings.HasSuffix(s, "bytes=1048576-") }) {
		t.Errorf("%v, told %+v", err, told)
	}
}

// A wrong byte is found, in files of both digests, and what came is thrown away; then it can be fetched.
func TestFetch_WrongChecksum(t *testing.T) {
	for _, name := range []string{"config.json", "model.safetensors"} {
		h := hubtest.Start(t)
		r := &hubtest.Repo{Files: map[string][]byte{
			"config.json":       []byte("{ }"),
			"model.safetensors": []byte("weights"),
		}, Corrupt: name}
		h.Repos["models/org/tiny"] = r
		_, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{})
		if err == nil || !strings.Contains(err.Error(), name+": wrong checksum") {
			t.Errorf("%s: %v", name, err)
		}
		r.Corrupt = ""
		if _, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Each refusal says what mends it.
func TestFetch_Refusals(t *testing.T) {
	h := hubtest.Start(t)
	files := map[string][]byte{"config.json": []byte("{}"), "model.safetensors": []byte("weights")}
	h.Repos["models/org/gated"] = &hubtest.Repo{Files: files, Gated: true, Token: "hf_right"}
	h.Repos["models/org/old"] = &hubtest.Repo{Renamed: "org/new"}
	h.Repos["models/org/new"] = &hubtest.Repo{Files: files}
	h.Repos["models/org/data"] = &hubtest.Repo{Files: map[string][]byte{"train.csv": nil}}
	refusal := func(name, token, offline string, says ...string) {
		t.Helper()
		t.Setenv("HF_TOKEN", token)
		t.Setenv("TRANSFORMERS_OFFLINE", offline)
		_, err := hub.Fetch(t.Context(), name, hub.Model, hub.Watcher{})
		if !errors.Is(err, hub.ErrName) {
			t.Errorf("%s: %v", name, err)
			return
		}
		for _, part := range append(says, name) {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v; want %q", name, err, part)
			}
		}
	}
	refusal("org/gated", "", "", "gated (401): accept its terms at "+h.URL+"/org/gated, then log in with 'hf auth "+
		"login', or set HF_TOKEN")
	refusal("org/gated", "hf_wrong", "", "gated (403)", "this one is from HF_TOKEN")
	refusal("org/none", "", "", "there is no such model at "+h.URL, "or it is private", "HF_TOKEN")
	refusal("org/new@v9", "", "", `no revision "v9"`, "leave @v9 out for main")
	refusal("org/new", "", "1", "TRANSFORMERS_OFFLINE=1 forbids downloads",
		"does not have it; unset TRANSFORMERS_OFFLINE")
	refusal("org/data", "", "", "it has no model_index.json and no config.json")
	t.Setenv("HF_TOKEN", "hf_right")
	var told heard
	for _, name := range []string{"org/gated", "org/old"} {
		if _, err := hub.Fetch(t.Context(), name, hub.Model, told.watcher()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(told.lines) != 1 || told.lines[0] != "org/old is called org/new on the Hub now: name that one from now on" {
		t.Errorf("told %q", told.lines)
	}
	h.Close()
	_, err := hub.Fetch(t.Context(), "org/other", hub.Model, hub.Watcher{})
	if err == nil || !strings.Contains(err.Error(), "cannot be reached at "+h.URL) ||
		!strings.Contains(err.Error(), "HF_ENDPOINT") {
		t.Errorf("no Hub: %v", err)
	}
}

// What does not fit on the disk is refused before the first byte.
func TestFetch_NoSpace(t *testing.T) {
	h := hubtest.Start(t)
	h.Repos["models/org/huge"] = &hubtest.Repo{Huge: "model.safetensors", Files: map[string][]byte{
		"config.json": []byte("{}"), "model.safetensors": []byte("weights"),
	}}
	var told heard
	_, err := hub.Fetch(t.Context(), "org/huge", hub.Model, told.watcher())
	if err == nil || !strings.Contains(err.Error(), "org/huge: no space: ") ||
		!strings.Contains(err.Error(), "HF_HOME") || len(told.plans) > 0 {
		t.Errorf("%v, told %+v", err, told)
	}
	for _, asked := range h.Asked() {
		if strings.Contains(asked, "resolve") {
			t.Errorf("asked %s", asked)
		}
	}
}

// The token of 'hf auth login' is used.
func TestFetch_TokenFile(t *testing.T) {
	h := hubtest.Start(t)
	h.Repos["models/org/gated"] = &hubtest.Repo{Gated: true, Token: "hf_file", Files: map[string][]byte{
		"config.json": []byte("{}"), "model.safetensors": []byte("weights"),
	}}
	if err := os.WriteFile(filepath.Join(os.Getenv("HF_HOME"), "token"), []byte("hf_file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := hub.Fetch(t.Context(), "org/gated", hub.Model, hub.Watcher{}); err != nil {
		t.Error(err)
	}
}

func TestFetchFile(t *testing.T) {
	h := hubtest.Start(t)
	r := &hubtest.Repo{Files: map[string][]byte{"data/train.parquet": []byte("PAR1"), "README.md": []byte("#")}}
	h.Repos["datasets/org/prompts"] = r
	for _, address := range []string{
		"hf://datasets/org/prompts/data/train.parquet", "hf://datasets/org/prompts@main/data/train.parquet",
		"hf://datasets/org/prompts/data/train.parquet@" + r.Commit(),
	} {
		path, source, err := hub.FetchFile(t.Context(), address, hub.Watcher{})
		b, _ := os.ReadFile(path)
		if err != nil || source != "hf://datasets/org/prompts@"+r.Commit()+"/data/train.parquet" ||
			string(b) != "PAR1" {
			t.Errorf("%s: %s %s %v", address, path, source, err)
		}
	}
	for address, says := range map[string]string{
		"hf://datasets/org/prompts/test.parquet": "it has no file test.parquet: see " + h.URL + "/datasets/org/prompts/tree/main",
		"hf://datasets/org/prompts":              "must be hf://datasets/ORG/NAME/FILE",
		"hf://datasets/org/prompts/../x":         "must be hf://datasets/ORG/NAME/FILE",
		"hf://datasets/org/other/a.parquet":      "there is no such data set",
		"hf://datasets/org/prompts@v9/a.parquet": `no revision "v9"`,
		"hf://datasets/org/prompts@/a.parquet":   "must be hf://datasets/ORG/NAME/FILE",
	} {
		if _, _, err := hub.FetchFile(t.Context(), address, hub.Watcher{}); err == nil ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", address, err, says)
		}
	}
}

// Names of the Hub, and others.
func TestParse(t *testing.T) {
	for name, want := range map[string]string{
		"org/name": "org/name", "org/name@main": "org/name", "Qwen/Qwen-Image@refs/pr/1": "Qwen/Qwen-Image@refs/pr/1",
		"name": "", "./org/name": "", "/org/name": "", "a/b/c": "", "org/name@": "", "org/name@a..b": "", "org/": "",
		"~/name": "", "../name": "", "org/na--me": "", "org/name.git": "", "https://huggingface.co/org/name": "",
	} {
		r, ok := hub.Parse(name)
		if ok != (want != "") || ok && r.String() != want {
			t.Errorf("%s: %v %v", name, r, ok)
		}
	}
	for name, says := range map[string]string{
		"https://huggingface.co/org/name/tree/main": "goes by its name: org/name", "hf://org/name": "goes by its name: org/name",
		"org/name@": `revision ""; must be`, "org/name/vae": "is ORG/NAME, as in org/name",
		"org/name": "", "./a/b": "", "/a/b/c": "", "signs": "",
	} {
		if got := hub.Misspelt(name); (got == "") != (says == "") || !strings.Contains(got, says) {
			t.Errorf("%s: %q; want %q", name, got, says)
		}
	}
}

// The variables of huggingface_hub say where the cache is.
func TestCache(t *testing.T) {
	for _, c := range []struct{ variable, value, want string }{
		{"HF_HUB_CACHE", "/a/cache", "/a/cache"},
		{"HF_HOME", "/b", "/b/hub"},
		{"XDG_CACHE_HOME", "/c", "/c/huggingface/hub"},
		{"HOME", "/d", "/d/.cache/huggingface/hub"},
	} {
		for _, v := range []string{"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"} {
			t.Setenv(v, "")
		}
		t.Setenv(c.variable, c.value)
		if got := hub.Cache(); got != c.want {
			t.Errorf("%s=%s: %s, want %s", c.variable, c.value, got, c.want)
		}
	}
}
