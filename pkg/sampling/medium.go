package sampling

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// MediumSize returns how large the media of a file are: of a sound a media.SoundSize, else a media.Size.
func MediumSize(m *schemas.Medium) fmt.Stringer {
	if m.Kind == schemas.KindAudio {
		return media.SoundSize{Samples: int(m.Samples), Channels: int(m.Channels), Rate: int(m.Rate)}
	}
	return media.Size{Frames: int(max(1, m.Frames)), Height: int(m.Height), Width: int(m.Width)}
}

// DecodeMedium reads the bytes of a file of a sample. An error: they are not of its format and size.
func DecodeMedium(m *schemas.Medium, file []byte) (made media.Media, err error) {
	switch size := MediumSize(m).(type) {
	case media.SoundSize:
		made.Sound, err = media.DecodeWAV(file, size)
	case media.Size:
		made, err = media.Decode(file, size)
	}
	return made, err
}
