package recorder

import (
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/model"
)

// Samples of one text have one entry, whichever of them encoded it; others have others. Entries that no one asked for
// in a while go.
func TestTexts_Of(t *testing.T) {
	var x texts
	text := func(prompt string) *model.Conditioning { return &model.Conditioning{Prompt: prompt} }
	first := x.entry(pairOf(text("a"), text("")))
	first.at.Store(time.Now().UnixNano())
	if !first.fresh() || x.entry(pairOf(text("a"), text(""))) != first {
		t.Error("the same texts have another entry")
	}
	for name, pair := range map[string]textPair{
		"another prompt": pairOf(text("b"), text("")), "another negative prompt": pairOf(text("a"), text("b")), "no guidance": pairOf(text("a"), nil),
		"cut": pairOf(&model.Conditioning{Prompt: "a", Cut: 1}, text("")),
	} {
		if x.entry(pair) == first {
			t.Errorf("%s has the same entry", name)
		}
	}
	first.at.Store(time.Now().Add(-2 * textsFresh).UnixNano())
	if x.entry(pairOf(text("c"), nil)); first.fresh() || x.entry(pairOf(text("a"), text(""))) == first {
		t.Error("an old entry is still there")
	}
}
