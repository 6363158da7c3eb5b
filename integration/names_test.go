package integration_test

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// namesOf are packages whose exported constants are names of a table that has what is true of each.
var namesOf = map[string]string{"flow": "pkg/flow", "estimator": "pkg/estimator", "scheduled": "pkg/scheduled"}

// comparesNames are the folders of the formulas, and of the words of another system.
var comparesNames = []string{
	"pkg/flow", "pkg/estimator", "pkg/scheduled", "pkg/remoteimage",
	"pkg/remoteimage/remoteimagetest",
}

// What follows from a transition, a solver, a sampler or an estimator is a property in the table of its kind. Code asks
// for the property: a comparison of names misses the next one.
func TestCode_NamesAreNotCompared(t *testing.T) {
	sequential(t)
	t.Parallel()
	names := slices.Concat(schemas.SDETypes, schemas.Solvers, schemas.RolloutSamplers, estimator.Names())
	constants := regexp.MustCompile(`^(SDE|CPS|DanceSDE|DDIM|ODE|Euler|Heun|RK4|DPM|UniPC?|Transition(SDE|ODE)|` +
		`(Flow|Dance|Dr)?GRPO(PassK)?|PerPrompt|RLOO|ReinforcePlusPlus(Baseline)?|OPO|GPG|GDPO|DiffusionNFT)$`)
	isName := func(e ast.Expr) bool {
		switch x := e.(type) {
		case *ast.BasicLit:
			s, err := strconv.Unquote(x.Value)
			return x.Kind == token.STRING && err == nil && slices.Contains(names, s)
		case *ast.Ident:
			return strings.HasPrefix(x.Name, "Transition") && constants.MatchString(x.Name)
		case *ast.SelectorExpr:
			p, ok := x.X.(*ast.Ident)
			return ok && (namesOf[p.Name] != "" || p.Name == "schemas") && constants.MatchString(x.Sel.Name)
		}
		return false
	}
	checked := 0
	for _, s := range readSources(t) {
		if strings.HasSuffix(s.name, "_test.go") || strings.HasPrefix(s.name, "integration/") ||
			slices.Contains(comparesNames, filepath.ToSlash(filepath.Dir(s.name))) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			var compared []ast.Expr
			switch x := n.(type) {
			case *ast.BinaryExpr:
				if x.Op == token.EQL || x.Op == token.NEQ {
					compared = []ast.Expr{x.X, x.Y}
				}
			case *ast.CaseClause:
				compared = x.List
			}
			for _, e := range compared {
				if checked++; isName(e) {
					t.Errorf("%s:%d compares a name; ask for what is true of it, as a property of its table", s.name,
						s.line(e.Pos()))
				}
			}
			return true
		})
	}
	in := regexp.MustCompile(`(==|!=|\bin [(\[{]) ?"(` + strings.Join(names, "|") + `)"`)
	python := "pkg/client/python/meander/"
	walkFiles(t, func(name string) {
		if !strings.HasPrefix(name, python) || !strings.HasSuffix(name, ".py") ||
			strings.HasPrefix(name, python+"maths/") {
			return
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		checked++
		for _, found := range in.FindAllString(string(data), -1) {
			t.Errorf("%s: %s compares a name; ask for what is true of it (meander.data.events)", name, found)
		}
	})
	if checked < 1000 {
		t.Fatalf("checked %d comparisons; the walk is broken", checked)
	}
}
