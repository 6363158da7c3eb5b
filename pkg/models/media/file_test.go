package media_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// video returns frames of height x width opaque pixels, all different.
func video(frames, height, width int) (m media.Media) {
	for f := range frames {
		img := image.NewNRGBA(image.Rect(0, 0, width, height))
		for i := range img.Pix {
			img.Pix[i] = uint8(31*i+i/7+40*f) | 255*uint8(i%4/3)
		}
		m.Frames = append(m.Frames, img)
	}
	return m
}

func encodedVideo(t testing.TB, m media.Media) []byte {
	t.Helper()
	file, err := media.EncodeVideo(m, 12.5)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func TestVideo(t *testing.T) {
	for _, m := range []media.Media{video(1, 3, 4), video(2, 3, 4), video(9, 160, 240)} {
		file := encodedVideo(t, m)
		if size, err := media.ReadSize(file); size != m.Size() || err != nil {
			t.Errorf("size %v, %v; want %v", size, err, m.Size())
		}
		got, err := media.Decode(file, m.Size())
		if err != nil || got.Size() != m.Size() || got.Digest() != m.Digest() {
			t.Fatalf("%v: %v of digest %s, %v", m.Size(), got.Size(), got.Digest(), err)
		}
		first, err := media.Decode(stripped(file), media.ImageSize(m.Size().Height, m.Size().Width))
		if err != nil || first.Digest() != media.Of(m.Frames[0]).Digest() {
			t.Errorf("programs that know no animations must see the first frame: %v", err)
		}
		short := m.Size()
		short.Frames++
		if _, err := media.Decode(file, short); err == nil ||
			!strings.Contains(err.Error(), "must be "+short.String()) {
			t.Errorf("another number of frames: %v", err)
		}
	}
	if _, err := media.Decode(encodedVideo(t, video(2, 3, 4)), media.Size{}); err == nil {
		t.Error("a video passes for an image")
	}
	clear := video(2, 3, 4)
	clear.Frames[1].Pix[3] = 0
	for name, m := range map[string]media.Media{
		"transparent": clear, "empty": {},
		"odd": {Frames: []*image.NRGBA{video(1, 3, 4).Frames[0], video(1, 3, 5).Frames[0]}},
	} {
		if _, err := media.EncodeVideo(m, 8); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for _, fps := range []float64{0, -1, 1e6} {
		if _, err := media.EncodeVideo(video(2, 3, 4), fps); err == nil {
			t.Errorf("%g frames a second: no error", fps)
		}
	}
}

// chunks cuts a PNG into its chunks, the signature first.
func chunks(file []byte) (list [][]byte) {
	list, file = append(list, file[:8]), file[8:]
	for len(file) > 0 {
		n := 12 + binary.BigEndian.Uint32(file)
		list, file = append(list, file[:n]), file[n:]
	}
	return list
}

// stripped is a file without the chunks of an animation.
func stripped(file []byte) []byte {
	return slices.Concat(slices.DeleteFunc(chunks(file), func(c []byte) bool {
		return len(c) > 8 && (bytes.Contains(c[4:8], []byte("acTL")) || bytes.Contains(c[4:8], []byte("fcTL")) ||
			bytes.Contains(c[4:8], []byte("fdAT")))
	})...)
}

// sealed corrects the checksum of a chunk.
func sealed(chunk []byte) []byte {
	c := slices.Clone(chunk)
	binary.BigEndian.PutUint32(c[len(c)-4:], crc32.ChecksumIEEE(c[4:len(c)-4]))
	return c
}

// Files that lie are refused, before pixels of what they do not say are read.
func TestDecode_refuses(t *testing.T) {
	m := video(3, 8, 8)
	whole := chunks(encodedVideo(t, m)) // signature IHDR acTL fcTL IDAT fcTL fdAT fcTL fdAT IEND
	for name, file := range map[string][][]byte{
		"fewer frames than it says": slices.Concat(whole[:7], whole[9:]),
		"more frames than it says":  slices.Concat(whole[:2], [][]byte{count(whole[2], 2)}, whole[3:]),
		"no frames":                 slices.Concat(whole[:2], [][]byte{count(whole[2], 0)}, whole[3:]),
		"two billion frames":        slices.Concat(whole[:2], [][]byte{count(whole[2], 1<<31)}, whole[3:]),
		"a missing chunk":           slices.Concat(whole[:6], whole[7:]),
		"an image outside":          slices.Concat(whole[:3], whole[4:]),
		"no end":                    whole[:9],
		"a frame of another size":   slices.Concat(whole[:5], [][]byte{changed(whole[5], 12+3, 9)}, whole[6:]),
		"a frame that is blended":   slices.Concat(whole[:5], [][]byte{changed(whole[5], 8+25, 1)}, whole[6:]),
		"pixels of no frame":        slices.Concat(whole[:5], whole[6:]),
		"a wrong checksum": slices.Concat(whole[:6], [][]byte{append(slices.Clone(whole[6][:12]),
			append([]byte{whole[6][12] ^ 1}, whole[6][13:]...)...)}, whole[7:]),
		"a second image":    slices.Concat(whole[:7], [][]byte{whole[4]}, whole[7:]),
		"nothing":           {},
		"a signature alone": whole[:1],
	} {
		if got, err := media.Decode(slices.Concat(file...), m.Size()); err == nil {
			t.Errorf("%s: decoded to %v", name, got.Size())
		}
	}
}

func count(chunk []byte, frames uint32) []byte {
	c := slices.Clone(chunk)
	binary.BigEndian.PutUint32(c[8:], frames)
	return sealed(c)
}

func changed(chunk []byte, at int, to byte) []byte {
	c := slices.Clone(chunk)
	c[at] = to
	return sealed(c)
}

func FuzzDecode(f *testing.F) {
	f.Add(encodedVideo(f, video(3, 8, 8)))
	png, err := media.EncodePNG(video(1, 8, 8).Frames[0])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(png)
	f.Fuzz(func(t *testing.T, file []byte) {
		size, err := media.ReadSize(file)
		if err != nil || size.Frames > 64 || size.Height > 64 || size.Width > 64 {
			return
		}
		if m, err := media.Decode(file, size); err == nil && m.Size() != size {
			t.Errorf("%v; the file says %v", m.Size(), size)
		}
	})
}

func TestSpaced(t *testing.T) {
	m := video(9, 2, 2)
	for n, want := range map[int][]int{1: {4}, 2: {0, 8}, 3: {0, 4, 8}, 5: {0, 2, 4, 6, 8}, 4: {0, 3, 5, 8}, 9: {
		0, 1, 2,
		3, 4, 5, 6, 7, 8,
	}, 12: {0, 1, 2, 3, 4, 5, 6, 7, 8}} {
		var got []int
		for _, f := range m.Spaced(n).Frames {
			got = append(got, slices.Index(m.Frames, f))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d of 9 frames: %v, want %v", n, got, want)
		}
	}
	if got := video(4, 2, 2).Middle().Size(); got != media.ImageSize(2, 2) || !(media.Media{}).Middle().Empty() {
		t.Errorf("the middle of 4 frames: %v", got)
	}
}
