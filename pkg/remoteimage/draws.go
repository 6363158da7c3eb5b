package remoteimage

import "github.com/meander-rl/meander/pkg/torchrandom"

// patch is the side of the square of latent pixels that a token has.
const patch = 2

// Draws draws what a server in float32 draws for the request: x_T [S, C], and the noise [S, C] of each of SDESteps. The
// bits are those of the server. One generator draws x_T, as an image [C/4, h, w], and then each noise in turn, of
// tokens; steps without noise draw nothing.
func (q *Request) Draws() (x []float32, noise map[int][]float32) {
	g, n := torchrandom.New(q.Seed), q.Tokens*q.Channels
	image := make([]float32, n)
	g.Randn(image)
	x, noise = make([]float32, n), map[int][]float32{}
	q.pack(x, image)
	for _, i := range q.SDESteps {
		noise[i] = make([]float32, n)
		g.Randn(noise[i])
	}
	return x, noise
}

// pack sets x [S, C] to the tokens of an image of latents [C/4, h, w]. Channel 4c + 2i + j of a token is row i and
// column j of its square in plane c.
func (q *Request) pack(x, image []float32) {
	edge := 1 // of a token, in pixels
	for edge*edge*q.Tokens < q.Height*q.Width {
		edge++
	}
	h, w := q.Height/edge*patch, q.Width/edge*patch
	for i, v := range image {
		plane, row, column := i/(h*w), i/w%h, i%w
		token := row/patch*(w/patch) + column/patch
		x[token*q.Channels+plane*patch*patch+row%patch*patch+column%patch] = v
	}
}
