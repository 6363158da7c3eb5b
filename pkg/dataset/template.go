package dataset

import (
	"fmt"
	"strconv"
	"strings"
)

// Template makes a prompt from the fields of a record, e.g. `a sign that says "{prompt}"`.
type Template struct {
	parts []part
}

// part is a literal text, followed by the value of a field unless field is empty.
type part struct{ text, field string }

// ParseTemplate reads the template by which prompts of a file are rewritten: {name} is a field, {{ and }} are braces.
// At least one field is required, or all prompts would be the same. A lone brace is an error.
func ParseTemplate(s string) (*Template, error) {
	bad := func(rule string) (*Template, error) { return nil, fault("template", s, rule) }
	t := &Template{}
	var text strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case strings.HasPrefix(s[i:], "{{"), strings.HasPrefix(s[i:], "}}"):
			text.WriteByte(s[i])
			i++
		case s[i] == '}':
			return bad("must have a { before each }; a brace itself is }}")
		case s[i] == '{':
			n := strings.IndexAny(s[i+1:], "{}")
			if n < 0 || s[i+1+n] == '{' {
				return bad("must have a } after each {; a brace itself is {{")
			}
			name := s[i+1 : i+1+n]
			if strings.TrimSpace(name) == "" {
				return bad("must have the name of a field in {}")
			}
			t.parts = append(t.parts, part{text.String(), name})
			text.Reset()
			i += n + 1
		default:
			text.WriteByte(s[i])
		}
	}
	if len(t.parts) == 0 {
		return bad("must have at least one field, such as {prompt}")
	}
	t.parts = append(t.parts, part{text: text.String()})
	return t, nil
}

// Apply replaces the prompt of r by the template's text with the fields of r. Names of fields are prompt,
// negative_prompt, ground_truth, uid, seed, index and those of the metadata. A field that r does not have, one whose
// value is a list or an object, and a prompt that becomes too long are errors; r is then unchanged.
func (t *Template) Apply(r *Record) error {
	var b strings.Builder
	for _, p := range t.parts {
		b.WriteString(p.text)
		if p.field == "" {
			continue
		}
		s, err := r.field(p.field)
		if err != nil {
			return err
		}
		if b.WriteString(s); b.Len() > MaxRecordBytes {
			return fault("prompt", missing{}, fmt.Sprintf("must be at most %d bytes after the template",
				MaxRecordBytes))
		}
	}
	r.Fields["prompt"] = b.String()
	return nil
}

// field returns the value of a name in a template as text. A name without a value, and a list or an object, are errors.
func (r *Record) field(name string) (string, error) {
	var v any = missing{}
	switch name {
	case "prompt", "negative_prompt", "uid", "seed":
		v = lookup(r.Fields, name)
	case "ground_truth":
		if r.GroundTruth != nil {
			v = r.GroundTruth
		}
	case "index":
		v = int64(r.Index)
	default:
		if metadata, ok := r.Fields["metadata"].(map[string]any); ok {
			v = lookup(metadata, name)
		}
	}
	switch v := v.(type) {
	case string:
		return v, nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64), nil
	case bool:
		return strconv.FormatBool(v), nil
	case missing, nil:
		return "", fault(name, v, "must have a value, since the template has {"+name+"}")
	}
	return "", fault(name, v, "must be a text, a number, true or false, since the template has {"+name+"}")
}
