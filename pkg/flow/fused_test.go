package flow_test

import (
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Every floating-point product in the package, and in the one of scheduled sampling, is
// rounded by a conversion of its own, or is only multiplied and divided further before one.
// Otherwise a compiler may fuse it with a later sum, and architectures differ in the last bit.
func TestNoFusedProducts(t *testing.T) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	build.Default.GOROOT = strings.TrimSpace(string(goroot)) // a test built with -trimpath does not know it
	fset := token.NewFileSet()
	conf := types.Config{Importer: importer.ForCompiler(fset, "source", nil)}
	for dir, least := range map[string]int{".": 50, "../scheduled": 30} {
		t.Run(dir, func(t *testing.T) { noFusedProducts(t, fset, conf, dir, least) })
	}
}

func noFusedProducts(t *testing.T, fset *token.FileSet, conf types.Config, dir string, least int) {
	var files []*ast.File
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			// of another architecture: calls alone
			if here, err := build.Default.MatchFile(dir, name); err != nil || !here {
				continue
			}
			f, err := parser.ParseFile(fset, filepath.Join(dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	if _, err := conf.Check(dir, fset, files, info); err != nil {
		t.Fatal(err)
	}
	isFloat := func(e ast.Expr) bool {
		tv := info.Types[e]
		if _, generic := tv.Type.(*types.TypeParam); generic {
			return true
		}
		b, ok := tv.Type.Underlying().(*types.Basic)
		return ok && b.Info()&types.IsFloat != 0 && tv.Value == nil // constants are folded exactly
	}
	products := 0
	for _, f := range files {
		var parents []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				parents = parents[:len(parents)-1]
				return true
			}
			parents = append(parents, n)
			if a, ok := n.(*ast.AssignStmt); ok && a.Tok == token.MUL_ASSIGN && isFloat(a.Lhs[0]) {
				t.Errorf("%s: float *=, write x = float(x * y)", fset.Position(n.Pos()))
			}
			b, ok := n.(*ast.BinaryExpr)
			if !ok || b.Op != token.MUL || !isFloat(b) {
				return true
			}
			products++
			for i := len(parents) - 2; i >= 0; i-- {
				switch p := parents[i].(type) {
				case *ast.ParenExpr:
					continue
				case *ast.UnaryExpr:
					continue
				case *ast.BinaryExpr:
					if p.Op == token.MUL || p.Op == token.QUO {
						continue
					}
				case *ast.CallExpr:
					if info.Types[p.Fun].IsType() {
						return true
					}
				}
				break
			}
			t.Errorf("%s: product is not converted", fset.Position(b.Pos()))
			return true
		})
	}
	if products < least {
		t.Errorf("saw %d products: the test looks in the wrong place", products)
	}
}
