package integration_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestImports_Dependencies(t *testing.T) {
	sequential(t)
	t.Parallel()
	packages := readPackages(t)
	used := map[string]bool{}
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		check := func(imports map[string]bool, test bool) {
			for _, imported := range slices.Sorted(maps.Keys(imports)) {
				first, _, _ := strings.Cut(imported, "/")
				if !strings.Contains(first, ".") || imported == module || strings.HasPrefix(imported, module+"/") {
					continue // the standard library, or ours
				}
				name, dep, ok := dependencyOf(imported)
				switch {
				case !ok:
					t.Errorf("%s imports %s, which has no line in dependencies", dir, imported)
				case !mayUse(dir, dep) && (!test || !dep.tests):
					t.Errorf("%s (test: %v) imports %s; it is for %v (tests: %v): %s", dir, test, imported, dep.users,
						dep.tests, dep.why)
				}
				used[name] = true
			}
		}
		check(packages[dir].code, false)
		check(packages[dir].tests, true)
	}
	for name, dep := range dependencies {
		if !used[name] {
			t.Errorf("dependency %s (%s) is imported by nobody; take it out of the table and of go.mod", name, dep.why)
		}
	}
}

func dependencyOf(imported string) (string, dependency, bool) {
	for name, dep := range dependencies {
		if imported == name || strings.HasPrefix(imported, name+"/") {
			return name, dep, true
		}
	}
	return "", dependency{}, false
}

func mayUse(dir string, dep dependency) bool {
	return slices.ContainsFunc(dep.users, func(user string) bool {
		parent, tree := strings.CutSuffix(user, "/...")
		return dir == parent || tree && strings.HasPrefix(dir, parent+"/")
	})
}

// go.mod's direct requirements and the table are the same list.
func TestImports_GoMod(t *testing.T) {
	sequential(t)
	t.Parallel()
	data, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	direct := regexp.MustCompile(`(?m)^(?:require )?\s*([a-z0-9.]+\.[a-z]+/\S+) v\S+$`)
	found := map[string]bool{}
	for _, m := range direct.FindAllStringSubmatch(string(data), -1) {
		name, _, ok := dependencyOf(m[1])
		if !ok {
			t.Errorf("go.mod requires %s, which has no line in dependencies", m[1])
		}
		found[name] = true
	}
	for name := range dependencies {
		if !found[name] {
			t.Errorf("dependency %s is not required by go.mod", name)
		}
	}
}
