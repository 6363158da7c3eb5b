package command

import (
	"bytes"
	"image"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// folderOf is a folder of images of that width, and texts.
func folderOf(t *testing.T, width int, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		data := []byte(text)
		if text == "" {
			var buf bytes.Buffer
			if err := png.Encode(&buf, image.NewNRGBA(image.Rect(0, 0, width, 32))); err != nil {
				t.Fatal(err)
			}
			data = buf.Bytes()
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Images are those of a prompt's samples, or of one prompt each; size and number follow from them.
func TestLoad_StartImage(t *testing.T) {
	opaque := image.NewNRGBA(image.Rect(0, 0, 48, 32))
	draw.Draw(opaque, opaque.Rect, image.Black, image.Point{}, draw.Src)
	video, err := media.EncodeVideo(media.Media{Frames: []*image.NRGBA{opaque, opaque}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	three := folderOf(t, 48, map[string]string{
		"a.png": "", "b.PNG": "", "c.png": "", "x-sheet.png": "",
		"c.txt": "words",
	})
	records := folderOf(t, 8, map[string]string{"null.jsonl": `{"prompt": "x", "start": null}`, "text.jsonl": `{"prompt": "x", "start": "a.png"}`})
	none, text := filepath.Join(records, "null.jsonl"), filepath.Join(records, "text.jsonl")
	for _, tt := range []struct {
		args []string
		want []int // images of each prompt
	}{
		{[]string{"--start-image", filepath.Join(three, "a.png"), "--start-step", "3", "x", "y"}, []int{1, 1}},
		{[]string{"--start-image", three, "--start-step", "3", "x"}, []int{3}},
		{[]string{"--start-image", three, "--start-sigma", "0.5", "x", "y", "z"}, []int{1, 1, 1}},
		{[]string{"--start-image", three, "--start-step", "3", "--prompts", none}, []int{3}},
	} {
		for i, p := range mustLoad(t, tt.args...) {
			e := event(t, p)
			if n := len(e.Start.Data.Images); n != tt.want[i] || *e.Width != 48 || *e.Height != 32 || n > 1 &&
				*e.GroupSize != int64(n) {
				t.Errorf("%q: prompt %d has %d images of %d x %d", tt.args, i, n, *e.Width, *e.Height)
			}
		}
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--start-image", three, "--start-step", "3", "x", "y"}, "--start-image: 3 images for 2 prompts; must be one image, one for each prompt"},
		{[]string{"--start-image", three, "x"}, "--start-step: not given; must be there, or --start-sigma"},
		{[]string{"--start-image", folderOf(t, 8, nil), "--start-step", "3", "x"}, "no PNG in it"},
		{[]string{"--start-image", folderOf(t, 8, map[string]string{"a.png": "longer than the head of a PNG"}), "--start-step", "3", "x"}, "a.png: png: invalid format: not a PNG file; must be a PNG"},
		{[]string{"--start-image", three, "--start-step", "3", "--width", "64", "x"}, "width 48; must be 64"},
		{[]string{"--start-image", folderOf(t, 48, map[string]string{"a.png": "", "b.png": string(video)}), "--start-step", "3", "x"}, "b.png: frames 2; must be 1"},
		{[]string{"--start-image", folderOf(t, 48, map[string]string{"a.png": string(video), "b.png": ""}), "--start-step", "3", "x"}, "b.png: frames 1; must be 2"},
		{[]string{"--start-image", three, "--probability", "2", "x"}, "--probability: 2; must be between 0 and 1"},
		{[]string{"--start-image", three, "--start-step", "3", "--prompts", text}, text + ` line 1: start: "a.png"; must be a map`},
	} {
		if _, _, err := loadPrompts(tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error\n %v\nwant\n %s", tt.args, err, tt.want)
		}
	}
}

// Images of one caption are one group, in the order of the files.
func TestCaptioned(t *testing.T) {
	dir := folderOf(t, 8, map[string]string{
		"a.png": "", "b.png": "", "c.png": "", "d.png": "", "b.txt": "words\n",
		"d.txt": "words",
	})
	files, err := imageFiles(dir)
	if err != nil {
		t.Fatal(err)
	}
	captions, groups, err := groupByCaption(files, new("default"))
	if err != nil || !slices.Equal(captions, []string{"default", "words"}) || len(groups[0]) != 2 ||
		!slices.Equal(groups[1], []string{files[1], files[3]}) {
		t.Errorf("%q, %q, %v", captions, groups, err)
	}
	if _, _, err := groupByCaption(files[1:], nil); err == nil || !strings.Contains(err.Error(), "c.png: no caption") {
		t.Errorf("an image without a caption: %v", err)
	}
	if captions, _, err := groupByCaption(files[1:2], nil); err != nil || !slices.Equal(captions, []string{"words"}) {
		t.Errorf("an image with a caption of its own: %q, %v", captions, err)
	}
}

// Flags that decide nothing are refused, with the flag that they need.
func TestScheduled_FlagsWithoutEffect(t *testing.T) {
	dir := folderOf(t, 32, map[string]string{"a.png": "", "b.png": ""})
	for _, tt := range []struct{ args, want string }{
		{"--prob-start 0 --prob-end 0", "--prob-start, --prob-end: given; must be absent without --ramp-steps"},
		{"--ramp-steps 0 --ramp-shape cosine", "--ramp-shape: given; must be absent without --ramp-steps"},
		{"--ramp-steps 5 --prob-start 0 --prob-end 1 --probability 0.5", "--probability: 0.5; must be absent: "},
		{"--ramp-steps 5 --prob-start 0.1 --compat simpletuner --probability 0.5", "--probability: 0.5; must be absent"},
		{"--reflexflow off --reflexflow-alpha 2", "--reflexflow-alpha: given; must be absent without --reflexflow on"},
		{"--ramp-steps 5 --prob-end 0.5 --probability 0.1", ""},
		{"--ramp-steps 5 --prob-start 0 --prob-end 1", ""},
		{"--ramp-steps 5 --prob-start 0 --prob-end 1 --compat simpletuner --probability 0.1", ""},
		{"--reflexflow on --reflexflow-alpha 2", ""},
	} {
		args := append([]string{
			"scheduled", dir, "--prompt", "x", "--model", "synthetic", "--timesteps", "50",
			"--dry-run", "--store", t.TempDir(),
		}, strings.Fields(tt.args)...)
		var out, errs text
		status := exitOK
		if tt.want != "" {
			status = exitUsage
		}
		if got := Execute(t.Context(), args, strings.NewReader(""), &out, &errs); got != status ||
			!strings.Contains(errs.String(), tt.want) {
			t.Errorf("%s: status %d\n%s\nwant %q", tt.args, got, errs.String(), tt.want)
		}
	}
}
