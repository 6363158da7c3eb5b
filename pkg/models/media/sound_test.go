package media_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// A sound comes back from its file with the same bits.
func TestWAV(t *testing.T) {
	s := media.Sound{
		Values:   []float32{0, -1, 1.5, float32(math.Copysign(0, -1)), math.SmallestNonzeroFloat32, 0.1},
		Channels: 2, Rate: 44100,
	}
	file, err := media.EncodeWAV(s)
	if err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint32(file[4:]); int(n) != len(file)-8 || !bytes.HasPrefix(file, []byte("RIFF")) {
		t.Errorf("a file of %d bytes says %d", len(file), n)
	}
	// A chunk of an odd length before the data, which other programs write.
	other := slices.Concat(file[:38], []byte("LIST\x03\x00\x00\x00abc\x00"), file[38:])
	for _, file := range [][]byte{file, other} {
		got, err := media.DecodeWAV(file, s.Size())
		if err != nil || got.Digest() != s.Digest() || got.Rate != s.Rate || got.Channels != 2 {
			t.Errorf("%v, %v; want %v", got, err, s)
		}
	}
	for name, c := range map[string]struct {
		file  []byte
		want  media.SoundSize
		fault string
	}{
		"another size": {file, media.SoundSize{Samples: 2, Channels: 3, Rate: 44100}, "3 samples of 2 channels, 44100 Hz in 24 bytes; must be 2 samples of 3"},
		"no file":      {[]byte("\x89PNG\r\n\x1a\n0000"), s.Size(), "no WAV file"},
		"cut":          {file[:len(file)-1], s.Size(), `"data": 24 bytes; the file has 23`},
		"no data":      {file[:50], s.Size(), "no values"},
		"integers":     {append(append(slices.Clone(file[:20]), 1, 0), file[22:]...), s.Size(), "values of type 1"},
	} {
		if _, err := media.DecodeWAV(c.file, c.want); err == nil || !strings.Contains(err.Error(), c.fault) {
			t.Errorf("%s: %v; want %q", name, err, c.fault)
		}
	}
	for _, s := range []media.Sound{
		{},
		{Values: []float32{1}, Channels: 2, Rate: 1},
		{Values: []float32{1}, Channels: 1},
	} {
		if _, err := media.EncodeWAV(s); err == nil {
			t.Errorf("%v is encoded", s)
		}
	}
}

func FuzzDecodeWAV(f *testing.F) {
	file, err := media.EncodeWAV(media.Sound{Values: []float32{1, 2}, Channels: 1, Rate: 8000})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(file)
	f.Fuzz(func(t *testing.T, file []byte) {
		want := media.SoundSize{Samples: 2, Channels: 1, Rate: 8000}
		if s, err := media.DecodeWAV(file, want); err == nil && s.Size() != want {
			t.Errorf("%v", s)
		}
	})
}
