package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// measures is why these run without the race detector.
const measures = "networks compute one sample after the other, and are measured"

// tinyBench measures next to nothing, with a model of the given name.
func tinyBench(dir string) samplerBench {
	return samplerBench{
		model: dir, batches: []int{1, 3}, threads: []int{1, 2}, steps: 2, scale: 4, prompt: "a", negative: " ",
		rounds: 2, round: time.Millisecond, profile: 300 * time.Millisecond,
	}
}

func TestBenchTokens(t *testing.T) {
	bustest.Sequential(t, measures)
	t.Setenv("MEANDER_TEST_PEER", "tokens")
	dir := filepath.Join(t.TempDir(), "random")
	if err := (qwen2test.Random{}).Write(dir); err != nil {
		t.Fatal(err)
	}
	b := tokensBench{
		model: dir, batches: []int{1, 3}, threads: []int{1, 2}, tokens: 4, rounds: 2, round: time.Millisecond,
		peer: os.Args[0] + " -test.run=^TestPeerProcess$", dtype: "float32", width: 64, layers: 1,
		events: time.Millisecond,
	}
	var out, stderr bytes.Buffer
	if err := b.run(t.Context(), &out, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	for want, n := range map[string]int{
		"| meander |": 8, ", generate | ": 8, ", loop | ": 8, "## random weights, width 64": 1,
		"## In a sampler's loop": 1, "| random weights, width 64, 1 layers | ": 4,
	} {
		if got := strings.Count(out.String(), want); got != n {
			t.Errorf("%q is %d times in the report, want %d:\n%s", want, got, n, &out)
		}
	}
	for _, wrong := range []tokensBench{
		{}, {batches: []int{1}, threads: []int{1}, tokens: 1, rounds: 1, layers: 1, width: 7, dtype: "float32"},
	} {
		if err := wrong.run(t.Context(), &out, &stderr); exitCode(err) != 2 {
			t.Errorf("%+v: %v, want a usage error", wrong, err)
		}
	}
}

func TestBenchSampler(t *testing.T) {
	bustest.Sequential(t, measures)
	t.Setenv("MEANDER_TEST_PEER", "twice")
	b := tinyBench(checkpoint.Dir(t, checkpoint.Config{}))
	b.peer = os.Args[0] + " -test.run=^TestPeerProcess$"
	report := ""
	// On a busy machine a profile has samples of everything only when it is longer.
	for ; !strings.Contains(report, "| denoise | all |") && b.profile < time.Minute; b.profile *= 4 {
		var out, stderr bytes.Buffer
		if err := b.run(t.Context(), &out, &stderr); errors.Is(err, errNoSamples) {
			continue
		} else if err != nil {
			t.Fatalf("%v\n%s", err, &stderr)
		}
		report = out.String()
	}
	for _, want := range []string{
		"## Loading and memory", "## Speed", "## Share of time per operation", "## Matrix products",
		"| denoise | all |", "Peak ",
	} {
		if !strings.Contains(report, want) {
			t.Errorf("no %q in the report", want)
		}
	}
	for _, threads := range b.threads {
		for _, batch := range b.batches {
			if !strings.Contains(report, fmt.Sprintf("\n| %d | %d | meander | ", threads, batch)) {
				t.Errorf("no row of meander for %d threads, batch %d", threads, batch)
			}
			// The peer says it takes 6 s of a batch: 2 + 3 + 1.
			want := fmt.Sprintf("\n| %d | %d | a peer of %d steps | %.2f | 1500.00 | 2000.00 | 3000.0 | 1000.0 | "+
				"%.1f |", threads, batch, b.steps, float64(batch)/6, 4000/float64(batch))
			if !strings.Contains(report, want) {
				t.Errorf("no row of the peer %q", want)
			}
		}
	}
	if t.Failed() {
		t.Log(report)
	}
}

// TestPeerProcess is the peer of TestBenchSampler, in a process of its own.
func TestPeerProcess(t *testing.T) {
	mode := os.Getenv("MEANDER_TEST_PEER")
	if mode == "" {
		t.Skip("it is a process of TestBenchSampler, which starts it with MEANDER_TEST_PEER")
	}
	in := bufio.NewScanner(os.Stdin)
	for n := 0; in.Scan(); n++ {
		switch {
		case n == 0:
			var c struct{ Steps int }
			if err := json.Unmarshal(in.Bytes(), &c); err != nil {
				t.Fatal(err)
			}
			fmt.Printf("{\"engine\": \"a peer of %d steps\"}\n", c.Steps)
		case mode == "dies":
			os.Exit(3)
		case mode == "babbles":
			fmt.Println("hello")
		case mode == "empty":
			fmt.Println("{}")
		case mode == "tokens":
			fmt.Println(`{"seconds": 2, "cpu": 1}`)
		default:
			fmt.Println(`{"encode": 2, "denoise": 3, "decode": 1, "cpu": 4}`)
		}
	}
}

func TestBenchSamplerPeerFails(t *testing.T) {
	bustest.Sequential(t, measures)
	dir := checkpoint.Dir(t, checkpoint.Config{})
	self := os.Args[0] + " -test.run=^TestPeerProcess$"
	for _, c := range []struct{ mode, peer, want string }{
		{"dies", self, "ended without an answer"},
		{"babbles", self, `answer "hello" of the peer`},
		{"empty", self, "no time"},
		{"", "/does/not/exist", "--peer"},
	} {
		t.Setenv("MEANDER_TEST_PEER", c.mode)
		b := tinyBench(dir)
		b.peer = c.peer
		var out bytes.Buffer
		if err := b.run(t.Context(), &out, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("peer that %s: error %v, want %q", c.mode, err, c.want)
		}
	}
}

func TestBenchEvents(t *testing.T) {
	b := eventsBench{
		sizes: []int{1, 64}, transports: []string{inProcess, loopback}, rounds: 1, volume: 1,
		profile: time.Millisecond, rate: 1000, latency: 20 * time.Millisecond, grow: []int{10},
	}
	var out bytes.Buffer
	if err := b.run(t.Context(), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	report := out.String()
	for _, want := range []string{
		"\n| 1 KiB | in-process | ", "\n| 64 KiB | TCP | ", "Steps of 64 KiB", "\n| 64 KiB | TCP | 20 | ",
	} {
		if !strings.Contains(report, want) {
			t.Errorf("no %q in the report:\n%s", want, report)
		}
	}
}

// The worker of tests stands for those of Python.
func TestBenchTorch(t *testing.T) {
	bustest.Sequential(t, measures)
	b := torchBench{
		model: remotetest.Folder(t, "FluxPipeline", 1), python: harness.WorkerProgram(t), echo: "-m meander.torch",
		device: "cpu", dtype: "f32", prompt: "a", batches: []int{1, 3}, runs: 2, steps: 2, rounds: 2, calls: 3,
		bodies: []torchBody{{16, 1, 1}, {32, 2, 2}},
	}
	var out, stderr bytes.Buffer
	if err := b.run(t.Context(), &out, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	for _, want := range []string{
		" B | 1 | ", " B | 2 | ", "without our own engine: ", "computed by the torch engine", "\n- worker: ",
		"\n| 1 | worker | ", "\n| 3 | worker | ", "\n| 3 | worker, deterministic | ", "\n| worker | ",
		"\n| worker, deterministic | ",
	} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("%q is not once in the report:\n%s", want, &out)
		}
	}
	b.calls, b.compile = 0, true
	out.Reset()
	if err := b.run(t.Context(), &out, &stderr); err != nil ||
		strings.Contains(out.String(), "A call there and back") ||
		strings.Count(out.String(), "\n| 3 | worker, compiled | ") != 1 {
		t.Errorf("%v without calls, with --compile:\n%s", err, &out)
	}
	b.calls, b.rounds = 3, 0
	out.Reset()
	if err := b.run(t.Context(), &out, &stderr); err != nil ||
		!strings.Contains(out.String(), "A call there and back") ||
		strings.Contains(out.String(), "A call of the network") {
		t.Errorf("%v without rounds:\n%s", err, &out)
	}
	b.python = "/does/not/exist"
	if err := b.run(t.Context(), &out, &stderr); exitCode(err) != exitUsage {
		t.Errorf("%v without a Python, want a usage error", err)
	}
}

// Ratios are those to the first engine, scaling that to the first size of the same.
func TestBenchTorch_beside(t *testing.T) {
	bustest.Sequential(t, measures)
	m, err := families.All().Open(checkpoint.Dir(t, checkpoint.Config{}), model.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	used := 0.0
	cpu := func(each float64) func() float64 {
		return func() float64 { used += each; return used }
	}
	engines := []torchEngine{{"ours", m, cpu(1)}, {"theirs", m, cpu(3)}}
	b := torchBench{device: "cpu", prompt: "a", batches: []int{1, 2}, runs: 2, steps: 2, rounds: 1}
	var out bytes.Buffer
	err = errors.Join(b.velocities(t.Context(), &out, engines), b.samples(t.Context(), &out, engines), m.Close())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`\n\| 1 \| ours \| [0-9.]+ \| \|  \|  \| 1.00 \|`,
		`\n\| 2 \| theirs \| [0-9.]+ \| \*\*[0-9.]+\*\* \([^|]+ \| [0-9.]+ \|  \| [0-9.]+ \|`,
		`\n\| ours \| [0-9.]+ \| [0-9.]+ \| [0-9]+ \| \|  \|`, `\n\| theirs \| [0-9.]+ \| [0-9.]+ \| [0-9]+ \| \*\*`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %s in the report:\n%s", want, &out)
		}
	}
}

func TestBenchSwarm(t *testing.T) {
	b := swarmBench{samplers: []int{1, 3}, groups: 2, n: 2, steps: 2, transport: loopback}
	var out bytes.Buffer
	if err := b.run(t.Context(), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"4 samples of 2 steps", "\n| 1 | ", "\n| 3 | "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the report:\n%s", want, &out)
		}
	}
}

func TestBenchUsage(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{})
	for _, line := range [][]string{
		{"sampler", "--model", "synthetic"},
		{"sampler", "--model", "/does/not/exist"},
		{"sampler", "--model", dir, "--batch", "0"},
		{"sampler", "--model", dir, "--threads", "-1"},
		{"sampler", "--model", dir, "--true-cfg-scale", "1"},
		{"sampler", "--model", dir, "--rounds", "0"},
		{"gemm", "--model", dir, "--kernels", "abacus"},
		{"gemm", "--model", dir, "--batch", "99999"},
		{"gemm", "extra"},
		{"e2e", "--true-cfg-scale", "0.5"},
		{"e2e", "--groups", "0"},
		{"events", "--sizes", "0"},
		{"events", "--transport", "pigeon"},
		{"events", "--latency", "-1s"},
		{"events", "--grow", "10,5"},
		{"swarm", "--samplers", "0"},
		{"update", "--size", "1000"},
		{"update", "--dtype", "F64"},
		{"weights", "--ways", "pigeon"},
		{"weights", "--gb", "0"},
		{"torch", "--model", "synthetic"},
		{"torch", "--batch", "0"},
		{"torch", "--rounds", "-1"},
		{"torch", "--rounds", "0", "--calls", "0"},
	} {
		if got := exitCode(execute(t.Context(), line)); got != exitUsage {
			t.Errorf("%q: exit status %d, want %d", line, got, exitUsage)
		}
	}
}

func TestBenchStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := tinyBench(checkpoint.Dir(t, checkpoint.Config{}))
	var out bytes.Buffer
	if err := b.run(ctx, &out, io.Discard); err == nil {
		t.Error("a bench of an ended context succeeds")
	}
}

func TestReadProfile(t *testing.T) {
	var buf bytes.Buffer
	var noise, all int64
	// The system gives few samples while others have the cores: then a longer profile is taken.
	for length := 300 * time.Millisecond; all == 0 && length < time.Minute; length *= 2 {
		noise, all = profileNoise(t, &buf, length)
	}
	if all == 0 || noise < all*8/10 {
		t.Errorf("%d of %d samples are in the noise, want nearly all", noise, all)
	}
	for n := range buf.Len() {
		if _, err := readProfile(buf.Bytes()[:n]); err == nil {
			t.Fatalf("a profile cut at %d of %d bytes reads", n, buf.Len())
		}
	}
}

// profileNoise draws noise for a while and returns how many samples of its profile are in the noise, and how many
// there are. The profile is left in buf.
func profileNoise(t *testing.T, buf *bytes.Buffer, length time.Duration) (noise, all int64) {
	t.Helper()
	buf.Reset()
	if err := pprof.StartCPUProfile(buf); err != nil {
		t.Fatal(err)
	}
	x := make([]float32, 1<<16)
	for began := time.Now(); time.Since(began) < length; {
		flow.InitialNoise(x, 1)
	}
	pprof.StopCPUProfile()
	stacks, err := readProfile(buf.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stacks {
		if f := s.functions[0]; f == "racecall" || strings.HasPrefix(f, "__tsan") {
			continue // inside the race detector, which has no Go stack
		}
		all += s.count
		if classOf(s.functions, operations) == "solver, guidance, noise" {
			noise += s.count
		}
	}
	return noise, all
}

func TestOperationOf(t *testing.T) {
	const tensor = "github.com/meander-rl/meander/pkg/models/tensor/cpu."
	const model = "github.com/meander-rl/meander/pkg/models/model/"
	for _, c := range []struct {
		functions []string
		op, stage string
	}{
		{[]string{
			tensor + "tileAVX512", tensor + "(*slot).store", tensor + "(*linearTask).multiply",
			tensor + "(*linearTask).part", model + "qwenimage.(*batch).compute", model + "qwenimage.(*Model).Velocity",
		}, "matrix products", "denoise"},
		{[]string{
			tensor + "geluAVX512", tensor + "(*Epilogue).apply", tensor + "(*linearTask).finish",
			model + "qwenimage.(*batch).compute", model + "qwenimage.(*Model).Velocity",
		}, "epilogues: activation, gate, residual", "denoise"},
		{[]string{
			tensor + "tileAVX512", tensor + "(*slot).panels", tensor + "(*attentionTask).block",
			model + "qwenimage.(*Model).DecodePixels",
		}, "attention", "decode"},
		{
			[]string{"runtime.memmove", tensor + "(*convTask).row", model + "qwenimage.(*Model).DecodePixels.func1"},
			"convolutions", "decode",
		},
		{
			[]string{tensor + "sum64AVX2", tensor + "(*rowTask).layerNorm", tensor + "(*rowTask).part"},
			"layer norm and modulation", "other",
		},
		{[]string{
			"runtime.mallocgc", model + "tokenizer.(*Tokenizer).Encode", model + "qwenimage.promptIDs",
			model + "qwenimage.(*Model).Encode",
		}, "tokenizer", "encode"},
		{[]string{"runtime.scanobject", "runtime.gcDrain", "runtime.gcBgMarkWorker"}, "garbage collection", "other"},
		{nil, "other", "other"},
	} {
		if op, stage := classOf(c.functions, operations), classOf(c.functions, stageFunctions); op != c.op ||
			stage != c.stage {
			t.Errorf("%q: %s of %s, want %s of %s", c.functions, op, stage, c.op, c.stage)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{4, 1}, 2.5}, {[]float64{9, 1, 2}, 2}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v = %g, want %g", c.values, got, c.want)
		}
	}
}

// The folder of a published size opens; its size is that of its layers, and its holes take
// no disk.
func TestFolder_isThatOfThePublishedModel(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "random")
	if err := execute(t.Context(), []string{
		"folder", "--layers", "2", "--text-layers", "1", "--vocabulary", "300", "--size", "512", "--hollow", dir,
	}); err != nil {
		t.Fatal(err)
	}
	info, err := families.All().Inspect(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Problems) > 0 {
		t.Errorf("it does not load: %q", info.Problems)
	}
	if info.Height != 512 || info.Width != 512 || info.LatentChannels != 64 || info.PixelsPerToken != 16 {
		t.Errorf("the card is %+v", info.Card)
	}
	if p := info.Parts[1]; p.Parameters < 700_000_000 || p.Parameters > 800_000_000 {
		t.Errorf("%d parameters of two blocks", p.Parameters)
	}
	if err := execute(t.Context(), []string{"folder", dir}); err == nil ||
		!strings.Contains(err.Error(), "must be a new one") {
		t.Errorf("a folder that is there: %v", err)
	}
	if err := execute(t.Context(), []string{"folder", "--layers", "-1", dir + "2"}); err == nil ||
		!strings.Contains(err.Error(), "--layers: -1; must be") {
		t.Errorf("-1 layers: %v", err)
	}
}

// What a GPU is measured by can be tried on the CPU; another engine that is missing is said.
func TestBenchGPU(t *testing.T) {
	bustest.Sequential(t, measures)
	var out, stderr bytes.Buffer
	g := gpuBench{
		device: "cpu", dtype: "f32", layers: 1, of: 60, small: true, round: time.Millisecond, peer: "false", out: &out,
	}
	t.Chdir("../../..")
	if err := g.run(t.Context(), &stderr); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"The other engine is missing", "| product 64 x 96 x 64 | ", "| attention, 40 tokens", "| copy in",
		"| copy out", "| a launch", "| evaluation with guidance, 64 x 128, batch 1", "scaled, at a sigma that came before |",
		"| putting a LoRA of rank 64 on the device", "scaled, with a LoRA of rank 64 of all projections |",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "not measured") {
		t.Errorf("something is not measured:\n%s", &out)
	}
}
