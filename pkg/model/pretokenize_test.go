package model

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"slices"
	"testing"
	"unicode/utf8"
)

// The golden holds how the reference's pattern engine classes every character, and the
// characters that make a contraction after an apostrophe.
func TestClassify_everyCharacter(t *testing.T) {
	f, err := os.Open("testdata/golden/classes.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bufio.NewReader(z))
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
