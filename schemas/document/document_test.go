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

// Descriptions name fields as they are on the wire, also those whose Go names have digits.
func TestJSONSchemas_wireNames(t *testing.T) {
	named := regexp.MustCompile(`"([A-Z][A-Za-z]*[0-9][A-Za-z0-9]*) is [^"]*"`)
	for _, event := range schemas.Events() {
		data, ok := schemas.JSONSchema(event.Type())
		if !ok {
			t.Fatalf("no schema of %s", event.Type())
		}
		if found := named.FindSubmatch(data); found != nil {
			t.Errorf("%s: a description begins with the Go name %s", event.Type(), found[1])
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
		return strings.FieldsFunc(strings.ToLower(s),
			func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
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

// The channels cover every event, and are the subjects that the code publishes on. A reader who filters the named
// stream or bucket by a channel's address gets what is stored there.
func TestChannels(t *testing.T) {
	subjects := map[string]string{ // channel -> a subject made by the code
		"prompt":     schemas.PromptSubject("r"),
		"group":      schemas.GroupSubject("r", "u"),
		"plan":       schemas.PlanSubject("r", "u"),
		"opening":    schemas.StoredSubject(schemas.OpeningSubject("r", "b", "u")),
		"request":    schemas.RequestSubject("r", "l", "u", 1, schemas.StageMain),
		"step":       schemas.StepSubject("r", "u", 1, schemas.StageMain, "a", 2),
		"part":       schemas.PartSubject(schemas.StepSubject("r", "u", 1, schemas.StageMain, "a", 2), 3),
		"tokens":     schemas.TokensSubject("r", "u", 1, schemas.StageMain, "a", 2),
		"trajectory": schemas.TrajectorySubject("r", "u", 1, schemas.StageMain),
		"score":      schemas.ScoreSubject("pickscore"),
		"interact":   schemas.InteractSubject("tutor"),
		"teacher":    schemas.TeacherSubject("reference"),
		"seen":       schemas.SeenSubject("l"),
		"verdict":    schemas.VerdictSubject("r", "u", 1, "human"),
		"rating":     schemas.RatingSubject("r", "u", 1), "selection": schemas.SelectionSubject("r", "u", 2),
		"step_reward": schemas.StepRewardSubject("r", "u", 1, 2), "dry": schemas.DrySubject("r"),
		"reward":             schemas.StoredSubject(schemas.RewardSubject("r", "b", "u", 1)),
		"advantage":          schemas.AdvantageSubject("r", "u"),
		"batch":              schemas.BatchSubject("r", "b"),
		"policy":             schemas.PolicySubject("l", schemas.TenantMain),
		"presence":           schemas.PresenceSubject("i"),
		"dead":               schemas.DeadSubject("intake", "r", "u"),
		"control":            schemas.ControlSubject("r"),
		"update":             schemas.UpdateSubject("r", "l", schemas.TenantMain, "t", 1),
		"alarm":              (&schemas.Alarm{Run: "r", Rule: schemas.RuleKL}).Subject(),
		"applied":            schemas.AppliedSubject("l", schemas.TenantMain, "i"),
		"parked":             schemas.ParkedSubject("r", "l", "u", 1, schemas.StageMain),
		"tokens_part":        schemas.PartSubject(schemas.TokensSubject("r", "u", 1, schemas.StageMain, "a", 2), 3),
		"held_control":       schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey("r", "")),
		"held_group_control": schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey("r", "u")),
		"opening_published":  schemas.OpeningSubject("r", "b", "u"),
		"reward_published":   schemas.RewardSubject("r", "b", "u", 1),
	}
	streams := map[string]schemas.StreamSpec{}
	for _, s := range schemas.Streams() {
		streams[s.Name] = s
	}
	seen, stored := map[string]bool{}, []string(nil) // as published
	for _, c := range channels {
		seen[c.event] = true
		if c.address == "" {
			continue
		}
		subject := subjects[c.name]
		if !matches(c.address, subject) {
			t.Errorf("channel %s: address %s does not fit subject %s", c.name, c.address, subject)
		}
		if c.stream == "" { // core NATS or a bucket: what a reader filters by is the subject of another channel, if any
			if a, ok := schemas.ParseSubject(subject); ok && schemas.StoredSubject(subject) == subject {
				t.Errorf("channel %s: %s are stored on %s, and no stream is named", c.name, a.Kind, subject)
			}
			continue
		}
		a, _ := schemas.ParseSubject(subject)
		if filter := (schemas.Address{Kind: a.Kind}).Filter(); filter != wildcards(c.address) {
			t.Errorf("channel %s: address %s; readers filter by %s", c.name, c.address, filter)
		}
		published := schemas.PublishedSubject(subject)
		stored = append(stored, published)
		if s := streams[c.stream]; !slices.ContainsFunc(s.Subjects,
			func(filter string) bool { return covers(filter, published) }) {
			t.Errorf("channel %s: stream %q does not store %s", c.name, c.stream, published)
		}
	}
	for _, e := range schemas.Events() {
		if !seen[e.Type()] {
			t.Errorf("no channel carries %s", e.Type())
		}
	}
	for _, s := range streams {
		for _, filter := range s.Subjects {
			if strings.HasPrefix(filter, schemas.Prefix) &&
				!slices.ContainsFunc(stored, func(subject string) bool { return covers(filter, subject) }) {
				t.Errorf("no channel has the subjects %s of %s", filter, s.Name)
			}
		}
	}
}

func TestChannels_ParametersAreNoKeywords(t *testing.T) {
	for _, c := range channels {
		for _, p := range placeholders(c.address) {
			if slices.Contains(keywords, p) {
				t.Errorf("channel %s: parameter %s is a keyword of languages whose clients are generated", c.name, p)
			}
		}
	}
}

// keywords cannot name a parameter of a function in TypeScript or Python.
var keywords = strings.Fields(`and as assert async await break case catch class const continue debugger def default del
	delete do elif else enum except export extends finally for from function global if import in instanceof is lambda
	new nonlocal not or package pass private protected public raise return static super switch this throw try typeof
	var void while with yield`)

// wildcards is the filter of an address: a wildcard for each parameter.
func wildcards(address string) string {
	return regexp.MustCompile(`\{[a-z]+\}`).ReplaceAllString(address, "*")
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

// The document has what AsyncAPI 3 asks for. The official parser says the same and more (make asyncapi-test), but it
// needs Node.
func TestAsyncAPI_structure(t *testing.T) {
	var doc map[string]any
	if err := yaml.Unmarshal(generated(t)["asyncapi.yaml"], &doc); err != nil {
		t.Fatal(err)
	}
	need := func(where string, v any, fields ...string) map[string]any {
		m, _ := v.(map[string]any)
		for _, f := range fields {
			if _, ok := m[f]; !ok {
				t.Errorf("%s has no %s", where, f)
			}
		}
		return m
	}
	need("the document", doc, "asyncapi", "info", "servers", "channels", "operations", "components")
	need("info", doc["info"], "title", "version")
	servers := need("servers", doc["servers"], "nats")
	for name, v := range servers {
		s := need(name, v, "host", "protocol")
		declared := need(name, s["variables"])
		for _, variable := range placeholders(strings.ReplaceAll(s["host"].(string), ":", ".")) {
			need(name, declared, variable)
		}
	}
	messages := map[string]bool{}
	for name, v := range need("channels", doc["channels"]) {
		c := need("channel "+name, v, "address", "messages")
		address, _ := c["address"].(string)
		parameters, _ := c["parameters"].(map[string]any)
		if names := placeholders(address); len(parameters) != len(names) {
			t.Errorf("channel %s: parameters %v, address %s", name, parameters, address)
		} else {
			need("channel "+name, parameters, names...)
		}
		for m := range need("channel "+name, c["messages"]) {
			messages["#/channels/"+name+"/messages/"+m] = true
		}
	}
	used := map[string]bool{}
	for name, v := range need("operations", doc["operations"]) {
		o := need("operation "+name, v, "action", "channel", "messages")
		if !regexp.MustCompile(`^[A-Za-z0-9_-]+$`).MatchString(name) || o["action"] != "send" && o["action"] != "receive" {
			t.Errorf("operation %q: action %v", name, o["action"])
		}
		channel, _ := need("operation "+name, o["channel"], "$ref")["$ref"].(string)
		for _, m := range o["messages"].([]any) {
			ref := m.(map[string]any)["$ref"].(string)
			if used[ref] = true; !messages[ref] || !strings.HasPrefix(ref, channel+"/") {
				t.Errorf("operation %s: message %s is none of its channel %s", name, ref, channel)
			}
		}
		if r, ok := o["reply"].(map[string]any); ok {
			if a, ok := r["address"]; ok {
				need("the reply address of "+name, a, "location")
			}
			need("the reply of "+name, r["channel"], "$ref")
		}
	}
	for m := range messages {
		if !used[m] {
			t.Errorf("no operation has %s", m)
		}
	}
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
