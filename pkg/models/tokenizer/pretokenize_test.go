package tokenizer

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"slices"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// openClasses opens the golden of what the reference knows about every character.
func openClasses(t *testing.T) *json.Decoder {
	t.Helper()
	f, err := os.Open("../model/qwenimage/testdata/golden/classes.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return json.NewDecoder(bufio.NewReader(z))
}

// The golden's first lines are how the reference's pattern engine classes every character,
// and the characters that make a contraction after an apostrophe.
func TestClassify_everyCharacter(t *testing.T) {
	d := openClasses(t)
	var runs [][3]any
	var folded []rune
	if err := d.Decode(&runs); err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(&folded); err != nil {
		t.Fatal(err)
	}
	names := map[string]charClass{"L": classLetter, "N": classNumber, "S": classSpace}
	want := make([]charClass, utf8.MaxRune+1)
	for _, r := range runs {
		for c := int(r[0].(float64)); c <= int(r[1].(float64)); c++ {
			want[c] = names[r[2].(string)]
		}
	}
	wrong := 0
	for c := range rune(utf8.MaxRune + 1) {
		if !utf8.ValidRune(c) {
			continue
		}
		w := want[c]
		if w == classNone {
			w = classOther
		}
		if got := classify(c); got != w {
			if wrong++; wrong < 20 {
				t.Errorf("classify(%U) = %d, want %d", c, got, w)
			}
		}
		if got := contraction("'"+string(c)+"0") > 0; got != slices.Contains(folded, c) {
			t.Errorf("contraction of %U is %v", c, got)
		}
	}
}

// The golden's last lines are the characters that the reference sorts as combining marks,
// and those that it composes from their canonical decomposition.
func TestNFC_everyCharacter(t *testing.T) {
	d := openClasses(t)
	var skipped any
	var marks, composed [][2]rune
	for _, v := range []any{&skipped, &skipped, &marks, &composed} {
		if err := d.Decode(v); err != nil {
			t.Fatal(err)
		}
	}
	set := func(runs [][2]rune) []bool {
		in := make([]bool, utf8.MaxRune+1)
		for _, r := range runs {
			for c := r[0]; c <= r[1]; c++ {
				in[c] = true
			}
		}
		return in
	}
	isMark, isComposed := set(marks), set(composed)
	for c := range rune(utf8.MaxRune + 1) {
		if !utf8.ValidRune(c) {
			continue
		}
		// A mark lets the last one, of a lower class than the first, pass to the front.
		s := "a\u0345" + string(c) + "\u0316"
		if got := nfc(s) != s; got != isMark[c] {
			t.Errorf("%U: taken for a mark: %v, want %v", c, got, isMark[c])
		}
		if s := norm.NFD.String(string(c)); s != string(c) {
			if got := nfc(s) == string(c); got != isComposed[c] {
				t.Errorf("%U: composed: %v, want %v", c, got, isComposed[c])
			}
		}
	}
}
