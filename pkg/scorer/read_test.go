package scorer_test

import (
	"context"
	"errors"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

// sign is an image of a text, and what was asked for.
type sign struct {
	file, text string
	img        *image.NRGBA
}

// signs reads the images of a folder; field says which part of a name is the text.
func signs(t testing.TB, folder string, field int) []sign {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata/signs", folder, "*.png"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no images in %s: %v", folder, err)
	}
	out := make([]sign, len(files))
	for i, file := range files {
		out[i] = sign{
			file: file, text: strings.Split(strings.TrimSuffix(filepath.Base(file), ".png"), "-")[field],
			img: load(t, file),
		}
	}
	return out
}

func load(t testing.TB, file string) *image.NRGBA {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	decoded, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	out := image.NewNRGBA(decoded.Bounds())
	draw.Draw(out, out.Rect, decoded, decoded.Bounds().Min, draw.Src)
	return out
}

func detail(t testing.TB, s scorer.Scorer, in scorer.Input) scorer.Result {
	t.Helper()
	r := s.(scorer.Detailer).ScoreDetail(t.Context(), in)
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return r
}

// Every drawing is read to the letter, in all fonts, sizes, places, inks and shapes.
func TestGlyph_ReadsDrawings(t *testing.T) {
	g := open(t, scorer.Glyph)
	for _, s := range signs(t, "clean", 1) {
		if r := detail(t, g, scorer.Input{Media: media.Of(s.img), GroundTruth: s.text}); r.Detail != s.text ||
			r.Value != 1 {
			t.Errorf("%s: read %q, score %v", s.file, r.Detail, r.Value)
		}
		// Against another text of the same length the score is low.
		other := strings.Repeat("J", len(s.text))
		if r := detail(t, g, scorer.Input{Media: media.Of(s.img), GroundTruth: other}); r.Value != 0 {
			t.Errorf("%s against %s: score %v", s.file, other, r.Value)
		}
	}
}

// Digits among capitals are read too, but that a 0 is no O, by which few pixels differ, is
// not always seen.
func TestGlyph_ReadsDigitsAmongCapitals(t *testing.T) {
	g := open(t, scorer.Glyph)
	list := signs(t, "mixed", 1)
	exact := 0
	for _, s := range list {
		r := detail(t, g, scorer.Input{Media: media.Of(s.img), GroundTruth: s.text})
		if r.Detail == s.text {
			exact++
		} else if strings.ReplaceAll(r.Detail, "0", "O") != strings.ReplaceAll(s.text, "0", "O") {
			t.Errorf("%s: read %q, score %v", s.file, r.Detail, r.Value)
		}
	}
	if exact*100 < 95*len(list) {
		t.Errorf("%d of %d are read to the letter", exact, len(list))
	}
}

func TestGlyph_Target(t *testing.T) {
	s := signs(t, "clean", 1)[0]
	if r := detail(t, open(t, scorer.Glyph), scorer.Input{
		Media: media.Of(s.img), Prompt: `a red sign that says "` + s.text + `"`,
	}); r.Value != 1 {
		t.Errorf("target from the prompt: %+v", r)
	}
}

// What is no sign reads as nothing or as question marks.
func TestGlyph_Rejects(t *testing.T) {
	g := open(t, scorer.Glyph)
	for name, img := range map[string]*image.NRGBA{
		"noise": noise(128, 64), "white": flat(128, 64, color.White), "black": flat(128, 64,
			color.Black), "gradient": gradient(128, 64), "clear": flat(128, 64, color.NRGBA{}),
	} {
		r := detail(t, g, scorer.Input{Media: media.Of(img), GroundTruth: "4071"})
		if r.Value != 0 || strings.Trim(r.Detail, "?") != "" {
			t.Errorf("%s: read %q, score %v", name, r.Detail, r.Value)
		}
	}
	_, err := g.Score(t.Context(), scorer.Input{Media: media.Of(flat(64, 64, color.White)), GroundTruth: "1"})
	if err == nil || !strings.Contains(err.Error(), "image of 64x64; it reads signs of 128x64 alone") {
		t.Errorf("another size: %v", err)
	}
	if _, err := g.Score(t.Context(), scorer.Input{
		Media: media.Of(flat(128, 64, color.White)), Prompt: "a fox",
	}); err == nil {
		t.Error("no target, and a score")
	}
}

// A sign of a larger image reads as the sign alone.
func TestGlyph_PartOfAnImage(t *testing.T) {
	s := signs(t, "clean", 1)[1]
	wide := flat(200, 100, color.White)
	draw.Draw(wide, image.Rect(31, 17, 159, 81), s.img, image.Point{}, draw.Src)
	part := wide.SubImage(image.Rect(31, 17, 159, 81)).(*image.NRGBA)
	if r := detail(t, open(t, scorer.Glyph), scorer.Input{Media: media.Of(part), GroundTruth: s.text}); r.Value != 1 {
		t.Errorf("%+v, want %s", r, s.text)
	}
}

func BenchmarkGlyph(b *testing.B) {
	s, g := signs(b, "painted", 0)[0], open(b, scorer.Glyph)
	for b.Loop() {
		if _, err := g.Score(b.Context(), scorer.Input{Media: media.Of(s.img), GroundTruth: s.text}); err != nil {
			b.Fatal(err)
		}
	}
}

// ocr is the real program, or the reason to skip.
func ocr(t testing.TB) *scorer.Tesseract {
	t.Helper()
	s, err := scorer.NewOCR(scorer.OCRConfig{Workers: 2})
	if errors.Is(err, scorer.ErrNoTesseract) {
		t.Skip("nothing was read by tesseract: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The glyph reader says of images what tesseract says. Both misread some, so they
// agree within bounds: on drawings both read nearly all; on images that the model
// painted the mean rewards are within 0.08, at least 7 of 10 images score the same, and
// of the pairs of a group that both tell apart at most a quarter are swapped.
func TestGlyph_AgreesWithTesseract(t *testing.T) {
	g, o := open(t, scorer.Glyph), ocr(t)
	compare := func(list []sign) (pairs [][2]float64, same int, means [2]float64) {
		pairs = make([][2]float64, len(list))
		var work sync.WaitGroup
		for i, s := range list {
			work.Go(func() {
				whitelist := "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
				if s.text[0] <= '9' {
					whitelist = "0123456789"
				}
				r := o.ScoreDetail(t.Context(), scorer.Input{
					Media: media.Of(s.img), GroundTruth: s.text, Params: map[string]string{"whitelist": whitelist},
				})
				if r.Err != nil {
					t.Error(r.Err)
				}
				pairs[i][1] = r.Value
			})
		}
		work.Wait()
		for i, s := range list {
			pairs[i][0] = detail(t, g, scorer.Input{Media: media.Of(s.img), GroundTruth: s.text}).Value
			if pairs[i][0] == pairs[i][1] {
				same++
			}
			means[0] += pairs[i][0] / float64(len(list))
			means[1] += pairs[i][1] / float64(len(list))
		}
		return pairs, same, means
	}
	clean := signs(t, "clean", 1)
	_, same, means := compare(clean)
	t.Logf("%d drawings: glyph %.3f, tesseract %.3f, %d the same", len(clean), means[0], means[1], same)
	if means[1] < 0.9 || same < len(clean)*9/10 {
		t.Errorf("drawings: tesseract %.3f, the same reward for %d of %d", means[1], same, len(clean))
	}
	painted := signs(t, "painted", 0)
	pairs, same, means := compare(painted)
	t.Logf("%d painted signs: glyph %.3f, tesseract %.3f, %d the same", len(painted), means[0], means[1], same)
	if d := means[0] - means[1]; d > 0.08 || d < -0.08 || same < len(painted)*7/10 {
		t.Errorf("painted signs: glyph %.3f, tesseract %.3f, the same reward for %d of %d", means[0], means[1], same,
			len(painted))
	}
	ordered, swapped := 0, 0
	for i := range pairs {
		for j := range i {
			if painted[i].text != painted[j].text {
				continue
			}
			if a, b := pairs[i][0]-pairs[j][0], pairs[i][1]-pairs[j][1]; a*b > 0 {
				ordered++
			} else if a*b < 0 {
				swapped++
			}
		}
	}
	t.Logf("pairs of a group: %d in the same order, %d swapped", ordered, swapped)
	if swapped*3 > ordered {
		t.Errorf("%d pairs in the same order, %d swapped", ordered, swapped)
	}
}

func TestOCR_Params(t *testing.T) {
	o := ocr(t)
	s := signs(t, "clean", 1)[3]
	if r := detail(t, o, scorer.Input{
		Media: media.Of(s.img), GroundTruth: s.text, Params: map[string]string{"whitelist": "0123456789", "psm": "7"},
	}); r.Value < 0.8 {
		t.Errorf("%+v", r)
	}
	if r := detail(t, o, scorer.Input{
		Media: media.Of(s.img), GroundTruth: "34068", Params: map[string]string{"whitelist": "ABC"},
	}); r.Value != 0 || strings.ContainsAny(r.Detail, "0123456789") {
		t.Errorf("digits read where they must not be: %+v", r)
	}
	for fault, params := range map[string]map[string]string{
		`lang: "xyz"; tesseract has no data for it here`: {"lang": "xyz"},
		"margin: 40; nothing is left":                    {"margin": "40"},
	} {
		if _, err := o.Score(t.Context(), scorer.Input{
			Media: media.Of(s.img), GroundTruth: "1", Params: params,
		}); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%v: error %v, want one about %q", params, err, fault)
		}
	}
	if !strings.HasPrefix(o.Version(), "2-tesseract-") {
		t.Errorf("version %q", o.Version())
	}
}

// Of an empty image nothing is read, and what the program says on stderr is no text.
func TestOCR_NothingToRead(t *testing.T) {
	o := ocr(t)
	for name, c := range map[string]color.Color{"white": color.White, "black": color.Black, "gray": color.Gray{Y: 90}} {
		if r := detail(t, o, scorer.Input{Media: media.Of(flat(128, 64, c)), GroundTruth: "O"}); r.Value != 0 ||
			r.Detail != "" {
			t.Errorf("%s: %+v", name, r)
		}
	}
	chatty, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t, "cat > /dev/null; echo 42 >&2")})
	if err != nil {
		t.Fatal(err)
	}
	if r := detail(t, chatty, scorer.Input{
		Media: media.Of(signs(t, "clean", 1)[3].img), GroundTruth: "42",
	}); r.Value != 0 || r.Detail != "" {
		t.Errorf("%+v", r)
	}
}

// What is read in company is what is read alone, and in fewer processes.
func TestOCR_InCompany(t *testing.T) {
	ocr(t)
	real, err := exec.LookPath("tesseract")
	if err != nil { // ocr has found it
		t.Fatal(err)
	}
	count := filepath.Join(t.TempDir(), "count")
	o, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t, "echo >> "+count+"\nexec "+real+` "$@"`)})
	if err != nil {
		t.Fatal(err)
	}
	var in []scorer.Input
	for _, s := range signs(t, "clean", 1)[:6] {
		in = append(in, scorer.Input{Media: media.Of(s.img), GroundTruth: s.text})
	}
	in = append(in, scorer.Input{Media: media.Of(flat(128, 64, color.White)), GroundTruth: "O"},
		scorer.Input{Media: in[0].Media}, in[1])
	in[len(in)-1].Params = map[string]string{"whitelist": "0123456789"}
	got := o.ScoreBatch(t.Context(), in)
	// Seven lines share a process; that with a whitelist has its own.
	if data, err := os.ReadFile(count); err != nil || len(data) != 2 {
		t.Errorf("%d processes, want 2; %v", len(data), err)
	}
	for i, r := range got {
		alone := o.ScoreDetail(t.Context(), in[i])
		if r.Value != alone.Value || r.Detail != alone.Detail || (r.Err == nil) != (alone.Err == nil) || r.Err == nil &&
			*r.Exact != *alone.Exact {
			t.Errorf("image %d: %+v in company, %+v alone", i, r, alone)
		}
	}
}

// Images share one process; what does not come out of it is read alone.
func TestOCR_Processes(t *testing.T) {
	img := signs(t, "clean", 1)[0].img
	in := []scorer.Input{
		{Media: media.Of(img), GroundTruth: "A"},
		{Media: media.Of(img), GroundTruth: "b"},
		{Media: media.Of(img), GroundTruth: "A"},
	}
	for _, c := range []struct {
		name, list string
		processes  int
	}{
		{"all", `printf 'A\n\fB\n\fAC\n'`, 1},
		{"all, of an older release", `printf 'A\n\fB\n\fAC\n\f'`, 1},
		{"one too many", `printf 'A\n\fB\n\fAC\n\fA\n'`, 4},
		{"too few", `printf 'A\n\fB\n\f'`, 4},
		{"crash", `exit 3`, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			count := filepath.Join(t.TempDir(), "count")
			o, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t,
				"echo >> "+count+"\ncase \"$1\" in stdin) cat > /dev/null; echo A;; *) "+c.list+";; esac")})
			if err != nil {
				t.Fatal(err)
			}
			got := o.ScoreBatch(t.Context(), in)
			if r := got[0]; r.Err != nil || r.Value != 1 || !*r.Exact {
				t.Errorf("%+v", r)
			}
			if r := got[2]; c.processes == 1 && (r.Value != 1 || r.Detail != "AC" || *r.Exact) {
				t.Errorf("%+v: the text has more than the target", r)
			}
			if data, err := os.ReadFile(count); err != nil || len(data) != c.processes {
				t.Errorf("%d processes for 3 images, want %d; %v", len(data), c.processes, err)
			}
		})
	}
}

// A release that prints nothing behind the last page is known by it, and then an empty last page is one.
func TestOCR_EmptyLastPage(t *testing.T) {
	seen := filepath.Join(t.TempDir(), "seen")
	list := "if [ -e " + seen + " ]; then printf 'A\n\f'; else touch " + seen + "; printf 'A\n\fB\n'; fi"
	o, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t,
		`case "$1" in stdin) cat > /dev/null; echo alone;; *) `+list+";; esac")})
	if err != nil {
		t.Fatal(err)
	}
	img := signs(t, "clean", 1)[0].img
	in := []scorer.Input{{Media: media.Of(img), GroundTruth: "A"}, {Media: media.Of(img), GroundTruth: "B"}}
	for _, want := range []string{"B", ""} {
		if got := o.ScoreBatch(t.Context(), in); got[0].Detail != "A" || got[1].Detail != want || got[1].Err != nil {
			t.Errorf("%+v, want A and %q", got, want)
		}
	}
}

// program writes an executable that stands where tesseract would.
func program(t *testing.T, body string) string {
	t.Helper()
	return script(t, "case \"$1\" in --version) echo 'tesseract 5.0.0'; exit;; --list-langs) printf "+
		"'List:\\neng\\n'; exit;; esac\n"+body)
}

// script writes an executable of the shell, called tesseract.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tesseract")
	syscall.ForkLock.RLock() // a process that starts meanwhile would inherit the open file: ETXTBSY
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// A program that fails or hangs is an error, never a score of 0.
func TestOCR_Failures(t *testing.T) {
	img := flat(64, 32, color.White)
	img.Set(30, 16, color.Black)
	in := scorer.Input{Media: media.Of(img), GroundTruth: "1"}
	t.Run("crash", func(t *testing.T) {
		o, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t, "echo out of paint >&2; exit 3")})
		if err != nil {
			t.Fatal(err)
		}
		if r := o.ScoreDetail(t.Context(), in); r.Err == nil || !strings.Contains(r.Err.Error(), "out of paint") ||
			r.Value != 0 {
			t.Errorf("%+v", r)
		}
	})
	t.Run("hang", func(t *testing.T) {
		o, err := scorer.NewOCR(scorer.OCRConfig{Path: program(t, "exec sleep 86400"), Timeout: 500 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = o.Score(t.Context(), in); !errors.Is(err, scorer.ErrUnavailable) {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := o.Score(ctx, in); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cancelled: %v", err)
		}
	})
	t.Run("absent", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		_, err := scorer.New(scorer.OCR)
		if !errors.Is(err, scorer.ErrNoTesseract) || !strings.Contains(err.Error(), "apt-get install tesseract-ocr") {
			t.Errorf("error %v, want one that says what to install", err)
		}
	})
	t.Run("no program", func(t *testing.T) {
		if _, err := scorer.NewOCR(scorer.OCRConfig{Path: "/bin/false"}); err == nil {
			t.Error("a program that is not tesseract was accepted")
		}
	})
}

func TestDiversity(t *testing.T) {
	d := scorer.NewGroup(scorer.Diversity)
	run := func(images ...*image.NRGBA) []scorer.Result {
		held := 0
		g := scorer.Group{Members: make([]int64, len(images))}
		g.Sample = func(_ context.Context, i int) (scorer.Input, func(), error) {
			if held++; held > 1 {
				t.Errorf("%d images at once", held)
			}
			return scorer.Input{Media: media.Of(images[i])}, func() { held-- }, nil
		}
		results := d.ScoreGroup(t.Context(), g)
		if held != 0 {
			t.Errorf("%d images not released", held)
		}
		return results
	}
	white, black := flat(64, 32, color.White), flat(64, 32, color.Black)
	for i, want := range []float64{2. / 3, 2. / 3, 2. / 3, 2. / 3} {
		if r := run(white, black, white, black)[i]; r.Err != nil || r.Value != want {
			t.Errorf("sample %d: %+v, want %v", i, r, want)
		}
	}
	if r := run(white, white, white, black); r[3].Value != 1 || r[0].Value != 1./3 {
		t.Errorf("one apart: %+v", r)
	}
	if r := run(white); r[0].Value != 0 || r[0].Err != nil {
		t.Errorf("alone: %+v", r)
	}
	if r := run(white, flat(32, 32, color.White)); r[0].Err == nil || r[1].Err == nil {
		t.Errorf("two sizes: %+v", r)
	}
	if r := run(white, nil); r[0].Err == nil {
		t.Errorf("an image is missing: %+v", r)
	}
	// Noise of pixels averages out: it counts little against a change of the whole.
	if r := run(noise(256, 256), noise(256, 256)); r[0].Value > 0.1 {
		t.Errorf("noise: %v", r[0].Value)
	}
	if scorer.NewGroup("ocr") != nil {
		t.Error("ocr needs no group")
	}
}
