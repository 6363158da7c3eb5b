package document

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/schemas"
)

func generated(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := Files("..")
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// What is committed, and so embedded, is what the sources say.
func TestDocuments_areCommitted(t *testing.T) {
	want := generated(t)
	for name, data := range want {
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, data) {
			t.Errorf("%s is stale: run go generate ./schemas", name)
		}
	}
	found, err := filepath.Glob("../jsonschema/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range found {
		if _, ok := want["jsonschema/"+filepath.Base(name)]; !ok {
			t.Errorf("%s is not generated any more: remove it", name)
		}
	}
}

func TestDocuments_areDeterministic(t *testing.T) {
	want := generated(t)
	for range 5 {
		if !maps.EqualFunc(generated(t), want, bytes.Equal) {
			t.Fatal("two runs differ")
		}
	}
}

func TestDocuments_areEmbedded(t *testing.T) {
	want := generated(t)
	for _, e := range schemas.Events() {
		got, ok := schemas.JSONSchema(e.Type())
		if !ok || !bytes.Equal(got, want[schemaFile(e.Type())]) {
			t.Errorf("JSONSchema(%q) is not the committed file", e.Type())
		}
	}
	if _, ok := schemas.JSONSchema("step/2"); ok {
		t.Error("there is a schema of step/2")
	}
	if !bytes.Equal(schemas.AsyncAPI(), want["asyncapi.yaml"]) {
		t.Error("AsyncAPI is not the committed file")
	}
}

// Every schema is one by the draft's own rules.
func TestJSONSchemas_compile(t *testing.T) {
	for name, data := range generated(t) {
		if !strings.HasSuffix(name, ".json") {
			continue
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		c := jsonschema.NewCompiler()
		if err := c.AddResource(name, doc); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := c.Compile(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if bytes.Contains(data, []byte(`\u00`)) {
			t.Errorf("%s has escaped prose", name)
		}
	}
}

// A description of a field says more than the field's name does.
func TestJSONSchemas_describe(t *testing.T) {
	empty := map[string]bool{}
	for _, word := range strings.Fields("is are was the a an of its it for in to and or on wire") {
		empty[word] = true
	}
	words := func(s string) []string {
		return strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	}
	checked := 0
	var check func(file, owner string, schema map[string]any)
	check = func(file, owner string, schema map[string]any) {
		fields, _ := schema["properties"].(map[string]any)
		for field, v := range fields {
			text, _ := v.(map[string]any)["description"].(string)
			known := words(field + " " + owner)
			said := slices.DeleteFunc(words(text), func(w string) bool { return empty[w] || slices.Contains(known, w) })
			if len(said) < 2 {
				t.Errorf("%s: %s %s: %q says nothing", file, owner, field, text)
			}
			checked++
		}
		defs, _ := schema["$defs"].(map[string]any)
		for name, v := range defs {
			check(file, name, v.(map[string]any))
		}
	}
	for name, data := range generated(t) {
		if strings.HasSuffix(name, ".json") {
			var schema map[string]any
			if err := json.Unmarshal(data, &schema); err != nil {
				t.Fatal(err)
			}
			check(name, strings.TrimSuffix(filepath.Base(name), ".v1.json"), schema)
		}
	}
	if checked < 200 {
		t.Errorf("only %d fields were checked", checked)
	}
}

// The channels cover every event, and are the subjects that the code publishes on
// and the streams store.
func TestChannels(t *testing.T) {
	subjects := map[string]string{ // channel -> a subject made by the code
		"prompt":     schemas.PromptSubject("r"),
		"group":      schemas.GroupSubject("r", "u"),
		"plan":       schemas.PlanSubject("r", "u"),
		"opening":    schemas.OpeningSubject("r", "b", "u"),
		"request":    schemas.RequestSubject("r", "l", "u", 1),
		"step":       schemas.StepSubject("r", "u", 1, "a", 2),
		"part":       schemas.PartSubject(schemas.StepSubject("r", "u", 1, "a", 2), 3),
		"tokens":     schemas.TokensSubject("r", "u", 1, "a", 2),
		"trajectory": schemas.TrajectorySubject("r", "u", 1),
		"score":      schemas.ScoreSubject("pickscore"),
		"interact":   schemas.InteractSubject("tutor"),
		"verdict":    schemas.VerdictSubject("r", "u", 1, "human"),
		"reward":     schemas.RewardSubject("r", "b", "u", 1),
		"advantage":  schemas.AdvantageSubject("r", "u"),
		"batch":      schemas.BatchSubject("r", "b"),
		"policy":     schemas.PolicySubject("l"),
		"presence":   schemas.PresenceSubject("i"),
		"dead":       schemas.DeadSubject("intake", "r", "u"),
		"control":    schemas.ControlSubject("r"),
		"applied":    schemas.AppliedSubject("l", "i"),
		"parked":     schemas.ParkedSubject("r", "l", "u", 1),

		"tokens_part":  schemas.PartSubject(schemas.TokensSubject("r", "u", 1, "a", 2), 3),
		"held_control": schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey("r", "")),
	}
	streams := map[string]schemas.StreamSpec{}
	for _, s := range schemas.Streams() {
		streams[s.Name] = s
	}
	seen := map[string]bool{}
	for _, c := range channels {
		seen[c.event] = true
		if c.address == "" {
			continue
		}
		if !matches(c.address, subjects[c.name]) {
			t.Errorf("channel %s: address %s does not fit subject %s", c.name, c.address, subjects[c.name])
		}
		if c.stream == "" { // core NATS: no stream has it
			for _, s := range streams {
				if slices.ContainsFunc(s.Subjects, func(filter string) bool { return covers(filter, subjects[c.name]) }) {
					t.Errorf("channel %s: stream %s stores %s", c.name, s.Name, subjects[c.name])
				}
			}
			continue
		}
		s, ok := streams[c.stream]
		if !ok || !slices.ContainsFunc(s.Subjects, func(filter string) bool { return covers(filter, subjects[c.name]) }) {
			t.Errorf("channel %s: stream %q does not store %s", c.name, c.stream, subjects[c.name])
		}
	}
	for _, e := range schemas.Events() {
		if !seen[e.Type()] {
			t.Errorf("no channel carries %s", e.Type())
		}
	}
}

var braces = regexp.MustCompile(`\\\{[a-z]+\\\}`)

// matches says whether subject is address with its parameters filled in.
func matches(address, subject string) bool {
	pattern := braces.ReplaceAllString(regexp.QuoteMeta(address), `[^.]+`)
	return regexp.MustCompile("^" + pattern + "$").MatchString(subject)
}

// covers says whether a NATS subject filter matches subject.
func covers(filter, subject string) bool {
	f, s := strings.Split(filter, "."), strings.Split(subject, ".")
	for i, token := range f {
		if token == ">" {
			return len(s) > i
		}
		if i >= len(s) || token != "*" && token != s[i] {
			return false
		}
	}
	return len(f) == len(s)
}

// Every reference of the AsyncAPI document leads somewhere.
func TestAsyncAPI_references(t *testing.T) {
	files := generated(t)
	var doc map[string]any
	if err := yaml.Unmarshal(files["asyncapi.yaml"], &doc); err != nil {
		t.Fatal(err)
	}
	count := 0
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				walk(e)
			}
		case map[string]any:
			if ref, ok := v["$ref"].(string); ok {
				count++
				if file, ok := strings.CutPrefix(ref, "./"); ok {
					if files[file] == nil {
						t.Errorf("%s is not generated", ref)
					}
				} else if resolve(doc, ref) == nil {
					t.Errorf("%s leads nowhere", ref)
				}
			}
			for _, e := range v {
				walk(e)
			}
		}
	}
	walk(doc)
	if count < 50 {
		t.Errorf("%d references, want the document's many", count)
	}
	streams, _ := doc["x-jetstream-streams"].(map[string]any)
	if len(streams) != len(schemas.Streams()) {
		t.Errorf("%d streams, want %d", len(streams), len(schemas.Streams()))
	}
	steps, _ := streams[schemas.StreamSteps].(map[string]any)
	if steps["discard"] != "new" || steps["max_msgs_per_subject"] != 1 || steps["discard_new_per_subject"] != true {
		t.Errorf("the guard of %s is missing: %v", schemas.StreamSteps, steps)
	}
}

func resolve(doc map[string]any, ref string) any {
	path, ok := strings.CutPrefix(ref, "#/")
	if !ok {
		return nil
	}
	var at any = doc
	for name := range strings.SplitSeq(path, "/") {
		m, _ := at.(map[string]any)
		at = m[name]
	}
	return at
}
