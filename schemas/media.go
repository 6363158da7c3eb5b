package schemas

import (
	"fmt"
	"slices"
)

// Medium is a file of a sample. Exactly one of Data and Ref carries the bytes. None of the formats loses anything.
type Medium struct {
	// Kind is image, video or audio.
	Kind string `msgpack:"kind" enum:"MediaKinds"`
	// Track is the track of the state that it is decoded from.
	Track string `msgpack:"track,omitempty" form:"token" absent:"the state has one track"`
	// Format of the bytes: an image is png, a video apng, an animated PNG, a sound wav, of 32-bit floats.
	Format string `msgpack:"format" enum:"MediaFormats"`
	// Width and Height are of images and videos.
	Width  int64 `msgpack:"width,omitempty" range:"0..MaxSide" unit:"pixels"`
	Height int64 `msgpack:"height,omitempty" range:"0..MaxSide" unit:"pixels"`
	// Frames is how many a video has, FPS how many of them are shown in a second.
	Frames int64   `msgpack:"frames,omitempty" range:"0..MaxFrames"`
	FPS    float64 `msgpack:"fps,omitempty" range:"0..MaxFPS"`
	// Samples is how many a sound has in each of its Channels, Rate how many of them are played in a second.
	Samples  int64 `msgpack:"samples,omitempty" range:"0..MaxAudio"`
	Channels int64 `msgpack:"channels,omitempty" range:"0..MaxAudio"`
	Rate     int64 `msgpack:"rate,omitempty" range:"0..MaxAudioRate" unit:"Hz"`
	// Digest is the sha-256, in lower-case hex, of the pixels: frame by frame, RGB, 8 bits, row-major; or of a sound:
	// little-endian float32, the channels of each sample together.
	Digest string `msgpack:"digest" form:"sha256"`
	Data   []byte `msgpack:"data,omitempty" size:"1..MaxInlineImage" digest:"-"`
	Ref    *Ref   `msgpack:"ref,omitempty" digest:"-"`
}

// Medium returns the file of a kind; nil: the sample has none.
func (e *Trajectory) Medium(kind string) *Medium {
	for i := range e.Media {
		if e.Media[i].Kind == kind {
			return &e.Media[i]
		}
	}
	return nil
}

// MediumOf returns the file of a kind, or else of a track: its video before its image; nil: the sample has none.
func (e *Trajectory) MediumOf(name string) *Medium {
	of := e.Medium(name)
	for i := len(e.Media) - 1; i >= 0 && of == nil; i-- {
		if e.Media[i].Track == name {
			of = &e.Media[i]
		}
	}
	return of
}

// MediaKinds lists the kinds of the files that a sample has.
func (e *Trajectory) MediaKinds() (kinds []string) {
	for i := range e.Media {
		kinds = append(kinds, e.Media[i].Kind)
	}
	return kinds
}

// Shown returns the file of what a sample shows: its video or, of one frame, its image; nil: it has none.
func (e *Trajectory) Shown() *Medium {
	if video := e.Medium(KindVideo); video != nil {
		return video
	}
	return e.Medium(KindImage)
}

// NameTracks notes of which track each file is, where the state has several: sound of the last one, pixels of the
// first.
func (e *Trajectory) NameTracks() {
	if len(e.Tracks) == 0 {
		return
	}
	for i := range e.Media {
		of := e.Tracks[0]
		if e.Media[i].Kind == KindAudio {
			of = e.Tracks[len(e.Tracks)-1]
		}
		e.Media[i].Track = of.Name
	}
}

// checkRules checks that exactly one of data and ref is given, and that the file has what its kind has.
func (m *Medium) checkRules(f *faults) {
	if (m.Data == nil) == (m.Ref == nil) {
		came := "both"
		if m.Data == nil {
			came = "none"
		}
		f.add("data", came, "must be exactly one of data and ref")
	}
	kind := slices.Index(MediaKinds, m.Kind)
	if kind < 0 {
		return
	}
	if format := MediaFormats[kind]; m.Format != format && slices.Contains(MediaFormats, m.Format) {
		f.add("format", quote(m.Format), "must be "+format+", that of "+m.Kind)
	}
	for _, x := range []struct {
		name  string
		value float64
		kinds []string
	}{
		{"width", float64(m.Width), MediaKinds[:2]},
		{"height", float64(m.Height), MediaKinds[:2]},
		{"frames", float64(m.Frames), MediaKinds[1:2]},
		{"fps", m.FPS, MediaKinds[1:2]},
		{"samples", float64(m.Samples), MediaKinds[2:]},
		{"channels", float64(m.Channels), MediaKinds[2:]},
		{"rate", float64(m.Rate), MediaKinds[2:]},
	} {
		switch has := slices.Contains(x.kinds, m.Kind); {
		case has && x.value == 0:
			f.add(x.name, "0", "must be positive: it is of "+m.Kind)
		case !has && x.value != 0:
			f.add(x.name, formatFloat(x.value), "must be absent: it is not of "+m.Kind)
		}
	}
	if n := m.Samples * m.Channels; m.Samples <= MaxAudio && m.Channels <= MaxAudio && n > MaxAudio {
		f.add("samples", fmt.Sprintf("%d of %d channels", m.Samples, m.Channels),
			fmt.Sprintf("must be at most %d in all", MaxAudio))
	}
}

// checkMedia checks the files of a completed sample that ends after the step before end.
func (e *Trajectory) checkMedia(f *faults, end int64) {
	switch {
	case len(e.Media) > 0 && !e.Decoded():
		f.add("media", "present",
			fmt.Sprintf("must be absent: the sample stops at step %d with noise in it, and stop.decode is false", end))
		return
	case len(e.Media) == 0 && e.Decoded():
		f.add("media", "none", "must be present when completed")
	}
	for i := range e.Media {
		m, g := &e.Media[i], f.inItem("media", i)
		if i > 0 && slices.Index(MediaKinds, m.Kind) <= slices.Index(MediaKinds, e.Media[i-1].Kind) {
			g.add("kind", quote(m.Kind), "must come at most once, in the order image, video, audio")
		}
		if of := slices.IndexFunc(e.Tracks, func(t Track) bool { return t.Name == m.Track }); m.Track != "" && of < 0 {
			g.add("track", quote(m.Track), "must be a track of the state")
		}
	}
	v := e.Medium(KindVideo)
	if asked := e.Frames > 1 && e.Medium(KindImage) != nil; asked != (v != nil) {
		f.add("media", map[bool]string{true: "no video", false: "a video"}[asked],
			"must have one beside the image of a sample of several frames, and none else")
	} else if v != nil && (v.Frames != e.Frames || v.Height != e.Height || v.Width != e.Width) {
		f.add("media", fmt.Sprintf("a video of %d of %d x %d pixels", v.Frames, v.Height, v.Width),
			fmt.Sprintf("must be of %d of %d x %d, the sample's", e.Frames, e.Height, e.Width))
	}
}
