package media

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// ErrNoFFmpeg says why there is no mp4.
var ErrNoFFmpeg = errors.New("mp4 needs the program ffmpeg in the PATH: install it, and start again")

// converting bounds how many mp4 are made at once: one takes the cores that there are.
var converting = make(chan struct{}, 1)

// FFmpeg returns the program that makes mp4, or ErrNoFFmpeg.
func FFmpeg() (string, error) {
	path, err := exec.LookPath("ffmpeg")
	if err != nil {
		return "", ErrNoFFmpeg
	}
	return path, nil
}

// MP4 returns a video, an animated PNG, as mp4 (H.264, with sound, a WAV, as AAC; nil: none), made by ffmpeg. Odd sizes
// get a row or a column of black. Its bytes depend on the version of ffmpeg: they are for people, and have no digest.
func MP4(ctx context.Context, video, sound []byte) ([]byte, error) {
	program, err := FFmpeg()
	if err != nil {
		return nil, err
	}
	select {
	case converting <- struct{}{}:
		defer func() { <-converting }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	dir, err := os.MkdirTemp("", "meander-mp4-")
	if err != nil {
		return nil, fmt.Errorf("make mp4: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // a folder of its own
	out := filepath.Join(dir, "out.mp4")
	args := []string{"-nostdin", "-v", "error", "-protocol_whitelist", "file"}
	for _, in := range []struct {
		format string
		data   []byte
	}{{"apng", video}, {"wav", sound}} {
		if in.data == nil {
			continue
		}
		path := filepath.Join(dir, "in."+in.format)
		if err := os.WriteFile(path, in.data, 0o600); err != nil {
			return nil, fmt.Errorf("make mp4: %w", err)
		}
		args = append(args, "-f", in.format, "-i", path)
	}
	args = append(args, "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p",
		"-c:a", "aac", "-movflags", "+faststart", "-f", "mp4", out)
	if said, err := exec.CommandContext(ctx, program, args...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make mp4 with %s: %w: %.300s", program, err, strings.TrimSpace(string(said)))
	}
	data, err := os.ReadFile(out)
	if err != nil {
		return nil, fmt.Errorf("make mp4: %w", err)
	}
	return data, nil
}
