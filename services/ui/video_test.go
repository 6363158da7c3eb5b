package ui_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/media/mediatest"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// startVideos serves a page of a pipeline whose worker makes videos of nine frames, with a run of one group.
func startVideos(t *testing.T) *served {
	t.Helper()
	dir := remotetest.Folder(t, "WanPipeline", 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	s := servePage(t, nil)
	c := pipeline.DefaultConfig()
	c.Sampler.Model, c.Sampler.Engine, c.Sampler.Lane = dir, "torch="+address, "videos"
	s.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	bustest.Await(t, s.Bus, 1, schemas.StreamPolicies)
	s.publish(t, "videos", "a", "a fox runs", func(p *schemas.Prompt) {
		p.Rollout = schemas.Rollout{}
		p.Model, p.GroupSize, p.Reward = "videos", new(int64(2)), []schemas.RewardSpec{{Name: "jpeg_compressibility"}}
	})
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	return s
}

// A video is served as it is stored and, where ffmpeg is there, as mp4; else the page says why not. What the model sees
// in a state of a video is the frame in the middle.
func TestServe_Video(t *testing.T) {
	mediatest.FFmpeg(t, true)
	s := startVideos(t)
	status, header, apng := s.ask(t, http.MethodGet, "/media/videos/a/1/video", nil)
	if status != http.StatusOK || header.Get("Content-Type") != "image/apng" {
		t.Errorf("the video: %d, %v", status, header)
	}
	status, header, mp4 := s.ask(t, http.MethodGet, "/media/videos/a/1/mp4", nil)
	if status != http.StatusOK || header.Get("Content-Type") != "video/mp4" ||
		!bytes.Equal(mp4, append([]byte(mediatest.Head), apng...)) {
		t.Errorf("the mp4: %d, %v, %d bytes", status, header, len(mp4))
	}
	if why := get[object](t, s, "page")["mp4"]; why != nil {
		t.Errorf("the page says %v of ffmpeg, which is there", why)
	}
	_, _, made := s.ask(t, http.MethodGet, "/media/videos/a/1/image", nil)
	_, _, first := s.ask(t, http.MethodGet, "/media/videos/a/1/seen-0", nil)
	_, _, last := s.ask(t, http.MethodGet, "/media/videos/a/1/seen-3", nil)
	if want := decoded(t, made); decoded(t, last) != want || decoded(t, first) == want {
		t.Error("the last state is not taken for the frame in the middle, or the first one is")
	}
	if status, _, body := s.ask(t, http.MethodGet, "/media/videos/a/1/2", nil); status != http.StatusNotFound ||
		!strings.Contains(string(body), "are no image") {
		t.Errorf("the false colours of a video: %d %s", status, body)
	}
	mediatest.FFmpeg(t, false)
	const why = "mp4 needs the program ffmpeg in the PATH: install it, and start again"
	if says := get[object](t, s, "page")["mp4"]; says != why {
		t.Errorf("the page says %v", says)
	}
	if status, _, body := s.ask(t, http.MethodGet, "/media/videos/a/1/mp4", nil); status != http.StatusNotFound ||
		!strings.Contains(string(body), why) {
		t.Errorf("without ffmpeg: %d %s", status, body)
	}
}

// A video plays on the page and stops; its frames are scrubbed by keys. Its files are there to load.
func TestPage_Video(t *testing.T) {
	b := startBrowser(t)
	mediatest.FFmpeg(t, true)
	s := startVideos(t)
	p := b.open(t, s.url)
	p.to("#/runs/videos/a/0")
	const button = `document.querySelector(".video button")`
	p.until(button + `.textContent === "Pause"`)
	p.until(`Number(document.querySelector(".video input").value) > 2`) // it plays
	p.click(".video button")
	p.until(button + `.textContent === "Play"`)
	_, _, apng := s.ask(t, http.MethodGet, "/media/videos/a/0/video", nil)
	size, err := media.ReadSize(apng)
	if err != nil {
		t.Fatal(err)
	}
	want, err := media.Decode(apng, size)
	if err != nil || size.Frames != 9 {
		t.Fatal(size, err)
	}
	eval[any](p, `(() => { const r = document.querySelector(".video input"); r.value = 0; r.dispatchEvent(new Event("input")); r.focus(); })()`)
	for i := range 9 {
		p.shows(fmt.Sprintf("frame %d of 9", i+1))
		bustest.Until(t, "the frame", func() error {
			got := eval[string](p, `(() => { const c = document.querySelector(".video canvas");
				return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data].map((v) => v.toString(16).padStart(2, "0")).join(""); })()`)
			if got != hex.EncodeToString(want.Frames[i].Pix) {
				return fmt.Errorf("the pixels of frame %d are %.80s", i+1, got)
			}
			return nil
		})
		if i < 8 {
			p.press("ArrowRight")
		}
	}
	eval[any](p, `[...document.querySelectorAll("button")].find((b) => b.textContent === "Show what the model sees").click()`)
	p.shows("What the model sees in each stored state")
	p.until(`[...document.querySelectorAll(".strip img")].every((i) => i.complete && i.naturalWidth > 0)`)
	p.until(`document.querySelector(".downloads a[download$='.apng']") && document.querySelector(".downloads a[download='videos-a-0.mp4']")`)
	mediatest.FFmpeg(t, false)
	eval[any](p, `location.reload()`)
	p.shows("mp4 needs the program ffmpeg in the PATH: install it, and start again")
	p.until(`document.querySelector(".downloads button").disabled`)
	if file := os.Getenv("MEANDER_UI_AXE"); file != "" {
		p.everywhere(axe(t), "video", "#/runs/videos/a/0")
	}
}
