package ui_test

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/ui"
)

// startSounds serves a page of a pipeline that makes images with a sound, with a run of one group.
func startSounds(t *testing.T) *served {
	t.Helper()
	dir := remotetest.Folder(t, remotetest.TracksClass, 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	s := servePage(t, nil)
	c := pipeline.DefaultConfig()
	c.Sampler.Model, c.Sampler.Engine, c.Sampler.Lane = dir, "torch="+address, "sounds"
	s.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	bustest.Await(t, s.Bus, 1, schemas.StreamPolicies)
	s.publish(t, "sounds", "a", "a drum", func(p *schemas.Prompt) {
		p.Model, p.GroupSize, p.Reward = "sounds", new(int64(2)), []schemas.RewardSpec{{Name: "loudness"}}
	})
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	return s
}

// The sound of a sample can be fetched, is in a report, and is a file of its own on the disk.
func TestSound(t *testing.T) {
	s := startSounds(t)
	status, header, body := s.ask(t, http.MethodGet, "/media/sounds/a/1/audio", nil)
	if status != http.StatusOK || header.Get("Content-Type") != "audio/wav" || !bytes.HasPrefix(body, []byte("RIFF")) {
		t.Errorf("the sound: %d, %s, %d bytes", status, header.Get("Content-Type"), len(body))
	}
	if status, _, body := s.ask(t, http.MethodGet, "/media/sounds/a/1/video", nil); status != http.StatusNotFound ||
		!strings.Contains(string(body), "video: no such file: it has image, audio") {
		t.Errorf("a video: %d, %s", status, body)
	}
	_, _, made := s.ask(t, http.MethodGet, "/media/sounds/a/1/image", nil)
	_, _, last := s.ask(t, http.MethodGet, "/media/sounds/a/1/seen-2", nil)
	if !bytes.HasPrefix(last, []byte("\x89PNG")) || len(made) == 0 {
		t.Errorf("what the model sees in a state of two tracks: %.200s", last)
	}
	file, contents := s.report(t, "sounds", ui.ReportOptions{})
	if contents.Images != 4 || strings.Count(file, "data:audio/wav;base64,") != 2 {
		t.Errorf("a report of two images with their sounds: %+v", contents)
	}
	run, err := results.Read(t.Context(), s.Bus, "sounds")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := run.Write(t.Context(), s.Bus, dir); err != nil {
		t.Fatal(err)
	}
	if wav, err := os.ReadFile(filepath.Join(dir, "a-001.wav")); err != nil || !bytes.Equal(wav, body) {
		t.Errorf("the file of the sound has %d bytes, %v; want %d", len(wav), err, len(body))
	}
}

// The pages of a group and of a sample draw the waveform of a sound and play it, of a server and from a file.
func TestPage_Sound(t *testing.T) {
	b := startBrowser(t)
	s := startSounds(t)
	const drawn = `[...document.querySelectorAll("canvas.wave")].filter((c) =>
		c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)).length === `
	see := func(p *tab, where string) {
		p.to("#/runs/sounds/a")
		p.until(drawn + "2")
		p.save(where + "-group")
		p.to("#/runs/sounds/a/1")
		p.shows("Sample 1", "2 channels at 8000 Hz")
		p.until(drawn + "1")
		p.until(`(() => { const a = document.querySelector("audio"); a.preload = "auto"; return a.duration > 0.09; })()`)
		p.save(where + "-sample")
	}
	see(b.open(t, s.url), "sounds")
	file, _ := s.report(t, "sounds", ui.ReportOptions{})
	s.stop()
	path := filepath.Join(t.TempDir(), "sounds.html")
	if err := os.WriteFile(path, []byte(file), 0o644); err != nil {
		t.Fatal(err)
	}
	see(b.open(t, "file://"+path), "sounds-file")
}
