package document

import (
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

	"github.com/meander-rl/meander/schemas"
)

// Comments are the doc comments of structs and of their fields ("Type.Field"), and
// the wire names of the fields.
type Comments struct {
	docs map[string]string
	wire map[string]string
}

// ReadComments reads those of the Go files that a pattern names; tests have their own.
func ReadComments(pattern string) (*Comments, error) {
	c := &Comments{docs: map[string]string{}, wire: map[string]string{}}
	names, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") && name != pattern {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok || gen.Tok != token.TYPE {
				continue
			}
			for _, spec := range gen.Specs {
				ts := spec.(*ast.TypeSpec)
				if st, ok := ts.Type.(*ast.StructType); ok {
					c.docs[ts.Name.Name] = gen.Doc.Text()
					c.fields(ts.Name.Name, st)
				}
			}
		}
	}
	return c, nil
}

func (c *Comments) fields(typeName string, st *ast.StructType) {
	before := ""
	for _, f := range st.Fields.List {
		for _, name := range f.Names {
			key := typeName + "." + name.Name
			text := f.Doc.Text()
			if text == "" && slices.Contains(identifier.FindAllString(before, -1), name.Name) {
				text = before // one comment for several fields names each of them
			}
			before = text
			c.docs[key] = text
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
	"BlobBucket": schemas.BlobBucket, "PolicyBucket": schemas.PolicyBucket, "PresenceBucket": schemas.PresenceBucket, "ControlBucket": schemas.ControlBucket, "HeaderReply": schemas.HeaderReply,
	"MaxMetadataBytes": strconv.Itoa(schemas.MaxMetadataBytes) + " bytes", "MaxMetadataDepth": strconv.Itoa(schemas.MaxMetadataDepth),
}

// Describe is what a field of t is, in one line; a field that the comments leave out has
// its place in the vocabulary.
func (c *Comments) Describe(t reflect.Type, f schemas.Field) (string, error) {
	text := c.text(t, f)
	if text == "" {
		return "", undescribed(t, f)
	}
	if f.Absent != "" {
		text = strings.TrimSuffix(text, ".") + ". Default: " + f.Absent + "."
	}
	return text, nil
}

func undescribed(t reflect.Type, f schemas.Field) error {
	return fmt.Errorf("%s.%s has neither a doc comment nor a place in the vocabulary", t.Name(), f.GoName)
}

// text is the description alone; empty where there is none.
func (c *Comments) text(t reflect.Type, f schemas.Field) string {
	if text := c.describe(t, f.GoName); text != "" {
		return text
	}
	return vocabulary[f.Name]
}

// describe is the comment of a field of t, or of t itself, in one line and with wire
// names for the Go names of t's fields.
func (c *Comments) describe(t reflect.Type, field string) string {
	key := t.Name()
	if field != "" {
		key += "." + field
	}
	text := strings.Join(strings.Fields(c.docs[key]), " ")
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
