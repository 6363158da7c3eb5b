package media

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
)

// Sound is a sampled sound: the values of all channels of a sample, then those of the next. The zero value is no sound.
type Sound struct {
	Values   []float32
	Channels int
	// Rate is how many samples there are in a second.
	Rate int
}

// Empty reports whether there is no sound.
func (s Sound) Empty() bool { return len(s.Values) == 0 || s.Channels < 1 }

// SoundSize is how much sound there is: Samples of Channels, Rate of them in a second.
type SoundSize struct{ Samples, Channels, Rate int }

// String says what a size is, for errors: "96000 samples of 2 channels, 48000 Hz".
func (s SoundSize) String() string {
	return fmt.Sprintf("%d samples of %d channels, %d Hz", s.Samples, s.Channels, s.Rate)
}

// Size returns how much sound there is.
func (s Sound) Size() SoundSize {
	return SoundSize{len(s.Values) / max(1, s.Channels), s.Channels, s.Rate}
}

// bytes returns the values as little-endian float32.
func (s Sound) bytes(to []byte) []byte {
	for _, x := range s.Values {
		to = binary.LittleEndian.AppendUint32(to, math.Float32bits(x))
	}
	return to
}

// Digest returns the SHA-256 in hex of the values, little-endian.
func (s Sound) Digest() string {
	sum := sha256.Sum256(s.bytes(nil))
	return hex.EncodeToString(sum[:])
}

// A WAV file is "RIFF", a size, "WAVE" and chunks, each with a name and a size: "fmt " says what the values are, "data"
// has them. See "Multimedia Programming Interface and Data Specifications 1.0", and of floats its "New Multimedia Data
// Types and Data Techniques", both of Microsoft.
const (
	floatValues = 3 // WAVE_FORMAT_IEEE_FLOAT
	valueBytes  = 4
)

// EncodeWAV returns a sound as a WAV file of 32-bit floats, which loses nothing.
func EncodeWAV(s Sound) ([]byte, error) {
	n := valueBytes * len(s.Values)
	if s.Empty() || len(s.Values)%s.Channels > 0 || s.Channels > math.MaxUint16/valueBytes || s.Rate < 1 ||
		n > math.MaxInt32 {
		return nil, fmt.Errorf("encode wav: %v; must be a sound", s.Size())
	}
	u16, u32 := binary.LittleEndian.AppendUint16, binary.LittleEndian.AppendUint32
	out := append(u32([]byte("RIFF"), uint32(50+n)), "WAVEfmt "...)
	out = u16(u16(u32(out, 18), floatValues), uint16(s.Channels))
	out = u32(u32(out, uint32(s.Rate)), uint32(s.Rate*s.Channels*valueBytes))
	out = u16(u16(u16(out, uint16(s.Channels*valueBytes)), 8*valueBytes), 0)
	out = u32(u32(append(out, "fact"...), 4), uint32(s.Size().Samples))
	return s.bytes(u32(append(out, "data"...), uint32(n))), nil
}

// DecodeWAV reads a WAV file of 32-bit floats. One of another size than want is an error before any value is read.
func DecodeWAV(file []byte, want SoundSize) (Sound, error) {
	if len(file) < 12 || string(file[:4]) != "RIFF" || string(file[8:12]) != "WAVE" {
		return Sound{}, errors.New("decode wav: no WAV file")
	}
	var s Sound
	for rest := file[12:]; len(rest) >= 8; {
		name, n := string(rest[:4]), binary.LittleEndian.Uint32(rest[4:])
		if rest = rest[8:]; uint64(n) > uint64(len(rest)) {
			return Sound{}, fmt.Errorf("decode wav: %q: %d bytes; the file has %d", name, n, len(rest))
		}
		data := rest[:n]
		switch rest = bytes.TrimPrefix(rest[n:], make([]byte, n%2)); {
		case name == "fmt " && n >= 16:
			kind, bits := binary.LittleEndian.Uint16(data), binary.LittleEndian.Uint16(data[14:])
			if kind != floatValues || bits != 8*valueBytes {
				return Sound{}, fmt.Errorf("decode wav: values of type %d with %d bits; must be of %d with %d, floats",
					kind, bits, floatValues, 8*valueBytes)
			}
			s.Channels, s.Rate = int(binary.LittleEndian.Uint16(data[2:])), int(binary.LittleEndian.Uint32(data[4:]))
		case name == "data":
			got := SoundSize{int(n) / valueBytes / max(1, s.Channels), s.Channels, s.Rate}
			if got != want || s.Channels < 1 || int(n) != valueBytes*got.Samples*got.Channels {
				return Sound{}, fmt.Errorf("decode wav: %v in %d bytes; must be %v", got, n, want)
			}
			s.Values = make([]float32, n/valueBytes)
			for i := range s.Values {
				s.Values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[valueBytes*i:]))
			}
			return s, nil
		}
	}
	return Sound{}, errors.New("decode wav: no values")
}
