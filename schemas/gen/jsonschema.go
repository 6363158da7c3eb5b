package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/meander-rl/meander/schemas"
)

// jsonSchemas is jsonschema/<event>.json for every event.
func jsonSchemas(dir string) (map[string][]byte, error) {
	comments, err := readComments(dir)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	files := map[string][]byte{}
	for _, e := range schemas.Events() {
		data, err := jsonSchema(e, comments, used)
		if err != nil {
			return nil, fmt.Errorf("json schema of %s: %w", e.Type(), err)
		}
		files[schemaFile(e.Type())] = data
	}
	var stale []string
	for name := range rules {
		if !used[name] {
			stale = append(stale, name)
		}
	}
	if slices.Sort(stale); len(stale) > 0 {
		return nil, fmt.Errorf("rules for fields that are not there: %s", strings.Join(stale, ", "))
	}
	return files, nil
}

// schemaFile is where the schema of an event type such as "step/1" is kept.
func schemaFile(eventType string) string {
	name, version, _ := strings.Cut(eventType, "/")
	return "jsonschema/" + name + ".v" + version + ".json"
}

func jsonSchema(e schemas.Event, comments comments, used map[string]bool) ([]byte, error) {
	r := jsonschema.Reflector{
		FieldNameTag: "msgpack", ExpandedStruct: true, AllowAdditionalProperties: true, Anonymous: true,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if t == reflect.TypeFor[schemas.Metadata]() {
				return &jsonschema.Schema{Type: "object"}
			}
			return nil
		},
	}
	s := r.Reflect(e)
	root := reflect.TypeOf(e).Elem()
	s.ID = jsonschema.ID("urn:meander:" + strings.ReplaceAll(e.Type(), "/", ":"))
	s.Title = e.Type()
	types := map[string]reflect.Type{root.Name(): root}
	collectTypes(root, types)
	if err := refine(s, root, comments, used); err != nil {
		return nil, err
	}
	for name, def := range s.Definitions {
		if err := refine(def, types[name], comments, used); err != nil {
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

// collectTypes finds the structs below t by name.
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
func refine(s *jsonschema.Schema, t reflect.Type, comments comments, used map[string]bool) error {
	if t == nil {
		return errors.New("schema of a type that is not reachable")
	}
	s.Description = comments.describe(t, "")
	s.Required = nil
	for f := range t.Fields() {
		name, option, _ := strings.Cut(f.Tag.Get("msgpack"), ",")
		p, ok := s.Properties.Get(name)
		if !ok {
			return fmt.Errorf("%s.%s has no property %q", t.Name(), f.Name, name)
		}
		optional := option == "omitempty"
		numbers(p, f.Type)
		path := t.Name() + "." + name
		if limit, ok := rules[path]; ok {
			used[path] = true
			for _, set := range limit {
				set(p)
			}
		}
		if name == "v" {
			p.Const = schemas.Version
		}
		if optional || f.Type.Kind() == reflect.Pointer || f.Type.Kind() == reflect.Slice {
			p = nullable(p)
		}
		if p.Ref != "" { // a reference is shared, so what is said of this use goes around it
			p = &jsonschema.Schema{AllOf: []*jsonschema.Schema{p}}
		}
		if p.Description = comments.describe(t, f.Name); p.Description == "" {
			p.Description = vocabulary[name]
		}
		if p.Description == "" {
			return fmt.Errorf("%s.%s has neither a doc comment nor a place in the vocabulary", t.Name(), f.Name)
		}
		s.Properties.Set(name, p)
		if required(t.Name(), name, optional) {
			s.Required = append(s.Required, name)
		}
	}
	return nil
}

// required says whether every writer gives the field. What users write (the prompt
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

// comments are the doc comments of structs and of their fields ("Type.Field"), and
// the wire names of the fields.
type comments struct {
	text map[string]string
	wire map[string]string
}

func readComments(dir string) (comments, error) {
	c := comments{text: map[string]string{}, wire: map[string]string{}}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return c, err
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return c, err
		}
		for _, decl := range file.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok || gen.Tok != token.TYPE {
				continue
			}
			for _, spec := range gen.Specs {
				ts := spec.(*ast.TypeSpec)
				if st, ok := ts.Type.(*ast.StructType); ok {
					c.text[ts.Name.Name] = gen.Doc.Text()
					c.fields(ts.Name.Name, st)
				}
			}
		}
	}
	return c, nil
}

func (c comments) fields(typeName string, st *ast.StructType) {
	before := ""
	for _, f := range st.Fields.List {
		for _, name := range f.Names {
			key := typeName + "." + name.Name
			text := f.Doc.Text()
			if text == "" && slices.Contains(identifier.FindAllString(before, -1), name.Name) {
				text = before // one comment for several fields names each of them
			}
			before = text
			c.text[key] = text
			if f.Tag != nil {
				tag, _ := strconv.Unquote(f.Tag.Value)
				wire, _, _ := strings.Cut(reflect.StructTag(tag).Get("msgpack"), ",")
				c.wire[key] = wire
			}
		}
	}
}

var identifier = regexp.MustCompile(`\b[A-Z][A-Za-z]*\b`)

// constants that comments name.
var constants = map[string]string{
	"MaxTensorDims": strconv.Itoa(schemas.MaxTensorDims), "MaxPartBytes": strconv.Itoa(schemas.MaxPartBytes) + " bytes",
	"BlobBucket": schemas.BlobBucket, "PolicyBucket": schemas.PolicyBucket, "PresenceBucket": schemas.PresenceBucket, "HeaderReply": schemas.HeaderReply,
	"MaxMetadataBytes": strconv.Itoa(schemas.MaxMetadataBytes) + " bytes", "MaxMetadataDepth": strconv.Itoa(schemas.MaxMetadataDepth),
}

// describe is the comment of a field of t, or of t itself, in one line and with wire
// names for the Go names of t's fields.
func (c comments) describe(t reflect.Type, field string) string {
	key := t.Name()
	if field != "" {
		key += "." + field
	}
	text := strings.Join(strings.Fields(c.text[key]), " ")
	return identifier.ReplaceAllStringFunc(text, func(word string) string {
		if value, ok := constants[word]; ok {
			return value
		}
		if wire, ok := c.wire[t.Name()+"."+word]; ok && (field != "" || wire != strings.ToLower(word)) {
			return wire
		}
		return word
	})
}
