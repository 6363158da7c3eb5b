package export_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/schemas"
)

// serveTree makes a run of a tree with three leaves that part at step 1, the last of which part again at step 2, and a
// sample that goes on from one of them.
func serveTree(t *testing.T) *bus.Bus {
	t.Helper()
	b := serve(t, 0)
	steps := func(p *schemas.Prompt) {
		p.NumInferenceSteps, p.GroupSize, p.Rollout.SDEStepIndices = new(int64(4)), nil, []int64{1, 2}
		p.Reward = []schemas.RewardSpec{{Name: "synthetic"}}
	}
	add(t, b, "tree", steps, func(p *schemas.Prompt) {
		p.Tree = &schemas.Tree{Branches: []schemas.BranchPoint{{StepIndex: 1, Width: 2}, {StepIndex: 2, Width: 2}}}
	})
	add(t, b, "later", steps, func(p *schemas.Prompt) {
		p.GroupSize = new(int64(1))
		p.Start = &schemas.Start{Branch: &schemas.Branch{UID: "tree", SampleIndex: 3, StepIndex: 3}}
	})
	return b
}

// records reads the records of a file.
var records = map[string]func(t *testing.T, path string) []export.Record{
	"webdataset": func(t *testing.T, path string) []export.Record {
		var lines []string
		for name, data := range untar(t, path) {
			if filepath.Ext(name) == ".json" {
				lines = append(lines, string(data))
			}
		}
		return parse(t, lines)
	},
	"parquet": func(t *testing.T, path string) []export.Record {
		rows, err := parquet.ReadFile[export.Record](path)
		if err != nil {
			t.Fatal(err)
		}
		return rows
	},
	"safetensors": func(t *testing.T, path string) []export.Record {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		a, err := safetensors.Parse(path, data)
		if err != nil {
			t.Fatal(err)
		}
		return parse(t, strings.Split(a.Metadata()["samples"], "\n"))
	},
}

func parse(t *testing.T, lines []string) []export.Record {
	t.Helper()
	list := make([]export.Record, len(lines))
	for i, line := range lines {
		if err := json.Unmarshal([]byte(line), &list[i]); err != nil {
			t.Fatal(err)
		}
	}
	return list
}

// Each record says where its sample branched off, and a leaf's whose steps led to it, with the advantages of these.
func TestWrite_Tree(t *testing.T) {
	b := serveTree(t)
	m, err := b.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", "tree"))
	if err != nil {
		t.Fatal(err)
	}
	var a schemas.Advantage
	if err := schemas.Decode(m.Data, &a); err != nil {
		t.Fatal(err)
	}
	at := func(branch, child int) export.Part {
		c := a.Branches[branch].Children[child]
		return export.Part{
			SampleIndex: c.SampleIndex, StepIndex: a.Branches[branch].StepIndex, Leaves: c.Leaves,
			Advantage: c.Advantage,
		}
	}
	root := export.Part{Leaves: 4}
	type place struct {
		uid   string
		index int64
	}
	type facts struct {
		Parent *export.Parent
		Path   []export.Part
	}
	want := map[place]facts{ // branches are by step, then by sample
		{"tree", 0}:  {nil, []export.Part{root, at(0, 0), at(1, 0)}},
		{"tree", 1}:  {&export.Parent{Run: "r", UID: "tree", StepIndex: 2}, []export.Part{root, at(0, 0), at(1, 1)}},
		{"tree", 2}:  {&export.Parent{Run: "r", UID: "tree", StepIndex: 1}, []export.Part{root, at(0, 1), at(2, 0)}},
		{"tree", 3}:  {&export.Parent{Run: "r", UID: "tree", SampleIndex: 2, StepIndex: 2}, []export.Part{root, at(0, 1), at(2, 1)}},
		{"later", 0}: {&export.Parent{Run: "r", UID: "tree", SampleIndex: 3, StepIndex: 3}, nil},
	}
	if p := want[place{"tree", 3}].Path; p[1].Leaves != 2 || p[2].SampleIndex != 3 || p[2].Advantage == nil {
		t.Fatalf("the tree's advantages: %+v", a.Branches)
	}
	for _, name := range export.Datasets() {
		o := export.DatasetOptions{Format: name, Folder: t.TempDir(), Bytes: 1 << 30, Latents: true}
		x := write(t, b, o)
		got := map[place]facts{}
		for _, r := range records[name](t, filepath.Join(o.Folder, x.Shards[0].File)) {
			if len(r.Path) == 0 {
				r.Path = nil
			}
			got[place{r.UID, r.SampleIndex}] = facts{r.Parent, r.Path}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%+v\nwant\n%+v", name, got, want)
		}
	}
}

// The libraries that people load datasets with find images, states and branches.
func TestWrite_Python(t *testing.T) {
	python := os.Getenv("MEANDER_PYTHON")
	if python == "" {
		python = "python3"
	}
	for format, c := range map[string]struct{ needs, program string }{
		"parquet": {"datasets, PIL, numpy", `
import datasets, numpy
rows = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=path + ".cache").cast_column("image", datasets.Image())
for r in rows:
    states = numpy.frombuffer(r["latents"], "<f4").reshape(r["latents_shape"])
    tell(r, r["image"].size, states)
`},
		"webdataset": {"webdataset, safetensors, PIL, numpy", `
import webdataset
from safetensors.numpy import load
for r in webdataset.WebDataset(path, shardshuffle=False).decode("pil"):
    tell(r["json"], r["png"].size, load(r["safetensors"])["latents"])
`},
		"safetensors": {"safetensors, numpy", `
import json
from safetensors import safe_open
with safe_open(path, "numpy") as f:
    for line in f.metadata()["samples"].splitlines():
        r = json.loads(line)
        key = f"{r['uid']}/{r['sample_index']}/"
        image = f.get_tensor(key + "image")
        tell(r, (image.shape[1], image.shape[0]), f.get_tensor(key + "latents"))
`},
	} {
		t.Run(format, func(t *testing.T) {
			if out, err := exec.Command(python, "-c", "import "+c.needs).CombinedOutput(); err != nil {
				t.Skipf("not read in Python: %s lacks some of %s (pip install datasets webdataset safetensors; "+
					"MEANDER_PYTHON names another Python): %s", python, c.needs, out)
			}
			b := serveTree(t)
			o := export.DatasetOptions{Format: format, Folder: t.TempDir(), Bytes: 1 << 30, Latents: true}
			path := filepath.Join(o.Folder, write(t, b, o).Shards[0].File)
			program := exec.Command(python, "-c", `
import sys
path = sys.argv[1]
def tell(r, size, states):
    parent, way = r.get("parent"), r.get("path") or []
    print(r["uid"], r["sample_index"], *size, list(states.shape) == r["latents_shape"] and bool(states.any()),
          "from %s/%d@%d" % (parent["uid"], parent["sample_index"], parent["step_index"]) if parent else "-",
          *("%d@%d" % (p["sample_index"], p["step_index"]) for p in way), all(p["advantage"] is not None for p in way[1:]))
`+c.program, path)
			program.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "HF_HOME="+t.TempDir())
			var errs bytes.Buffer
			program.Stderr = &errs
			got, err := program.Output()
			if err != nil {
				t.Fatalf("%v: %s", err, errs.String())
			}
			if want := `tree 0 64 64 True - 0@0 0@1 0@2 True
tree 1 64 64 True from tree/0@2 0@0 0@1 1@2 True
tree 2 64 64 True from tree/0@1 0@0 2@1 2@2 True
tree 3 64 64 True from tree/2@2 0@0 2@1 3@2 True
later 0 64 64 True from tree/3@3 True
`; string(got) != want {
				t.Errorf("%s\nwant\n%s", got, want)
			}
		})
	}
}
