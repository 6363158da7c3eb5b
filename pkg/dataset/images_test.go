package dataset_test

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/dataset"
)

// Data sets of edits name their images in columns of their own: all become the condition image, with the instruction as
// the prompt. Other images of a table are listed as not used.
func TestRead_Edits(t *testing.T) {
	type file struct {
		Bytes []byte `parquet:"bytes"`
		Path  string `parquet:"path"`
	}
	type gedit struct {
		Key              string `parquet:"key"`
		TaskType         string `parquet:"task_type"`
		Instruction      string `parquet:"instruction"`
		InputImage       file   `parquet:"input_image"`
		InputImageRaw    file   `parquet:"input_image_raw"`
		IntersectionOnly bool   `parquet:"Intersection_exist"`
	}
	var table bytes.Buffer
	// larger than a record without images
	photo := file{append([]byte("\x89PNG\xff"), make([]byte, dataset.MaxRecordBytes)...), "a.png"}
	if err := parquet.Write(&table, []gedit{{"k", "color_alter", "make it red", photo, photo, true}}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		file, text, column string
		image              any
		metadata           object
	}{
		{
			"gedit.parquet", table.String(), "instruction",
			object{"bytes": photo.Bytes, "path": "a.png"},
			object{"key": "k", "task_type": "color_alter", "Intersection_exist": true},
		},
		{
			"imgedit.jsonl", `{"instruction": "make it red", "input_images": ["a.png"], "edit_type": "color"}`, "instruction",
			[]any{"a.png"},
			object{"edit_type": "color"},
		},
		{
			"geneval-edit.jsonl", `{"prompt": "make it red", "image": "a.png", "tag": "color", "include": [{"class": "cup"}]}`, "",
			"a.png",
			object{"tag": "color", "include": []any{object{"class": "cup"}}},
		},
	} {
		d, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Fields: fields, PromptColumn: tt.column})
		if err != nil || len(d.Records) != 1 {
			t.Fatalf("%s: %v", tt.file, err)
		}
		f := d.Records[0].Fields
		if f["prompt"] != "make it red" || !reflect.DeepEqual(f["conditions"], object{"image": tt.image}) ||
			!reflect.DeepEqual(f["metadata"], tt.metadata) {
			t.Errorf("%s: %#v", tt.file, f)
		}
	}
}

// Places of images before and after a text go, as many as the record has images; what is said within it stays.
func TestRead_ImagePlaces(t *testing.T) {
	for text, want := range map[string]string{
		"<image>\nmake it red": "make it red", "<image> <image> mix them": "mix them", "make <image": "make <image",
		"as in this: <image>": "as in this:",
	} {
		images := `"a.png"`
		if strings.Count(text, "<image>") == 2 {
			images += `, "b.png"`
		}
		line := `{"prompt": ` + encode(t, text) + `, "images": [` + images + `]}`
		d, err := readAll(strings.NewReader(line), "p.jsonl", dataset.Options{Fields: fields})
		if err != nil || d.Records[0].Fields["prompt"] != want {
			t.Errorf("%q: %v, %v", text, d, err)
		}
	}
}
