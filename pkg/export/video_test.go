package export_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/media/mediatest"
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
	mediatest.FFmpeg(t, true)
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
