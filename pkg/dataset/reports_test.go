package dataset_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/dataset"
)

// encode returns a value as JSON.
func encode(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Files in the forms that people have come out as the records that they mean, or are refused with what to do.
func TestRead_Reports(t *testing.T) {
	settings := object{
		"prompt": `a red sign that says "OPEN"`, "negative_prompt": "blurry", "num_inference_steps": int64(4),
		"true_cfg_scale": 3.5, "width": int64(64), "height": int64(64), "group_size": int64(2), "seed": int64(7),
	}
	asked := func(text string, metadata object) object { return object{"prompt": text, "metadata": metadata} }
	rule := object{"style": "rule"}
	find := asked("Find x.", object{
		"data_source": "hiyouga/geometry3k", "ability": "math", "index": int64(0),
		"reward_model": rule,
	})
	find["conditions"] = object{"image": []any{object{"bytes": "iVBORw0KGgo="}}}
	for _, tt := range []struct {
		file, column string
		first        object
		truth        any
		records      int
		want         string // of the error
	}{
		{file: "01-parti-tsv/prompts.tsv", records: 2, first: asked("bond", object{"Category": "Abstract", "Challenge": "Basic", "Note": "Biology-inspired"})},
		{file: "02-hps-json-strings/benchmark_anime.json", records: 2, first: object{"prompt": `a red sign that says "OPEN"`}},
		{file: "03-pickapic-caption-csv/caption.csv", column: "caption", records: 2, first: asked(`a red sign, with "OPEN" on it`, object{"image_0_uid": "aaaa"})},
		{file: "03-pickapic-caption-csv/drawbench.csv", column: "Prompts", records: 1, first: asked("a red sign", object{"Category": "Text"})},
		{file: "03-pickapic-caption-csv/laion.csv", column: "caption", records: 1, first: asked("a red sign", object{"url": "http://x"})},
		{file: "03-pickapic-caption-csv/laion.csv", want: `header: "caption,url"; must have a column prompt; name the column of the prompts with --prompt-column`},
		{file: "05-verl-groundtruth/bool.jsonl", records: 1, truth: true, first: asked("is 3 prime?", object{"data_source": "x", "index": int64(0), "reward_model": rule})},
		{file: "05-verl-groundtruth/float.jsonl", records: 1, truth: 42.0, first: asked("12+30=?", object{"data_source": "openai/gsm8k", "ability": "math", "index": int64(0), "split": "train", "reward_model": rule})},
		{file: "05-verl-groundtruth/list.jsonl", records: 1, truth: object{"target": []any{"Rembrandt", "Rembrandt van Rijn"}}, first: asked("who painted it?", object{"data_source": "searchR1_nq", "ability": "fact-reasoning", "index": int64(0), "reward_model": rule})},
		{file: "06-verl-parts/imagetag.jsonl", records: 1, truth: "3", first: find},
		{file: "06-verl-parts/parts.jsonl", records: 1, truth: "3", first: find},
		{file: "06-verl-parts/textparts.jsonl", records: 1, truth: "42", first: asked("12+30=?", object{"data_source": "x", "index": int64(0), "reward_model": rule})},
		{file: "07-geneval/metadata.jsonl", records: 4, first: asked("a photo of a bench and a cat", object{"tag": "two_object", "include": []any{object{"class": "bench", "count": int64(1)}, object{"class": "cat", "count": int64(1)}}})},
		{file: "17-csv-fields/fields.csv", records: 1, first: settings},
		{file: "17-csv-fields/fields.jsonl", records: 1, first: settings},
	} {
		t.Run(tt.file, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", "reports", tt.file))
			if err != nil {
				t.Fatal(err)
			}
			d, err := readAll(bytes.NewReader(data), tt.file, dataset.Options{Fields: fields, PromptColumn: tt.column})
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Fatalf("error %v, want %s", err, tt.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r := d.Records[0]; len(d.Records) != tt.records || !reflect.DeepEqual(r.Fields, tt.first) ||
				!reflect.DeepEqual(r.GroundTruth, tt.truth) {
				t.Errorf("%d records, the first %v with %#v; want %d, %v with %#v", len(d.Records), r.Fields,
					r.GroundTruth, tt.records, tt.first, tt.truth)
			}
		})
	}
}

// What is no file of prompts, and content that contradicts a name, is refused with what to do.
func TestRead_Refused(t *testing.T) {
	for _, tt := range []struct{ file, text, want string }{
		{"p.yaml", "- a\n", "read p.yaml: .yaml files are not read; " + hint},
		{"p.toml", "a = 1\n", "read p.toml: .toml files are not read; " + hint},
		{"p.xlsx", "PK\x03\x04", "a ZIP archive or an Excel workbook, not a file of prompts; unpack it, or save the sheet as CSV in UTF-8"},
		{"p.csv", "PK\x03\x04", "a ZIP archive or an Excel workbook"},
		{"p.jsonl.gz", "\x1f\x8b\x08\x00", "compressed by gzip, not a file of prompts; unpack it with gunzip"},
		{"p.txt", "\xff\xfea\x00", "it is UTF-16, not a file of prompts; convert it with iconv -f UTF-16 -t UTF-8"},
		{"p.txt", "a\x00 \x00f\x00", "it is UTF-16, not UTF-8; convert it with iconv"},
		{"p.txt", "{\"prompt\": \"a\"}\n", "read p.txt: it begins with JSON, and a .txt file is read as text; say --prompts-format json, or text"},
		{"p.txt", "[\n\"a\"]\n", "it begins with JSON"},
		{"p.csv", "[{\"prompt\": \"a\"}]\n", "read p.csv: it begins with JSON, and a .csv file is read as csv; say --prompts-format json, or csv"},
		{"-", "Prompt\tCategory\na\tb\n", `read -: its first line looks like the header of a table, "Prompt\tCategory"; say --prompts-format csv or tsv, or text if it is a prompt`},
		{"-", "- prompt: a\n  seed: 7\n", `read -: its first line looks like YAML or TOML, "- prompt: a"; write the records as JSON lines; say --prompts-format text if it is a prompt`},
		{"p", "prompt = \"a\"\n", "looks like YAML or TOML"},
		{"p.txt", "a\rb\rc", `p.txt line 1: "a\rb\rc"; must have lines that end with a line feed, not a carriage return`},
		{"p.csv", "seed,caption\n", `p.csv line 1: header: "seed,caption"; must have a column prompt; name the column of the prompts with --prompt-column`},
		{"p.csv", "prompt,seed\na,1,2\n", "p.csv line 2: 3 cells; must be 2, as the header has"},
		{"p.csv", ",prompt\nx,a\n", `p.csv line 2: column 1: "x"; must have a name in the header; only the row numbers of pandas may have none`},
		{"p.csv", "prompt\n\"[{'role': 'user', 'content': 'x'}]\"\n", `must be a text; write conversations as JSON lines or Parquet`},
		{"p.jsonl", `{"prompt": "a", "prompt": "b"}`, "p.jsonl line 1: prompt: must come at most once"},
		{"p.jsonl", `{"prompt": "\ud800"}`, `p.jsonl line 1: "\\ud800"; must be a whole character: half of a surrogate pair stands alone`},
		{"p.jsonl", `{"prompt": "a", "id": 123456789012345678901}`, "p.jsonl line 1: id: 123456789012345678901; must be a number that 64 bits hold; write it as a text"},
		{"p.jsonl", `{"prompt": "a", "videos": ["x.mp4"]}`, "p.jsonl line 1: videos: a list of 1; must be absent: give a pipeline's files by its names for them, in an object conditions"},
		{"p.jsonl", `{"prompt": "a", "extra_info": {"image": "x.png"}}`, `p.jsonl line 1: extra_info.image: "x.png"; must be absent: give a pipeline's files`},
		{"p.jsonl", `{"prompt": "a", "images": ["x.png"], "image": "y.png"}`, "p.jsonl line 1: images: a list of 1; must be absent beside conditions, or other images"},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": "<image>Find x."}]}`, `line 1: prompt[0].content: "<image>Find x."; must be without <image>: no model here takes media with a prompt`},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}`, `prompt[0].content[0].type: "image"; must be text`},
		{"p.jsonl", `{"prompt": "put <image> there", "images": ["x.png"]}`, `line 1: prompt: "put <image> there"; must have <image> before or after the text`},
		{"p.jsonl", `{"prompt": "<image>red", "images": ["x.png", "y.png"]}`, `line 1: prompt: 1 places of images; must be 2, one for each image of the record, or none`},
		{"p.jsonl", `{"prompt": "x", "agent_name": "tool_agent"}`, `agent_name: "tool_agent"; must be absent: --interaction names what answers a model`},
		{"p.jsonl", `{"prompt": "x", "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}`, "extra_info.interaction_kwargs: an object of name; must be absent: --interaction names what answers a model"},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": "x"}], "tools": [{}]}`, "tools: a list of 1; must be absent: no model here is told of tools"},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": "x"}], "extra_info": {"need_tools_kwargs": true}}`, "extra_info.need_tools_kwargs: true; must be absent"},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": "x", "name": "n"}]}`, `prompt[0].name: "n"; must be absent: a message has a role and a content`},
		{"p.jsonl", `{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}`, `messages[0].content[0].type: "image_url"; must be text`},
		{"p.jsonl", `{"prompt": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"a": 1}}]}]}`, `content[0].cache_control: an object of a; must be absent`},
	} {
		_, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Fields: fields})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s with %q: %v\nwant %s", tt.file, tt.text, err, tt.want)
		}
	}
	for _, tt := range []struct{ file, text string }{
		{"-", "caption,seed\na,1\n"},
		{"p.txt", "a\n"},
		{"p.jsonl", "\"a\"\n"},
	} {
		_, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Fields: fields, PromptColumn: "caption"})
		if err == nil || !strings.Contains(err.Error(), "line 1: \"") &&
			!strings.Contains(err.Error(), "looks like the header of a table") {
			t.Errorf("%s: a column of %q: %v", tt.file, tt.text, err)
		}
	}
	d, err := readAll(strings.NewReader(`{"prompt": [{"role": "user", "content": "\ud83d\ude00 \\ud800", "name": null}], "ability": null, "images": [], "agent_name": "single_turn_agent", "data_source": 3}`), "p.jsonl", dataset.Options{Fields: fields})
	if err != nil || d.Records[0].Fields["prompt"] != `😀 \ud800` {
		t.Errorf("what says nothing is no fault: %v, %v", d, err)
	}
}

// Nothing in a record is lost: a random name at any level is a field, in the metadata, the ground truth, or a fault
// that names it; and rows of tables are the objects of their columns.
func TestRead_NothingIsLost(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	value := func() any {
		return []any{
			"v" + fmt.Sprint(random.Uint32()), int64(random.Uint32()), true,
			[]any{"x"},
			object{"k": int64(1)},
			0.5,
		}[random.IntN(6)]
	}
	for i := range 3000 {
		name, v := fmt.Sprintf("zz%d", random.Uint32()), value()
		message := object{"role": "user", "content": "12+30=?"}
		record := object{
			"prompt": []any{message}, "data_source": "x", "reward_model": object{"style": "rule", "ground_truth": object{"t": "y"}},
			"extra_info": object{"index": int64(1)}, "rollout": object{"sde_type": "sde"}, "metadata": object{"m": object{"n": int64(1)}},
		}
		if i%2 == 0 {
			record["prompt"] = "12+30=?"
		}
		part := object{"type": "text", "text": "12+30=?"}
		message["content"] = []any{part}
		places := []object{
			record, record["reward_model"].(object),
			record["reward_model"].(object)["ground_truth"].(object), record["extra_info"].(object),
			record["rollout"].(object), record["metadata"].(object), record["metadata"].(object)["m"].(object),
		}
		if i%2 == 1 {
			places = append(places, message, part)
		}
		places[random.IntN(len(places))][name] = v
		d, err := readAll(strings.NewReader(encode(t, record)), "p.jsonl", dataset.Options{Fields: fields})
		if err != nil {
			if !strings.Contains(err.Error(), name) {
				t.Fatalf("%v is refused without its name, %s: %v", record, name, err)
			}
			continue
		}
		r := d.Records[0]
		if got := encode(t, object{"fields": r.Fields, "truth": r.GroundTruth}); !strings.Contains(got, `"`+name+`":`+encode(t, v)) {
			t.Fatalf("%s of %v is lost: %s", name, record, got)
		}
	}
}

// A row of a table, in any of its formats, is the record that the object of its columns is.
func TestRead_RowsAreObjects(t *testing.T) {
	type row struct {
		Prompt     string    `parquet:"prompt"`
		Seed       *int64    `parquet:"seed,optional"`
		Steps      *float64  `parquet:"num_inference_steps,optional"`
		Scale      *float64  `parquet:"true_cfg_scale,optional"`
		Validation *bool     `parquet:"validation,optional"`
		Sigmas     []float64 `parquet:"sigmas,list"`
		Note       string    `parquet:"note"`
		Tag        *string   `parquet:"tag,optional"`
	}
	want := object{
		"prompt": "a, b", "seed": int64(7), "num_inference_steps": int64(4), "true_cfg_scale": 3.5, "validation": true,
		"sigmas": []any{1.0, 0.5}, "metadata": object{"note": "n"},
	}
	var columns bytes.Buffer
	w := parquet.NewGenericWriter[row](&columns)
	if _, err := w.Write([]row{{
		Prompt: "a, b", Seed: new(int64(7)), Steps: new(4.0), Scale: new(3.5),
		Validation: new(true), Sigmas: []float64{1, 0.5}, Note: "n",
	}}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"p.jsonl":   `{"prompt": "a, b", "seed": 7, "num_inference_steps": 4.0, "true_cfg_scale": 3.5, "validation": true, "sigmas": [1.0, 0.5], "note": "n", "tag": null}`,
		"p.csv":     "prompt,seed,num_inference_steps,true_cfg_scale,validation,sigmas,note,tag\n\"a, b\",7,4.0,3.5,True,\"[1.0, 0.5]\",n,\n",
		"p.tsv":     "prompt\tseed\tnum_inference_steps\ttrue_cfg_scale\tvalidation\tsigmas\tnote\na, b\t7\t4.0\t3.5\tTrue\t[1.0, 0.5]\tn\n",
		"p.parquet": columns.String(),
	} {
		d, err := readAll(strings.NewReader(text), name, dataset.Options{Fields: fields})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		// JSON knows one kind of number.
		if got := encode(t, d.Records[0].Fields); got != encode(t, want) {
			t.Errorf("%s: %s\nwant %s", name, got, encode(t, want))
		}
	}
	if _, err := readAll(io.MultiReader(strings.NewReader(columns.String())), "-",
		dataset.Options{Fields: fields}); err == nil ||
		!strings.Contains(err.Error(), "so it must be a file, not a pipe") {
		t.Errorf("Parquet from a pipe: %v", err)
	}
	for n := range columns.Len() { // a damaged file is an error, not a panic
		damaged := bytes.Clone(columns.Bytes())
		damaged[n] ^= 0x55
		_, _ = readAll(bytes.NewReader(damaged), "p.parquet", dataset.Options{Fields: fields})
	}
}

// A table without rows, or with a group of none, is no fault.
func TestRead_ParquetWithoutRows(t *testing.T) {
	if d := read(t, "empty-group.parquet", dataset.Options{Fields: fields}); len(d.Records) != 1 {
		t.Errorf("%d records, want 1", len(d.Records))
	}
}

// A row with a large image says which column is too large.
func TestRead_ParquetLargeRow(t *testing.T) {
	type row struct {
		Image  []byte `parquet:"jpg_0"`
		Prompt string `parquet:"prompt"`
	}
	var file bytes.Buffer
	w := parquet.NewGenericWriter[row](&file)
	if _, err := w.Write([]row{{make([]byte, dataset.MaxRecordBytes), "a"}}); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	_, err := readAll(bytes.NewReader(file.Bytes()), "p.parquet", dataset.Options{Fields: fields})
	if want := "p.parquet line 1: jpg_0: 1048576 bytes; must be a record of at most 1048576 bytes; leave out columns " +
		"that no reward function needs"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// Ten prompts of a file are chosen without reading the others.
func TestChoose_ReadsNoFurther(t *testing.T) {
	long := strings.NewReader(strings.Repeat("{\"prompt\": \"a\"}\n", 1<<20))
	d, err := dataset.Open(long, "p.jsonl", dataset.Options{Fields: fields})
	if err != nil {
		t.Fatal(err)
	}
	batches, report, err := choose(d.Records(), dataset.Choice{Offset: 3, Limit: 10})
	if err != nil || len(batches[0].Records) != 10 || !report.Partial || d.Total != 13 || long.Len() < 8<<20 {
		t.Errorf("%d read, %d bytes left, %+v, %v", d.Total, long.Len(), report, err)
	}
	// A shuffled file is read to its end; what is chosen is that of the whole.
	whole := texts()
	for i := range 500 {
		whole = append(whole, texts(fmt.Sprint(i))...)
	}
	for i := range whole {
		whole[i].Index = i
	}
	all, _, err := choose(each(whole), dataset.Choice{Shuffle: new(int64(5))})
	if err != nil {
		t.Fatal(err)
	}
	some, _, err := choose(each(whole), dataset.Choice{Shuffle: new(int64(5)), Offset: 2, Limit: 7})
	if err != nil || !reflect.DeepEqual(some[0].Records, all[0].Records[2:9]) {
		t.Errorf("%v, %v", some, err)
	}
}

// The column that is named is the prompt; one called prompt beside it is metadata.
func TestRead_PromptColumn(t *testing.T) {
	for name, text := range map[string]string{"p.csv": "caption,prompt\na,b\n", "p.jsonl": `{"caption": "a", "prompt": "b"}`} {
		d, err := readAll(strings.NewReader(text), name, dataset.Options{
			Fields: fields, PromptColumn: "caption", Misspelt: func(string) string { return "prompt" },
		})
		if err != nil {
			t.Fatal(err)
		}
		if want := (object{"prompt": "a", "metadata": object{"prompt": "b"}}); !reflect.DeepEqual(d.Records[0].Fields,
			want) {
			t.Errorf("%s: %v, want %v", name, d.Records[0].Fields, want)
		}
	}
}
