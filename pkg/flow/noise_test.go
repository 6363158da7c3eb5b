package flow_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/portable"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

const vectors = "../../schemas/testdata/"

// word is a 32-bit number as "0x..", float a hexadecimal float, long a 64-bit number
// in decimal.
type (
	word  uint32
	float float64
	long  uint64
)

func (w *word) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 0, 32)
	*w = word(n)
	return err
}

func (f *float) UnmarshalText(b []byte) error {
	n, err := strconv.ParseFloat(string(b), 64)
	*f = float(n)
	return err
}

func (l *long) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 10, 64)
	*l = long(n)
	return err
}

// noiseVectors is schemas/testdata/noise.json, written by the independent Python
// implementation noise_check.py --write; every comparison is exact.
type noiseVectors struct {
	Philox []struct {
		Counter, Words [4]word
		Key            [2]word
	}
	BoxMuller []struct {
		Words   [2]word
		Normals [2]float
	} `json:"box_muller"`
	Normal []struct {
		Seed         long
		Step, Stream uint32
		Normals      []float
	}
	Long []struct {
		Seed         long
		Step, Stream uint32
		Count        int
		SHA256       string
	}
	SampleSeed []struct {
		Base, UID   string
		SampleIndex long `json:"sample_index"`
		Seed        long
	} `json:"sample_seed"`
	Window []struct {
		Size, Lo, Hi  int
		Strategy      flow.Strategy
		Iteration     int
		ItersPerGroup int `json:"iters_per_group"`
		Seed          long
		Indices       []int
	}
}

func loadVectors(t *testing.T) noiseVectors {
	t.Helper()
	b, err := os.ReadFile(vectors + "noise.json")
	if err != nil {
		t.Fatal(err)
	}
	var v noiseVectors
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Philox) == 0 || len(v.BoxMuller) == 0 || len(v.Normal) == 0 || len(v.Long) == 0 ||
		len(v.SampleSeed) == 0 ||
		len(v.Window) == 0 {
		t.Fatalf("noise.json lacks a section")
	}
	return v
}

func TestPhilox4x32_Vectors(t *testing.T) {
	for _, c := range loadVectors(t).Philox {
		got := portable.Philox4x32(
			[4]uint32{uint32(c.Counter[0]), uint32(c.Counter[1]), uint32(c.Counter[2]), uint32(c.Counter[3])},
			[2]uint32{uint32(c.Key[0]), uint32(c.Key[1])})
		for i, w := range got {
			if w != uint32(c.Words[i]) {
				t.Errorf("counter %x, key %x: word %d = %#08x, want %#08x", c.Counter, c.Key, i, w, c.Words[i])
			}
		}
	}
}

func TestNormal_Vectors(t *testing.T) {
	v := loadVectors(t)
	for _, c := range v.Normal {
		got := make([]float32, len(c.Normals))
		flow.Normal(got, uint64(c.Seed), c.Step, c.Stream)
		for i, n := range got {
			if float64(n) != float64(c.Normals[i]) {
				t.Errorf("seed %d, step %d, stream %d: normal %d = %x, want %x", c.Seed, c.Step, c.Stream, i, n,
					float64(c.Normals[i]))
			}
		}
	}
	for _, c := range v.Long {
		got := make([]float32, c.Count)
		flow.Normal(got, uint64(c.Seed), c.Step, c.Stream)
		sum := sha256.Sum256(tensor.F32.AppendFloats(nil, got))
		if hex.EncodeToString(sum[:]) != c.SHA256 {
			t.Errorf("seed %d, step %d: digest of %d normals differs", c.Seed, c.Step, c.Count)
		}
	}
}

func TestSampleSeed_Vectors(t *testing.T) {
	for _, c := range loadVectors(t).SampleSeed {
		got := flow.GroupSeed(c.Base, c.UID)
		if c.SampleIndex != math.MaxUint64 {
			got = flow.SampleSeed(c.Base, c.UID, int(c.SampleIndex))
		}
		if got != uint64(c.Seed) {
			t.Errorf("seed of (%q, %q, %d) = %d, want %d", c.Base, c.UID, c.SampleIndex, got, c.Seed)
		}
	}
}

func TestWindow_Vectors(t *testing.T) {
	for _, c := range loadVectors(t).Window {
		w := flow.Window{
			Size: c.Size, Lo: c.Lo, Hi: c.Hi, Strategy: c.Strategy, Iteration: c.Iteration,
			ItersPerGroup: c.ItersPerGroup,
		}
		got, err := w.Indices(c.Hi, uint64(c.Seed))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, c.Indices) {
			t.Errorf("%+v, seed %d: %v, want %v", w, c.Seed, got, c.Indices)
		}
	}
}

// The second implementation still agrees with the vectors that Go is tested against.
func TestNoise_Python(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 on PATH: the vectors were checked in Go alone")
	}
	out, err := exec.CommandContext(t.Context(), python, vectors+"noise_check.py").CombinedOutput()
	if err != nil {
		t.Fatalf("noise_check.py: %v\n%s", err, out)
	}
}

func TestSampleSeed_NoAmbiguity(t *testing.T) {
	type key struct {
		base, uid string
		index     int
	}
	seen := map[uint64]key{}
	for _, base := range []string{"run:a", "run:ab", "run:", flow.SeedBase(7), flow.RunBase("7"), flow.SeedBase(-7)} {
		for _, uid := range []string{"", "a", "b", "ab", "ba"} {
			for index := range 50 {
				k := key{base, uid, index}
				seed := flow.SampleSeed(base, uid, index)
				if other, ok := seen[seed]; ok {
					t.Fatalf("%v and %v share seed %d", k, other, seed)
				}
				seen[seed] = k
			}
		}
	}
}

// Element i does not depend on how many others are asked for.
func TestNormal_Prefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		step := rapid.Uint32().Draw(t, "step")
		long := make([]float32, rapid.IntRange(0, 67).Draw(t, "long"))
		flow.Normal(long, seed, step, flow.StreamLatents)
		short := make([]float32, rapid.IntRange(0, len(long)).Draw(t, "short"))
		flow.Normal(short, seed, step, flow.StreamLatents)
		if !slices.Equal(short, long[:len(short)]) {
			t.Fatalf("%d normals are not the first of %d", len(short), len(long))
		}
	})
}

func ExampleStepNoise() {
	seed := flow.SampleSeed(flow.SeedBase(42), "cat", 0)
	noise := make([]float32, 3)
	flow.InitialNoise(noise, seed)
	fmt.Printf("%.4f\n", noise)
	flow.StepNoise(noise, seed, 0)
	fmt.Printf("%.4f\n", noise)
	// Output:
	// [0.0013 -0.0398 1.3213]
	// [0.9482 1.0295 2.2869]
}

func BenchmarkNormal(b *testing.B) {
	for _, n := range []int{4096, 262144} {
		x := make([]float32, n)
		b.Run(fmt.Sprintf("n=%d", n), func(b *testing.B) {
			for b.Loop() {
				flow.Normal(x, 1, 2, 0)
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e6, "M/s")
		})
	}
}
