package scorer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

func TestNew(t *testing.T) {
	names := scorer.Names()
	if !slices.IsSorted(names) {
		t.Errorf("names %v are not sorted", names)
	}
	for _, name := range single(t) {
		s := open(t, name)
		if s.Name() != name || s.Version() == "" {
			t.Errorf("scorer %q says it is %q, version %q", name, s.Name(), s.Version())
		}
	}
	_, err := scorer.New("beauty")
	if err == nil {
		t.Fatal("an unknown scorer was opened")
	}
	for _, want := range append(names, `"beauty"`) {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %s", err, want)
		}
	}
}

// single are the scorers of one image that work here: all but diversity, and ocr where
// tesseract is.
func single(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(scorer.Names(), func(name string) bool {
		_, err := scorer.New(name)
		if err != nil && name != scorer.Diversity && !errors.Is(err, scorer.ErrNoTesseract) {
			t.Error(err)
		}
		return err != nil || scorer.OfText(name)
	})
}

func TestScorers_Refuse(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	tests := []struct {
		name  string
		ctx   context.Context
		in    scorer.Input
		fault string
	}{
		{"no image", t.Context(), scorer.Input{}, "no image"},
		{"empty image", t.Context(), scorer.Input{Media: media.Of(image.NewNRGBA(image.Rect(3, 3, 3, 9)))}, "no image"},
		{"unknown parameter", t.Context(), scorer.Input{
			Media:  media.Media{Frames: []*image.NRGBA{flat(4, 4, color.White)}, Sound: tone(1, 440)},
			Params: map[string]string{"quality": "80"},
		}, `"quality"`},
		{"cancelled", cancelled, scorer.Input{Media: media.Of(flat(4, 4, color.White))}, "canceled"},
	}
	for _, name := range single(t) {
		for _, tt := range tests {
			if scorer.Hears(name) {
				tt.fault = strings.ReplaceAll(tt.fault, "no image", "no sound")
			}
			t.Run(name+", "+tt.name, func(t *testing.T) {
				_, err := open(t, name).Score(tt.ctx, tt.in)
				if err == nil || !strings.Contains(err.Error(), tt.fault) ||
					!strings.HasPrefix(err.Error(), name+": ") {
					t.Errorf("error %v, want one of %s about %q", err, name, tt.fault)
				}
			})
		}
	}
}

// The score is the length of the file that image/jpeg writes at quality 95, and noise is
// harder to compress than a gradient, and a gradient than nothing.
func TestJPEG(t *testing.T) {
	up, down := open(t, scorer.JPEGIncompressibility), open(t, scorer.JPEGCompressibility)
	var last float64
	for _, p := range []struct {
		name string
		img  *image.NRGBA
	}{{"flat", flat(96, 64, color.White)}, {"gradient", gradient(96, 64)}, {"noise", noise(96, 64)}} {
		var file bytes.Buffer
		if err := jpeg.Encode(&file, p.img, &jpeg.Options{Quality: 95}); err != nil {
			t.Fatal(err)
		}
		got := score(t, up, p.img)
		if want := float64(file.Len()) / 1000; got != want {
			t.Errorf("%s: %v kilobytes, want %v", p.name, got, want)
		}
		if minus := score(t, down, p.img); minus != -got {
			t.Errorf("%s: compressibility %v, incompressibility %v", p.name, minus, got)
		}
		scaled, err := down.Score(t.Context(),
			scorer.Input{Media: media.Of(p.img), Params: map[string]string{"divisor": "500"}})
		if err != nil || scaled != -got/500 { // as Flow-GRPO has it
			t.Errorf("%s: compressibility over 500 is %v, %v; want %v", p.name, scaled, err, -got/500)
		}
		if got <= last {
			t.Errorf("%s: %v kilobytes, no more than the simpler image's %v", p.name, got, last)
		}
		last = got
	}
}

func TestSynthetic(t *testing.T) {
	half := image.NewNRGBA(image.Rect(0, 0, 8, 2)) // left half white, right half black
	for y := range 2 {
		for x := range 8 {
			half.Set(x, y, color.NRGBA{A: 255})
			if x < 4 {
				half.Set(x, y, color.White)
			}
		}
	}
	tests := []struct {
		name string
		img  *image.NRGBA
		want float64
	}{
		{"white", flat(5, 7, color.White), 1},
		{"black", flat(5, 7, color.Black), 0},
		{"transparent white counts as black", flat(5, 7, color.NRGBA{255, 255, 255, 0}), 0},
		{"half transparent", flat(5, 7, color.NRGBA{255, 255, 255, 51}), 0.2},
		{"red", flat(5, 7, color.NRGBA{255, 0, 0, 255}), 0.299},
		{"green", flat(5, 7, color.NRGBA{0, 255, 0, 255}), 0.587},
		{"blue", flat(5, 7, color.NRGBA{0, 0, 255, 255}), 0.114},
		{"half white, half black: 1/2 - 1/4", half, 0.25},
		{"part of an image", half.SubImage(image.Rect(2, 0, 6, 1)).(*image.NRGBA), 0.25},
		{"white part of an image", half.SubImage(image.Rect(1, 1, 3, 2)).(*image.NRGBA), 1},
	}
	s := open(t, scorer.Synthetic)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := score(t, s, tt.img); math.Abs(got-tt.want) > 1e-14 {
				t.Errorf("score %v, want %v", got, tt.want)
			}
		})
	}
	// Mean 1/2 less variance (0.299^2+0.587^2+0.114^2)/12 = 0.0372 for uniform noise;
	// 128*128 pixels leave a standard error of 0.193/128 = 0.0015.
	if got := score(t, s, noise(128, 128)); math.Abs(got-0.4628) > 5*0.0015 {
		t.Errorf("noise: score %v, want about 0.463", got)
	}
}

// All scorers leave the image alone and say the same twice.
func TestScorers_ArePure(t *testing.T) {
	for _, name := range single(t) {
		img := noise(128, 64)
		before := slices.Clone(img.Pix)
		s := open(t, name)
		in := scorer.Input{GroundTruth: "4071", Media: media.Media{Frames: []*image.NRGBA{
			gradient(128, 64), img,
			flat(128,
				64, color.White),
		}}}
		if scorer.FramesOf(s) <= 1 {
			in.Media = in.Media.Middle()
		}
		in.Media.Sound = tone(0.5, 440)
		if scorer.SeesConditions(s) {
			for kind, img := range map[string]*image.NRGBA{
				"image": gradient(128, 64),
				"mask":  flat(128, 64, color.Black),
			} {
				file, err := media.EncodePNG(img)
				if err != nil {
					t.Fatal(err)
				}
				in.Conditions = append(in.Conditions, scorer.Condition{Name: kind, Type: kind, File: file})
			}
		}
		a, err1 := s.Score(t.Context(), in)
		b, err2 := s.Score(t.Context(), in)
		if err := errors.Join(err1, err2); err != nil || a != b {
			t.Errorf("%s: %v, then %v; %v", name, a, b, err)
		}
		if !bytes.Equal(before, img.Pix) {
			t.Errorf("%s changed the image", name)
		}
	}
}

func TestCombine(t *testing.T) {
	broken := errors.New("broken")
	tests := []struct {
		name   string
		parts  []scorer.Part
		want   float64
		fault  string
		failed []string // parts with an error afterwards
	}{
		{"one", []scorer.Part{{Name: "a", Weight: 1, Value: 0.3}}, 0.3, "", nil},
		{
			"a sum, not a mean",
			[]scorer.Part{{Name: "a", Weight: 2, Value: 3}, {Name: "b", Weight: 0.5, Value: 4}},
			8, "",
			nil,
		},
		{"a penalty", []scorer.Part{{Name: "a", Weight: 1, Value: 1}, {Name: "b", Weight: -0.5, Value: 1}}, 0.5, "", nil},
		{"optional failure left out", []scorer.Part{
			{Name: "a", Weight: 1, Value: 3},
			{Name: "b", Weight: 5, Value: 7, Err: broken},
		}, 3, "", []string{"b"}},
		{
			"optional NaN left out",
			[]scorer.Part{{Name: "a", Weight: 1, Value: 3}, {Name: "b", Weight: 5, Value: math.NaN()}},
			3, "",
			[]string{"b"},
		},
		{"required failure", []scorer.Part{
			{Name: "a", Weight: 1, Value: 3},
			{Name: "b", Weight: 1, Required: true, Err: broken},
		}, 0, "required score b: broken", []string{"b"}},
		{
			"required infinity",
			[]scorer.Part{{Name: "a", Weight: 1, Required: true, Value: math.Inf(1)}},
			0,
			"required score a: score is +Inf",
			[]string{"a"},
		},
		{"nothing scored", []scorer.Part{{Name: "a", Weight: 1, Err: broken}}, 0, "no score succeeded", []string{"a"}},
		{"no parts", nil, 0, "total 0", nil},
		{"weights cancel", []scorer.Part{{Name: "a", Weight: 1}, {Name: "b", Weight: -1}}, 0, "total 0", nil},
		{"NaN weight", []scorer.Part{{Name: "a", Weight: math.NaN()}}, 0, "weight of a: NaN", nil},
		{"infinite weight", []scorer.Part{{Name: "a", Weight: math.Inf(1)}}, 0, "weight of a: +Inf", nil},
		{"sum beyond float64", []scorer.Part{{Name: "a", Weight: 1e200, Value: 1e200}}, 0, "weighted sum is +Inf", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := scorer.Combine(tt.parts)
			if got != tt.want || (err == nil) != (tt.fault == "") || err != nil &&
				!strings.Contains(err.Error(), tt.fault) {
				t.Errorf("reward %v, error %v; want %v, %q", got, err, tt.want, tt.fault)
			}
			var failed []string
			for _, p := range tt.parts {
				if p.Err != nil {
					failed = append(failed, p.Name)
				}
			}
			if !slices.Equal(failed, tt.failed) {
				t.Errorf("failed parts %v, want %v", failed, tt.failed)
			}
		})
	}
	_, err := scorer.Combine([]scorer.Part{{Name: "a", Weight: 1, Required: true, Err: broken}})
	if !errors.Is(err, broken) {
		t.Errorf("error %v does not wrap the scorer's", err)
	}
}

func ExampleNew() {
	s, err := scorer.New(scorer.Synthetic)
	if err != nil {
		fmt.Println(err)
		return
	}
	value, err := s.Score(context.Background(), scorer.Input{Media: media.Of(flat(64, 64, color.White))})
	fmt.Println(s.Name(), value, err)
	// Output: synthetic 1 <nil>
}

func open(t testing.TB, name string) scorer.Scorer {
	t.Helper()
	s, err := scorer.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func score(t testing.TB, s scorer.Scorer, img *image.NRGBA) float64 {
	t.Helper()
	v, err := s.Score(t.Context(), scorer.Input{Media: media.Of(img), GroundTruth: "4071"})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func flat(width, height int, c color.Color) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			img.Set(x, y, c)
		}
	}
	return img
}

func gradient(width, height int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			img.Set(x, y, color.NRGBA{uint8(2 * x), uint8(3 * y), 90, 255})
		}
	}
	return img
}

func noise(width, height int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range img.Pix {
		img.Pix[i] = uint8(rng.Uint32())
		if i%4 == 3 {
			img.Pix[i] = 255
		}
	}
	return img
}

// Change that goes on counts; what stands, flickers or changes once does not.
func TestMotion(t *testing.T) {
	s := open(t, scorer.Motion)
	if n := scorer.FramesOf(s); n < 1024 {
		t.Errorf("it sees %d frames; want all", n)
	}
	of := func(frames int, level func(frame int) uint8) scorer.Input {
		var in scorer.Input
		for f := range frames {
			in.Media.Frames = append(in.Media.Frames, flat(6, 4, color.Gray{Y: level(f)}))
		}
		return in
	}
	for _, c := range []struct {
		name  string
		level func(frame int) uint8
		want  float64
	}{
		{"fades in", func(f int) uint8 { return uint8(51 * f) }, 0.4},
		{"fades out", func(f int) uint8 { return uint8(255 - 51*f) }, 0.4},
		{"stands", func(int) uint8 { return 90 }, 0},
		{"flickers", func(f int) uint8 { return uint8(255 * (f % 2)) }, 0},
		{"changes once", func(f int) uint8 { return uint8(255 * (f / 3)) }, 0},
		{"goes on slower", func(f int) uint8 { return []uint8{0, 51, 51 + 17, 68, 68, 68}[f] }, 2 * 17. / 255 / 4},
	} {
		got, err := s.Score(t.Context(), of(6, c.level))
		if err != nil || math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%s: %v, %v; want %v", c.name, got, err, c.want)
		}
	}
	if _, err := s.Score(t.Context(), of(2, func(int) uint8 { return 0 })); err == nil ||
		!strings.Contains(err.Error(), "2 frames; must be 3 or more") {
		t.Errorf("two frames: %v", err)
	}
}
