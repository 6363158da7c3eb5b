package kernels_test

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
)

// rule breaks a line of PTX, as a person who writes a kernel might.
type rule struct {
	name     string
	line     *regexp.Regexp
	replaced string
	draw     int
}

// What the short form draws: of some rules, of grave ones of all kernels but instances of a template, which take turns,
// of directives, which take no time, of all.
const (
	some = iota
	grave
	directive
)

func re(text string) *regexp.Regexp { return regexp.MustCompile(text) }

const (
	offset  = `^\s*mul\.(?:lo\.s64|wide\.s32)\s+(%rd\d+), %\w+, %\w+;`
	product = `^wgmma\.mma_async\S+ \{[^}]*\}, `
)

var rules = []rule{
	{"no barrier", re(`^\s*bar\.(sync|arrive).*`), ";", grave},
	{"no barrier of a warp", re(`^\s*bar\.warp\.sync.*`), ";", grave},
	{
		"another barrier", re(`(bar\.(?:sync|arrive)) (%r\d+), (%r\d+);`),
		"{ .reg .b32 other; add.s32 other, $2, 1; $1 other, $3; }", some,
	},
	{
		"a barrier for less", re(`(bar\.(?:sync|arrive)) (%r\d+), (%r\d+);`),
		"{ .reg .b32 other; add.s32 other, $3, -32; $1 $2, other; }", some,
	},
	{
		"a barrier for more", re(`(bar\.(?:sync|arrive)) (%r\d+), (%r\d+);`),
		"{ .reg .b32 other; add.s32 other, $3, 128; $1 $2, other; }", some,
	},
	{"go on where it must wait", re(`bar\.sync (%r)`), "bar.arrive $1", some},
	{"no commit", re(`^\s*(cp\.async|wgmma)\.commit_group.*`), ";", some},
	{"no wait", re(`^\s*(cp\.async|wgmma)\.wait_group.*`), ";", some},
	{"wait for one group less", re(`(wait_group(?:\.sync\.aligned)?) 1`), "$1 2", some},
	{"wait for all but one group", re(`(wait_group(?:\.sync\.aligned)?) 0`), "$1 1", some},
	{"no fence of registers", re(`^\s*wgmma\.fence.*`), ";", grave},
	{"no fence of shared memory", re(`^\s*fence\.proxy.*`), ";", grave},
	{"a 16 bytes further", re(`(` + product + `)(%rd\d+), `), "add.s64 $2, $2, 1; $1$2, ", some},
	{"b 16 bytes further", re(`(` + product + `.*)(%rd\d+), p, `), "add.s64 $2, $2, 1; $1$2, p, ", some},
	{
		"b with another stride", re(`(` + product + `.*)(%rd\d+), p, `),
		"add.s64 $2, $2, 274877906944; $1$2, p, ", some,
	},
	{
		"b with other panels", re(`(^wgmma\.mma_async\.sync\.aligned\.m64n128\S+ \{[^}]*\}, \{.*)(%rd\d+), p, `),
		"add.s64 $2, $2, 4194304; $1$2, p, ", some,
	},
	{"b transposed", re(`p, 1, 1, 0, 0;`), "p, 1, 1, 0, 1;", some},
	{"b not transposed", re(`p, 1, 1, 1;`), "p, 1, 1, 0;", some},
	{"new for more", re(`setp\.ne\.b32 p`), "setp.eq.b32 p", some},
	{"lt", re(`setp\.lt\.([su])`), "setp.le.$1", grave},
	{"le", re(`setp\.le\.([su])`), "setp.lt.$1", grave},
	{"gt", re(`setp\.gt\.([su])`), "setp.ge.$1", grave},
	{"ge", re(`setp\.ge\.([su])`), "setp.gt.$1", grave},
	{
		"no guard of columns",
		re(`(setp\.lt\.s32\s+%p\d+, %r\d+), (?:9|17|25|33|41|49|57|65|73|81|89|97|105|113|121);`), "$1, 1;", grave,
	},
	{"offset of 32 bits", re(offset), "$0 and.b64 $1, $1, 4294967295;", grave},
	{"offset of 20 bits", re(offset), "$0 and.b64 $1, $1, 1048575;", grave},
	{"other branch", re(`@%p`), "@!%p", some},
	{"shuffle by another distance", re(`(shfl\.sync\.bfly.*), (1|2|4|8|16), 31`), "$1, 3, 31", some},
	{"order of a pair", re(`cvt\.rn\.bf16x2\.f32 (\S+), (\S+), (\S+);`), "cvt.rn.bf16x2.f32 $1, $3, $2;", some},
	{"order of a fragment", re(`((?:wgm|m)ma\S+ \{[^}]*\}), \{(%r\d+), (%r\d+), `), "$1, {$3, $2, ", some},
	{"b0 for b1", re(`(mma\.sync.*\{)(%r\d+), (%r\d+)(\}, \{[^}]*\};)`), "$1$3, $2$4", some},
	{"transposed", re(`x4\.trans\.shared`), "x4.shared", some},
	{"not transposed", re(`x4\.shared`), "x4.trans.shared", some},
	{"address", re(`^(\s*(?:ld|st)\.(?:global|shared)\S*\s.*\[%rd\d+)\]`), "$1+4]", some},
	{"shift", re(`(sh[lr]\.\S+\s.*), (\d);`), "$1, 1$2;", some},
	{"factor", re(`(mul\.(?:wide|lo)\.\S+\s.*), (\d+);`), "$1, 1$2;", some},
	{"add for subtract", re(`sub\.s32`), "add.s32", some},
	{"subtract for add", re(`add\.rn\.f32`), "sub.rn.f32", some},
	{"add for multiply", re(`mul\.rn\.f32`), "add.rn.f32", some},
	{"min for max", re(`max\.f32`), "min.f32", some},
	{"the other value", re(`selp\.(\S+)\s+(\S+), (\S+), (\S+), `), "selp.$1 $2, $4, $3, ", some},
	{"no block size", re(`^\.maxntid.*`), "", directive},
	{"half a block size", re(`^\.maxntid (\d+)`), ".maxntid 32", directive},
	{"no residency", re(`^\.minnctapersm.*`), "", directive},
	{"other residency", re(`^\.minnctapersm \d`), ".minnctapersm 3", directive},
}

// exceptions are mutants that compute the same, or that no case of reasonable size tells.
var exceptions = []struct {
	kernels, rules, line *regexp.Regexp
	why                  string
}{
	// Loads of whole pieces of 8 columns, and what lies beyond the end.
	{
		re(`attention_(bf16|wgmma)`), re(`^(lt|gt)$`), re(`setp\.[lg]t\.s32\s+%p\d+, %r\d+, \d*[13579];`),
		"heads have a multiple of 8 columns, and columns of a piece begin at one",
	},
	{
		re(`attention_(bf16|wgmma)|conv_bf16`), re(`^shift$`), re(`shl\.b32\s+%r\d+, %r\d+, 1;`),
		"twice the columns that are left: 0, or more than 16 either way",
	},
	{re(`wgmma`), re(`^gt$`), re(`, 0;`), "of a piece without columns nothing is read, wherever it is"},
	{re(`wgmma`), re(`^lt$`), re(`, 128;`), "a whole chunk may be loaded as one that is not"},
	{re(`wgmma`), re(`^le$`), re(`%p81, %r209, |%p85, %r277, `), "nothing is cut of a chunk that ends where keys do"},
	{re(`wgmma_128`), re(`^ge$`), re(`%r912, %r6;`), "of a chunk beyond the last all keys are zeros"},
	{re(`conv_bf16`), re(`^lt$`), re(`%r(12|35), %r8;`), "beyond the last column of x, w has zeros"},
	{re(`linear_f32`), re(`^lt$`), re(`%r83, %r32;`), "a slab beyond the last is zeros"},
	{re(`conv_f32`), re(`^lt$`), re(`%r157, %r155;`), "a slab beyond the last is zeros"},
	{re(`linear_bf16`), re(`^ge$`), re(`%r15, %r7;`), "a slab beyond the last is zeros"},
	{re(`conv_bf16`), re(`^ge$`), re(`%r34, %r26;`), "a slab beyond the last is zeros"},
	{re(`(linear|conv)_f32`), re(`no guard`), re(``), "sums that nobody stores may be made"},
	{re(`conv_f32`), re(`add for subtract`), re(`%r3, %r2, %r64;`), "sums that nobody stores may be made"},
	// Numbers that nothing has.
	{re(`attention_bf16`), re(`^lt$`), re(`setp\.lt\.u32\s+%p\d+, %r\d+, %r`), "a loop ends where i + 256 < i"},
	{re(`attention_bf16`), re(`^lt$`), re(`setp\.lt\.s32.*, -\d+;`), "numbers of keys are not negative"},
	{re(`wgmma`), re(`^lt$`), re(`, -254;`), "numbers of keys are not negative"},
	{re(`attention_bf16`), re(`^gt$`), re(`setp\.gt\.u32.*, (511|767|1023|2047);`), "a block has 256 threads"},
	{re(`(linear|conv)_bf16`), re(`^gt$`), re(`, 4095;`), "a block has 256 threads"},
	{re(`(linear|conv)_bf16|wgmma`), re(`^shift$`), re(`shr\.u16.*, [4-7];`), "the sign of a thread's number"},
	{re(`wgmma`), re(`add for subtract`), re(`%r666, %r670;|%r274, %r287;`), "8 bits of a difference are used"},
	{re(`wgmma`), re(`add for subtract`), re(`%r804, %r808;|%r342, %r355;`), "8 bits of a difference are used"},
	{re(`norm_rope_wide`), re(`^lt$`), re(`%r\d+, 8;`), "half a head has 32, 64 or 128 columns"},
	{re(`attention_f32`), re(`^le$`), re(`%p16, %r4, %r97;`), "in the loop c is less than count"},
	{re(`conv_(f32|bf16)`), re(`^lt$`), re(`%r(8|82), 1;`), "a convolution has a k"},
	{re(`conv_bf16`), re(`no wait|wait for all but one`), re(`wait_group 0`), "a convolution has a k"},
	// Branches and loops that are never taken, sums that begin with 0.
	{re(`wgmma`), re(`no barrier of a warp`), re(``), "it is in a branch that is never taken"},
	{re(`wgmma_64`), re(`other branch`), re(`@%p148 `), "that branch, which changes nothing"},
	{re(`wgmma_128`), re(`other branch`), re(`@%p152 `), "that branch, which changes nothing"},
	{re(``), re(`subtract for add`), re(`, 0f00000000;`), "the first of a sum is added to 0"},
	{
		re(`linear_f32`), re(``),
		re(`%r6, 12;|%r38, 1023;|%p[69], %r|@%p11 |\[%rd18[012]\]|%rd(19|22|119|125), |%r(8|56|57), %r`),
		"what is left of 16 rounds in steps of 4",
	},
	{
		re(`conv_f32`), re(``), re(`%r7, 12;|%r56, 1023;|%p([789]|13|73), %r|@%p(15|73) |\[%rd(134|21[5-9])\]|` +
			`%rd(22|118|126|129|132|133), |%r9, %r`),
		"what is left of 16 rounds in steps of 4",
	},
	// Matrices that would have to be as large as they seem.
	{re(`linear_f32`), re(`offset`), re(`%rd11\b`), "rows of w follow each other"},
	{re(`conv_f32`), re(`offset`), re(`%rd9\b`), "rows of w follow each other"},
	{re(`conv_bf16`), re(`offset`), re(`%rd17;|%r8;`), "rows of w follow each other"},
	{re(`upsample2`), re(`offset`), re(``), "numbers of elements have 32 bits, and 20 of them take seconds"},
}

// needless are the last barriers of kernels that nothing follows.
var needless = re(`(linear|conv)_bf16`)

// mutant is a kernel with one line that is wrong.
type mutant struct {
	rule string
	at   int
	line string
}

// mutants lists those of a kernel, and counts those that are exceptions.
func mutants(name string, lines []string) (byRule [][]mutant, left int) {
	for _, r := range rules {
		var found []mutant
		for i, line := range lines {
			if changed := r.line.ReplaceAllString(line, r.replaced); changed != line {
				found = append(found, mutant{r.name, i, changed})
			}
		}
		all := len(found)
		last := all - 1
		kept := found[:0]
		for i, m := range found {
			if !excepted(name, r.name, lines[m.at]) && (i < last || r.name != "no barrier" ||
				!needless.MatchString(name)) {
				kept = append(kept, m)
			}
		}
		byRule, left = append(byRule, kept), left+all-len(kept)
	}
	return byRule, left
}

func excepted(kernel, rule, line string) bool {
	for _, e := range exceptions {
		if e.kernels.MatchString(kernel) && e.rules.MatchString(rule) && e.line.MatchString(line) {
			return true
		}
	}
	return false
}

// passes reports whether a text passes all checks.
func (k shipped) passes(t *testing.T, text string) bool {
	if k.resident(text) != nil {
		return false
	}
	for _, c := range k.checks {
		if c.on(t, []byte(text), ptxvm.Options{Budget: budget()}) != nil {
			return false
		}
	}
	return true
}

// drawn is what the short form takes of the mutants of a rule: one or none, anywhere in the kernel.
func drawn(kernel string, rule int, all []mutant) []mutant {
	const step = 6 // one of so many
	turn, instances := rule, 1
	for i, name := range []string{
		"attention_bf16_32", "attention_bf16_64", "attention_bf16_128",
		"attention_bf16_384",
	} {
		if name == kernel {
			turn, instances = rule-i, 4
		}
	}
	for i, name := range []string{"attention_wgmma_64", "attention_wgmma_128"} {
		if name == kernel {
			turn, instances = rule-i, 2
		}
	}
	h := fnv.New32()
	h.Write([]byte(kernel + rules[rule].name))
	draw := int(h.Sum32() >> 8)
	switch {
	case len(all) == 0, rules[rule].draw != directive && turn%instances != 0,
		rules[rule].draw == some && draw/1024%step != 0:
		return nil
	}
	return all[draw%len(all):][:1]
}

// Kernels that are wrong in one place fail: faults of the interpreter, or results. The long form takes every mutant;
// the short one, of each kernel, one of every grave rule and of some others.
func TestMutants(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	const most = 0.97 // the part that must fail
	total, killed := 0, 0
	var table strings.Builder
	fmt.Fprintf(&table, "%-20s %6s %8s %7s %9s", "kernel", "cases", "mutants", "killed", "left out")
	for _, k := range everyKernel() {
		t.Run(k.name, func(t *testing.T) {
			text := k.alone(t)
			if soak() && !k.passes(t, text) {
				t.Fatal("it fails as it is")
			}
			lines := strings.Split(text, "\n")
			byRule, left := mutants(k.name, lines)
			n, dead := 0, 0
			for i, r := range rules {
				chosen := byRule[i]
				if !soak() {
					chosen = drawn(k.name, i, chosen)
				}
				for _, m := range chosen {
					n++
					changed := slices.Clone(lines)
					changed[m.at] = m.line
					if !k.passes(t, strings.Join(changed, "\n")) {
						dead++
						continue
					}
					t.Logf("%s passes, %d: %s: %s", k.name, m.at+1, r.name, strings.TrimSpace(lines[m.at]))
				}
			}
			fmt.Fprintf(&table, "\n%-20s %6d %8d %7d %9d", k.name, len(k.checks), n, dead, left)
			total, killed = total+n, killed+dead
		})
	}
	t.Log(table.String())
	t.Logf("%d of %d mutants fail", killed, total)
	if float64(killed) < most*float64(total) {
		t.Errorf("%d of %d mutants pass all tests, want at most %.0f %%", total-killed, total, 100*(1-most))
	}
}
