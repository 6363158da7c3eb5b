package integration_test

import (
	"encoding/base64"
	"encoding/json"
	"image"
	"image/color"
	"image/jpeg"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// colourFile writes an image of one colour.
func colourFile(t *testing.T, path string, c color.Color) {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, 24, 16))
	for i := range 24 * 16 {
		img.Set(i%24, i/24, c)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if strings.HasSuffix(path, ".jpg") {
		err = jpeg.Encode(f, img, nil)
	} else {
		var b []byte
		if b, err = media.EncodePNG(img); err == nil {
			_, err = f.Write(b)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// An image goes from the command line, or from a file of prompts, through a whole pipeline: it decides the samples, is
// verified with them, and what the pipeline does not take is refused before anything runs.
func TestConditions(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, remotetest.EditClass, 1), t.TempDir()
	colourFile(t, filepath.Join(dir, "red.png"), color.NRGBA{R: 200, A: 255})
	colourFile(t, filepath.Join(dir, "blue.jpg"), color.NRGBA{B: 200, A: 255})
	engine := []string{"--engine", "torch", "--model", folder, "--deterministic"}
	digests := map[string]bool{}
	for _, c := range []struct{ run, image, strength string }{
		{"a", "red.png", "0.5"}, {"b", "blue.jpg", "0.5"}, {"c", "red.png", "0.7"},
	} {
		args := append([]string{
			"run", "--json", "--seed", "5", "-n", "2", "--run", c.run, "--sde-steps", "1", "--condition",
			"image=" + c.image, "--set", "strength=" + c.strength, "--set", "true_cfg_scale=2", "make it red",
		}, engine...)
		var of struct{ Summary struct{ Digest string } }
		lines := strings.Split(strings.TrimSpace(byWorker(t, dir, nil, args...).must(t, 0).stdout), "\n")
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &of); err != nil || of.Summary.Digest == "" {
			t.Fatalf("%v: %s", err, lines)
		}
		digests[of.Summary.Digest] = true
		r := provenRun(t, byWorker(t, dir, nil, append([]string{"verify", "--json", c.run}, engine...)...))
		if r.Trajectories != 2 || len(r.Mismatches) > 0 || r.MaxRatio != 0 {
			t.Errorf("run %s: %+v", c.run, r)
		}
	}
	// An archive has the files, so that another store verifies the run, and the prompt can be given there again.
	byWorker(t, dir, nil, "runs", "export", "a", "--out", "a.tar").must(t, 0)
	other := t.TempDir()
	byWorker(t, other, nil, "runs", "import", filepath.Join(dir, "a.tar")).must(t, 0)
	r := provenRun(t, byWorker(t, other, nil, append([]string{"verify", "--json", "a"}, engine...)...))
	if r.Trajectories != 2 || len(r.Mismatches) > 0 || r.MaxRatio != 0 {
		t.Errorf("the run on another server: %+v", r)
	}
	if len(digests) != 3 {
		t.Errorf("%d digests of three runs that differ", len(digests))
	}
	red, err := os.ReadFile(filepath.Join(dir, "red.png"))
	if err != nil {
		t.Fatal(err)
	}
	file, inline := filepath.Join(dir, "prompts.jsonl"), base64.StdEncoding.EncodeToString(red)
	lines := `{"prompt": "make it red", "conditions": {"image": "red.png", "references": ["red.png", "blue.jpg"]}}` + "\n" +
		`{"prompt": "make it blue", "images": [{"path": "blue.jpg"}], "arguments": {"strength": 0.5, "clean": true}}` + "\n" +
		`{"prompt": [{"role": "user", "content": "<image>\nmake it green"}], "images": [{"bytes": "` + inline + `"}]}` + "\n" +
		`{"prompt": "make it white", "input_image": {"bytes": "` + inline + `"}}` + "\n"
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	byWorker(t, dir, nil, append([]string{"run", "-n", "2", "--run", "d", "--prompts", file}, engine...)...).must(t, 0)
	for want, more := range map[string][]string{
		"conditions: image: absent":                 nil,
		"mask.png: no such file":                    {"--condition", "mask_image=mask.png"},
		"depth; must be one that":                   {"--condition", "image=red.png", "--condition", "depth=red.png"},
		"callback; must be one that":                {"--condition", "image=red.png", "--set", "callback=f"},
		`strength: "much"; must be of type`:         {"--condition", "image=red.png", "--set", "strength=much"},
		"prompts.jsonl: png: invalid format":        {"--condition", "image=prompts.jsonl"},
		`--set: "strength"; must be NAME=VALUE`:     {"--condition", "image=red.png", "--set", "strength"},
		`--condition: "red.png"; must be NAME=`:     {"--condition", "red.png"},
		"--guidance-rescale: given; must be absent": {"--condition", "image=red.png", "--guidance-rescale", "0.5"},
	} {
		out := byWorker(t, dir, nil, append(append([]string{"run", "--run", "e", "x"}, more...), engine...)...)
		if out.code == 0 || !strings.Contains(strings.ReplaceAll(out.stderr, "\n", " "), want) {
			t.Errorf("%v: exit %d, %s; must say %q", more, out.code, out.stderr, want)
		}
	}
}

// What else can be asked of a rollout works beside conditions, and is verified with them: parts of it, a branch, a
// tree. Images to roll are encoded. An estimate reads the files, and refuses what a run would.
func TestConditions_Parts(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, remotetest.EditClass, 1), t.TempDir()
	colourFile(t, filepath.Join(dir, "red.png"), color.NRGBA{R: 200, A: 255})
	engine := []string{"--engine", "torch", "--model", folder, "--deterministic"}
	run := func(name string, more ...string) output {
		t.Helper()
		args := []string{
			"run", "--json", "--seed", "5", "--run", name, "--steps", "4", "--condition", "image=red.png",
			"make it red",
		}
		return byWorker(t, dir, nil, append(append(args, more...), engine...)...)
	}
	samples := map[string]int{"whole": 2, "tail": 2, "head": 2, "branch": 2, "tree": 4, "from": 2}
	whole := run("whole", "-n", "2", "--sde-steps", "1,2", "--save-latents", "whole.safetensors", "--out",
		"made").must(t, 0)
	run("tail", "-n", "2", "--sde-steps", "2", "--start-step", "2", "--start-latents", "whole.safetensors").must(t, 0)
	run("head", "-n", "2", "--sde-steps", "1", "--stop-step", "2", "--stop-decode").must(t, 0)
	run("tree", "--tree", "2@1,2@2").must(t, 0)
	run("from", "-n", "2", "--sde-steps", "2", "--start-step", "2", "--start-image",
		"made/0000-make-it-red-000.png").must(t, 0)
	var group struct{ UID string }
	if err := json.Unmarshal([]byte(strings.SplitN(whole.stdout, "\n", 2)[0]), &group); err != nil {
		t.Fatal(err)
	}
	run("branch", "-n", "2", "--sde-steps", "2", "--branch-from", "whole/"+group.UID+"/0@2").must(t, 0)
	for name, n := range samples {
		r := provenRun(t, byWorker(t, dir, nil, append([]string{"verify", "--json", name}, engine...)...))
		if r.Trajectories != n || len(r.Mismatches) > 0 || r.MaxRatio != 0 {
			t.Errorf("run %s: %+v", name, r)
		}
	}
	run("dry", "-n", "2", "--dry-run").must(t, 0)
	out := byWorker(t, dir, nil, append([]string{"run", "--run", "dry", "--dry-run", "x"}, engine...)...)
	if out.code == 0 || !strings.Contains(out.stdout, "conditions: image: absent") {
		t.Errorf("an estimate without the image: exit %d, %s%s", out.code, out.stdout, out.stderr)
	}
}

// Models of texts alone refuse images, given by a flag or in the records of verl, whose text says where they belong.
func TestConditions_OfTextsAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	colourFile(t, filepath.Join(dir, "red.png"), color.NRGBA{R: 200, A: 255})
	line := `{"prompt": [{"role": "user", "content": "<image>Find x."}], "images": ["red.png"]}`
	if err := os.WriteFile(filepath.Join(dir, "tagged.jsonl"), []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, model := range []string{"synthetic", sums(t)} {
		for _, given := range [][]string{{"--condition", "image=red.png", "x"}, {"--prompts", "tagged.jsonl"}} {
			out := byWorker(t, dir, nil, append([]string{"run", "--run", "f", "--model", model}, given...)...)
			if out.code == 0 || !strings.Contains(out.stderr, "must be absent") {
				t.Errorf("%v for %s: exit %d, %s", given, model, out.code, out.stderr)
			}
		}
	}
}
