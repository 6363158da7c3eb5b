package torchrandom_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/meander-rl/meander/pkg/torchrandom"
)

// draws is testdata/randn.json, which deploy/golden/make_torch_random.py writes with torch itself.
type draws struct {
	Torch string
	Cases []struct {
		Seed  uint64 `json:",string"`
		Draws []struct {
			N      int
			SHA256 string
			Bits   []string
		}
	}
}

// TestRandn_Torch draws what torch drew: every length of a tail, draws in a row, and seeds of more than 32 bits.
func TestRandn_Torch(t *testing.T) {
	data, err := os.ReadFile("testdata/randn.json")
	var want draws
	if err == nil {
		err = json.Unmarshal(data, &want)
	}
	if err != nil || len(want.Cases) == 0 {
		t.Fatal(err)
	}
	for _, c := range want.Cases {
		g := torchrandom.New(c.Seed)
		for i, d := range c.Draws {
			x := make([]float32, d.N)
			g.Randn(x)
			for j, bits := range d.Bits {
				if got := fmt.Sprintf("%08x", math.Float32bits(x[j])); got != bits {
					t.Errorf("seed %d, draw %d of %d, number %d: %s; torch %s", c.Seed, i, d.N, j, got, bits)
				}
			}
			sum := sha256.New()
			if err := binary.Write(sum, binary.LittleEndian, x); err != nil {
				t.Fatal(err)
			}
			if got := hex.EncodeToString(sum.Sum(nil)); got != d.SHA256 {
				t.Fatalf("seed %d, draw %d of %d: other numbers than torch's", c.Seed, i, d.N)
			}
		}
	}
}

func BenchmarkRandn(b *testing.B) {
	x := make([]float32, 1<<18)
	b.SetBytes(int64(4 * len(x)))
	g := torchrandom.New(1)
	for b.Loop() {
		g.Randn(x)
	}
}
