package integration_test

import (
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// extension says what one more of a kind touches, by one that is there.
type extension struct {
	kind string
	// like is the one that is there; names match it in identifiers and strings.
	like  string
	names *regexp.Regexp
	// places are the files that name it, or the one folder that does, with a slash at its end.
	places []string
	// most bounds the places.
	most int
}

// extensions is the table that CONTRIBUTING.md shows. If one of these needs one more
// file, something stands twice.
var extensions = []extension{
	{"scorer", "jpeg_compressibility", regexp.MustCompile(`\bJPEGCompressibility\b`), []string{"pkg/scorer/jpeg.go", "pkg/scorer/name.go", "pkg/scorer/scorer.go"}, 3},
	{"estimator", "gpg", regexp.MustCompile(`\b(?i:gpg)\b`), []string{"pkg/estimator/estimator.go", "pkg/estimator/flowgrpo.go"}, 2},
	{"transition", "cps", regexp.MustCompile(`\b(?i:cps)\b|CPS\b|\bcps[A-Z]`), []string{"pkg/flow/transition.go", "schemas/enums.go"}, 2},
	{"solver", "heun", regexp.MustCompile(`(?i)\bheun`), []string{"pkg/flow/solver.go", "pkg/flow/solver_heun.go", "schemas/enums.go"}, 3},
	{"setting, from flag to trainer", "cfg_from", regexp.MustCompile(`CFGFrom|cfg_from`), []string{"schemas/prompt.go", "schemas/sampling.go", "services/intake/resolve.go"}, 5},
	{"engine", "flow", regexp.MustCompile(`(?i)flowEngine`), []string{"services/sampler/"}, 1},
	{"server that draws tokens", "sglang", regexp.MustCompile(`(?i)sglang([^-d]|$)`), []string{"pkg/remotelm/", "schemas/enums.go", "schemas/drawn.go", "services/sampler/"}, 4},
	{
		"server that makes images", "sglang-diffusion", regexp.MustCompile(`(?i)sglang-?diffusion`),
		[]string{"pkg/remoteimage/", "schemas/enums.go", "services/sampler/"},
		3,
	},
	{"device", "cuda", regexp.MustCompile(`pkg/models/tensor/cuda`), []string{"pkg/models/tensor/cuda/", "pkg/models/tensor/devices/devices.go"}, 2},
	{"model family", "qwenimage", regexp.MustCompile(`(?i)qwen.?image`), []string{"pkg/models/model/families/families.go", "pkg/models/model/qwenimage/"}, 2},
}

// words are the identifiers and strings of a Go file.
func words(t *testing.T, name string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	var s scanner.Scanner
	set := token.NewFileSet()
	s.Init(set.AddFile(name, -1, len(data)), data, nil, 0)
	var out []string
	for {
		_, tok, text := s.Scan()
		switch tok {
		case token.EOF:
			return out
		case token.IDENT, token.STRING:
			out = append(out, text)
		}
	}
}

func TestExtend_TouchesOnlyItsPlaces(t *testing.T) {
	sequential(t)
	t.Parallel()
	found := make([]map[string]bool, len(extensions))
	for i := range found {
		found[i] = map[string]bool{}
	}
	for _, source := range readSources(t) {
		if strings.HasSuffix(source.name, "_test.go") || isTool(source.name) {
			continue
		}
		text := words(t, source.name)
		for i, x := range extensions {
			if slices.ContainsFunc(text, x.names.MatchString) {
				found[i][place(source.name, x.places)] = true
			}
		}
	}
	for i, x := range extensions {
		for name := range found[i] {
			if !slices.Contains(x.places, name) {
				t.Errorf("%s %s: %s names it, too", x.kind, x.like, name)
			}
		}
		for _, p := range x.places {
			if !found[i][p] {
				t.Errorf("%s %s: %s is in the table and does not name it", x.kind, x.like, p)
			}
		}
		if len(x.places) > x.most {
			t.Errorf("%s %s: %d places; must be at most %d", x.kind, x.like, len(x.places), x.most)
		}
	}
}

// place is the file, or the folder of the list that it is in.
func place(name string, places []string) string {
	for _, p := range places {
		if strings.HasSuffix(p, "/") && strings.HasPrefix(path.Dir(name)+"/", p) {
			return p
		}
	}
	return name
}

func TestExtend_Document(t *testing.T) {
	sequential(t)
	var table strings.Builder
	table.WriteString("| one more | as | touches |\n|---|---|---|\n")
	for _, x := range extensions {
		fmt.Fprintf(&table, "| %s | %s | `%s` |\n", x.kind, x.like, strings.Join(x.places, "` `"))
	}
	inDocument(t, "CONTRIBUTING.md", "extensions", table.String())
}
