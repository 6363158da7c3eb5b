package kernels_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

// check is a case of a kernel's tests. A far one has matrices of more than 2^32 elements. What it takes goes with its
// weight.
type check struct {
	name   string
	far    bool
	weight int
	run    func(g *gpu) error
}

// on runs the check on a device of its own.
func (c check) on(t *testing.T, ptx []byte, o ptxvm.Options) error {
	t.Helper()
	if c.far {
		o.Gap = apart
	}
	g, err := newGPU(t, ptx, o)
	if err != nil {
		return err
	}
	return c.run(g)
}

func runChecks(t *testing.T, mode string, ptx []byte, o ptxvm.Options, checks []check) {
	t.Helper()
	for _, c := range checks {
		if err := c.on(t, ptx, o); err != nil {
			t.Fatalf("%s: %s: %v", mode, c.name, err)
		}
	}
}

// shipped is a kernel with what it is compiled for: threads of a block, and blocks that share a multiprocessor at
// least, where that is told.
type shipped struct {
	name            string
	ptx             []byte
	threads, blocks int
	checks          []check
}

// everyKernel lists all kernels, with their cases, small ones first.
func everyKernel() []shipped {
	rows := map[string][]check{}
	for _, k := range rowKernels {
		rows[k.kernel] = append(rows[k.kernel], k.checks()...)
	}
	all := []shipped{
		{"layer_norm_f32", kernels.PTX, 128, 0, rows["layer_norm_f32"]},
		{"norm_f32", kernels.PTX, 128, 0, rows["norm_f32"]},
		{"norm_rope_f32", kernels.PTX, 128, 0, rows["norm_rope_f32"]},
		{"rope_f32", kernels.PTX, 128, 0, rows["rope_f32"]},
		{"silu_mul_f32", kernels.PTX, 128, 0, rows["silu_mul_f32"]},
		{"copy_f32", kernels.PTX, 128, 0, rows["copy_f32"]},
		{"upsample2_f32", kernels.PTX, 128, 0, rows["upsample2_f32"]},
		{"finish_f32", kernels.PTX, 128, 0, rows["finish_f32"]},
		{"layer_norm_wide", kernels.PTX, 128, 0, rows["layer_norm_wide"]},
		{"norm_rope_wide", kernels.PTX, 128, 0, rows["norm_rope_wide"]},
		{"copy_wide", kernels.PTX, 128, 0, rows["copy_wide"]},
		{"finish_wide", kernels.PTX, 128, 0, rows["finish_wide"]},
		{"linear_f32", kernels.PTX, 64, 0, productChecks("linear_f32")},
		{"conv_f32", kernels.PTX, 64, 0, convChecks("conv_f32")},
		{"linear_bf16", kernels.PTX, 256, 0, productChecks("linear_bf16")},
		{"conv_bf16", kernels.PTX, 256, 0, convChecks("conv_bf16")},
		{"attention_f32", kernels.PTX, 128, 0, attentionChecks("attention_f32")},
		{"attention_bf16_32", kernels.PTX, 256, 2, attentionChecks("attention_bf16_32")},
		{"attention_bf16_64", kernels.PTX, 256, 2, attentionChecks("attention_bf16_64")},
		{"attention_bf16_128", kernels.PTX, 256, 1, attentionChecks("attention_bf16_128")},
		{"attention_bf16_384", kernels.PTX, 256, 1, attentionChecks("attention_bf16_384")},
		{"attention_wgmma_64", kernels.Hopper, 384, 1, wgmmaChecks("attention_wgmma_64")},
		{"attention_wgmma_128", kernels.Hopper, 384, 1, wgmmaChecks("attention_wgmma_128")},
	}
	for _, k := range all {
		slices.SortStableFunc(k.checks, func(a, b check) int { return a.weight - b.weight })
	}
	return all
}

const entry = ".visible .entry "

// alone is a module with one kernel of the one that ships.
func (k shipped) alone(t *testing.T) string {
	t.Helper()
	text := string(k.ptx)
	start := strings.Index(text, entry+k.name+"(")
	if start < 0 {
		t.Fatalf("there is no kernel %s", k.name)
	}
	body := text[start:]
	if end := strings.Index(body[1:], entry); end > 0 {
		body = body[:end]
	}
	return text[:strings.Index(text, entry)] + body
}

// resident compares what a text tells the assembler of registers: the interpreter has as many as a kernel wants, and a
// GPU does not launch a block with too many.
func (k shipped) resident(text string) error {
	_, text, _ = strings.Cut(text, entry+k.name+"(")
	head, _, _ := strings.Cut(text, "{")
	for directive, want := range map[string]int{".maxntid": k.threads, ".minnctapersm": k.blocks} {
		_, after, _ := strings.Cut(head, directive)
		got := regexp.MustCompile(`^ *(\d*)`).FindStringSubmatch(after)[1]
		if got != fmt.Sprint(want) && (got != "" || want != 0) {
			return fmt.Errorf("%s has %s %q, want %d", k.name, directive, got, want)
		}
	}
	return nil
}

// No kernel is without a case, and each is compiled for the blocks that it is launched in.
func TestKernels(t *testing.T) {
	known := map[string]bool{}
	for _, k := range everyKernel() {
		known[k.name] = true
		if len(k.checks) == 0 {
			t.Errorf("%s has no case", k.name)
		}
		if err := k.resident(string(k.ptx)); err != nil {
			t.Error(err)
		}
	}
	for _, ptx := range [][]byte{kernels.PTX, kernels.Hopper} {
		for _, m := range regexp.MustCompile(`\.visible \.entry (\w+)\(`).FindAllSubmatch(ptx, -1) {
			if name := string(m[1]); !known[name] {
				t.Errorf("%s has no case", name)
			}
		}
	}
}
