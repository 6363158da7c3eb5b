package integration_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// documents are the Markdown files of the repository.
func documents(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	walkFiles(t, func(name string) {
		if path.Ext(name) == ".md" {
			docs[name] = read(t, name)
		}
	})
	return docs
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// fences are the code blocks of a document: their content is not prose.
var fences = regexp.MustCompile("(?ms)^ *```.*?^ *```$")

// What people read is short: pages by their length, lines of text by 120 columns. Rows of tables and images are one
// line each, and the appendix is tables. The guide lists each of its pages.
func TestDocs_AreShort(t *testing.T) {
	sequential(t)
	const guide, appendix = "deploy/guide/", "deploy/guide/appendix.md"
	contents := read(t, guide+"README.md")
	longest := map[string]int{"README.md": 150, "ARCHITECTURE.md": 250, "CONTRIBUTING.md": 250}
	for name := range documents(t) {
		switch {
		// reports that programs write
		case strings.HasPrefix(name, "deploy/bench/") || strings.Contains(name, "testdata/"):
			continue
		case strings.HasPrefix(name, guide) && name != appendix:
			longest[name] = 200
		default:
			longest[name] += 0
		}
		if page, ok := strings.CutPrefix(name, guide); ok && page != "README.md" &&
			!strings.Contains(contents, "]("+page+")") {
			t.Errorf("%sREADME.md does not list %s", guide, page)
		}
	}
	for name, most := range longest {
		lines := strings.Split(strings.TrimSuffix(read(t, name), "\n"), "\n")
		if most > 0 && len(lines) > most {
			t.Errorf("%s has %d lines; must be at most %d", name, len(lines), most)
		}
		for i, line := range lines {
			if utf8.RuneCountInString(line) > 120 && !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "![") {
				t.Errorf("%s:%d: %d columns; must be at most 120", name, i+1, utf8.RuneCountInString(line))
			}
		}
	}
}

// A path that the documents for developers name is there: from the root, or the end of one, as of a file whose folder
// the text has named. <name> in it stands for any name.
func TestDocs_PathsAreThere(t *testing.T) {
	sequential(t)
	named := regexp.MustCompile("`([\\w.*<][^`\\s]*)`")
	kinds := []string{".go", ".py", ".md", ".cu", ".txt", ".yaml"}
	var files []string
	walkFiles(t, func(name string) { files = append(files, name) })
	isThere := func(file string) bool {
		pattern := strings.ReplaceAll(file, "<name>", "*")
		if paths, _ := filepath.Glob(filepath.Join(root, pattern)); len(paths) > 0 {
			return true
		}
		return slices.ContainsFunc(files, func(name string) bool {
			parts := strings.Split(name, "/")
			end, _ := path.Match(pattern, strings.Join(parts[max(0, len(parts)-1-strings.Count(pattern, "/")):], "/"))
			return end && slices.Contains(kinds, path.Ext(pattern))
		})
	}
	for _, name := range []string{"CONTRIBUTING.md", "ARCHITECTURE.md"} {
		found := 0
		for _, m := range named.FindAllStringSubmatch(fences.ReplaceAllString(read(t, name), ""), -1) {
			file := strings.TrimSuffix(m[1], "/")
			first, _, _ := strings.Cut(file, "/")
			if _, err := os.Stat(filepath.Join(root, first)); err != nil && !slices.Contains(kinds, path.Ext(file)) {
				continue // a name of Go, a setting, a subject
			}
			if found++; !isThere(file) {
				t.Errorf("%s names %s, which is not there", name, m[1])
			}
		}
		if found == 0 {
			t.Errorf("%s names no path", name)
		}
	}
}

func TestDocs_LinksLeadSomewhere(t *testing.T) {
	sequential(t)
	link := regexp.MustCompile(`\]\(([^()\s]+)\)`)
	reference := regexp.MustCompile(`(?m)^\[[^\]]+\]:\s*(\S+)`)
	image := regexp.MustCompile(`(?:src|href)="([^"]+)"`)
	links := 0
	for name, text := range documents(t) {
		text = fences.ReplaceAllString(text, "")
		for _, pattern := range []*regexp.Regexp{link, reference, image} {
			for _, m := range pattern.FindAllStringSubmatch(text, -1) {
				target, anchor, _ := strings.Cut(m[1], "#")
				if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
					continue
				}
				links++
				file := name
				if target != "" {
					file = path.Join(path.Dir(name), target)
					if _, err := os.Stat(filepath.Join(root, file)); err != nil {
						t.Errorf("%s links to %s, which is not there", name, m[1])
						continue
					}
				}
				if anchor != "" && path.Ext(file) == ".md" && !slices.Contains(anchors(read(t, file)), anchor) {
					t.Errorf("%s links to %s, but %s has no such heading", name, m[1], file)
				}
			}
		}
	}
	if links == 0 {
		t.Error("found no links; the patterns are broken")
	}
}

// anchors are the fragment names that headings get when Markdown is shown.
func anchors(text string) []string {
	heading := regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
	dropped := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	var out []string
	for _, m := range heading.FindAllStringSubmatch(fences.ReplaceAllString(text, ""), -1) {
		out = append(out, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return out
}

func TestDocs_MakeTargetsExist(t *testing.T) {
	sequential(t)
	target := regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	var targets []string
	includes := strings.Fields(regexp.MustCompile(`(?m)^include (.+)$`).FindStringSubmatch(read(t, "Makefile"))[1])
	files := append([]string{"Makefile"}, includes...)
	for _, name := range files {
		for _, m := range target.FindAllStringSubmatch(read(t, name), -1) {
			targets = append(targets, m[1])
		}
	}
	// In prose only what is set as code counts: "make sure" is English.
	said := regexp.MustCompile("`make ([a-z][a-z0-9-]*)")
	shell := regexp.MustCompile(`(?m)^ *(?:\$ )?make ([a-z][a-z0-9-]*)`)
	mentions := 0
	for name, text := range documents(t) {
		found := said.FindAllStringSubmatch(text, -1)
		for _, block := range fences.FindAllString(text, -1) {
			found = append(found, shell.FindAllStringSubmatch(block, -1)...)
		}
		for _, m := range found {
			mentions++
			if !slices.Contains(targets, m[1]) {
				t.Errorf("%s says make %s; the Makefiles have no such target", name, m[1])
			}
		}
	}
	if mentions == 0 {
		t.Error("found no mention of a target; the patterns are broken")
	}
	// The other way round: help is generated from "## " comments, so each target has one.
	for _, name := range files {
		for line := range strings.Lines(read(t, name)) {
			if m := target.FindStringSubmatch(line); m != nil && !strings.Contains(line, " ## ") {
				t.Errorf("%s: target %s has no help comment", name, m[1])
			}
		}
	}
}

// A path of somebody's machine means nothing to a reader.
func TestDocs_NoAbsolutePaths(t *testing.T) {
	sequential(t)
	local := regexp.MustCompile("(?m)(?:^|[\\s`'\"(=])(/(?:home|root|Users|work|mnt|private)/[^\\s`'\")]*)")
	for name, text := range documents(t) {
		for _, m := range local.FindAllStringSubmatch(text, -1) {
			t.Errorf("%s has the path %s", name, m[1])
		}
	}
	for _, name := range []string{"Makefile", "docker-compose.yml", "deploy/nats/nats.conf", "go.mod"} {
		for _, m := range local.FindAllStringSubmatch(read(t, name), -1) {
			t.Errorf("%s has the path %s", name, m[1])
		}
	}
}

// Every package says what it is for, and every exported name what it does.
func TestDocs_GoIsDocumented(t *testing.T) {
	sequential(t)
	type source struct {
		name string
		set  *token.FileSet
		file *ast.File
	}
	packages := map[string][]source{}
	walkFiles(t, func(name string) {
		if path.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata/") {
			return
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, filepath.Join(root, name), nil,
			parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		packages[path.Dir(name)] = append(packages[path.Dir(name)], source{name, set, file})
	})
	for dir, sources := range packages {
		documented := false
		promised := map[string]bool{} // methods whose meaning an interface of the package states
		for _, s := range sources {
			documented = documented || s.file.Doc.Text() != ""
			interfaceMethods(s.file, promised)
		}
		if !documented {
			t.Errorf("%s: no file has a package comment", dir)
		}
		for _, s := range sources {
			if ast.IsGenerated(s.file) || s.file.Name.Name == "main" {
				continue
			}
			for _, missing := range undocumented(s.file, promised) {
				t.Errorf("%s:%d: %s has no comment", s.name, s.set.Position(missing.pos).Line, missing.name)
			}
		}
	}
}

// interfaceMethods adds the methods of the file's interfaces that have a comment.
func interfaceMethods(file *ast.File, into map[string]bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		if i, ok := n.(*ast.InterfaceType); ok {
			for _, m := range i.Methods.List {
				for _, name := range m.Names {
					into[name.Name] = into[name.Name] || m.Doc != nil || m.Comment != nil
				}
			}
		}
		return true
	})
}

type exportedName struct {
	name string
	pos  token.Pos
}

// undocumented lists exported declarations without a comment. A comment on a group of
// constants or variables, or at the end of the line, is one.
func undocumented(file *ast.File, promised map[string]bool) []exportedName {
	var out []exportedName
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && d.Doc == nil && exportedReceiver(d) && (d.Recv == nil || !promised[d.Name.Name]) {
				out = append(out, exportedName{d.Name.Name, d.Pos()})
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					if s.Name.IsExported() && d.Doc == nil && s.Doc == nil {
						out = append(out, exportedName{s.Name.Name, s.Pos()})
					}
				case *ast.ValueSpec:
					for _, n := range s.Names {
						if n.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
							out = append(out, exportedName{n.Name, n.Pos()})
						}
					}
				}
			}
		}
	}
	return out
}

// exportedReceiver leaves out methods of unexported types, and those whose meaning an
// interface of the standard library fixes.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	switch d.Name.Name {
	case "String", "Error", "Unwrap", "MarshalJSON", "UnmarshalJSON", "MarshalText", "UnmarshalText", "Len", "Less",
		"Swap", "Read", "Write", "Close":
		return false
	}
	base := d.Recv.List[0].Type
	for {
		switch b := base.(type) {
		case *ast.StarExpr:
			base = b.X
		case *ast.IndexExpr:
			base = b.X
		case *ast.IndexListExpr:
			base = b.X
		case *ast.Ident:
			return b.IsExported()
		default:
			return false
		}
	}
}

// What is left to do is said in the open, not in a comment.
func TestDocs_NoLeftovers(t *testing.T) {
	sequential(t)
	marks := regexp.MustCompile(`\b(?:TO` + `DO|FIX` + `ME|XX` + `X)\b`)
	text := []string{".go", ".md", ".py", ".yml", ".yaml", ".conf", ".s", ".cu"}
	walkFiles(t, func(name string) {
		if strings.Contains(name, "testdata/") || !slices.Contains(text, path.Ext(name)) &&
			path.Base(name) != "Makefile" {
			return
		}
		for i, line := range strings.Split(read(t, name), "\n") {
			if m := marks.FindString(line); m != "" {
				t.Errorf("%s:%d: %s", name, i+1, m)
			}
		}
	})
}

// The Go example of the README compiles against the packages as they are. TestReading runs that of schemas/README.md.
func TestDocs_GoExamplesCompile(t *testing.T) {
	skipShort(t)
	sequential(t)
	t.Parallel()
	goExample(t, "deploy/guide/publish-and-subscribe.md", "build")
}

// goExample builds or runs the first Go block of a document, as the body of a function
// with a client c of the pipeline at the given address, and returns what it prints.
func goExample(t *testing.T, name, verb string, args ...string) string {
	t.Helper()
	block := regexp.MustCompile("(?ms)^```go\n(.*?)^```").FindStringSubmatch(read(t, name))
	if block == nil {
		t.Fatalf("%s has no Go example", name)
	}
	body, given := block[1], ""
	if !strings.Contains(body, "client.Connect") {
		given = "c, err := client.Connect(ctx, os.Args[1])\nif err != nil {\nreturn err\n}\ndefer c.Close()\n"
	}
	pkg, command := "main", []string{verb, "-trimpath"} // as the tests are compiled: the cache has these packages
	if verb == "build" {
		pkg = "readme" // which is compiled, and not linked
	}
	source := "package " + pkg + `

import (
	"context"
	"fmt"
	"os"

	"` + module + `/pkg/client"
	"` + module + `/schemas"
)

func example(ctx context.Context) error {
` + given + body + `
	return nil
}

var _ schemas.Event

func main() {
	if err := example(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
`
	// An overlay lets the compiler see the file inside the module without writing it there.
	dir := t.TempDir()
	file, overlay := filepath.Join(dir, "example.go"), filepath.Join(dir, "overlay.json")
	place, err := filepath.Abs(filepath.Join(root, "integration", "readme", "example.go"))
	if err != nil {
		t.Fatal(err)
	}
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{place: file}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(file, []byte(source), 0o600),
		os.WriteFile(overlay, replace, 0o600)); err != nil {
		t.Fatal(err)
	}
	command = append(command, "-overlay", overlay, module+"/integration/readme")
	out, err := exec.Command("go", append(command, args...)...).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", name, err, out)
	}
	return string(out)
}

// Each command line of the documents names a program, a subcommand and flags that exist.
func TestDocs_CommandLinesExist(t *testing.T) {
	sequential(t)
	t.Parallel()
	line := regexp.MustCompile(`bin/(meander[a-z-]*)((?: [^&#|\n]+)?)`)
	flag, subcommand := regexp.MustCompile(`(--[a-z][a-z-]*)`), regexp.MustCompile(`^[a-z]+$`)
	help := map[string]string{}
	lines := 0
	for name, text := range documents(t) {
		if strings.Contains(name, "/") && !strings.HasPrefix(name, "deploy/guide/") {
			continue
		}
		for _, m := range line.FindAllStringSubmatch(strings.Join(fences.FindAllString(text, -1), "\n"), -1) {
			lines++
			words := strings.Fields(m[2])
			command := []string{"--help"}
			if m[1] == "meander" && len(words) > 0 && !strings.HasPrefix(words[0], "-") {
				command = []string{words[0], "--help"}
				if len(words) > 1 && subcommand.MatchString(words[1]) {
					// an argument that is no subcommand changes nothing
					command = []string{words[0], words[1], "--help"}
				}
			}
			key := m[1] + " " + strings.Join(command, " ")
			if help[key] == "" {
				out, err := exec.Command(program(t, m[1]), command...).CombinedOutput()
				if strings.Contains(string(out), "--help-all") {
					command[len(command)-1] = "--help-all"
					out, err = exec.Command(program(t, m[1]), command...).CombinedOutput()
				}
				if err != nil {
					t.Errorf("%s: %s: %v\n%s", name, key, err, out)
				}
				help[key] = string(out)
			}
			if len(command) > 1 && !strings.Contains(help[key], "meander "+command[0]) {
				t.Errorf("%s: %s is no command of meander", name, command[0])
			}
			for _, f := range flag.FindAllString(m[2], -1) {
				if !strings.Contains(help[key], f+" ") {
					t.Errorf("%s: %q: %s has no flag %s", name, strings.TrimSpace(m[0]), key, f)
				}
			}
		}
	}
	if lines == 0 {
		t.Error("found no command lines; the patterns are broken")
	}
}
