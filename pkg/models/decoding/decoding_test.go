package decoding_test

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
)

func reset(t testing.TB, logits []float32, p decoding.Params) *decoding.Distribution {
	t.Helper()
	var d decoding.Distribution
	if err := d.Reset(logits, p); err != nil {
		t.Fatal(err)
	}
	return &d
}

// The worked numbers of four logits.
var worked = []float32{2, 1, 0, -1}

func near(t *testing.T, name string, got float32, want float64) {
	t.Helper()
	if math.Abs(float64(got)-want) > 2e-7*math.Max(1, math.Abs(want)) {
		t.Errorf("%s: %v, want %v", name, got, want)
	}
}

func TestDistribution_WorkedNumbers(t *testing.T) {
	d := reset(t, worked, decoding.Params{Temperature: 1})
	for i, want := range []float64{-.440189698561, -1.440189698561, -2.440189698561, -3.440189698561} {
		c := d.At(int32(i))
		near(t, "log-prob", c.LogProb, want)
		near(t, "processed", c.Processed, want)
		near(t, "lse", c.LSE, 2.440189698561)
		near(t, "processed lse", c.ProcessedLSE, 2.440189698561)
		near(t, "entropy", c.Entropy, .947536963975)
	}
	for _, c := range []struct{ t, lse, first, second float64 }{
		{.5, 4.145077938961, -.145077938961, -2.145077938961},
		{.7, 3.127816687832, -.270673830690, -1.699245259261},
		{2, 1.787338671698, -.787338671698, -1.287338671698},
	} {
		d := reset(t, worked, decoding.Params{Temperature: c.t})
		near(t, "lse of z/T", d.At(0).ProcessedLSE, c.lse)
		near(t, "first", d.At(0).Processed, c.first)
		near(t, "second", d.At(1).Processed, c.second)
		near(t, "as it is", d.At(1).LogProb, -1.440189698561)
	}
	// The two best: never renormalised in LogProb, and too high by -ln of their mass in Processed.
	d = reset(t, worked, decoding.Params{Temperature: 1, TopK: 2})
	near(t, "log-prob", d.At(0).LogProb, -.440189698561)
	near(t, "processed", d.At(0).Processed, -.313261687518)
	near(t, "processed", d.At(1).Processed, -1.313261687518)
	near(t, "mass", float32(math.Exp(float64(d.At(0).LogProb))+math.Exp(float64(d.At(1).LogProb))), .880797077978)
	if c := d.At(2); !math.IsInf(float64(c.Processed), -1) {
		t.Errorf("processed log-prob of a token that is left out: %v", c.Processed)
	}
	processed := make([]float32, 4)
	d.Process(processed)
	if inf := float32(math.Inf(-1)); !slices.Equal(processed, []float32{2, 1, inf, inf}) || d.Kept() != 2 {
		t.Errorf("processed logits %v, %d kept", processed, d.Kept())
	}
}

// entropyBounds are those that the k largest logits leave, with the log-sum-exp of all V: the rest of the
// probability is on one token, or spread over all that are left.
func entropyBounds(top []float32, lse float64, vocabulary int) (low, high float64) {
	mass := 0.0
	for _, z := range top {
		p := math.Exp(float64(z) - lse)
		mass, low = mass+p, low-p*(float64(z)-lse)
	}
	tail := 1 - mass
	if tail <= 0 {
		return low, low
	}
	low -= tail * math.Log(tail)
	return low, low + tail*math.Log(float64(vocabulary-len(top)))
}

// What is recorded of a token, its log-sum-exp and its entropy, lies where the logits that may be stored of it say.
func TestEntropy_WithinTheBoundsOfTopLogits(t *testing.T) {
	low, high := entropyBounds(worked[:2], 2.440189698561, len(worked))
	if math.Abs(low-.878136652186) > 1e-12 || math.Abs(high-.960761821500) > 1e-12 {
		t.Errorf("bounds of the worked numbers: %.12f, %.12f", low, high)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		z := make([]float32, 2+rng.IntN(500))
		for i := range z {
			z[i] = float32(4 * rng.NormFloat64())
		}
		d := reset(t, z, decoding.Params{Temperature: 1})
		k := 1 + rng.IntN(len(z)-1)
		var top []float32
		for _, id := range decoding.Top(z, k) {
			top = append(top, z[id])
		}
		c := d.At(0)
		const rounded = 5e-5 // of an lse in float32, which the rest is a small difference of
		if low, high := entropyBounds(top, float64(c.LSE), len(z)); float64(c.Entropy) < low-rounded ||
			float64(c.Entropy) > high+rounded {
			t.Errorf("entropy %v of %d tokens; the %d largest logits leave %v to %v", c.Entropy, len(z), k, low, high)
		}
	}
}

// vllm gives the processed log-probs as vLLM's sampler does, a mask after the other.
func vllm(z []float32, p decoding.Params) []float64 {
	out := make([]float64, len(z))
	for i := range z {
		out[i] = float64(z[i]) / p.Temperature
	}
	softmax := func() (probs []float64) {
		sum := 0.0
		for _, x := range out {
			sum += math.Exp(x)
		}
		for _, x := range out {
			probs = append(probs, math.Exp(x)/sum)
		}
		return probs
	}
	probs := softmax()
	for i, q := range probs {
		if q < p.MinP*slices.Max(probs) {
			out[i] = math.Inf(-1)
		}
	}
	sorted := slices.Sorted(slices.Values(out)) // the smallest first
	if p.TopK > 0 {
		kth := sorted[max(0, len(sorted)-p.TopK)]
		for i := range out {
			if out[i] < kth {
				out[i] = math.Inf(-1)
			}
		}
	}
	probs = softmax()
	order := make([]int, len(out))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(out[a], out[b]) })
	sum := 0.0
	for _, i := range order[:len(order)-1] {
		if sum += probs[i]; p.TopP < 1 && sum <= 1-p.TopP {
			out[i] = math.Inf(-1)
		}
	}
	for i, q := range softmax() {
		out[i] = math.Log(q)
	}
	return out
}

// With MinPFirst the processed log-probs are those of vLLM; in the order of noise.md they are others where
// min-p and top-p are set.
func TestDistribution_FilterOrders(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 4))
	furthest := 0.0
	for range 500 {
		z := make([]float32, 2+rng.IntN(60))
		for i := range z {
			z[i] = float32(rng.IntN(12)) / 2 // some are equal
		}
		z[rng.IntN(len(z))] += 0.25 // not all are 0
		p := decoding.Params{
			Temperature: []float64{.5, 1, 2}[rng.IntN(3)], TopK: []int{0, 1, 3, 10, 99}[rng.IntN(5)],
			TopP: []float64{.3, .6, .9, 1}[rng.IntN(4)], MinP: []float64{0, .05, .2, .9, 1}[rng.IntN(5)],
		}
		if p.TopP < 1 {
			for i := range z { // which of equal ones at the border of top-p stay is the sort's affair
				z[i] += float32(i) / 4096
			}
		}
		want := vllm(z, p)
		own := reset(t, z, p)
		p.MinPFirst = true
		d := reset(t, z, p)
		for i := range z {
			got, w := float64(d.At(int32(i)).Processed), want[i]
			if got != w && !(math.Abs(got-w) <= 1e-5) {
				t.Fatalf("%v, %+v: token %d: %v, want %v", z, p, i, got, w)
			}
			if o := float64(own.At(int32(i)).Processed); !math.IsInf(o, 0) && !math.IsInf(w, 0) {
				furthest = max(furthest, math.Abs(o-w))
			}
		}
	}
	if furthest < .1 {
		t.Errorf("the orders differ by at most %v", furthest)
	}
}

// tokenVectors are those of schemas/testdata/noise.json, which the independent Python
// implementation wrote.
type tokenVectors struct {
	Token []struct {
		Logits      string
		Temperature string
		TopK        int    `json:"top_k"`
		TopP        string `json:"top_p"`
		MinP        string `json:"min_p"`
		Kept        int
		Draws       []struct {
			Seed         string
			Position     uint32
			Token        int32
			LogProb      string `json:"logprob"`
			LSE          string
			Entropy      string
			Processed    string
			ProcessedLSE string `json:"processed_lse"`
		}
	}
}

func number(t testing.TB, s string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestDistribution_HasTheBitsOfTheContract(t *testing.T) {
	b, err := os.ReadFile("../../../schemas/testdata/noise.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors tokenVectors
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors.Token) < 10 {
		t.Fatal("noise.json has too few tokens")
	}
	var d decoding.Distribution // one for all: nothing may stay of the last
	for i, c := range vectors.Token {
		var logits []float32
		for _, z := range strings.Fields(c.Logits) {
			logits = append(logits, float32(number(t, z)))
		}
		p := decoding.Params{
			Temperature: number(t, c.Temperature), TopK: c.TopK, TopP: number(t, c.TopP), MinP: number(t, c.MinP),
		}
		if err := errors.Join(p.Validate(), d.Reset(logits, p)); err != nil {
			t.Fatal(err)
		}
		if d.Kept() != c.Kept {
			t.Errorf("%d: %d tokens kept, want %d", i, d.Kept(), c.Kept)
		}
		for _, draw := range c.Draws {
			seed, err := strconv.ParseUint(draw.Seed, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			want := decoding.Choice{
				ID: draw.Token, LogProb: float32(number(t, draw.LogProb)), LSE: float32(number(t,
					draw.LSE)), Entropy: float32(number(t, draw.Entropy)),
				Processed: float32(number(t, draw.Processed)), ProcessedLSE: float32(number(t, draw.ProcessedLSE)),
			}
			if got := d.At(d.Draw(seed, draw.Position)); got != want {
				t.Errorf("%d: %+v: %+v, want %+v", i, p, got, want)
			}
		}
	}
}

// Draws have the frequencies of the processed distribution, and positions are independent.
func TestDraw_Frequencies(t *testing.T) {
	t.Parallel()
	const n = 40000
	for _, p := range []decoding.Params{
		{Temperature: 1},
		{Temperature: .7, TopP: .9},
		{Temperature: 2, TopK: 3},
		{Temperature: 1, MinP: .2},
	} {
		d := reset(t, []float32{1, -.5, 2, .25, 0}, p)
		counts := map[int32]float64{}
		for i := range n {
			counts[d.Draw(uint64(i%200), uint32(i/200))]++
		}
		chi, cells := 0.0, 0
		for id := range int32(5) {
			want := n * math.Exp(float64(d.At(id).Processed))
			if want == 0 {
				if counts[id] > 0 {
					t.Errorf("%+v: token %d drawn %v times, left out", p, id, counts[id])
				}
				continue
			}
			chi += math.Pow(counts[id]-want, 2) / want
			cells++
		}
		if limit := []float64{0, 1e-9, 10.8, 13.8, 16.3, 18.5}[cells]; chi > limit { // p = 0.001
			t.Errorf("%+v: chi-squared %.1f of %d cells, want at most %.1f", p, chi, cells, limit)
		}
	}
}

func TestTop(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 40 {
		logits := make([]float32, n)
		order := make([]int32, n)
		for i := range logits {
			logits[i], order[i] = float32(r.IntN(9)), int32(i)
		}
		sort.SliceStable(order, func(a, b int) bool { return logits[order[a]] > logits[order[b]] })
		for k := range n + 2 {
			if got := decoding.Top(logits, k); !slices.Equal(got, order[:min(k, n)]) {
				t.Fatalf("the best %d of %v: %v, want %v", k, logits, got, order[:min(k, n)])
			}
		}
	}
}

func TestRefuses(t *testing.T) {
	t.Parallel()
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	var d decoding.Distribution
	for _, logits := range [][]float32{{}, {1, nan}, {inf, 1}, {-inf, -inf}, {0, 0, 0}} {
		if err := d.Reset(logits, decoding.Params{}); !errors.Is(err, decoding.ErrLogits) {
			t.Errorf("%v: %v, want an ErrLogits", logits, err)
		}
	}
	if err := d.Reset([]float32{-inf, 3, -inf}, decoding.Params{Temperature: 1, TopK: 2, TopP: .5}); err != nil ||
		d.Masked() != 2 || d.Kept() != 1 || d.Draw(1, 2) != 1 {
		t.Errorf("one token that is not masked: %v, %d masked, %d kept", err, d.Masked(), d.Kept())
	}
	for _, p := range []decoding.Params{
		{Temperature: -1},
		{Temperature: 1e-9},
		{Temperature: math.NaN()},
		{TopK: -1},
		{TopP: 1.5},
		{TopP: math.NaN()},
		{MinP: -.1},
		{Temperature: math.Inf(1)},
	} {
		if p.Validate() == nil {
			t.Errorf("%+v: no error", p)
		}
	}
	err := decoding.Params{Temperature: -1, TopK: -2, TopP: 3, MinP: 4}.Validate()
	for _, field := range []string{"temperature", "top_k", "top_p", "min_p"} {
		if !strings.Contains(fmt.Sprint(err), field) {
			t.Errorf("%v: does not name %s", err, field)
		}
	}
}

// FuzzDistribution: what is drawn is left by the filters, and has a probability.
func FuzzDistribution(f *testing.F) {
	f.Add([]byte{0, 0, 128, 63, 0, 0, 0, 64}, 1.0, 0, 0.9, 0.0, uint64(1), uint32(2))
	f.Add([]byte{0, 0, 128, 255, 0, 0, 0, 64, 1, 2, 3, 4}, 0.001, 2, 0.5, 0.1, uint64(1), uint32(2))
	f.Fuzz(func(t *testing.T, b []byte, temperature float64, topK int, topP, minP float64, seed uint64,
		position uint32,
	) {
		logits := make([]float32, len(b)/4)
		for i := range logits {
			logits[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		}
		p := decoding.Params{Temperature: temperature, TopK: topK, TopP: topP, MinP: minP}
		var d decoding.Distribution
		if p.Validate() != nil || d.Reset(logits, p) != nil {
			return
		}
		id := d.Draw(seed, position)
		c := d.At(id)
		if math.IsInf(float64(logits[id]), -1) || !(c.Processed <= 1e-6) || math.IsInf(float64(c.Processed), 0) {
			t.Errorf("%v, %+v: drew %+v", logits, p, c)
		}
		if !(c.Entropy >= -1e-6) || !(c.LogProb <= 1e-6) || d.Kept() < 1 || d.Kept() > len(logits)-d.Masked() ||
			id != d.Draw(seed, position) {
			t.Errorf("%v, %+v: %+v, %d kept", logits, p, c, d.Kept())
		}
	})
}
