package schemas_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

// The goldens are the encodings of samples, of version 1 of each type. They are
// what readers in other languages are tested with, and every one ever committed must
// stay readable: -update adds new ones and refuses to change old ones.
var update = flag.Bool("update", false, "write goldens of samples that have none")

const goldenDir = "testdata/golden"

// digests.json holds the content digests of the goldens that have one, and payload digests of steps.
const digestFile = "testdata/digests.json"

func goldenTypes() map[string]string {
	types := map[string]string{}
	for _, e := range schemas.Events() {
		name, _, _ := strings.Cut(e.Type(), "/")
		types[name] = e.Type()
	}
	return types
}

// goldens calls test with each committed golden and an empty event of its type.
func goldens(t *testing.T, test func(t *testing.T, name string, data []byte, e schemas.Event)) {
	t.Helper()
	files, err := filepath.Glob(goldenDir + "/*.msgpack")
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens: %v", err)
	}
	types := goldenTypes()
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".msgpack")
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			kind, _, _ := strings.Cut(name, "-")
			e, ok := schemas.New(types[kind])
			if !ok {
				t.Fatalf("no event type %q", kind)
			}
			test(t, name, data, e)
		})
	}
}

func TestGoldens_samples(t *testing.T) {
	for _, s := range samples(t) {
		t.Run(s.name, func(t *testing.T) {
			file := filepath.Join(goldenDir, s.name+".msgpack")
			data := encoded(t, s.event)
			want, err := os.ReadFile(file)
			if *update && errors.Is(err, os.ErrNotExist) {
				write(t, file, data)
				write(t, filepath.Join(goldenDir, s.name+".json"), twin(t, data))
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(data, want) {
				t.Errorf("the encoding of the sample changed: % x, want % x", data, want)
			}
		})
	}
}

func write(t *testing.T, file string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// twin is an event as readable JSON, by the general decoder: byte strings in base64.
func twin(t *testing.T, data []byte) []byte {
	t.Helper()
	v, err := msgpack.NewDecoder(bytes.NewReader(data)).DecodeInterface()
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return append(out, '\n')
}

// decodedTwin is the twin as the schema checker takes it.
func decodedTwin(t *testing.T, data []byte) any {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(twin(t, data)))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// Every golden ever committed decodes, is valid, and encodes to the same bytes.
func TestGoldens_roundTrip(t *testing.T) {
	goldens(t, func(t *testing.T, name string, data []byte, e schemas.Event) {
		if err := schemas.DecodeValid(data, e); err != nil {
			t.Fatal(err)
		}
		if again := encoded(t, e); !bytes.Equal(again, data) {
			t.Errorf("encodes to % x, want % x", again, data)
		}
		want, err := os.ReadFile(filepath.Join(goldenDir, name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		if got := twin(t, data); !bytes.Equal(got, want) {
			t.Errorf("readable twin is\n%s\nwant\n%s", got, want)
		}
	})
}

// keptFile lists the goldens with their digests, in the order they came. A line "# v0.1.0 DIGEST" ends those of a
// release and seals all before it. Lines are added and never changed: who reads a release's events must be able to for
// ever.
const keptFile = "testdata/kept.txt"

// release seals the list for a release; see Releases in CONTRIBUTING.md.
var release = flag.String("release", "", "end the goldens of this release, such as v0.1.0")

// Every golden is listed, and every one that is listed is there with the bytes it had. TestGoldens_roundTrip reads them
// all.
func TestGoldens_Kept(t *testing.T) {
	list, err := os.ReadFile(keptFile)
	if err != nil && !*update {
		t.Fatal(err)
	}
	kept := map[string]bool{}
	var before strings.Builder
	for line := range strings.Lines(string(list)) {
		digest, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		sealed, sealing := strings.CutPrefix(line, "# ")
		if sealing {
			name, digest, ok = strings.Cut(strings.TrimSuffix(sealed, "\n"), " ")
			if got := digestOf(before.String()); !ok || got != digest {
				t.Errorf("the goldens of release %s were changed: their list has the digest %s, had %s", name, got,
					digest)
			}
		} else if data, err := os.ReadFile(filepath.Join(goldenDir, name)); err != nil || !ok ||
			digestOf(string(data)) != digest {
			t.Errorf("%q is not the golden that was committed: %v", name, err)
		}
		kept[name] = true
		before.WriteString(line)
	}
	files, err := filepath.Glob(goldenDir + "/*.msgpack")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		if kept[name] {
			continue
		}
		if !*update {
			t.Errorf("%s is not in %s; go test ./schemas -run TestGoldens -update adds it", name, keptFile)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		before.WriteString(digestOf(string(data)) + "  " + name + "\n")
	}
	if *release != "" {
		before.WriteString("# " + *release + " " + digestOf(before.String()) + "\n")
	}
	if (*update || *release != "") && !t.Failed() {
		write(t, keptFile, []byte(before.String()))
	}
}

// Decoded goldens are what the JSON Schemas describe.
func TestGoldens_jsonSchema(t *testing.T) {
	compiled := compileSchemas(t)
	goldens(t, func(t *testing.T, _ string, data []byte, e schemas.Event) {
		if err := compiled[e.Type()].Validate(decodedTwin(t, data)); err != nil {
			t.Errorf("%#v", err)
		}
	})
}

func compileSchemas(t *testing.T) map[string]*jsonschema.Schema {
	t.Helper()
	compiled := map[string]*jsonschema.Schema{}
	for _, e := range schemas.Events() {
		data, ok := schemas.JSONSchema(e.Type())
		if !ok {
			t.Fatalf("no schema of %s", e.Type())
		}
		compiled[e.Type()] = compile(t, data)
	}
	return compiled
}

// The schemas and Validate agree on faults of one field.
func TestJSONSchema_refuses(t *testing.T) {
	compiled := compileSchemas(t)
	tests := []struct {
		name  string
		event schemas.Event
	}{
		{"prompt too long", &schemas.Prompt{Prompt: strings.Repeat("x", schemas.MaxPromptBytes+1)}},
		{"group of none", &schemas.Prompt{Prompt: "x", GroupSize: new(int64(0))}},
		{"group too large", &schemas.Prompt{Prompt: "x", GroupSize: new(int64(1025))}},
		{"uid with a dot", &schemas.Prompt{Prompt: "x", UID: "a.b"}},
		{"no height", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Height: new(int64(0))}}},
		{"sigma 0", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Sigmas: []float64{1, 0}}}},
		{"no sigma", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Sigmas: []float64{}}}},
		{"sde type", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEType: "foo"}}}},
		{"negative index", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{-1}}}}},
		{"index twice", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 1}}}}},
		{"window of none", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{}}}}},
		{"reward without a name", &schemas.Prompt{Prompt: "x", Reward: []schemas.RewardSpec{{}}}},
		{"batch of none", &schemas.Prompt{Prompt: "x", Batch: &schemas.BatchSpec{ID: "b"}}},
		{"empty request", &schemas.Request{}},
		{"empty step", &schemas.Step{}},
		{"empty trajectory", &schemas.Trajectory{}},
		{"empty reward", &schemas.Reward{}},
		{"empty advantage", &schemas.Advantage{}},
		{"empty batch", &schemas.Batch{}},
		{"empty policy", &schemas.Policy{}},
		{"empty dead letter", &schemas.Dead{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if compiled[tt.event.Type()].Validate(decodedTwin(t, encoded(t, tt.event))) == nil {
				t.Error("the schema accepts it")
			}
			if tt.event.Validate() == nil {
				t.Error("Validate accepts it")
			}
		})
	}
}

// Digests must not change either: they are compared across versions.
func TestGoldens_digests(t *testing.T) {
	got := map[string]string{}
	goldens(t, func(t *testing.T, name string, data []byte, e schemas.Event) {
		if err := schemas.Decode(data, e); err != nil {
			t.Fatal(err)
		}
		if _, ok := e.(schemas.StepEvent); ok {
			payload, err := schemas.PayloadDigest(data)
			if err != nil {
				t.Error(err)
			}
			got[name+" payload"] = payload
		}
		sum, err := schemas.ContentDigest(e)
		switch {
		// a tensor by another algorithm
		case errors.Is(err, schemas.ErrNoContent), name == "step-parts-and-refs", name == "tokens-parts":
		case err != nil:
			t.Error(err)
		default:
			got[name] = schemas.BLAKE3.Text(sum)
		}
	})
	want := map[string]string{}
	data, err := os.ReadFile(digestFile)
	if err == nil {
		err = json.Unmarshal(data, &want)
	}
	if *update && (err == nil || errors.Is(err, os.ErrNotExist)) {
		for _, name := range slices.Collect(maps.Keys(got)) {
			if want[name] == "" {
				want[name] = got[name]
			}
		}
		out, err := json.MarshalIndent(want, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		write(t, digestFile, append(out, '\n'))
	} else if err != nil {
		t.Fatal(err)
	}
	for name, digest := range want {
		if got[name] != digest {
			t.Errorf("%s: digest %s, want %s", name, got[name], digest)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d digests, %d committed", len(got), len(want))
	}
}

// A second implementation, in Python, reads the same from the goldens and computes
// the same digests.
func TestGoldens_python(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 on PATH: the second reader did not run")
	}
	out, err := exec.Command(python, "testdata/check.py").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), scheduleVector) {
		t.Errorf("schedule vector %s is not in\n%s", scheduleVector, out)
	}
}
