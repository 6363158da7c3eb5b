package dataset_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/dataset"
)

// check reads bytes as each of the formats: no panic, every record in its place, and all
// of them texts.
func check(t *testing.T, file string, data []byte, formats ...dataset.Format) {
	for _, format := range formats {
		d, err := readAll(bytes.NewReader(data), file, dataset.Options{Format: format, Fields: fields, SkipBad: true})
		if err != nil {
			continue
		}
		if d.Total != len(d.Records)+len(d.Bad) {
			t.Fatalf("%s: %d records and %d bad ones of %d", format, len(d.Records), len(d.Bad), d.Total)
		}
		index, line := -1, 0
		for _, r := range d.Records {
			if r.Index <= index || r.Line < line || r.Index >= d.Total {
				t.Fatalf("%s: record %d of line %d after record %d of line %d", format, r.Index, r.Line, index, line)
			}
			index, line = r.Index, r.Line
			prompt, ok := r.Prompt()
			if !ok && d.Format != dataset.JSON && d.Format != dataset.Meander || !utf8.ValidString(prompt) {
				t.Fatalf("%s: record %d has the prompt %q", format, r.Index, prompt)
			}
		}
		for _, b := range d.Bad {
			if len(b.Error()) > 1000 {
				t.Fatalf("%s: an error of %d bytes", format, len(b.Error()))
			}
		}
	}
}

// seed adds the files of testdata.
func seed(f *testing.F, pattern string) {
	files, err := filepath.Glob(filepath.Join("testdata", pattern))
	if err != nil || len(files) == 0 {
		f.Fatalf("no %s: %v", pattern, err)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
}

func FuzzText(f *testing.F) {
	seed(f, "*.txt")
	f.Fuzz(func(t *testing.T, data []byte) { check(t, "-", data, dataset.Auto, dataset.Text) })
}

func FuzzCSV(f *testing.F) {
	seed(f, "*.csv")
	f.Fuzz(func(t *testing.T, data []byte) { check(t, "p.csv", data, dataset.CSV) })
}

func FuzzJSON(f *testing.F) {
	seed(f, "*.json*")
	f.Fuzz(func(t *testing.T, data []byte) {
		check(t, "p.json", data, dataset.JSON, dataset.Meander, dataset.Metadata, dataset.Verl)
	})
}

func FuzzTemplate(f *testing.F) {
	for _, s := range []string{`a sign that says "{prompt}"`, `{{{prompt}}}`, `{`, `}`, `{}`, `{a{b}}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		template, err := dataset.ParseTemplate(s)
		if err != nil {
			return
		}
		_ = template.Apply(&dataset.Record{Fields: object{"prompt": "x"}})
	})
}
