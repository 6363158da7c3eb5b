package integration_test

import (
	"image"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Pipelines of ten kinds that no family knows go the whole way, with zero lines each: a run with their conditions
// ends, and verify finds no difference at all.
func TestTorch_PythonPipelines(t *testing.T) {
	needTorch(t)
	conditions := map[string][]string{
		"FluxKontextPipeline":                 {"image"},
		"WanImageToVideoPipeline":             {"image"},
		"LTX2Pipeline":                        nil, // with sound
		"StableDiffusionPipeline":             nil,
		"StableDiffusionXLPipeline":           nil,
		"StableDiffusionInpaintPipeline":      {"image", "mask_image"},
		"StableDiffusionXLControlNetPipeline": {"image"},
		"CogView4Pipeline":                    nil,                     // by sigmas that its card lists
		"CogVideoXImageToVideoPipeline":       {"image"},               // by a scheduler of its own
		"FluxFillPipeline":                    {"image", "mask_image"}, // without an argument of guidance
	}
	var classes []string
	for class := range conditions {
		classes = append(classes, class)
	}
	folder := t.TempDir()
	zoo := filepath.Join(root, "pkg/client/python/tests/torch_engine/zoo.py")
	c := exec.Command(os.Getenv("MEANDER_PYTHON"), zoo, "--write", folder, "--classes", strings.Join(classes, ","))
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	media := t.TempDir()
	for _, name := range []string{"image", "mask_image"} {
		file, err := os.Create(filepath.Join(media, name+".png"))
		if err != nil {
			t.Fatal(err)
		}
		photo := image.NewNRGBA(image.Rect(0, 0, 16, 16))
		for i := range 256 {
			grey := uint8(i)
			if name == "mask_image" {
				grey = uint8(255 * (i / 128)) // one half
			}
			photo.SetNRGBA(i%16, i/16, color.NRGBA{grey, grey, grey, 255})
		}
		if err := png.Encode(file, photo); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for class, names := range conditions {
		t.Run(class, func(t *testing.T) {
			model, dir := filepath.Join(folder, class), t.TempDir()
			engine := joinPython(t, model, "--generic", "--deterministic")
			run := []string{
				"run", "--json", "--model", model, "--engine", engine, "--batch", "2", "--seed", "5", "--run", "r", "-n", "2",
				"--steps", "4", "--sde-steps", "1,2", "--out", "out",
			}
			for _, name := range names {
				run = append(run, "--condition", name+"="+filepath.Join(media, name+".png"))
			}
			_, sum := meander(t, dir, append(run, "a red cat")...).must(t, 0).parse(t)
			if sum.Complete != 1 {
				t.Errorf("%+v", sum)
			}
			r := provenRun(t, meander(t, dir, "verify", "--json", "--model", model, "--engine", engine))
			if r.Steps != 4 || r.Tolerance != 0 || r.MaxRatio != 0 {
				t.Errorf("%d log-probs, ratio %g, tolerance %g; want 4 without a difference", r.Steps, r.MaxRatio,
					r.Tolerance)
			}
		})
	}
}
