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

// Comments are the doc comments of structs and of their fields ("Type.Field").
type Comments struct{ docs map[string]string }

// ReadComments reads the comments of the Go files that match a pattern. It skips test files, unless the
// pattern is the name of one.
func ReadComments(pattern string) (*Comments, error) {
	c := &Comments{docs: map[string]string{}}
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

// fields reads the comments of a struct's fields. A field without a comment gets that of the field before it, if that
// names it too.
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
		}
	}
}

var identifier = regexp.MustCompile(`\b[A-Z][A-Za-z0-9]*\b`)

// constants that comments name.
var constants = map[string]string{
	"MaxTensorDims": strconv.Itoa(schemas.MaxTensorDims), "MaxPartBytes": strconv.Itoa(schemas.MaxPartBytes) + " bytes",
	"BlobBucket": schemas.BlobBucket, "PolicyBucket": schemas.PolicyBucket, "PresenceBucket": schemas.PresenceBucket,
	"ControlBucket": schemas.ControlBucket, "HeaderReply": schemas.HeaderReply,
	"MaxMetadataBytes": strconv.Itoa(schemas.MaxMetadataBytes) + " bytes",
	"MaxMetadataDepth": strconv.Itoa(schemas.MaxMetadataDepth),
}

// Describe is what a field of t is, in one line; a field that the comments leave out has
// its place in the vocabulary.
func (c *Comments) Describe(t reflect.Type, f schemas.Field) (string, error) {
	text := c.text(t, f)
	if text == "" {
		return "", undescribed(f)
	}
	if f.Absent != "" {
		text = strings.TrimSuffix(text, ".") + ". Default: " + f.Absent + "."
	}
	return text, nil
}

func undescribed(f schemas.Field) error {
	return fmt.Errorf("%s.%s has neither a doc comment nor a place in the vocabulary", f.Owner.Name(), f.GoName)
}

// text returns the description of a field without its default; "" if there is none.
func (c *Comments) text(t reflect.Type, f schemas.Field) string {
	if text := c.inWireNames(t, f.Owner.Name()+"."+f.GoName); text != "" {
		return text
	}
	return vocabulary[f.Name]
}

// inWireNames is the comment of a type or of a field, "Type.Field", in one line and with wire names for the Go names of
// t's fields.
func (c *Comments) inWireNames(t reflect.Type, key string) string {
	text := strings.Join(strings.Fields(c.docs[key]), " ")
	ofField := strings.Contains(key, ".")
	return identifier.ReplaceAllStringFunc(text, func(word string) string {
		if value, ok := constants[word]; ok {
			return value
		}
		for _, f := range schemas.Fields(t) {
			if f.GoName == word && (ofField || f.Name != strings.ToLower(word)) {
				return f.Name
			}
		}
		return word
	})
}
