package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/meander-rl/meander/schemas"
)

// jsonSchemas returns the file jsonschema/<event>.json of every event, by name.
func jsonSchemas(c *Comments) (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, e := range schemas.Events() {
		data, err := JSONSchema(e, e.Type(), c)
		if err != nil {
			return nil, fmt.Errorf("json schema of %s: %w", e.Type(), err)
		}
		files[schemaFile(e.Type())] = data
	}
	return files, nil
}

// schemaFile returns the file of the schema of an event type such as "step/1".
func schemaFile(eventType string) string {
	name, version, _ := strings.Cut(eventType, "/")
	return "jsonschema/" + name + ".v" + version + ".json"
}

// JSONSchema returns the JSON Schema of a struct of the contract, from its tags (see
// schemas.Field) and comments. e is a pointer to the struct, title a type such as "step/1".
func JSONSchema(e any, title string, c *Comments) ([]byte, error) {
	r := jsonschema.Reflector{
		FieldNameTag: "msgpack", ExpandedStruct: true, AllowAdditionalProperties: true, Anonymous: true,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if t == reflect.TypeFor[schemas.Metadata]() {
				return &jsonschema.Schema{Type: "object", MaxProperties: new(uint64(schemas.MaxMapKeys))}
			}
			if t == reflect.TypeFor[schemas.Truth]() {
				return &jsonschema.Schema{Description: "any value of JSON"}
			}
			return nil
		},
	}
	s := r.Reflect(e)
	root := reflect.TypeOf(e).Elem()
	s.ID = jsonschema.ID("urn:meander:" + strings.ReplaceAll(title, "/", ":"))
	s.Title = title
	types := map[string]reflect.Type{root.Name(): root}
	collectTypes(root, types)
	if err := refine(s, root, c); err != nil {
		return nil, err
	}
	for name, def := range s.Definitions {
		if err := refine(def, types[name], c); err != nil {
			return nil, err
		}
	}
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, data, "", "  "); err != nil {
		return nil, err
	}
	out.WriteByte('\n')
	// Marshalling escapes these for the sake of HTML pages; here they are prose.
	text := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(out.String())
	return []byte(text), nil
}

// typesOfEvents returns all structs of the contract by name: the events, and what is in them.
func typesOfEvents() map[string]reflect.Type {
	types := map[string]reflect.Type{}
	for _, e := range schemas.Events() {
		t := reflect.TypeOf(e).Elem()
		types[t.Name()] = t
		collectTypes(t, types)
	}
	return types
}

// collectTypes adds the structs nested in t to types, by name.
func collectTypes(t reflect.Type, types map[string]reflect.Type) {
	for f := range t.Fields() {
		ft := f.Type
		for ft.Kind() == reflect.Pointer || ft.Kind() == reflect.Slice {
			ft = ft.Elem()
		}
		if ft.Kind() == reflect.Struct && types[ft.Name()] == nil {
			types[ft.Name()] = ft
			collectTypes(ft, types)
		}
	}
}

// refine adds to the schema of struct t what reflection does not see: descriptions,
// limits and defaults, null, and the fields a writer must give.
func refine(s *jsonschema.Schema, t reflect.Type, c *Comments) error {
	if t == nil {
		return errors.New("schema of a type that is not reachable")
	}
	s.Description = c.inWireNames(t, t.Name())
	s.Required = nil
	properties := s.Properties
	s.Properties = jsonschema.NewProperties()
	for _, f := range schemas.Fields(t) {
		p, ok := properties.Get(f.Name)
		if !ok {
			return fmt.Errorf("%s.%s has no property %q", f.Owner.Name(), f.GoName, f.Name)
		}
		numbers(p, f.Type)
		if err := limit(p, &f); err != nil {
			return fmt.Errorf("%s.%s: %w", f.Owner.Name(), f.GoName, err)
		}
		if f.Name == "v" {
			p.Const = schemas.Version
		}
		if f.Optional || f.Type.Kind() == reflect.Pointer || f.Type.Kind() == reflect.Slice {
			p = nullable(p)
		}
		if p.Ref != "" { // a reference is shared, so what is said of this use goes around it
			p = &jsonschema.Schema{AllOf: []*jsonschema.Schema{p}}
		}
		var err error
		if p.Description, err = c.Describe(t, f); err != nil {
			return err
		}
		s.Properties.Set(f.Name, p)
		if f.Digest != "" {
			if p.Extras == nil {
				p.Extras = map[string]any{}
			}
			p.Extras["x-digest"] = f.Digest
		}
		if required(t.Name(), f.Name, f.Optional) {
			s.Required = append(s.Required, f.Name)
		}
	}
	return nil
}

// limit adds what the tags of a field say. Rules across fields are not in the schema, only in
// Validate.
func limit(p *jsonschema.Schema, f *schemas.Field) error {
	each := p // what the rules of a single value go to
	if p.Items != nil {
		each = p.Items
		p.UniqueItems = f.Unique
	}
	if r := f.Range; r != nil {
		bound(r.Low, r.OpenLow, &each.Minimum, &each.ExclusiveMinimum)
		bound(r.High, r.OpenHigh, &each.Maximum, &each.ExclusiveMaximum)
	}
	switch {
	case f.Size == nil:
	case p.Items != nil:
		p.MinItems, p.MaxItems = length(f.Size)
	case f.Type.Kind() == reflect.Map:
		p.MinProperties, p.MaxProperties = length(f.Size)
	case f.Type.Kind() != reflect.Slice: // base64 of byte strings has another length
		// Characters, where Validate counts bytes: necessary, not sufficient.
		p.MinLength, p.MaxLength = length(f.Size)
	}
	if f.Enum != nil {
		each.Enum = nil
		if f.Empty {
			each.Enum = append(each.Enum, "")
		}
		for _, v := range f.Enum {
			each.Enum = append(each.Enum, v)
		}
	}
	setForm(each, f)
	if f.Unit != "" {
		p.Extras = map[string]any{"x-unit": f.Unit}
	}
	if f.Default == "" {
		return nil
	}
	value, err := f.DefaultValue()
	p.Default = value
	return err
}

// setForm sets the pattern that Field.Form means for a text, such as a digest; without a form nothing.
func setForm(p *jsonschema.Schema, f *schemas.Field) {
	least := 1
	if f.Empty {
		least = 0
	}
	switch f.Form {
	case schemas.FormToken:
		most := schemas.MaxToken
		if f.Size != nil && f.Type.Kind() == reflect.String {
			most = int(f.Size.High)
		}
		p.Pattern = fmt.Sprintf("^[A-Za-z0-9_-]{%d,%d}$", least, most)
	case schemas.FormDigest, schemas.FormSHA256:
		digest := "[0-9a-f]{64}"
		if f.Form == schemas.FormDigest {
			digest = "(blake3:)?" + digest
		}
		if f.Empty {
			digest = "(" + digest + ")?"
		}
		p.Pattern = "^" + digest + "$"
	case schemas.FormPath:
		const element = `([^./\\\x00-\x1f]|\.[^./\\\x00-\x1f]|\.\.[^/\\\x00-\x1f])[^/\\\x00-\x1f]*`
		p.Pattern, p.MaxLength = "^"+element+"(/"+element+")*$", new(uint64(schemas.MaxPath))
	case schemas.FormRewardName: // that the whole has at most MaxToken characters is the length
		p.Pattern = "^[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)?$"
		p.MaxLength = new(uint64(schemas.MaxToken))
	}
}

// bound sets an end of a range: at, or beyond if the end itself is left out. An infinite end sets nothing.
func bound(x float64, open bool, at, beyond *json.Number) {
	if math.IsInf(x, 0) {
		return
	}
	if open {
		at = beyond
	}
	*at = json.Number(strconv.FormatFloat(x, 'f', -1, 64))
}

// length returns the ends of a size, nil for an end that says nothing.
func length(r *schemas.Range) (low, high *uint64) {
	if r.Low > 0 {
		low = new(uint64(r.Low))
	}
	if !math.IsInf(r.High, 1) {
		high = new(uint64(r.High))
	}
	return low, high
}

// required reports whether every writer gives the field. What users write (the prompt
// and what is in it) has defaults; the rest is written by services, in full.
func required(typeName, field string, optional bool) bool {
	if given, ok := userWritten[typeName]; ok {
		return slices.Contains(given, field)
	}
	return !optional
}

var userWritten = map[string][]string{
	"Prompt":        {"prompt"},
	"Rollout":       {},
	"SDEWindow":     {"size"},
	"RewardSpec":    {"name"},
	"AdvantageSpec": {},
	"BatchSpec":     {"id", "groups"},
	"RuleSpec":      {"name"},
}

// numbers states the wire types, which JSON does not tell apart.
func numbers(p *jsonschema.Schema, t reflect.Type) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Int64:
		p.Format = "int64"
	case reflect.Uint64:
		p.Format = "uint64"
		p.Minimum, p.Maximum = "0", "18446744073709551615"
	case reflect.Float32:
		p.Format = "float"
	case reflect.Float64:
		p.Format = "double"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			if p.Type == "string" {
				p.ContentEncoding = "base64"
				p.Extras = map[string]any{"x-msgpack": "bin"}
			}
			return
		}
		numbers(p.Items, t.Elem())
		if t.Elem().Kind() == reflect.Pointer {
			p.Items = nullable(p.Items)
		}
	}
}

// nullable also accepts null.
func nullable(p *jsonschema.Schema) *jsonschema.Schema {
	if p.Ref == "" && p.Type == "" { // any value, so null too
		return p
	}
	if p.Ref != "" {
		return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{p, {Type: "null"}}}
	}
	if p.Extras == nil {
		p.Extras = map[string]any{}
	}
	p.Extras["type"] = []string{p.Type, "null"}
	p.Type = ""
	if p.Enum != nil {
		p.Enum = append(p.Enum, nil)
	}
	return p
}
