package integration_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	longestFunction = 80  // lines
	longestFile     = 600 // lines
	widestLine      = 120 // columns, with tabs of 4
	mostRepeated    = 5   // lines that say the same thing in two places, outside tests
	bareFunction    = 8   // lines of the longest function of the product without a comment
)

// source is one parsed file that was written by hand.
type source struct {
	name  string // slash-separated, from the repository's top
	set   *token.FileSet
	file  *ast.File
	lines []string
}

func (s *source) line(p token.Pos) int { return s.set.Position(p).Line }

// readSources parses every Go file that is not generated.
func readSources(t *testing.T) []*source {
	t.Helper()
	var all []*source
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".go") {
			return
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		s := &source{name: name, set: token.NewFileSet(), lines: strings.Split(string(data), "\n")}
		if s.file, err = parser.ParseFile(s.set, name, data,
			parser.ParseComments|parser.SkipObjectResolution); err != nil {
			t.Fatal(err)
		}
		if !ast.IsGenerated(s.file) {
			all = append(all, s)
		}
	})
	if len(all) < 100 {
		t.Fatalf("found %d files; the walk is broken", len(all))
	}
	return all
}

// unbroken returns the lines that may be wide: tags and raw strings cannot be broken, and the rows of literals in tests
// are read better whole.
func (s *source) unbroken() map[int]bool {
	test := strings.HasSuffix(s.name, "_test.go") || strings.HasSuffix(path.Dir(s.name), "test")
	whole := map[int]bool{}
	set := func(from, to int, is bool) {
		for n := from; n <= to; n++ {
			whole[n] = is
		}
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CompositeLit:
			if from, to := s.line(n.Lbrace), s.line(n.Rbrace); test && from < to {
				set(from+1, to-1, true)
			}
		case *ast.FuncLit:
			set(s.line(n.Body.Lbrace)+1, s.line(n.Body.Rbrace)-1, false)
		case *ast.BasicLit:
			if strings.HasPrefix(n.Value, "`") {
				set(s.line(n.Pos()), s.line(n.End()), true)
			}
		}
		return true
	})
	return whole
}

// What the short form of the tests leaves out `make integration` runs: it names the folders.
func TestCode_LongTestsRun(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	_, recipe, _ := strings.Cut(string(makefile), "\nintegration:")
	recipe, _, _ = strings.Cut(recipe, "\n\n")
	long := 0
	for _, s := range readSources(t) {
		text := strings.Join(s.lines, "\n")
		if !strings.HasSuffix(s.name, "_test.go") || !strings.Contains(text, "testing."+"Short()") &&
			!strings.Contains(text, "harness.") {
			continue
		}
		long++
		if !slices.ContainsFunc(strings.Fields(recipe), func(w string) bool {
			folder, ok := strings.CutSuffix(strings.TrimPrefix(w, "./"), "/...")
			return ok && strings.HasPrefix(s.name, folder+"/")
		}) {
			t.Errorf("%s has tests with a long form; make integration does not run its package", s.name)
		}
	}
	if long == 0 {
		t.Error("no test has a long form")
	}
}

func TestCode_Lengths(t *testing.T) {
	sequential(t)
	t.Parallel()
	for _, s := range readSources(t) {
		if n := s.set.File(s.file.Pos()).LineCount(); n > longestFile {
			t.Errorf("%s: %d lines; must be at most %d", s.name, n, longestFile)
		}
		whole := s.unbroken()
		for i, line := range s.lines {
			wide := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")) > widestLine
			if wide && !whole[i+1] {
				t.Errorf("%s:%d is wider than %d columns", s.name, i+1, widestLine)
			}
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.line(f.End()) - s.line(f.Pos()) + 1; n > longestFunction {
				t.Errorf("%s: %s has %d lines; must be at most %d", s.name, f.Name.Name, n, longestFunction)
			}
		}
	}
}

// A reader of one function knows what it is for, and what its errors mean, from the comment above it.
func TestCode_FunctionsSayWhatTheyAreFor(t *testing.T) {
	sequential(t)
	t.Parallel()
	checked := 0
	for _, s := range readSources(t) {
		if strings.HasSuffix(s.name, "_test.go") || strings.HasPrefix(s.name, "integration/") {
			continue
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Name.Name == "main" { // the comment of its package says what it is for
				continue
			}
			n := s.line(f.End()) - s.line(f.Pos()) + 1
			if n <= bareFunction {
				continue
			}
			if checked++; strings.TrimSpace(f.Doc.Text()) == "" {
				t.Errorf("%s:%d: %s has %d lines and no comment; must say what it does, when, and what a failure means",
					s.name, s.line(f.Pos()), f.Name.Name, n)
			}
		}
	}
	if checked < 1000 {
		t.Fatalf("checked %d functions; the walk is broken", checked)
	}
}

// The same lines in two functions are one function that is missing. Lines of brackets alone
// and blank ones do not count.
func TestCode_NothingIsSaidTwice(t *testing.T) {
	sequential(t)
	t.Parallel()
	const window = mostRepeated + 1
	type place struct {
		file  string
		lines []int // where each line of the window stands
	}
	seen := map[string]place{}
	for _, s := range readSources(t) {
		if strings.HasSuffix(s.name, "_test.go") {
			continue
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			var text []string
			var at []int
			for n := s.line(f.Body.Lbrace) + 1; n < s.line(f.Body.Rbrace); n++ {
				if line := strings.TrimSpace(s.lines[n-1]); strings.Trim(line, "{}()[],; ") != "" &&
					!strings.HasPrefix(line, "//") {
					text, at = append(text, line), append(at, n)
				}
			}
			for i := 0; i+window <= len(text); i++ {
				key := strings.Join(text[i:i+window], "\n")
				here := place{s.name, at[i : i+window]}
				first, repeated := seen[key]
				if !repeated {
					seen[key] = here
					continue
				}
				if first.file != here.file || !slices.Contains(first.lines, here.lines[0]) { // not its own overlap
					t.Errorf("%s:%d: the lines of %s:%d again:\n%s", here.file, here.lines[0], first.file,
						first.lines[0], key)
				}
				break
			}
		}
	}
	if len(seen) < 1000 {
		t.Fatalf("compared %d windows; the walk is broken", len(seen))
	}
}
