package kernels_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/tensor/cuda/kernels"
)

// rules break a line of PTX, as a person who writes a kernel might.
var rules = []struct {
	name     string
	line     *regexp.Regexp
	replaced string
}{
	{"no barrier", regexp.MustCompile(`^\s*bar\.sync.*`), ";"},
	{"no commit", regexp.MustCompile(`^\s*cp\.async\.commit_group.*`), ";"},
	{"no wait", regexp.MustCompile(`^\s*cp\.async\.wait_group.*`), ";"},
	{"wait for one group less", regexp.MustCompile(`wait_group 1`), "wait_group 2"},
	{"lt", regexp.MustCompile(`setp\.lt\.([su])`), "setp.le.$1"},
	{"gt", regexp.MustCompile(`setp\.gt\.([su])`), "setp.ge.$1"},
	{"ge", regexp.MustCompile(`setp\.ge\.([su])`), "setp.gt.$1"},
	{"other branch", regexp.MustCompile(`@%p`), "@!%p"},
	{"shuffle by another distance", regexp.MustCompile(`(shfl\.sync\.bfly.*), (1|2|4|8|16), 31`), "$1, 3, 31"},
	{"order of a pair", regexp.MustCompile(`cvt\.rn\.bf16x2\.f32 (\S+), (\S+), (\S+);`), "cvt.rn.bf16x2.f32 $1, $3, $2;"},
	{"order of a fragment", regexp.MustCompile(`(mma\.sync\S+) (\{[^}]*\}), \{(\S+), (\S+), `), "$1 $2, {$4, $3, "},
	{"b0 for b1", regexp.MustCompile(`(mma\.sync.*\{)(%r\d+), (%r\d+)(\}, \{[^}]*\};)`), "$1$3, $2$4"},
	{"transposed", regexp.MustCompile(`x4\.trans\.shared`), "x4.shared"},
	{"not transposed", regexp.MustCompile(`x4\.shared`), "x4.trans.shared"},
	{"address", regexp.MustCompile(`^(\s*(?:ld|st)\.(?:global|shared)\S*\s.*\[%rd\d+)\]`), "$1+4]"},
	{"shift", regexp.MustCompile(`(sh[lr]\.\S+\s.*), (\d);`), "$1, 1$2;"},
	{"factor", regexp.MustCompile(`(mul\.(?:wide|lo)\.\S+\s.*), (\d+);`), "$1, 1$2;"},
	{"add for subtract", regexp.MustCompile(`sub\.s32`), "add.s32"},
	{"subtract for add", regexp.MustCompile(`add\.rn\.f32`), "sub.rn.f32"},
	{"add for multiply", regexp.MustCompile(`mul\.rn\.f32`), "add.rn.f32"},
	{"min for max", regexp.MustCompile(`max\.f32`), "min.f32"},
	{"the other value", regexp.MustCompile(`selp\.(\S+)\s+(\S+), (\S+), (\S+), `), "selp.$1 $2, $4, $3, "},
}

// alone is a module with one kernel of the one that ships.
func alone(t *testing.T, name string) string {
	t.Helper()
	text := string(kernels.PTX)
	const entry = ".visible .entry "
	start := strings.Index(text, entry+name+"(")
	if start < 0 {
		t.Fatalf("there is no kernel %s", name)
	}
	body := text[start:]
	if end := strings.Index(body[1:], entry); end > 0 {
		body = body[:end]
	}
	return text[:strings.Index(text, entry)] + body
}

// survives reports whether a text passes the tests of its kernel.
func survives(t *testing.T, name, text string) bool {
	g, err := newGPU(t, []byte(text), ptxvm.Options{Budget: 1 << 22})
	if err != nil {
		return false
	}
	if strings.HasPrefix(name, "linear") {
		for _, s := range productShapes() {
			if g.product(name, s[0], s[1], s[2]) != nil {
				return false
			}
		}
		return true
	}
	if strings.HasPrefix(name, "conv") {
		for _, c := range convolutions() {
			if g.convolution(name, c) != nil {
				return false
			}
		}
		return true
	}
	for _, k := range rowKernels {
		if k.kernel == name && k.check(g) != nil {
			return false
		}
	}
	for _, a := range attentions() {
		if (name == "attention_f32" || name == a.kernel()) && g.attention(name, a) != nil {
			return false
		}
	}
	return true
}

// Kernels that are wrong in one place fail: faults of the interpreter, or results.
func TestMutants(t *testing.T) {
	step, most, allowed := 41, 12, 4 // every so many of the mutants; places of a rule in a kernel; one in so many may pass
	if soak() {
		step, allowed = 1, 10
	}
	total, alive, n := 0, 0, 0
	names := []string{
		"linear_f32", "attention_f32", "linear_bf16", "attention_bf16_32", "attention_bf16_384", "conv_f32",
		"conv_bf16",
	}
	for _, k := range rowKernels {
		if !slices.Contains(names, k.kernel) {
			names = append(names, k.kernel)
		}
	}
	for _, name := range names {
		text := alone(t, name)
		if !survives(t, name, text) {
			t.Fatalf("%s fails its tests as it is", name)
		}
		lines := strings.Split(text, "\n")
		for _, rule := range rules {
			places := 0
			for i, line := range lines {
				mutant := rule.line.ReplaceAllString(line, rule.replaced)
				if mutant == line || places == most {
					continue
				}
				places++
				if n++; n%step != 0 {
					continue
				}
				total++
				changed := append([]string(nil), lines...)
				changed[i] = mutant
				if survives(t, name, strings.Join(changed, "\n")) {
					alive++
					t.Logf("%s, %s: %s", name, rule.name, strings.TrimSpace(line))
				}
			}
		}
	}
	t.Logf("%d of %d mutants fail", total-alive, total)
	if total == 0 || allowed*alive > total {
		t.Errorf("%d of %d mutants pass all tests, want at most one in %d", alive, total, allowed)
	}
}
