package dataset_test

import (
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/dataset"
)

// fields are those of a prompt, as far as the tests need them.
var fields = map[string]dataset.Kind{
	"v": dataset.KindInteger, "prompt": dataset.KindText, "negative_prompt": dataset.KindText, "uid": dataset.KindText,
	"seed": dataset.KindInteger, "group_size": dataset.KindInteger, "height": dataset.KindInteger,
	"width": dataset.KindInteger, "num_inference_steps": dataset.KindInteger, "true_cfg_scale": dataset.KindNumber,
	"validation": dataset.KindBool, "sigmas": dataset.KindJSON, "messages": dataset.KindJSON,
	"rollout": dataset.KindJSON, "reward": dataset.KindJSON, "metadata": dataset.KindJSON,
}

// set is all that a Reader says of a file.
type set struct {
	*dataset.Reader
	Records []dataset.Record
}

func readAll(r io.Reader, name string, o dataset.Options) (*set, error) {
	d, err := dataset.Open(r, name, o)
	if err != nil {
		return nil, err
	}
	out := &set{Reader: d}
	for r, err := range d.Records() {
		if err != nil {
			return nil, err
		}
		out.Records = append(out.Records, r)
	}
	return out, nil
}

// each yields records as a Reader does.
func each(records []dataset.Record) iter.Seq2[dataset.Record, error] {
	return func(yield func(dataset.Record, error) bool) {
		for _, r := range records {
			if !yield(r, nil) {
				return
			}
		}
	}
}

type object = map[string]any

func read(t *testing.T, name string, o dataset.Options) *set {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if o.Fields == nil {
		o.Fields = fields
	}
	d, err := readAll(f, name, o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

type formatCase struct {
	file   string
	format dataset.Format
	want   []dataset.Record
}

func formatCases() []formatCase {
	quoted := `A neon sign above a diner that says "OPEN 24 HOURS"`
	return []formatCase{
		{"ocr.txt", dataset.Text, []dataset.Record{
			{Index: 0, Line: 1, Fields: object{"prompt": quoted}},
			{Index: 1, Line: 2, Fields: object{"prompt": `A chalkboard in a cafe with "Soup of the day" written on it`}},
			{Index: 2, Line: 4, Fields: object{"prompt": `Une affiche où est écrit "Défense d'entrer"`}},
			{Index: 3, Line: 5, Fields: object{"prompt": quoted}},
		}},
		{"prompts.jsonl", dataset.JSON, []dataset.Record{
			{Index: 0, Line: 1, Fields: object{
				"prompt": `a blue sign that says "4071"`, "uid": "first", "group_size": int64(4),
				"rollout": object{"sde_step_indices": []any{int64(2), int64(3)}},
			}},
			{Index: 1, Line: 2, GroundTruth: "OPEN", Fields: object{
				"prompt": "a red sign", "negative_prompt": "blurry", "reward": []any{object{"name": "ocr", "weight": 0.5}},
			}},
			{Index: 2, Line: 4, Fields: object{
				"prompt": `a green sign that says "EXIT"`, "metadata": object{"source": "hand", "split": "test"},
			}},
		}},
		{"prompts.json", dataset.JSON, []dataset.Record{
			{Index: 0, Line: 2, Fields: object{"prompt": `a blue sign that says "4071"`, "seed": int64(7)}},
			{Index: 1, Line: 3, Fields: object{"prompt": `a red sign that says "OPEN"`, "metadata": object{"split": "train"}}},
			{Index: 2, Line: 7, GroundTruth: "EXIT", Fields: object{"prompt": "a green sign", "metadata": object{"data_source": "signs", "reward_model": object{"style": "rule"}}}},
		}},
		{"verl-ocr.jsonl", dataset.JSON, []dataset.Record{
			{Index: 0, Line: 1, GroundTruth: "SALE 50%", Messages: []any{
				object{"role": "system", "content": "Describe the image in detail:"},
				object{"role": "user", "content": `A shop window with "SALE 50%" painted on the glass`},
			}, Fields: object{
				"prompt": `A shop window with "SALE 50%" painted on the glass`, "negative_prompt": " ",
				"metadata": object{
					"data_source": "flow_grpo/ocr", "ability": "ocr", "split": "train", "index": int64(0),
					"reward_model":  object{"style": "rule"},
					"system_prompt": "Describe the image in detail:", "system_negative_prompt": "Describe the image in detail:",
				},
			}},
			{Index: 1, Line: 2, GroundTruth: int64(42), Fields: object{
				"prompt":   `A door plate reading "42"`,
				"metadata": object{"data_source": "flow_grpo/ocr", "ability": "ocr", "split": "train", "index": int64(1), "reward_model": object{"style": "model"}},
			}},
		}},
		{"geneval.jsonl", dataset.JSON, []dataset.Record{
			{Index: 0, Line: 1, Fields: object{"prompt": "a photo of a bench and a clock", "metadata": object{
				"tag": "two_object", "include": []any{object{"class": "bench", "count": int64(1)}, object{"class": "clock", "count": int64(1)}},
			}}},
			{Index: 1, Line: 2, Fields: object{"prompt": "a photo of three birds", "metadata": object{
				"tag": "counting", "include": []any{object{"class": "bird", "count": int64(3)}}, "exclude": []any{object{"class": "bird", "count": int64(4)}},
			}}},
			{Index: 2, Line: 3, Fields: object{"prompt": "a photo of a dog left of a cup", "metadata": object{
				"tag": "position", "include": []any{
					object{"class": "cup", "count": int64(1)},
					object{"class": "dog", "count": int64(1), "position": []any{"left of", int64(0)}},
				},
			}}},
		}},
		{"prompts.csv", dataset.CSV, []dataset.Record{
			{Index: 0, Line: 2, GroundTruth: "4071", Fields: object{
				"prompt": `a sign that says "4071"`, "seed": int64(11), "uid": "blue-one", "metadata": object{"colour": "blue"},
			}},
			{Index: 1, Line: 3, Fields: object{"prompt": "two\nlines, one prompt", "negative_prompt": "blurry"}},
			{Index: 2, Line: 5, GroundTruth: "OPEN", Fields: object{"prompt": "a red sign", "metadata": object{"colour": "red"}}},
		}},
	}
}

func TestRead_Formats(t *testing.T) {
	for _, tt := range formatCases() {
		t.Run(tt.file, func(t *testing.T) {
			d := read(t, tt.file, dataset.Options{})
			if d.Format != tt.format || d.Total != len(tt.want) {
				t.Errorf("format %s, %d records; want %s, %d", d.Format, d.Total, tt.format, len(tt.want))
			}
			for i := range min(len(d.Records), len(tt.want)) {
				if !reflect.DeepEqual(d.Records[i], tt.want[i]) {
					t.Errorf("record %d:\n got %#v\nwant %#v", i, d.Records[i], tt.want[i])
				}
			}
			if len(d.Records) != len(tt.want) {
				t.Errorf("%d records, want %d", len(d.Records), len(tt.want))
			}
		})
	}
}

// The name says nothing about standard input, the bytes do; a format that is asked for
// beats both.
func TestRead_DetectsAndObeys(t *testing.T) {
	tests := []struct {
		name, file, text string
		asked            dataset.Format
		format           dataset.Format
		prompts          []string
	}{
		{"text", "-", "a\nb\n", "", dataset.Text, []string{"a", "b"}},
		{"text in braces", "x.txt", "{red|blue} sign\n", "", dataset.Text, []string{"{red|blue} sign"}},
		{"another extension, asked for", "prompts.lst", "a", dataset.Text, dataset.Text, []string{"a"}},
		{"texts, one a line", "x.jsonl", "\"a\"\n{\"prompt\": \"b\"}\n", "", dataset.JSON, []string{"a", "b"}},
		{"objects over lines", "x.jsonl", "{\n \"prompt\": \"a\"\n}\n{\n \"prompt\": \"b\"\n}\n", "", dataset.JSON, []string{"a", "b"}},
		{"an array on stdin that begins a line", "-", "[\n\"a\",\n\"b\"]", "", dataset.JSON, []string{"a", "b"}},
		{"a prompt column, however it is written", "x.tsv", "PROMPT\tNote\na\t\n", "", dataset.TSV, []string{"a"}},
		{"quotes of CSV and quotes as text", "x.tsv", "prompt\tn\n\"a \"\"b\"\"\"\t1\n\"c\" d\t2\n", "", dataset.TSV, []string{`a "b"`, `"c" d`}},
		{"semicolons", "x.csv", "seed;prompt\n1;a, b\n", "", dataset.CSV, []string{"a, b"}},
		{"a separator that Excel names", "x.csv", "\xef\xbb\xbfsep=|\r\nprompt|seed\r\na;b, c|1\r\n", "", dataset.CSV, []string{"a;b, c"}},
		{"a separator in quotes", "x.csv", "\"sep=,\"\nprompt,seed\na,1\n", "", dataset.CSV, []string{"a"}},
		{"empty columns and rows of Excel", "x.csv", "prompt,seed,,\na,1,,\n,,,\nb,2,,\n,,,\n", "", dataset.CSV, []string{"a", "b"}},
		{"tabs in CSV", "x.csv", "seed\tprompt\n1\ta, b\n", "", dataset.CSV, []string{"a, b"}},
		{"lines of objects", "-", "\n\n {\"prompt\": \"a\"}", "", dataset.JSON, []string{"a"}},
		{"an array", "-", " [ {\"prompt\": \"a\"}, {\"prompt\": \"b\"} ] \n", "", dataset.JSON, []string{"a", "b"}},
		{"text that starts with a bracket", "x.txt", "[photo] of a fox\n", "", dataset.Text, []string{"[photo] of a fox"}},
		{"text that starts like parquet", "x.txt", "PAR1S sign\n", "", dataset.Text, []string{"PAR1S sign"}},
		{"byte order mark", "x.txt", "\xef\xbb\xbfa\r\nb\r\n", "", dataset.Text, []string{"a", "b"}},
		{"byte order mark of a table", "x.csv", "\xef\xbb\xbfprompt\na\n", "", dataset.CSV, []string{"a"}},
		{"text asked for", "x.jsonl", `{"prompt": "a"}`, dataset.Text, dataset.Text, []string{`{"prompt": "a"}`}},
		{"a table asked for", "-", "n,prompt\n1,a\n", dataset.CSV, dataset.CSV, []string{"a"}},
		{"metadata asked for", "x.jsonl", `{"prompt": "a", "seed": "x"}`, dataset.Metadata, dataset.Metadata, []string{"a"}},
		{"plain prompts under verl", "x.jsonl", `{"prompt": "a"}`, dataset.Verl, dataset.Verl, []string{"a"}},
		{"nothing", "x.txt", "", "", dataset.Text, nil},
		{"an empty array", "x.json", "[]", "", dataset.JSON, nil},
		{"a header alone", "x.csv", "prompt\n", "", dataset.CSV, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Format: tt.asked, Fields: fields})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range d.Records {
				p, _ := r.Prompt()
				got = append(got, p)
			}
			if d.Format != tt.format || !reflect.DeepEqual(got, tt.prompts) {
				t.Errorf("%s %q, want %s %q", d.Format, got, tt.format, tt.prompts)
			}
		})
	}
}

// Values of fields are checked by who serves the prompt; asked for as meander, names are too.
func TestRead_PromptsAreLeftAlone(t *testing.T) {
	text := `{"prompt": "a", "metadata": [1]}` + "\n" + `{"prompt": "a", "seed": -1, "rollout": 3, "height": null}`
	d, err := readAll(strings.NewReader(text), "x.jsonl", dataset.Options{Fields: fields})
	if err != nil {
		t.Fatal(err)
	}
	want := []object{
		{"prompt": "a", "metadata": []any{int64(1)}},
		{"prompt": "a", "seed": int64(-1), "rollout": int64(3)},
	}
	for i, r := range d.Records {
		if !reflect.DeepEqual(r.Fields, want[i]) {
			t.Errorf("record %d is %v, want %v", i, r.Fields, want[i])
		}
	}
	text = `{"prompt": "a", "ground_truth": "b", "other": 1}`
	if d, err = readAll(strings.NewReader(text), "x.jsonl",
		dataset.Options{Format: dataset.Meander, Fields: fields}); err != nil {
		t.Fatal(err)
	}
	if r := d.Records[0]; r.GroundTruth != nil || !reflect.DeepEqual(r.Fields,
		object{"prompt": "a", "ground_truth": "b", "other": int64(1)}) {
		t.Errorf("as meander: %+v", r)
	}
}

// hint ends refusals of files whose format is not clear.
const hint = "the formats are text (.txt), csv, tsv, parquet and json (.json, .jsonl); --prompts-format says which " +
	"one a file has"

func TestRead_Errors(t *testing.T) {
	deep := strings.Repeat(`{"a":`, dataset.MaxDepth) + `{}` + strings.Repeat(`}`, dataset.MaxDepth)
	var wide strings.Builder
	for i := range dataset.MaxFields {
		fmt.Fprintf(&wide, `"f%d": 1, `, i)
	}
	tests := []struct{ name, file, text, want string }{
		{"not JSON", "p.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": }\n", `p.jsonl line 2: prompt: not JSON: invalid character '}' looking for beginning of value`},
		{"cut off", "p.jsonl", `{"prompt": "a"`, `p.jsonl line 1: not JSON: unexpected EOF`},
		{"text among JSON", "p.jsonl", "{\"prompt\": \"a\"}\n\na fox\n", `p.jsonl line 3: not JSON: invalid character 'a' looking for beginning of value`},
		{"no object", "p.jsonl", `7`, `p.jsonl line 1: 7; must be a JSON object, or a text`},
		{"two values", "p.jsonl", `{"prompt": "a"} {}`, `p.jsonl line 1: must be one JSON value, not more`},
		{"a name twice", "p.jsonl", `{"prompt": "a", "rollout": {"x": 1, "x": 2}}`, `p.jsonl line 1: rollout.x: must come at most once`},
		{"too deep", "p.jsonl", `{"prompt": "a", "metadata": ` + deep + `}`, `must have at most 8 levels of lists and objects`},
		{"too many fields", "p.jsonl", `{` + wide.String() + `"prompt": "a"}`, `p.jsonl line 1: must have at most 128 fields`},
		{"too many items", "p.jsonl", `{"prompt": "a", "sigmas": [` + strings.Repeat("1,", dataset.MaxItems) + `1]}`, `p.jsonl line 1: sigmas: must have at most 8192 items`},
		{"no text beside metadata", "p.jsonl", `{"tag": "counting"}`, `p.jsonl line 1: prompt: must be a text; the record has tag; name the one with the prompt with --prompt-column`},
		{"metadata twice", "p.jsonl", `{"prompt": "a", "tag": 1, "metadata": {"tag": 2}}`, `p.jsonl line 1: metadata.tag: 2; must come at most once; the record has 1`},
		{"two answers", "p.jsonl", `{"prompt": "a", "ground_truth": "x", "reward_model": {"ground_truth": "y"}}`, `p.jsonl line 1: reward_model.ground_truth: "y"; must come at most once; the record has "x"`},
		{"broken array", "p.json", "[\n{\"prompt\": \"a\"},\n{\"prompt\" 1}]", `p.json line 3: not JSON: invalid character '1' after object key`},
		{"unfinished array", "p.json", "[\n{\"prompt\": \"a\"}\n", `p.json line 3: not JSON: unexpected EOF`},
		{"more after an array", "p.json", `[{"prompt": "a"}] 1`, `p.json line 1: more after the end of the array`},
		{"element that is none", "p.json", "[{\"prompt\": \"a\"},\n\n7]", `p.json line 3: 7; must be a JSON object, or a text`},
		{"messages without a user", "p.jsonl", `{"prompt": [{"role": "system", "content": "x"}]}`, `p.jsonl line 1: prompt: 0 messages of the user, 1 of the system; must have one message of the user and at most one of the system`},
		{"a role", "p.jsonl", `{"prompt": [{"role": "tool", "content": "x"}]}`, `p.jsonl line 1: prompt[0].role: "tool"; must be one of user, system, assistant`},
		{"its own answer", "p.jsonl", `{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}`, `p.jsonl line 1: prompt[1].role: "assistant"; must be user: the last message is what is answered`},
		{"content that is no text", "p.jsonl", `{"prompt": [{"role": "user", "content": [1]}]}`, `p.jsonl line 1: prompt[0].content[0]: 1; must be a part {"type": "text", "text"}`},
		{"a message that is none", "p.jsonl", `{"prompt": [{"role": "user", "content": "x"}, 3]}`, `p.jsonl line 1: prompt[1]: 3; must be a message {role, content}`},
		{"an empty user message", "p.jsonl", `{"prompt": [{"role": "user", "content": " "}]}`, `p.jsonl line 1: prompt: " "; must have a user message with a text`},
		{"a rule without an answer", "p.jsonl", `{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"style": "rule"}}`, `p.jsonl line 1: reward_model.ground_truth: must have a value, since style is "rule"`},
		{"extra_info that is none", "p.jsonl", `{"prompt": [{"role": "user", "content": "x"}], "extra_info": 3}`, `p.jsonl line 1: extra_info: 3; must be an object`},
		{"metadata in two places", "p.jsonl", `{"prompt": [{"role": "user", "content": "x"}], "data_source": "a", "extra_info": {"prompt": "y", "data_source": "b"}}`, `p.jsonl line 1: extra_info.data_source: "b"; must come at most once; the record has "a"`},
		{"no prompt column", "p.csv", "text,seed\na,1\n", `p.csv line 1: header: "text,seed"; must have a column prompt; name the column of the prompts with --prompt-column`},
		{"column twice", "p.csv", "prompt,seed,seed\n", `p.csv line 1: header: "seed"; must come at most once`},
		{"column without a name", "p.csv", "prompt,,\na,,b\n", `p.csv line 2: column 3: "b"; must have a name in the header; only the row numbers of pandas may have none`},
		{"a cell of several lines", "p.tsv", "tag\tprompt\nx\t\"a\nb\"\n", `p.tsv line 2: prompt: "\"a"; must have a quote at its end, as at its begin, on the same line; write texts of several lines as CSV or JSON lines`},
		{"lines of an old Mac", "p.csv", "prompt,seed\ra,1\r", `p.csv line 1: header: "seed\ra"; must have lines that end with a line feed, not a carriage return`},
		{"missing cell", "p.csv", "prompt,seed\na,1\nb\n", `p.csv line 3: 1 cells; must be 2, as the header has`},
		{"bad sigmas", "p.csv", "prompt,sigmas\na,one\n", `p.csv line 2: sigmas: not JSON: invalid character 'o' looking for beginning of value`},
		{"empty prompt", "p.csv", "prompt,seed\n ,1\n", `p.csv line 2: prompt: " "; must be a text`},
		{"stray quote", "p.csv", "prompt\na\nb\"c\n", `p.csv line 3: not CSV: bare " in non-quoted-field`},
		{"not UTF-8", "p.txt", "a\nb\xff\n", `p.txt line 2: "b�"; must be UTF-8`},
		{"zero bytes", "p.txt", "a\x00b\n", `p.txt line 1: "a\x00b"; must be without zero bytes`},
		{"too long", "p.txt", "a\n" + strings.Repeat("x", dataset.MaxRecordBytes+1) + "\n", `p.txt line 2: must be a line of at most 1048576 bytes`},
		{"too long an element", "p.json", `[{"prompt": "` + strings.Repeat("x", dataset.MaxRecordBytes) + `"}]`, `p.json line 1: must be a record of at most 1048576 bytes`},
		{"too long a cell", "p.csv", "prompt\n" + strings.Repeat("x", dataset.MaxRecordBytes+1) + "\n", `p.csv line 2: must be a record of at most 1048576 bytes`},
		{"a quote never closed", "p.csv", "prompt\n\"" + strings.Repeat("x\n", 3<<20), `read p.csv: a record of more than 1048576 bytes`},
		{"too many records", "p.txt", strings.Repeat("x\n", dataset.MaxRecords+1), `read p.txt: more than 1048576 records`},
		{"no Parquet", "p.parquet", "prompt\na\n", `read p.parquet: no Parquet file: it does not begin with PAR1; ` + hint},
		{"Parquet that is cut off", "p", "PAR1\x15\x04", `read p: not Parquet: reading magic footer of parquet file: strings.Reader.ReadAt: negative offset (read: 0)`},
		{"Parquet by another name", "p.txt", "PAR1\x15\x04", `read p.txt: it is a Parquet file, and its name says text; say --prompts-format parquet`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Fields: fields})
			if err == nil || !strings.HasSuffix(err.Error(), tt.want) {
				t.Fatalf("error\n %v\nwant\n %s", err, tt.want)
			}
			if strings.HasPrefix(tt.want, tt.file) && err.Error() != tt.want {
				t.Errorf("error\n %v\nwant\n %s", err, tt.want)
			}
		})
	}
	if _, err := readAll(strings.NewReader("a"), "x", dataset.Options{Format: "xml"}); err == nil || !strings.Contains(err.Error(), `format: "xml"; must be one of auto, text, csv`) {
		t.Errorf("unknown format: %v", err)
	}
}

// endless is more than any file may have.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = "\nxxxxxxxxxxxxxxx"[i%16]
	}
	return len(p), nil
}

func TestRead_Bounds(t *testing.T) {
	_, err := readAll(endless{}, "p.txt", dataset.Options{SkipBad: true})
	if err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("an endless file: %v", err)
	}
}

// Bad records are listed, keep their place, and leave the others alone.
func TestRead_SkipBad(t *testing.T) {
	tests := []struct {
		name, file, text string
		indices          []int
		bad              []int // lines
	}{
		{"lines", "p.jsonl", "{\"prompt\": \"a\"}\nnope\n\n{\"tag\": 1}\n{\"prompt\": \"d\"}\n", []int{0, 3}, []int{2, 4}},
		{"array", "p.json", "[{\"prompt\": \"a\"},\n3,\n{\"prompt\": \"c\"}]", []int{0, 2}, []int{2}},
		{"table", "p.csv", "prompt,sigmas\na,1\nb\"c,2\nd,x\ne\nf,3\n", []int{0, 4}, []int{3, 4, 5}},
		{"text", "p.txt", "a\n\xff\n" + strings.Repeat("y", dataset.MaxRecordBytes+1) + "\nd", []int{0, 3}, []int{2, 3}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d, err := readAll(strings.NewReader(tt.text), tt.file, dataset.Options{Fields: fields, SkipBad: true})
			if err != nil {
				t.Fatal(err)
			}
			var indices, bad []int
			for _, r := range d.Records {
				indices = append(indices, r.Index)
			}
			for _, b := range d.Bad {
				bad = append(bad, b.Line)
				if b.File != tt.file || b.Rule == "" {
					t.Errorf("bad record %+v", b)
				}
			}
			if !reflect.DeepEqual(indices, tt.indices) || !reflect.DeepEqual(bad, tt.bad) ||
				d.Total != len(indices)+len(bad) {
				t.Errorf("records %v, bad lines %v of %d; want %v and %v", indices, bad, d.Total, tt.indices, tt.bad)
			}
		})
	}
}

// What Prepare refuses is a bad record like any other.
func TestRead_Prepare(t *testing.T) {
	o := dataset.Options{SkipBad: true, Prepare: func(r *dataset.Record) error {
		if r.Fields["prompt"] == "b" {
			return fmt.Errorf("b is not wanted")
		}
		r.Fields["prompt"] = fmt.Sprint("the ", r.Fields["prompt"])
		return nil
	}}
	d, err := readAll(strings.NewReader("a\nb\nc\n"), "p.txt", o)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Records) != 2 || d.Records[1].Fields["prompt"] != "the c" || d.Records[1].Index != 2 {
		t.Errorf("records %+v", d.Records)
	}
	if len(d.Bad) != 1 || d.Bad[0].Error() != "p.txt line 2: b is not wanted" {
		t.Errorf("bad %v", d.Bad)
	}
}

// A name that was probably meant for a field is no metadata, where the caller can tell.
func TestRead_Misspelt(t *testing.T) {
	o := dataset.Options{Fields: fields, Misspelt: func(name string) string {
		return map[string]string{"gruop_size": "group_size", "negativ_prompt": "negative_prompt"}[name]
	}}
	for name, text := range map[string]string{
		"p.jsonl": `{"prompt": "a", "tag": "x", "gruop_size": 4}`,
		"p.csv":   "prompt,tag,negativ_prompt\na,x,y\n",
	} {
		if _, err := readAll(strings.NewReader(text), name, o); err == nil ||
			!strings.Contains(err.Error(), name+" line 1: ") || !strings.Contains(err.Error(), ", did you mean ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	o.SkipBad = true
	set, err := readAll(strings.NewReader(`{"prompt": "a", "gruop_size": 4}
{"prompt": "a", "metadata": {"gruop_size": 4}}
`), "p.jsonl", o)
	if err != nil || len(set.Bad) != 1 || len(set.Records) != 1 {
		t.Errorf("%+v, %v", set, err)
	}
}
