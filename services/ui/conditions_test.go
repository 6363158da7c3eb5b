package ui_test

import (
	"bytes"
	"context"
	"image"
	"image/color"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/ui"
)

// disc is a PNG of a disc of one colour.
func disc(t *testing.T, width, height int, on, off color.NRGBA) []byte {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			dx, dy := x-width/2, y-height/2
			img.SetNRGBA(x, y, map[bool]color.NRGBA{true: on, false: off}[9*(dx*dx+dy*dy) < height*height])
		}
	}
	data, err := media.EncodePNG(img)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// startEdits serves a page of a pipeline that edits images, with a run of one group, and one that waits for a verdict;
// it returns what was given.
func startEdits(t *testing.T) (s *served, given []byte) {
	t.Helper()
	dir := remotetest.Folder(t, remotetest.EditClass, 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	s = servePage(t, nil)
	c := pipeline.DefaultConfig()
	c.Sampler.Model, c.Sampler.Engine, c.Sampler.Lane = dir, "torch="+address, "edits"
	s.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	bustest.Await(t, s.Bus, 1, schemas.StreamPolicies)
	given = disc(t, 96, 64, color.NRGBA{200, 40, 40, 255}, color.NRGBA{240, 230, 200, 255})
	mask := disc(t, 96, 64, color.NRGBA{255, 255, 255, 255}, color.NRGBA{A: 255})
	edit := func(p *schemas.Prompt) {
		p.Model, p.GroupSize = "edits", new(int64(3))
		p.Conditions = []schemas.Condition{
			{Name: "mask_image", DataImage: schemas.DataImage{Data: mask}},
			{Name: "image", DataImage: schemas.DataImage{Data: given}},
		}
		p.Reward = []schemas.RewardSpec{{Name: "jpeg_compressibility"}}
	}
	s.publish(t, "edits", "a", "make it red", edit)
	s.publish(t, "judged", "a", "make it red", func(p *schemas.Prompt) {
		edit(p)
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	bustest.Await(t, s.Bus, 6, schemas.StreamTrajectories)
	return s, given
}

// What a network was given can be fetched beside the samples; it is in a report, once for a group, and on a sheet.
func TestConditions(t *testing.T) {
	s, given := startEdits(t)
	line := get[object](t, s, "runs/edits/groups/a/2")["line"].(object)
	if names, ok := line["conditions"].([]any); !ok || len(names) != 2 || names[0] != "image" ||
		names[1] != "mask_image" {
		t.Errorf("conditions of a sample: %v", line["conditions"])
	}
	status, header, body := s.ask(t, http.MethodGet, "/media/edits/a/2/condition-0", nil)
	if status != http.StatusOK || header.Get("Content-Type") != "image/png" || !bytes.Equal(body, given) {
		t.Errorf("the condition: %d, %s, %d bytes", status, header.Get("Content-Type"), len(body))
	}
	for _, kind := range []string{"condition-2", "condition--1", "condition-x"} {
		if status, _, body := s.ask(t, http.MethodGet, "/media/edits/a/2/"+kind, nil); status != http.StatusNotFound {
			t.Errorf("%s: %d, %s", kind, status, body)
		}
	}
	file, contents := s.report(t, "edits", ui.ReportOptions{})
	if contents.Images != 5 || strings.Count(file, `"edits/a/condition-`) != 2 {
		t.Errorf("a report of three images and two conditions: %+v", contents)
	}
	run, err := results.Read(t.Context(), s.Bus, "edits")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := run.Write(t.Context(), s.Bus, dir); err != nil {
		t.Fatal(err)
	}
	drawn, err := os.ReadFile(filepath.Join(dir, "a-sheet.png"))
	if err != nil {
		t.Fatal(err)
	}
	sheet, err := media.DecodeInput(drawn)
	if err != nil || sheet.Size().Width < 5*160 {
		t.Errorf("a sheet of five tiles: %v, %v", sheet.Size(), err)
	}
	if shots := os.Getenv("MEANDER_UI_SHOTS"); shots != "" {
		if err := os.WriteFile(filepath.Join(shots, "edits-sheet.png"), drawn, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// The pages of a group and of a sample show what the network was given, of a server and from a file.
func TestPage_Conditions(t *testing.T) {
	b := startBrowser(t)
	s, _ := startEdits(t)
	const shown = `[...document.querySelectorAll(".given img")].filter((i) => i.complete && i.naturalWidth === 96).length === 2`
	see := func(p *tab, where string) {
		p.to("#/runs/edits/a")
		p.shows("condition image", "condition mask_image")
		p.until(shown)
		p.save(where + "-group")
		p.to("#/runs/edits/a/1")
		p.shows("Sample 1", "condition mask_image")
		p.until(shown)
		p.save(where + "-sample")
	}
	p := b.open(t, s.url)
	see(p, "edits")
	p.to("#/judge/judged")
	p.shows("condition image", "waits for the verdict")
	p.until(shown)
	p.save("edits-judge")
	file, _ := s.report(t, "edits", ui.ReportOptions{})
	s.stop()
	name := filepath.Join(t.TempDir(), "edits.html")
	if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	p = b.open(t, "file://"+name)
	p.awaitShown()
	see(p, "edits-report")
}
