package nn

import (
	"math"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// RopeFrequencies returns theta^(-2i/dim) for 0 <= i < dim/2, rounded to float32 at the same
// places as in the reference.
func RopeFrequencies(theta float64, dim int) []float32 {
	f := make([]float32, dim/2)
	for i := range f {
		f[i] = 1 / float32(math.Pow(theta, float64(float32(2*i)/float32(dim))))
	}
	return f
}

// RopeTable holds cos and sin [positions, D/2] of rotary embeddings, on the host.
type RopeTable struct {
	positions, pairs int
	cos, sin         []float32
}

// NewRopeTable returns an empty table; Fill sets its rows.
func NewRopeTable(positions, pairs int) *RopeTable {
	n := positions * pairs
	return &RopeTable{positions: positions, pairs: pairs, cos: make([]float32, n), sin: make([]float32, n)}
}

// Load copies the rows of the first positions to a session.
func (t *RopeTable) Load(s tensor.Session, positions int) (cos, sin tensor.Matrix) {
	cos, sin = tensor.NewMatrix(s, positions, t.pairs), tensor.NewMatrix(s, positions, t.pairs)
	s.CopyIn(cos, t.cos[:positions*t.pairs])
	s.CopyIn(sin, t.sin[:positions*t.pairs])
	return cos, sin
}

// Bytes returns the memory of the table.
func (t *RopeTable) Bytes() int { return 4 * (len(t.cos) + len(t.sin)) }

// Fill sets columns from..from+len(freqs) of row to a position. Angles are float32
// products, as in the reference; their cos and sin are rounded once.
func (t *RopeTable) Fill(row, from, position int, freqs []float32) {
	cos, sin := t.cos[row*t.pairs+from:], t.sin[row*t.pairs+from:]
	for i, f := range freqs {
		angle := float64(float32(position) * f)
		cos[i], sin[i] = float32(math.Cos(angle)), float32(math.Sin(angle))
	}
}
