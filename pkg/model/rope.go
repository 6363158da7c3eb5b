package model

import (
	"math"

	"github.com/meander-rl/meander/pkg/tensor"
)

// ropeFrequencies returns theta^(-2i/dim) for 0 <= i < dim/2, rounded to float32 where the
// reference rounds.
func ropeFrequencies(theta float64, dim int) []float32 {
	f := make([]float32, dim/2)
	for i := range f {
		f[i] = 1 / float32(math.Pow(theta, float64(float32(2*i)/float32(dim))))
	}
	return f
}

// ropeTable holds cos and sin [positions, D/2] of rotary embeddings, on the host.
type ropeTable struct {
	positions, pairs int
	cos, sin         []float32
}

func newRopeTable(positions, pairs int) *ropeTable {
	n := positions * pairs
	return &ropeTable{positions: positions, pairs: pairs, cos: make([]float32, n), sin: make([]float32, n)}
}

// load copies the first positions to a session.
func (t *ropeTable) load(s tensor.Session, positions int) (cos, sin tensor.Matrix) {
	cos, sin = tensor.NewMatrix(s, positions, t.pairs), tensor.NewMatrix(s, positions, t.pairs)
	s.CopyIn(cos, t.cos[:positions*t.pairs])
	s.CopyIn(sin, t.sin[:positions*t.pairs])
	return cos, sin
}

func (t *ropeTable) bytes() int { return 4 * (len(t.cos) + len(t.sin)) }

// fill sets columns from..from+len(freqs) of row to a position. Angles are float32
// products, as in the reference; their cos and sin are rounded once.
func (t *ropeTable) fill(row, from, position int, freqs []float32) {
	cos, sin := t.cos[row*t.pairs+from:], t.sin[row*t.pairs+from:]
	for i, f := range freqs {
		angle := float64(float32(position) * f)
		cos[i], sin[i] = float32(math.Cos(angle)), float32(math.Sin(angle))
	}
}

// jointTheta is the base of the transformer's rotary embedding, fixed by its class.
const jointTheta = 10000

// jointRope returns the table of a picture of h x w tokens followed by text: rows 0 to
// h*w-1 are the image, row-major, positions (frame, y, x) with frame 0 and y and x
// centred, y in [-(h-h/2), h/2); row h*w+i is text token i, at max(h/2, w/2)+i on all
// three axes (QwenEmbedRope with scale_rope).
func jointRope(axes []int, h, w, textTokens int) *ropeTable {
	pairs := (axes[0] + axes[1] + axes[2]) / 2
	t := newRopeTable(h*w+textTokens, pairs)
	var freqs [3][]float32
	for i, d := range axes {
		freqs[i] = ropeFrequencies(jointTheta, d)
	}
	set := func(row int, position [3]int) {
		from := 0
		for i, f := range freqs {
			t.fill(row, from, position[i], f)
			from += len(f)
		}
	}
	for y := range h {
		for x := range w {
			set(y*w+x, [3]int{0, y - (h - h/2), x - (w - w/2)})
		}
	}
	start := max(h/2, w/2)
	for i := range textTokens {
		set(h*w+i, [3]int{start + i, start + i, start + i})
	}
	return t
}

// textRope returns the table of positions 0 to n-1 of the text encoder.
func textRope(theta float64, headDim, n int) *ropeTable {
	t := newRopeTable(n, headDim/2)
	freqs := ropeFrequencies(theta, headDim)
	for i := range n {
		t.fill(i, 0, i, freqs)
	}
	return t
}
