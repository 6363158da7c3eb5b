package media

import (
	"bytes"
	"image"
	"image/png"
	"math/rand/v2"
	"testing"
)

// The assembly has the bits of Go, also where two neighbours are equally near.
func TestPaeth_BitsOfGo(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, levels := range []int{2, 5, 256} {
		var in [4][]byte
		for i := range in {
			in[i] = make([]byte, 1<<16)
			for j := range in[i] {
				in[i][j] = byte(255 * r.IntN(levels) / (levels - 1))
			}
		}
		got, want := make([]byte, 1<<16), make([]byte, 1<<16)
		paeth(got, in[0], in[1], in[2], in[3])
		goPaeth(want, in[0], in[1], in[2], in[3])
		if !bytes.Equal(got, want) {
			t.Errorf("%d levels: other bytes", levels)
		}
	}
}

// Whatever the size, image/png reads the pixels that went in: noise, a flat image, with alpha or without.
func TestEncodePNG_Pixels(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for width := 1; width < 80; width++ {
		for _, kind := range []string{"noise", "flat", "clear"} {
			whole := image.NewNRGBA(image.Rect(0, 0, width+3, 7))
			for i := range whole.Pix {
				whole.Pix[i] = 77
				if kind != "flat" {
					whole.Pix[i] = byte(r.Uint32())
				}
				if kind != "clear" && i%4 == 3 {
					whole.Pix[i] = 255
				}
			}
			img := whole.SubImage(image.Rect(2, 1, 2+width, 6)).(*image.NRGBA)
			file, err := EncodePNG(img)
			if err != nil {
				t.Fatal(err)
			}
			got, err := decodeImage(file)
			if err != nil {
				t.Fatalf("width %d, %s: %v", width, kind, err)
			}
			for y := range 5 {
				if n := 4 * width; !bytes.Equal(got.Pix[y*got.Stride:][:n], img.Pix[y*img.Stride:][:n]) {
					t.Fatalf("width %d, %s: row %d differs", width, kind, y)
				}
			}
		}
	}
	if _, err := EncodePNG(image.NewNRGBA(image.Rect(1, 1, 1, 5))); err == nil {
		t.Error("an image without pixels has a file")
	}
}

// smooth is what models make: colours that change slowly, and a little noise.
func smooth(height, width int) *image.NRGBA {
	r := rand.New(rand.NewPCG(5, 6))
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			p := img.Pix[y*img.Stride+4*x:]
			p[0], p[1], p[2], p[3] = byte(x/5+r.IntN(4)), byte(y/3+r.IntN(4)), byte((x+y)/9+r.IntN(4)), 255
		}
	}
	return img
}

// A file is no larger than that of image/png at its fastest; a flat image, which is compressed with matches, is small.
func TestEncodePNG_Size(t *testing.T) {
	for name, img := range map[string]*image.NRGBA{
		"smooth": smooth(256, 256),
		"flat":   image.NewNRGBA(image.Rect(0, 0, 512, 512)),
	} {
		var other bytes.Buffer
		if err := (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&other, img); err != nil {
			t.Fatal(err)
		}
		file, err := EncodePNG(img)
		if err != nil || len(file) > other.Len() {
			t.Errorf("%s: %d bytes, image/png takes %d; %v", name, len(file), other.Len(), err)
		}
	}
}

func BenchmarkEncodePNG(b *testing.B) {
	img := smooth(1024, 1024)
	encoders := map[string]func() error{
		"own":       func() error { _, err := EncodePNG(img); return err },
		"image/png": func() error { return (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&bytes.Buffer{}, img) },
	}
	for _, name := range []string{"own", "image/png"} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(3 << 20)
			for b.Loop() {
				if err := encoders[name](); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
