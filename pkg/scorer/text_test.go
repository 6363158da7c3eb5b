package scorer_test

import (
	"cmp"
	"encoding/json"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/scorer"
)

func TestTextReward(t *testing.T) {
	tests := []struct {
		name, target, recognised string
		want                     float64
	}{
		{"case", "Open 24 Hours", "OPEN 24 HOURS", 1},
		{"inside a sentence", "Open 24 Hours", "We are\nopen 24 hours a day", 1},
		{"two letters off", "OPEN 24 HOURS", "OPFN 24 HOUR", .818181818},
		{"long and unrelated", "STOP", "the quick brown fox jumps over the lazy dog by the river bank", 0},
		{"nothing read", "STOP", "", 0},
		{"white space of all kinds", "S T\tO\u00a0P", "stop", 1},
		{"both empty", " ", "\n", 1},
		{"empty target", "", "x", 0},
		{"characters, not bytes", "größe", "grösse", .6},
		{"one more", "88", "8 8 8", 1},
		{"swapped", "12", "21", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := scorer.TextReward(tt.target, tt.recognised); math.Abs(got-tt.want) > 1e-9 {
				t.Errorf("%q against %q: %v, want %v", tt.recognised, tt.target, got, tt.want)
			}
		})
	}
}

// same fails t unless the rule takes the texts for equal: each contains the other.
func same(t *testing.T, what, text, plain string) {
	t.Helper()
	if scorer.TextReward(text, plain) != 1 || scorer.TextReward(plain, text) != 1 {
		t.Errorf("%s: %+q is not taken for %+q", what, text, plain)
	}
}

// testdata/text.json is the rule in Python, of every character, see deploy/golden/make_text.py.
func TestTextReward_Python(t *testing.T) {
	b, err := os.ReadFile("testdata/text.json")
	if err != nil {
		t.Fatal(err)
	}
	type ranges [][2]rune
	var file struct {
		Plain      map[string]string
		Unassigned ranges
		Final      [3]ranges
		Scores     [][3]any
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Plain) == 0 || len(file.Scores) == 0 {
		t.Fatal("no cases")
	}
	within := func(rs ranges, r rune) bool {
		i, _ := slices.BinarySearchFunc(rs, r, func(b [2]rune, r rune) int { return cmp.Compare(b[1], r) })
		return i < len(rs) && rs[i][0] <= r
	}
	frames := []struct{ text, plain, final [2]string }{ // what stands around a character; Σ ends a word, or does not
		{[2]string{"", "Σ"}, [2]string{"", "σ"}, [2]string{"", "ς"}},
		{[2]string{"A", "Σ"}, [2]string{"a", "σ"}, [2]string{"a", "ς"}},
		{[2]string{"AΣ", ""}, [2]string{"aσ", ""}, [2]string{"aς", ""}},
	}
	for r := range rune(unicode.MaxRune + 1) {
		if r >= 0xd800 && r < 0xe000 || within(file.Unassigned, r) {
			continue
		}
		c := string(r)
		plain, ok := file.Plain[c]
		if !ok {
			plain = c
		}
		same(t, "character", "7"+c+"7", "7"+plain+"7")
		for i, frame := range frames {
			if within(file.Final[i], r) {
				frame.plain = frame.final
			}
			if r != 'Σ' {
				same(t, "sigma", frame.text[0]+c+frame.text[1], frame.plain[0]+plain+frame.plain[1])
			}
		}
	}
	for _, c := range file.Scores {
		if got := scorer.TextReward(c[0].(string), c[1].(string)); got != c[2] {
			t.Errorf("%+q against %+q: %v, want %v", c[1], c[0], got, c[2])
		}
	}
}

func TestTextReward_laws(t *testing.T) {
	text := rapid.StringOfN(rapid.RuneFrom([]rune("abAB1 0ß日\n")), 0, 12, -1)
	rapid.Check(t, func(t *rapid.T) {
		target, read := text.Draw(t, "target"), text.Draw(t, "read")
		got := scorer.TextReward(target, read)
		if !(got >= 0 && got <= 1) {
			t.Fatalf("%v is outside of [0, 1]", got)
		}
		if same := scorer.TextReward(target, target); same != 1 {
			t.Fatalf("a text scores %v against itself", same)
		}
		if again := scorer.TextReward(" "+strings.ToUpper(target)+"\n", "\t"+read); again != got {
			t.Fatalf("case and white space: %v, then %v", got, again)
		}
		if strings.TrimSpace(target) != "" && scorer.TextReward(target, read+target+read) != 1 {
			t.Fatal("a text that contains the target scores less than 1")
		}
	})
}

func TestTarget(t *testing.T) {
	tests := []struct{ prompt, truth, want string }{
		{`a sign that says "4071"`, "", "4071"},
		{`a sign that says "A" above "B"`, "", "A"},
		{`a sign that says “OPEN” in red`, "", "OPEN"},
		{`a sign that says "A"`, "B", "B"},
		{`no quotes`, "text", "text"},
		{`a sign that says " "`, "", " "},
	}
	for _, tt := range tests {
		if got, err := scorer.Target(tt.prompt, tt.truth); err != nil || got != tt.want {
			t.Errorf("%s, %s: %q, %v; want %q", tt.prompt, tt.truth, got, err, tt.want)
		}
	}
	for _, prompt := range []string{"", "a red fox", `one " only`, `""`, `"`} {
		if got, err := scorer.Target(prompt, ""); err == nil || !strings.Contains(err.Error(), "double quotes") {
			t.Errorf("%q: %q, %v; want an error that says how to give a target", prompt, got, err)
		}
	}
}

func TestSplitName(t *testing.T) {
	for name, want := range map[string][2]string{
		"ocr": {"ocr", ""}, "http:clip": {"http", "clip"}, "nats:pick-score_2": {
			"nats",
			"pick-score_2",
		}, "external": {"external", ""}, "external:human": {"external", "human"},
	} {
		if kind, instance, err := scorer.SplitName(name); err != nil || kind != want[0] || instance != want[1] {
			t.Errorf("%s: %q, %q, %v", name, kind, instance, err)
		}
	}
	for name, fault := range map[string]string{
		"":          "must be one of " + strings.Join(scorer.Kinds(), ", "),
		"beauty":    `"beauty"; must be one of`,
		"ocr:x":     "ocr has no instances",
		"http":      "must be http:NAME",
		"http:":     "must be http:NAME",
		"external:": "must be external:NAME",
	} {
		if _, _, err := scorer.SplitName(name); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%q: error %v, want one about %q", name, err, fault)
		}
	}
	if !slices.IsSorted(scorer.Kinds()) {
		t.Errorf("kinds %v are not sorted", scorer.Kinds())
	}
}

func TestCheck(t *testing.T) {
	const sign = `a sign that says "4071"`
	tests := []struct {
		name, prompt, truth string
		params              map[string]string
		fault               string // empty: it is legal
	}{
		{"ocr", sign, "", nil, ""},
		{"ocr", "a red fox", "fox", nil, ""},
		{"ocr", "a red fox", "", nil, "ground_truth: empty, and the prompt has no text in double quotes; ocr needs one"},
		{"glyph", "a red fox", "", nil, "glyph needs one"},
		{"ocr", sign, "", map[string]string{
			"lang": "eng+deu", "psm": "7", "margin": "5", "whitelist": "0123",
			"prepare": "none",
		}, ""},
		{"ocr", sign, "", map[string]string{"psm": "2"}, `params: psm: "2"; must be a number from 3 to 13`},
		{"ocr", sign, "", map[string]string{"lang": "../eng"}, `params: lang: "../eng"; must be languages`},
		{"ocr", sign, "", map[string]string{"margin": "-1"}, "params: margin"},
		{"ocr", sign, "", map[string]string{"prepare": "some"}, "must be auto or none"},
		{"ocr", sign, "", map[string]string{"whitelist": "a\nb"}, "one line"},
		{
			"ocr", sign, "",
			map[string]string{"quality": "1"},
			`params: "quality" is unknown; ocr has lang, margin, prepare, psm, whitelist`,
		},
		{
			"jpeg_compressibility", "x", "",
			map[string]string{"quality": "1"},
			`params: "quality" is unknown; jpeg_compressibility has divisor`,
		},
		{"jpeg_compressibility", "x", "", map[string]string{"divisor": "500"}, ""},
		{
			"jpeg_incompressibility", "x", "",
			map[string]string{"divisor": "0"},
			`params.divisor: "0"; must be a number from 0.000001 to 1000000`,
		},
		{"jpeg_incompressibility", "x", "", map[string]string{"divisor": "NaN"}, `params.divisor: "NaN"`},
		{"diversity", "x", "", map[string]string{"quality": "1"}, `params: "quality" is unknown; diversity has none`},
		{"http:clip", "x", "", map[string]string{"anything": "1"}, ""},
		{"http", "x", "", nil, "must be http:NAME"},
		{"external:human", "x", "", nil, ""},
		{"diversity", "x", "", nil, ""},
		{"beauty", "x", "", nil, `"beauty"; must be one of`},
	}
	for _, tt := range tests {
		err := scorer.Check(tt.name, tt.prompt, tt.truth, tt.params)
		if (err == nil) != (tt.fault == "") || err != nil && !strings.Contains(err.Error(), tt.fault) {
			t.Errorf("%s %q %q %v: %v, want %q", tt.name, tt.prompt, tt.truth, tt.params, err, tt.fault)
		}
	}
}

func FuzzTextReward(f *testing.F) {
	f.Add("4071", "4O71")
	f.Fuzz(func(t *testing.T, target, read string) {
		if len(target)+len(read) > 1000 {
			return
		}
		if r := scorer.TextReward(target, read); !(r >= 0 && r <= 1) {
			t.Errorf("%q against %q: %v", read, target, r)
		}
		if got, err := scorer.Target(read, ""); err == nil &&
			(got == "" || utf8.ValidString(read) && !strings.Contains(read, got)) {
			t.Errorf("target %q of %q", got, read)
		}
	})
}
