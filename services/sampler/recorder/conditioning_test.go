package recorder

import (
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

// Samples of one text have one entry, whichever of them encoded it; others have others. Entries that no one asked for
// in a while go.
func TestTexts_Of(t *testing.T) {
	var x texts
	plain := &schemas.Sampling{}
	text := func(prompt string) *model.Conditioning { return &model.Conditioning{Prompt: prompt} }
	first := x.entryOf(pairOf(plain, text("a"), text("")))
	first.at.Store(time.Now().UnixNano())
	if !first.fresh() || x.entryOf(pairOf(plain, text("a"), text(""))) != first {
		t.Error("the same texts have another entry")
	}
	for name, pair := range map[string]textPair{
		"another prompt": pairOf(plain, text("b"), text("")), "another negative prompt": pairOf(plain, text("a"), text("b")), "no guidance": pairOf(plain, text("a"), nil),
		"another second text": pairOf(&schemas.Sampling{Prompt2: "b"}, text("a"), text("")),
		"another third text":  pairOf(&schemas.Sampling{Prompt3: "b"}, text("a"), text("")),
		"cut":                 pairOf(plain, &model.Conditioning{Prompt: "a", Cut: 1}, text("")),
	} {
		if x.entryOf(pair) == first {
			t.Errorf("%s has the same entry", name)
		}
	}
	first.at.Store(time.Now().Add(-2 * textsFresh).UnixNano())
	if x.entryOf(pairOf(plain, text("c"), nil)); first.fresh() ||
		x.entryOf(pairOf(plain, text("a"), text(""))) == first {
		t.Error("an old entry is still there")
	}
}
