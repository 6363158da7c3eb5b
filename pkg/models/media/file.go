package media

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/draw"
	"image/png"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// An animated PNG is a PNG with these chunks besides: acTL (frames, plays) before the pixels, fcTL (number, size, place
// and time) before those of each frame, and fdAT in the place of IDAT after the first frame. See "Portable Network
// Graphics, third edition", section 11.3.6.
const (
	signature    = "\x89PNG\r\n\x1a\n"
	controlBytes = 26 // fcTL
	numberBytes  = 4  // at the start of fdAT: chunks of the animation are numbered
)

// EncodeVideo returns media as an animated PNG, which loses nothing and plays without end. fps is rounded to a
// hundredth; it must be 0.01 to 655. Frames that are not all opaque, or all not, are an error.
func EncodeVideo(m Media, fps float64) ([]byte, error) {
	delay := math.Round(100 * fps)
	switch {
	case m.Empty():
		return nil, errors.New("encode video: no frames")
	case !(delay >= 1 && delay <= math.MaxUint16):
		return nil, fmt.Errorf("encode video: fps: %g; must be 0.01 to 655", fps)
	}
	var header, out []byte
	number := uint32(0)
	for i, img := range m.Frames {
		file, err := EncodePNG(img)
		if err != nil {
			return nil, fmt.Errorf("encode video: frame %d: %w", i, err)
		}
		err = eachChunk(file, func(kind string, data []byte) error {
			switch {
			case kind == "IHDR" && i == 0:
				header = data
				out = appendChunk([]byte(signature), kind, data)
				out = appendChunk(out, "acTL", binary.BigEndian.AppendUint64(nil, uint64(len(m.Frames))<<32))
			case kind == "IHDR" && !bytes.Equal(data, header):
				return errors.New("of another size, or transparent where the first is not; all frames must be alike")
			case kind == "IDAT" && i == 0:
				out = appendChunk(out, kind, data)
			case kind == "IDAT":
				out = appendChunk(out, "fdAT", binary.BigEndian.AppendUint32(nil, number), data)
				number++
			}
			if kind == "IHDR" {
				control := binary.BigEndian.AppendUint32(nil, number)
				control = append(control, header[:8]...)      // width and height
				control = append(control, make([]byte, 8)...) // at the left and top
				control = binary.BigEndian.AppendUint16(control, 100)
				control = binary.BigEndian.AppendUint16(control, uint16(delay))
				out = appendChunk(out, "fcTL", control, []byte{0, 0}) // the frame stays, and replaces the one before
				number++
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("encode video: frame %d: %w", i, err)
		}
	}
	return appendChunk(out, "IEND"), nil
}

// Decode reads a PNG file: the frame of an image or, of an animated one, all frames. Media of another size than want
// are an error before any pixel is read; a zero want accepts every image and refuses videos. Frames of an animation
// must cover all of it, each replacing the one before.
func Decode(file []byte, want Size) (Media, error) {
	size, err := ReadSize(file)
	switch {
	case err != nil:
		return Media{}, err
	case want == Size{} && size.Frames > 1:
		return Media{}, fmt.Errorf("a video of %d frames; must be an image", size.Frames)
	case want != Size{} && size != want:
		return Media{}, fmt.Errorf("%v; must be %v", size, want)
	case size.Frames == 1:
		img, err := decodeImage(file)
		return Of(img), err
	}
	return decodeFrames(file, size)
}

// ReadSize returns the size of the media in a PNG file, without reading pixels.
func ReadSize(file []byte) (Size, error) {
	c, err := png.DecodeConfig(bytes.NewReader(file))
	if err != nil {
		return Size{}, err
	}
	size := ImageSize(c.Height, c.Width)
	err = eachBefore(file, func(kind string, data []byte) error {
		if kind == "acTL" && len(data) == 8 {
			n := binary.BigEndian.Uint32(data)
			if n < 1 || n > math.MaxInt32 {
				return fmt.Errorf("acTL: %d frames; must be 1 to %d", n, math.MaxInt32)
			}
			size.Frames = int(n)
		}
		return nil
	})
	if err != nil {
		return Size{}, err
	}
	return size, nil
}

// eachBefore is eachChunk up to the first pixels.
func eachBefore(file []byte, visit func(kind string, data []byte) error) error {
	errDone := errors.New("done")
	err := eachChunk(file, func(kind string, data []byte) error {
		if kind == "IDAT" {
			return errDone
		}
		return visit(kind, data)
	})
	if errors.Is(err, errDone) {
		return nil
	}
	return err
}

// decodeFrames reads an animated PNG of that size, frame by frame: each is made a PNG of its own, which image/png
// reads.
func decodeFrames(file []byte, size Size) (m Media, err error) {
	var header, frame []byte // frame is the PNG of the frame that is being read
	number := uint32(0)
	finish := func() error {
		if frame == nil {
			return nil
		}
		img, err := decodeImage(appendChunk(frame, "IEND"))
		if err != nil {
			return fmt.Errorf("frame %d: %w", len(m.Frames), err)
		}
		m.Frames, frame = append(m.Frames, img), nil
		return nil
	}
	next := func(data []byte) error { // the numbers of the animation's chunks
		if len(data) < numberBytes || binary.BigEndian.Uint32(data) != number {
			return fmt.Errorf("frame %d: chunk %d is missing", len(m.Frames), number)
		}
		number++
		return nil
	}
	err = eachChunk(file, func(kind string, data []byte) error {
		switch kind {
		case "IHDR":
			header = data
		case "fcTL":
			if err := errors.Join(next(data), finish()); err != nil {
				return err
			}
			if len(m.Frames) == size.Frames {
				return fmt.Errorf("more than %d frames, which it says that it has", size.Frames)
			}
			if err := wholeFrame(data, header); err != nil {
				return fmt.Errorf("frame %d: %w", len(m.Frames), err)
			}
			frame = appendChunk([]byte(signature), "IHDR", header)
		case "IDAT":
			if frame == nil || len(m.Frames) > 0 {
				return errors.New("an image outside the animation; the first frame must be the image")
			}
			frame = appendChunk(frame, kind, data)
		case "fdAT":
			if err := next(data); err != nil || frame == nil {
				return errors.Join(err, errors.New("pixels that are of no frame"))
			}
			frame = appendChunk(frame, "IDAT", data[numberBytes:])
		}
		return nil
	})
	if err == nil {
		err = finish()
	}
	if err == nil && len(m.Frames) != size.Frames {
		err = fmt.Errorf("%d frames; must be %d, as it says", len(m.Frames), size.Frames)
	}
	if err != nil {
		return Media{}, err
	}
	return m, nil
}

// wholeFrame refuses a frame that covers a part of the animation, or is drawn onto the one before.
func wholeFrame(control, header []byte) error {
	if len(control) != controlBytes || !bytes.Equal(control[4:12], header[:8]) || control[25] != 0 {
		return errors.New("it covers a part of the animation, or is blended with it; each must replace the one before")
	}
	return nil
}

// eachChunk calls visit with each chunk of a PNG file, in order, up to IEND or until it returns an error, which is
// returned. A file that ends within a chunk, or whose checksums are wrong, is an error.
func eachChunk(file []byte, visit func(kind string, data []byte) error) error {
	rest, ok := bytes.CutPrefix(file, []byte(signature))
	if !ok {
		return errors.New("not a PNG file")
	}
	for {
		if len(rest) < 12 {
			return errors.New("the PNG file ends too early")
		}
		n := uint64(binary.BigEndian.Uint32(rest))
		if uint64(len(rest)) < 12+n {
			return errors.New("the PNG file ends too early")
		}
		kind, data := string(rest[4:8]), rest[8:8+n]
		if crc32.ChecksumIEEE(rest[4:8+n]) != binary.BigEndian.Uint32(rest[8+n:]) {
			return fmt.Errorf("chunk %q: wrong checksum", kind)
		}
		if err := visit(kind, data); err != nil {
			return err
		}
		if rest = rest[12+n:]; kind == "IEND" {
			return nil
		}
	}
}

// appendChunk adds a chunk with its length and checksum; data may be in parts.
func appendChunk(out []byte, kind string, data ...[]byte) []byte {
	n := 0
	for _, part := range data {
		n += len(part)
	}
	out = binary.BigEndian.AppendUint32(out, uint32(n))
	from := len(out)
	out = append(out, kind...)
	for _, part := range data {
		out = append(out, part...)
	}
	return binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(out[from:]))
}

// decodeImage reads a PNG file as NRGBA.
func decodeImage(file []byte) (*image.NRGBA, error) {
	decoded, err := png.Decode(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	switch d := decoded.(type) {
	case *image.NRGBA:
		return d, nil
	case *image.RGBA:
		if d.Opaque() { // then both layouts have the same bytes
			return &image.NRGBA{Pix: d.Pix, Stride: d.Stride, Rect: d.Rect}, nil
		}
	}
	img := image.NewNRGBA(decoded.Bounds())
	draw.Draw(img, img.Rect, decoded, decoded.Bounds().Min, draw.Src)
	return img, nil
}

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
