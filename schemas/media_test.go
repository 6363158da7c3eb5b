package schemas_test

import (
	"slices"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// A reward function names what it judges by a kind or by a track of the state; a person is shown the pixels.
func TestTrajectory_Media(t *testing.T) {
	t.Parallel()
	var e schemas.Trajectory
	e.Tracks = []schemas.Track{{Name: "video"}, {Name: "sound"}}
	e.Media = []schemas.Medium{{Kind: schemas.KindImage}, {Kind: schemas.KindVideo}, {Kind: schemas.KindAudio}}
	e.NameTracks()
	if kinds := e.MediaKinds(); !slices.Equal(kinds, []string{"image", "video", "audio"}) {
		t.Errorf("kinds %v", kinds)
	}
	for name, want := range map[string]int{"image": 0, "video": 1, "audio": 2, "sound": 2, "depth": -1} {
		got := e.MediumOf(name)
		if want < 0 && got != nil || want >= 0 && got != &e.Media[want] {
			t.Errorf("the file of %s is %+v; want number %d", name, got, want)
		}
	}
	if e.Shown() != &e.Media[1] {
		t.Errorf("shown is %+v; want the video", e.Shown())
	}
	e.Media = e.Media[:1]
	if e.Shown() != &e.Media[0] {
		t.Errorf("shown is %+v; want the image", e.Shown())
	}
	if e.Media = nil; e.Shown() != nil || e.MediumOf("image") != nil {
		t.Error("a sample without files shows one")
	}
}
