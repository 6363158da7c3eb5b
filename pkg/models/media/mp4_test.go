package media_test

import (
	"bytes"
	"context"
	"errors"
	"image"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// The real program makes an mp4 of all frames, also of odd sizes, with the sound. What it cannot read is an error with
// its words; so is a program that is not there.
func TestMP4(t *testing.T) {
	if _, err := media.FFmpeg(); errors.Is(err, media.ErrNoFFmpeg) {
		if _, err := media.MP4(t.Context(), []byte("x"), nil); !errors.Is(err, media.ErrNoFFmpeg) {
			t.Errorf("without ffmpeg: %v", err)
		}
		t.Skip("no mp4 was made by the real program: ", err)
	}
	var m media.Media
	for i := range 9 {
		img := image.NewNRGBA(image.Rect(0, 0, 65, 33))
		for k := range img.Pix {
			img.Pix[k] = uint8(k*(i+1)) | 3
			if k%4 == 3 {
				img.Pix[k] = 255
			}
		}
		m.Frames = append(m.Frames, img)
	}
	video, err := media.EncodeVideo(m, 8)
	if err != nil {
		t.Fatal(err)
	}
	sound, err := media.EncodeWAV(media.Sound{Rate: 8000, Channels: 1, Values: make([]float32, 9000)})
	if err != nil {
		t.Fatal(err)
	}
	for name, with := range map[string][]byte{"silent": nil, "sound": sound} {
		data, err := media.MP4(t.Context(), video, with)
		if err != nil || !bytes.Contains(data[:16], []byte("ftyp")) ||
			bytes.Contains(data, []byte("mp4a")) != (with != nil) {
			t.Fatalf("%s: %d bytes, %v", name, len(data), err)
		}
		path := filepath.Join(t.TempDir(), "x.mp4")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		said, err := exec.Command("ffmpeg", "-i", path, "-f", "null", "-").CombinedOutput()
		if text := string(said); err != nil || !strings.Contains(text, "66x34") ||
			!strings.Contains(text, "frame=    9") {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
	if _, err := media.MP4(t.Context(), []byte("no video"), nil); err == nil ||
		!strings.Contains(err.Error(), "make mp4 with ") {
		t.Errorf("of no video: %v", err)
	}
	gone, end := context.WithCancel(t.Context())
	end()
	if _, err := media.MP4(gone, video, nil); err == nil {
		t.Error("an mp4 for a reader that has gone")
	}
}
