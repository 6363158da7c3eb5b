package integration_test

import (
	"bytes"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// The worker in Python and this program compute the same: samples of each, with and without an adapter, have the same
// noise, states within 1e-5 and images within 1 of 255, and are verified by the other within roundings. Row by row, the
// digest of a run does not depend on micro-batches.
func TestTorch_Python(t *testing.T) {
	needTorch(t)
	asThisProgram(t)
}

// The networks of vLLM-Omni compute the same.
func TestEngines_Omni(t *testing.T) {
	env := os.Getenv("MEANDER_ENGINES")
	if env == "" {
		t.Skip("MEANDER_ENGINES: not set; make engines-test installs the real engines and names them")
	}
	t.Setenv("MEANDER_PYTHON", absolute(t, env+"/omni/bin/python"))
	needTorch(t)
	asThisProgram(t, "--network", "vllm-omni")
}

// asThisProgram makes samples by a worker with these flags, and by this program, and compares and verifies them.
func asThisProgram(t *testing.T, network ...string) {
	t.Helper()
	signs, adapter := absolute(t, signsFolder), absolute(t, filepath.Join(root, "deploy/demo/adapter"))
	engine := []string{"--engine", "torch", "--device", "cpu", "--dtype", "f32", "--threads", "1", "--deterministic"}
	engine = append(engine, network...)
	native := []string{"--engine", "none", "--device", "cpu", "--tolerance", "1e-5"}
	added := []string{"--adapter", adapter}
	digests, dirs := map[string]string{}, map[string]string{}
	for name, x := range map[string]struct{ run, verify, other []string }{
		"worker":          {engine, nil, native},
		"worker, by two":  {append([]string{"--batch", "2"}, engine...), nil, native},
		"adapter":         {slices.Concat(added, engine), added, native},
		"native":          {[]string{"--device", "cpu"}, nil, append([]string{"--tolerance", "1e-5"}, engine...)},
		"native, adapter": {append([]string{"--device", "cpu"}, added...), added, nil},
	} {
		dir := t.TempDir()
		run := slices.Concat([]string{
			"run", "--model", signs, "--json", "--seed", "5", "-n", "4", "--steps", "4", "--sde-steps", "1,2", "--run", "r",
			"--return-steps", "0-4", "--save-latents", "states.safetensors", `a red sign that says "EXIT"`,
		}, x.run)
		_, sum := meander(t, dir, run...).must(t, 0).parse(t)
		if sum.Complete != 1 {
			t.Fatalf("%s: %+v", name, sum)
		}
		digests[name], dirs[name] = sum.Digest, dir
		check := slices.Concat([]string{"verify", "--json", "--model", signs}, x.verify)
		if r := provenRun(t, meander(t, dir, check...)); r.Steps != 8 || r.MaxRatio != 0 {
			t.Errorf("%s: %d steps, ratio %g; want all exact by what made them", name, r.Steps, r.MaxRatio)
		}
		if x.other == nil {
			continue
		}
		r := provenRun(t, meander(t, dir, append(check, x.other...)...))
		if r.Steps != 8 || r.MaxRatio == 0 || r.MaxRatio > 1e-5 {
			t.Errorf("%s: %d steps, ratio %g; want a small difference by the other", name, r.Steps, r.MaxRatio)
		}
	}
	if digests["worker"] == "" || digests["worker"] != digests["worker, by two"] {
		t.Errorf("digests %q; want equal ones of two sizes of micro-batches", digests)
	}
	sameStates(t, dirs["worker"], dirs["native"])
	sameStates(t, dirs["adapter"], dirs["native, adapter"])
}

// sameStates compares the kept states and the images of two runs, in the folders that they were made in.
func sameStates(t *testing.T, a, b string) {
	t.Helper()
	first, err := safetensors.Open(filepath.Join(a, "states.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	second, err := safetensors.Open(filepath.Join(b, "states.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if len(first.Names()) == 0 || !slices.Equal(first.Names(), second.Names()) {
		t.Fatalf("states %v and %v", first.Names(), second.Names())
	}
	noise := 0
	for _, name := range first.Names() {
		if !strings.Contains(name, ".latents.") {
			continue
		}
		x, err1 := first.Floats(name)
		y, err2 := second.Floats(name)
		if err1 != nil || err2 != nil || len(x) != len(y) {
			t.Fatalf("%s: %d and %d elements, %v, %v", name, len(x), len(y), err1, err2)
		}
		most, size := float32(0), float32(0)
		for i := range x {
			most, size = max(most, x[i]-y[i], y[i]-x[i]), max(size, x[i], -x[i])
		}
		if most > 1e-5*size {
			t.Errorf("%s: states differ by %g of %g", name, most, size)
		}
		if strings.HasSuffix(name, ".latents.0") != (most == 0) {
			t.Errorf("%s: states differ by %g; want x_T to be equal, and no other", name, most)
		}
		if most == 0 {
			noise++
		}
		t.Logf("%s: %g of %g", name, most, size)
	}
	if noise != 1 {
		t.Errorf("%d of %v are noise; want one", noise, first.Names())
	}
	images, err := filepath.Glob(filepath.Join(a, "meander-out", "r", "*.png"))
	if err != nil || len(images) < 4 {
		t.Fatalf("images %q, %v", images, err)
	}
	for _, file := range images {
		x, y := pixels(t, file), pixels(t, strings.Replace(file, a, b, 1))
		for i := range x {
			if d := int(x[i]) - int(y[i]); d > 1 || d < -1 {
				t.Errorf("%s: pixels differ by %d", filepath.Base(file), d)
				break
			}
		}
	}
}

// pixels returns the bytes of an image, of which the size is checked by who compares.
func pixels(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	switch img := img.(type) {
	case *image.RGBA:
		return img.Pix
	case *image.NRGBA:
		return img.Pix
	}
	t.Fatalf("%s is a %T", file, img)
	return nil
}
