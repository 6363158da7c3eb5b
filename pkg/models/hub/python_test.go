package hub_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/hub/hubtest"
)

// python returns a program that has huggingface_hub; without one the test is skipped.
func python(t *testing.T) string {
	t.Helper()
	py := os.Getenv("MEANDER_PYTHON")
	if py == "" || exec.Command(py, "-c", "import huggingface_hub").Run() != nil {
		t.Skip("MEANDER_PYTHON names no Python with huggingface_hub; make engines-torch does")
	}
	return py
}

// runPython runs a program in Python, and returns what it writes.
func runPython(t *testing.T, py, offline, code string) (stdout, stderr string, err error) {
	t.Helper()
	path, err := filepath.Abs("../../client/python")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(py, "-c", code)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "HF_HUB_DISABLE_XET=1", "HF_HUB_DISABLE_PROGRESS_BARS=1", "HF_HUB_OFFLINE="+offline,
		"PYTHONPATH="+path)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), errs.String(), err
}

// Python's huggingface_hub finds what was downloaded here, without the Hub, and what it downloads is found here.
func TestCache_OfPython(t *testing.T) {
	py := python(t)
	h := hubtest.Start(t)
	r := &hubtest.Repo{Files: pipeline()}
	h.Repos["models/org/tiny"], h.Repos["models/org/other"] = r, r
	say := func(offline, code string) string {
		t.Helper()
		out, errs, err := runPython(t, py, offline, "import huggingface_hub as h\n"+code)
		if err != nil {
			t.Fatalf("%v\n%s", err, errs)
		}
		return out
	}
	dir, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{})
	if err != nil {
		t.Fatal(err)
	}
	if got := say("1", `print(h.snapshot_download("org/tiny"))`); got != dir {
		t.Errorf("huggingface_hub finds %q, want %q", got, dir)
	}
	// It has nothing to download of what is here, and takes what it lacks beside it.
	h.Asked()
	say("", `h.hf_hub_download("org/tiny", "vae/diffusion_pytorch_model.safetensors"); h.hf_hub_download("org/tiny", "README.md")`)
	for _, asked := range h.Asked() {
		if strings.HasPrefix(asked, "GET ") && strings.HasSuffix(asked, ".safetensors") {
			t.Errorf("huggingface_hub downloads again: %s", asked)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "README.md")); err != nil || string(b) != "# a card" {
		t.Errorf("beside it: %q, %v", b, err)
	}

	other := say("", `print(h.snapshot_download("org/other"))`)
	h.Asked()
	got, err := hub.Fetch(t.Context(), "org/other", hub.Model, hub.Watcher{})
	if err != nil || got != other || len(h.Asked()) > 0 {
		t.Errorf("of huggingface_hub: %q, %v; want %q, and nothing asked", got, err, other)
	}
}

// The worker and the trainer in Python take the same names, find what is in the cache, and say what is wrong.
func TestCache_OfWorker(t *testing.T) {
	py := python(t)
	h := hubtest.Start(t)
	r := &hubtest.Repo{Files: pipeline()}
	h.Repos["models/org/tiny"], h.Repos["models/org/other"] = r, r
	h.Repos["models/org/gated"] = &hubtest.Repo{Files: pipeline(), Gated: true}
	folder := func(offline, name string) (string, string) {
		t.Helper()
		out, errs, err := runPython(t, py, offline, "from meander.torch.folder import Folder; "+
			"print(Folder("+strconv.Quote(name)+").path)")
		if strings.Contains(errs, "ModuleNotFoundError") {
			t.Skip("no Python with what the worker needs: " + errs)
		}
		if (err == nil) == (out == "") {
			t.Fatalf("%s: %v\n%s", name, err, errs)
		}
		return out, errs
	}
	dir, err := hub.Fetch(t.Context(), "org/tiny", hub.Model, hub.Watcher{})
	if err != nil {
		t.Fatal(err)
	}
	h.Asked()
	if got, _ := folder("", "org/tiny"); got != dir || len(h.Asked()) > 0 {
		t.Errorf("the worker finds %q, want %q and nothing asked", got, dir)
	}
	got, said := folder("", "org/other@"+r.Commit())
	if want := "downloading org/other@" + r.Commit() + ": "; !strings.Contains(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}
	h.Asked()
	if want, err := hub.Fetch(t.Context(), "org/other@"+r.Commit(), hub.Model, hub.Watcher{}); err != nil ||
		want != got || len(h.Asked()) > 0 {
		t.Errorf("of the worker: %q, %v; want %q", want, err, got)
	}
	for name, says := range map[string]string{
		"org/gated": "gated: accept its terms", "org/none": "there is no such model, or it is private",
		"org/tiny@v9": "it has no revision 'v9'", "./none": "must be a folder in the layout of diffusers, or ORG/NAME",
	} {
		if _, said := folder("", name); !strings.Contains(said, says) {
			t.Errorf("%s: %s; want %q", name, said, says)
		}
	}
}
