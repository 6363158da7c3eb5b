package command

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const reports = examples + "reports/"

// 'meander prompts' says what every name is taken as, and shows prompts as they will be read.
func TestPrompts(t *testing.T) {
	for _, tt := range []struct {
		args   []string
		status int
		want   []string
	}{
		{[]string{reports + "07-geneval/metadata.jsonl"}, exitOK, []string{
			": json, one a line; 4 prompts\n", "prompt   4        prompt\n", "exclude  1        metadata\n",
			"line 3          \"a photo of a tie right of a dog\"\n", `"position": [ "right of", 0 ]`,
		}},
		{[]string{reports + "03-pickapic-caption-csv/caption.csv", "--prompt-column", "caption", "--model", "../../deploy/models/signs"}, exitOK, []string{
			"(no name)    2        not used, row numbers, as pandas writes them", "image_0_uid  2        metadata",
			"signs takes 512 tokens; the longest prompt has 25",
		}},
		{[]string{reports + "17-csv-fields/fields.csv"}, exitOK, []string{"seed                 1        field\n", "  field         true_cfg_scale 3.5\n"}},
		{[]string{reports + "05-verl-groundtruth/list.jsonl", "--model", "../../deploy/models/sums"}, exitOK, []string{
			"reward_model.ground_truth  1        ground truth", "  ground truth", `{ "target": [ "Rembrandt",`, "extra_info.index           1        metadata, as index",
		}},
		{[]string{reports + "01-parti-tsv/prompts.tsv", "--limit", "1"}, exitOK, []string{": tsv, columns with tabs; the first 1 prompt\n", "Category   1        metadata"}},
		{[]string{reports + "06-verl-parts/parts.jsonl"}, exitOK, []string{"images                     1        field, as conditions.image", "line 1          \"Find x.\""}},
		{[]string{reports + "03-pickapic-caption-csv/laion.csv"}, exitUsage, []string{`laion.csv line 1: header: "caption,url"; must have a column prompt; name the column of the prompts with --prompt-column`}},
		{[]string{"x.yaml"}, exitUsage, []string{"x.yaml: no such file"}},
		{[]string{reports + "01-parti-tsv/prompts.tsv", "--model", "sign"}, exitUsage, []string{"--model: ", `model "sign": no such model`}},
	} {
		var out, errs text
		status := Execute(t.Context(), append([]string{"prompts"}, tt.args...), strings.NewReader(""), &out, &errs)
		said := out.String() + errs.String()
		for _, want := range tt.want {
			if status != tt.status || !strings.Contains(said, want) {
				t.Errorf("%q: exit status %d, want %d and %q:\n%s", tt.args, status, tt.status, want, said)
			}
		}
	}
	file := filepath.Join(t.TempDir(), "p.jsonl")
	long := `{"prompt": "` + strings.Repeat("word ", 600) + `"}`
	if err := os.WriteFile(file, []byte(`{"prompt": "a", "rollout": {"sde_typ": "ode"}}`+"\n"+`{"prompt": "a", "group_size": 0}`+"\n"+long+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := expect(t, exitFailed, "2 records would be refused", "prompts", file, "--model", "../../deploy/models/signs")
	for _, want := range []string{
		"line 1: rollout.sde_typ: unknown field; did you mean sde_type?",
		"line 2: group_size: 0; must be between 1 and 1024", "too long: 1 prompt, the first at line 3",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing:\n%s", want, out)
		}
	}
	for record, want := range map[string]string{
		`{"prompt": "a", "noise_level": 0.5}`:   "noise_level: 0.5; must be a field of a prompt, did you mean rollout.noise_level?",
		`{"prompt": "a", "rollout.solver": ""}`: "did you mean rollout, which holds an object in JSON?",
		`{"prompt": "a", "group_siz": 4}`:       "did you mean group_size?",
	} {
		other := filepath.Join(t.TempDir(), "p.jsonl")
		if err := os.WriteFile(other, []byte(record), 0o600); err != nil {
			t.Fatal(err)
		}
		expect(t, exitFailed, want, "prompts", other)
	}
	lines := linesOf(t, expect(t, exitFailed, "", "prompts", file, "--json"))
	if len(lines) != 1 || lines[0]["refused"] != 2.0 || lines[0]["prompts"] != 1.0 ||
		len(lines[0]["reasons"].([]any)) != 2 {
		t.Errorf("JSON: %v", lines)
	}
}

// What --out writes is read as the same records.
func TestPrompts_Out(t *testing.T) {
	for _, name := range []string{
		"verl-ocr.jsonl", "geneval.jsonl", "prompts.csv", "prompts.jsonl",
		"reports/05-verl-groundtruth/list.jsonl",
	} {
		file := filepath.Join(t.TempDir(), "out.jsonl")
		expect(t, exitOK, "", "prompts", examples+name, "--out", file)
		want, got := mustLoad(t, "-f", examples+name), mustLoad(t, "-f", file)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v\nwant %+v", name, got, want)
		}
		expect(t, exitUsage, "--out: open "+file+": file exists", "prompts", examples+name, "--out", file)
	}
}
