package qwenimage

import "github.com/meander-rl/meander/pkg/models/model/nn"

// jointTheta is the base of the transformer's rotary embedding, fixed by its class.
const jointTheta = 10000

// jointRope returns the table of an image of h x w tokens followed by text: rows 0 to
// h*w-1 are the image, row-major, positions (frame, y, x) with frame 0 and y and x
// centred, y in [-(h-h/2), h/2); row h*w+i is text token i, at max(h/2, w/2)+i on all
// three axes (QwenEmbedRope with scale_rope).
func jointRope(axes []int, h, w, textTokens int) *nn.RopeTable {
	pairs := (axes[0] + axes[1] + axes[2]) / 2
	t := nn.NewRopeTable(h*w+textTokens, pairs)
	var freqs [3][]float32
	for i, d := range axes {
		freqs[i] = nn.RopeFrequencies(jointTheta, d)
	}
	set := func(row int, position [3]int) {
		from := 0
		for i, f := range freqs {
			t.Fill(row, from, position[i], f)
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
