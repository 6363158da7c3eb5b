package integration_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Subjects are put together and taken apart in package schemas alone, so that no one
// miscounts their tokens.
func TestContract_SubjectsAreMadeInSchemas(t *testing.T) {
	sequential(t)
	files := 0
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") ||
			strings.HasPrefix(name, "schemas/") {
			return
		}
		files++
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, made := range []string{"schemas.Prefix", `"mdr.v1`, `"$KV.`, `Split(schemas.MessageID(`} {
			if strings.Contains(string(data), made) {
				t.Errorf("%s has %s: a subject is made or read there; use schemas.Address, or a function of schemas "+
					"that returns it", name, made)
			}
		}
	})
	if files < 100 {
		t.Fatalf("found %d files; the walk is broken", files)
	}
}

// otherDialects are ways to say what this project says as "field: value; must be ...".
var otherDialects = regexp.MustCompile(`\bwant\b|\bexpected\b|\bgot\b| = %`)

// An error names the field, its value and the rule, in the same words everywhere.
func TestContract_ErrorsSpeakOneDialect(t *testing.T) {
	sequential(t)
	errors := 0
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || strings.Contains(name, "test/") {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			f, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || f.Sel.Name != "Errorf" && f.Sel.Name != "New" {
				return true
			}
			if x, ok := f.X.(*ast.Ident); !ok || x.Name != "fmt" && x.Name != "errors" {
				return true
			}
			if text, ok := call.Args[0].(*ast.BasicLit); ok && text.Kind == token.STRING {
				errors++
				if s, err := strconv.Unquote(text.Value); err == nil && otherDialects.MatchString(s) {
					t.Errorf("%s: error %q; must be of the form field: value; must be ...", name, s)
				}
			}
			return true
		})
	})
	if errors < 500 {
		t.Fatalf("found %d errors; the walk is broken", errors)
	}
}
