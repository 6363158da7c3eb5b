package synthetic

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"unicode"
)

// A synthetic conditioning holds the 32 bytes of the prompt's SHA-256, byte b as
// b/128-1 (exact in every float type), then the RGB in 0..1 of its palette.
const (
	paletteColours = 4
	embedWidth     = sha256.Size + 3*paletteColours
)

func digestEmbed(b byte) float32 { return float32(b)/128 - 1 }

// embed returns the conditioning of a prompt: its digest and the colours of its palette.
func embed(prompt string) (e [embedWidth]float32) {
	digest := sha256.Sum256([]byte(prompt))
	for i, b := range digest {
		e[i] = digestEmbed(b)
	}
	for i, colour := range palette(prompt, digest) {
		for ch, v := range colour.rgb() {
			e[sha256.Size+3*i+ch] = float32(v)
		}
	}
	return e
}

// dice is a counter-based random generator: draw n is the first 8 bytes of
// SHA-256(seed, n).
type dice struct {
	seed [33]byte // a digest and a purpose
	n    uint64
}

func newDice(digest [32]byte, purpose byte) *dice {
	d := &dice{}
	copy(d.seed[:], digest[:])
	d.seed[32] = purpose
	return d
}

// between draws uniformly from [low, high).
func (d *dice) between(low, high float64) float64 {
	sum := sha256.Sum256(binary.LittleEndian.AppendUint64(d.seed[:], d.n))
	d.n++
	return low + (high-low)*float64(binary.LittleEndian.Uint64(sum[:])>>11)*0x1p-53
}

// newMixture builds the mixture of a conditioning.
func newMixture(cfg Config, digest [32]byte, key mixtureKey) *Mixture {
	m := &Mixture{}
	var total float64
	d := newDice(digest, 'm')
	for range cfg.Components {
		w := d.between(0.5, 1.5)
		total += w
		m.Weights = append(m.Weights, w)
		m.Stds = append(m.Stds, d.between(cfg.MinStd, cfg.MaxStd))
	}
	var colours [paletteColours][3]float64
	for i := range colours {
		for ch := range colours[i] {
			colours[i][ch] = float64(key.embeds[sha256.Size+3*i+ch])
		}
	}
	for k := range cfg.Components {
		m.Weights[k] /= total
		p := newScene(d, colours, k)
		mean := encodeImage(p.in(key.height, key.width), key.height, key.width)
		for i := range mean {
			mean[i] *= float32(cfg.Contrast)
		}
		m.Means = append(m.Means, mean)
	}
	return m
}

// scene is a gradient between two colours along a bent line, with soft blobs of the
// palette on it and a faint ripple. Lengths are in units of the shorter edge, from the
// middle of the image.
type scene struct {
	from, to     [3]float64
	angle, shift float64
	bend, phase  float64
	blobs        []blob
	ripple       [3]float64 // wave vector and phase
}

type blob struct {
	colour           [3]float64
	y, x, radius     float64
	strength, squash float64
}

// newScene draws the parameters of image k of a prompt. Each image begins with another colour
// of the palette.
func newScene(d *dice, colours [paletteColours][3]float64, k int) *scene {
	p := &scene{
		from: colours[k%paletteColours], to: colours[(k+1)%paletteColours],
		angle: d.between(0, 2*math.Pi), shift: d.between(-0.25, 0.25),
		bend: d.between(0.05, 0.25), phase: d.between(0, 2*math.Pi),
	}
	for j := range 4 {
		p.blobs = append(p.blobs, blob{
			colour: colours[(k+2+j)%paletteColours],
			y:      d.between(-0.5, 0.5), x: d.between(-0.5, 0.5), radius: d.between(0.1, 0.28),
			strength: d.between(0.6, 0.95), squash: d.between(0.7, 1.4),
		})
	}
	direction, length := d.between(0, math.Pi), d.between(12, 20)
	p.ripple = [3]float64{length * math.Sin(direction), length * math.Cos(direction), d.between(0, 2*math.Pi)}
	return p
}

// in returns the colours of the image at positions on a canvas of height x width pixels.
func (p *scene) in(height, width int) func(y, x float64) [3]float64 {
	unit := float64(min(height, width))
	sin, cos := math.Sincos(p.angle)
	return func(y, x float64) [3]float64 {
		y, x = (y-float64(height)/2)/unit, (x-float64(width)/2)/unit
		along, across := cos*x+sin*y, cos*y-sin*x
		c := mix(p.from, p.to, smoothstep(0.5+1.1*(along+p.shift+p.bend*math.Sin(5*across+p.phase))))
		for _, b := range p.blobs {
			dy, dx := (y-b.y)*b.squash, (x-b.x)/b.squash
			c = mix(c, b.colour, b.strength*math.Exp(-(dy*dy+dx*dx)/(2*b.radius*b.radius)))
		}
		light := 0.035 * math.Sin(p.ripple[0]*y+p.ripple[1]*x+p.ripple[2]+2*p.bend*math.Sin(7*across))
		for ch := range c {
			c[ch] += light
		}
		return c
	}
}

func mix(a, b [3]float64, t float64) [3]float64 {
	return [3]float64{a[0] + t*(b[0]-a[0]), a[1] + t*(b[1]-a[1]), a[2] + t*(b[2]-a[2])}
}

// smoothstep goes from 0 to 1 as t does, without corners.
func smoothstep(t float64) float64 {
	t = min(1, max(0, t))
	return t * t * (3 - 2*t)
}

// oklch is a colour by lightness 0..1, chroma (0 grey, about 0.3 vivid) and hue in
// degrees, in Ottosson's Oklab space: equal steps look equal at every hue, so colours
// drawn from it go together.
type oklch struct{ lightness, chroma, hue float64 }

// rgb converts to sRGB in 0..1 (Ottosson 2020, "A perceptual color space for image
// processing"), clamped to the gamut.
func (c oklch) rgb() [3]float64 {
	sin, cos := math.Sincos(c.hue * math.Pi / 180)
	a, b := c.chroma*cos, c.chroma*sin
	l := math.Pow(c.lightness+0.3963377774*a+0.2158037573*b, 3)
	m := math.Pow(c.lightness-0.1055613458*a-0.0638541728*b, 3)
	s := math.Pow(c.lightness-0.0894841775*a-1.2914855480*b, 3)
	linear := [3]float64{
		4.0767416621*l - 3.3077115913*m + 0.2309699292*s,
		-1.2684380046*l + 2.6097574011*m - 0.3413193965*s,
		-0.0041960863*l - 0.7034186147*m + 1.7076147010*s,
	}
	for i, v := range linear {
		v = min(1, max(0, v))
		if v <= 0.0031308 {
			linear[i] = 12.92 * v
		} else {
			linear[i] = 1.055*math.Pow(v, 1/2.4) - 0.055
		}
	}
	return linear
}

// named are the colours that have common names.
var named = []struct {
	names []string
	oklch
}{
	{[]string{"red", "crimson", "scarlet"}, oklch{0.60, 0.23, 27}},
	{[]string{"orange"}, oklch{0.75, 0.17, 58}},
	{[]string{"yellow", "gold", "golden"}, oklch{0.88, 0.17, 95}},
	{[]string{"green"}, oklch{0.64, 0.19, 143}},
	{[]string{"teal"}, oklch{0.64, 0.11, 190}},
	{[]string{"cyan", "turquoise"}, oklch{0.82, 0.13, 200}},
	{[]string{"blue"}, oklch{0.55, 0.20, 260}},
	{[]string{"navy"}, oklch{0.33, 0.13, 264}},
	{[]string{"purple", "violet"}, oklch{0.52, 0.21, 300}},
	{[]string{"magenta"}, oklch{0.65, 0.26, 330}},
	{[]string{"pink"}, oklch{0.80, 0.12, 0}},
	{[]string{"brown"}, oklch{0.47, 0.08, 55}},
	{[]string{"black"}, oklch{0.18, 0.01, 270}},
	{[]string{"gray", "grey", "silver"}, oklch{0.65, 0.01, 250}},
	{[]string{"white"}, oklch{0.96, 0.01, 90}},
}

// namedColour returns the colour of a common name, and whether word is one.
func namedColour(word string) (oklch, bool) {
	for _, c := range named {
		if slices.Contains(c.names, word) {
			return c.oklch, true
		}
	}
	return oklch{}, false
}

// palette returns the colours of a prompt: the colours that it names, in order, then variants of
// them. If it names none, the colours are random.
func palette(prompt string, digest [32]byte) (out [paletteColours]oklch) {
	d := newDice(digest, 'p')
	var anchors []oklch
	words := strings.FieldsFunc(strings.ToLower(prompt), func(r rune) bool { return !unicode.IsLetter(r) })
	for _, w := range words {
		if c, ok := namedColour(w); ok && len(anchors) < paletteColours {
			anchors = append(anchors, c)
		}
	}
	if len(anchors) == 0 {
		hue := d.between(0, 360)
		turn := d.between(40, 90)
		return [paletteColours]oklch{
			{d.between(0.62, 0.74), d.between(0.13, 0.18), hue},
			{d.between(0.80, 0.90), d.between(0.08, 0.13), hue + turn},
			{d.between(0.42, 0.55), d.between(0.12, 0.17), hue - turn},
			{d.between(0.68, 0.80), d.between(0.13, 0.18), hue + d.between(150, 210)},
		}
	}
	for i := range out {
		c := anchors[i%len(anchors)]
		if i >= len(anchors) {
			c.lightness = min(0.97, max(0.12, c.lightness+d.between(0.05, 0.2)*[2]float64{1, -1}[i%2]))
			c.chroma *= d.between(0.55, 0.9)
			c.hue += d.between(-30, 30)
		}
		out[i] = c
	}
	return out
}
