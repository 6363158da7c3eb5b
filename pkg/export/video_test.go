package export_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/media/mediatest"
	"github.com/meander-rl/meander/pkg/results"
)

// A video is in the files as it is stored and, where that is asked for, as mp4.
func TestWrite_Videos(t *testing.T) {
	plane := serveClass(t, "WanPipeline")
	add(t, plane.Bus, "g")
	mediatest.FFmpeg(t, false)
	o := export.DatasetOptions{Format: "webdataset", Folder: t.TempDir(), Bytes: 1 << 30, MP4: true}
	if _, err := export.WriteDataset(t.Context(), plane.Bus, "r", o); !errors.Is(err, media.ErrNoFFmpeg) {
		t.Errorf("without ffmpeg: %v", err)
	}
	r, err := results.Read(t.Context(), plane.Bus, "r")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := r.Write(t.Context(), plane.Bus, dir); err != nil || r.Summary.NoMP4 != media.ErrNoFFmpeg.Error() {
		t.Errorf("results without ffmpeg: %q, %v", r.Summary.NoMP4, err)
	}
	mediatest.FFmpeg(t, true)
	r.Summary.NoMP4 = ""
	err = r.Write(t.Context(), plane.Bus, dir)
	made, readErr := os.ReadFile(filepath.Join(dir, "g-001.mp4"))
	if err != nil || readErr != nil || r.Summary.NoMP4 != "" || !bytes.HasPrefix(made, []byte(mediatest.Head)) {
		t.Errorf("results with ffmpeg: %q, %v, %v, %d bytes", r.Summary.NoMP4, err, readErr, len(made))
	}
	x := write(t, plane.Bus, o)
	parts := untar(t, filepath.Join(o.Folder, x.Shards[0].File))
	apng, mp4 := parts["g_000001.apng"], parts["g_000001.mp4"]
	if len(apng) == 0 || !bytes.Equal(mp4, append([]byte(mediatest.Head), apng...)) {
		t.Errorf("webdataset: %d bytes of video, %d of mp4", len(apng), len(mp4))
	}
	o.Format, o.Folder = "parquet", t.TempDir()
	x = write(t, plane.Bus, o)
	rows, err := parquet.ReadFile[struct {
		Video []byte `parquet:"video,optional"`
		MP4   *struct {
			Bytes []byte `parquet:"bytes"`
			Path  string `parquet:"path"`
		} `parquet:"mp4,optional"`
	}](filepath.Join(o.Folder, x.Shards[0].File))
	if err != nil || len(rows) != 2 || rows[1].MP4 == nil || rows[1].MP4.Path != "g_000001.mp4" ||
		!bytes.Equal(rows[1].MP4.Bytes, mp4) || !bytes.Equal(rows[1].Video, apng) {
		t.Errorf("parquet: %v, %d rows", err, len(rows))
	}
}
