package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

const folder = "../../../schemas/vectors"

// What the packages compute is what the files say, to the bit.
func TestFiles(t *testing.T) {
	files, err := Files()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what the packages compute; go generate ./integration/tools/vectors", name)
		}
	}
}

// Every file, that of losses too, has the one form.
func TestFiles_Form(t *testing.T) {
	names, err := filepath.Glob(folder + "/*.json")
	if err != nil || len(names) != 7 {
		t.Fatalf("%v, %v", names, err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var f file
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		if err := d.Decode(&f); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if f.Kind+".json" != filepath.Base(name) || f.About == "" || len(f.Sets) == 0 {
			t.Errorf("%s: kind %q, about %q, %d sets", name, f.Kind, f.About, len(f.Sets))
		}
		for _, s := range f.Sets {
			if s.Name == "" || s.Formula == "" || s.Source == "" || len(s.Cases) == 0 || len(s.Tolerance) == 0 {
				t.Errorf("%s, %s: something is not said", name, s.Name)
			}
			for i, c := range s.Cases {
				got, want := slices.Sorted(maps.Keys(c.Inputs)), slices.Sorted(maps.Keys(s.Inputs))
				if !slices.Equal(got, want) {
					t.Errorf("%s, %s, case %d: inputs %v, said are %v", name, s.Name, i, got, want)
				}
				if _, has := c.Expected[s.Returns]; !has {
					t.Errorf("%s, %s, case %d: no %s", name, s.Name, i, s.Returns)
				}
				for input, said := range s.Inputs {
					v := c.Inputs[input]
					text, is := v.(string)
					if is != (said.Choices != nil) || is && !slices.Contains(said.Choices, text) {
						t.Errorf("%s, %s, case %d: %s: %v", name, s.Name, i, input, v)
					}
				}
			}
		}
	}
}
