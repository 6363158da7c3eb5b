package synthetic

import (
	"image"
	"math"
)

// The synthetic latent space. What a token adds to the image is in its window,
// 32x32 pixels around its own 16x16: per colour axis a cosine series of 21 terms, faded out
// towards the window's edge so that neighbours blend without seams.
const (
	tokenEdge     = 16 // pixels per token
	tokenChannels = 64 // 3 axes x 21 terms, and one that no image shows
	windowEdge    = 2 * tokenEdge
	orders        = 6 // terms (u, v) with u+v < 6
	terms         = orders * (orders + 1) / 2
)

// axes are the colour axes of the latents in RGB, orthonormal: grey, red against blue,
// green against magenta.
var axes = [3][3]float64{
	{1 / math.Sqrt(3), 1 / math.Sqrt(3), 1 / math.Sqrt(3)},
	{1 / math.Sqrt2, 0, -1 / math.Sqrt2},
	{-1 / math.Sqrt(6), 2 / math.Sqrt(6), -1 / math.Sqrt(6)},
}

// axisGain is how much one unit of an axis's constant term changes the colour; full scale is 1.
var axisGain = [3]float64{0.3, 0.12, 0.12}

// gain returns the factor of term (u, v). Fine detail is fainter, as in photographs: so
// latents are of order 1, and noise of one size looks natural at every scale.
func gain(axis, u, v int) float64 {
	return axisGain[axis] / (1 + 0.8*float64(u*u+v*v))
}

// cosines returns the cosine basis over a window of n samples, [orders][n], each with
// mean square 1: phi_0 = 1, phi_u(t) = sqrt(2)*cos(pi*u*(t+1/2)/n).
func cosines(n int) [orders][]float64 {
	var phi [orders][]float64
	for u := range phi {
		phi[u] = make([]float64, n)
		for t := range phi[u] {
			phi[u][t] = 1
			if u > 0 {
				phi[u][t] = math.Sqrt2 * math.Cos(math.Pi*float64(u)*(float64(t)+0.5)/float64(n))
			}
		}
	}
	return phi
}

// fade returns the weights of a token's window along one direction: sin^2, so that the weights of
// overlapping windows sum to 1. The first and the last token of the direction have no neighbour
// on one side; in that half their weight is 1.
func fade(first, last bool) [windowEdge]float32 {
	var w [windowEdge]float32
	for t := range w {
		s := math.Sin(math.Pi * (float64(t) + 0.5) / windowEdge)
		w[t] = float32(s * s)
		if first && t < windowEdge/2 || last && t >= windowEdge/2 {
			w[t] = 1
		}
	}
	return w
}

// decodeTokens turns finite latents [S, C] into an image. Linear up to the clamp: with
// z the latents of a token and w its fade, the colour at (y, x) of its window gains
//
//	255 * w[y]*w[x] * sum_axis axes[axis] * sum_uv gain(axis,u,v) * z[axis,u,v] * phi_u(x)*phi_v(y)
//
// on top of mid-grey.
func decodeTokens(latents []float32, height, width int) *image.NRGBA {
	planes := [3][]float32{}
	for c := range planes {
		planes[c] = make([]float32, height*width)
	}
	var phi [orders][windowEdge]float32
	for u, p := range cosines(windowEdge) {
		for t, v := range p {
			phi[u][t] = float32(v)
		}
	}
	rows, columns := height/tokenEdge, width/tokenEdge
	for r := range rows {
		fy := fade(r == 0, r == rows-1)
		for c := range columns {
			fx := fade(c == 0, c == columns-1)
			token := latents[(r*columns+c)*tokenChannels:][:tokenChannels]
			for axis, plane := range planes {
				along := alongRows(token[axis*terms:][:terms], axis, &phi)
				addWindow(plane, height, width, r, c, &along, &phi, &fy, &fx)
			}
		}
	}
	return colours(planes, height, width)
}

// alongRows sums the series over u: [v][x] = sum_u gain*z[u,v]*phi_u(x).
func alongRows(z []float32, axis int, phi *[orders][windowEdge]float32) (sum [orders][windowEdge]float32) {
	t := 0
	for v := range orders {
		for u := range orders - v {
			a := float32(gain(axis, u, v)) * z[t]
			t++
			for x := range windowEdge {
				sum[v][x] += a * phi[u][x]
			}
		}
	}
	return sum
}

// addWindow adds a token's window to a plane, without the part outside the image.
func addWindow(plane []float32, height, width, r, c int, along, phi *[orders][windowEdge]float32, fy,
	fx *[windowEdge]float32,
) {
	const margin = (windowEdge - tokenEdge) / 2
	top, left := r*tokenEdge-margin, c*tokenEdge-margin
	x0, x1 := max(0, -left), min(windowEdge, width-left)
	for y := max(0, -top); y < min(windowEdge, height-top); y++ {
		line := plane[(top+y)*width+left+x0:][:x1-x0]
		p0, p1, p2, p3, p4, p5 := phi[0][y], phi[1][y], phi[2][y], phi[3][y], phi[4][y], phi[5][y]
		for i := range line {
			x := x0 + i
			s := p0*along[0][x] + p1*along[1][x] + p2*along[2][x] + p3*along[3][x] + p4*along[4][x] + p5*along[5][x]
			line[i] += fy[y] * fx[x] * s
		}
	}
}

// colours turns planes along the colour axes into RGB.
func colours(planes [3][]float32, height, width int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for i := range planes[0] {
		pix := img.Pix[4*i : 4*i+4 : 4*i+4]
		for ch := range 3 {
			v := 0.5 + axes[0][ch]*float64(planes[0][i]) + axes[1][ch]*float64(planes[1][i]) +
				axes[2][ch]*float64(planes[2][i])
			pix[ch] = uint8(math.Round(255 * min(1, max(0, v))))
		}
		pix[3] = 255
	}
	return img
}

// encodeImage returns the latents [S, C] whose image is close to rgb, a function of
// the position in pixels with values in 0..1: the cosine series of each window. It
// samples every second pixel, finer than the series can show.
func encodeImage(rgb func(y, x float64) [3]float64, height, width int) []float32 {
	const (
		pitch  = 2
		edge   = windowEdge / pitch
		hop    = tokenEdge / pitch
		margin = (windowEdge - tokenEdge) / 2
	)
	rows, columns := height/tokenEdge, width/tokenEdge
	stride := columns*hop + edge - hop
	samples := make([][3]float64, (rows*hop+edge-hop)*stride)
	for i := range samples {
		at := rgb(float64(pitch*(i/stride)+pitch/2-margin), float64(pitch*(i%stride)+pitch/2-margin))
		for axis := range axes {
			for ch, v := range at {
				samples[i][axis] += axes[axis][ch] * (v - 0.5)
			}
		}
	}
	phi := cosines(edge)
	latents := make([]float32, rows*columns*tokenChannels)
	for r := range rows {
		for c := range columns {
			token := latents[(r*columns+c)*tokenChannels:][:tokenChannels]
			window := samples[r*hop*stride+c*hop:]
			for axis := range axes {
				var along [orders][edge]float64 // [u][y]
				for u := range along {
					for y := range edge {
						for x, p := range phi[u] {
							along[u][y] += p * window[y*stride+x][axis]
						}
					}
				}
				t := axis * terms
				for v := range orders {
					for u := range orders - v {
						var s float64
						for y, p := range phi[v] {
							s += p * along[u][y]
						}
						token[t] = float32(s / (edge * edge) / gain(axis, u, v))
						t++
					}
				}
			}
		}
	}
	return latents
}
