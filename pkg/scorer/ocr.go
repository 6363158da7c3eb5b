package scorer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/image/draw"
)

// OCR compares the text that tesseract reads in an image with the target (see Target
// and TextReward). Params, all optional:
//
//	lang       tesseract's languages, such as eng or eng+deu; default eng
//	psm        its page segmentation mode, 3 to 13; default 7, a line, for images at least
//	           half as wide again as high, else 6, a block
//	whitelist  the characters it may read; default all
//	margin     pixels cut off on every side first, where frames are; default 5/64 of the
//	           height of images up to 128 high, else 0
//	prepare    auto (default): grey, dark on light, full contrast, small images
//	           enlarged; none: the image as it is
const OCR = "ocr"

var ocrParams = []string{"lang", "margin", "prepare", "psm", "whitelist"}

// ErrNoTesseract is wrapped by the error of NewOCR if the program is missing.
var ErrNoTesseract = errors.New("tesseract is not installed")

const installTesseract = `install it: "apt-get install tesseract-ocr" (Debian, Ubuntu), "dnf install tesseract" (Fedora), ` +
	`"brew install tesseract" (macOS); or use the reward glyph for images of the model signs`

// OCRConfig says how tesseract runs. Zero fields have defaults.
type OCRConfig struct {
	// Path of the program; default tesseract on PATH.
	Path string
	// Workers is how many processes run at once; default half the processors, at least 1.
	Workers int
	// Timeout bounds one process; default 20 s.
	Timeout time.Duration
}

// Tesseract is the OCR scorer.
type Tesseract struct {
	config  OCRConfig
	version string
	langs   []string
	slots   chan struct{}
	// newer: this release prints no page break after the last of several pages.
	newer atomic.Bool
}

// NewOCR finds the program and asks it for its version and languages. If it is missing, the error wraps
// ErrNoTesseract and says what to install.
func NewOCR(cfg OCRConfig) (*Tesseract, error) {
	if cfg.Workers == 0 {
		cfg.Workers = max(1, runtime.GOMAXPROCS(0)/2)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 20 * time.Second
	}
	if cfg.Workers < 0 || cfg.Timeout < 0 {
		return nil, fmt.Errorf("ocr: workers, timeout: %d, %v; must be above 0", cfg.Workers, cfg.Timeout)
	}
	name := cfg.Path
	if name == "" {
		name = "tesseract"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("ocr: %w (%w); %s", ErrNoTesseract, err, installTesseract)
	}
	cfg.Path = path
	t := &Tesseract{config: cfg, slots: make(chan struct{}, cfg.Workers)}
	out, err := t.query("--version")
	if err != nil {
		return nil, fmt.Errorf("ocr: %w", err)
	}
	line, _, _ := strings.Cut(out, "\n")
	if t.version = strings.TrimPrefix(strings.TrimSpace(line), "tesseract "); t.version == "" {
		return nil, fmt.Errorf("ocr: %s --version says %q", path, out)
	}
	if out, err = t.query("--list-langs"); err != nil {
		return nil, fmt.Errorf("ocr: %w", err)
	}
	lines := strings.Fields(strings.TrimSpace(out[strings.IndexByte(out, '\n')+1:]))
	if t.langs = lines; len(lines) == 0 {
		return nil, fmt.Errorf("ocr: %s has no language data; install it (Debian: apt-get install tesseract-ocr-eng)",
			path)
	}
	return t, nil
}

// Name is OCR.
func (t *Tesseract) Name() string { return OCR }

// Version names the reward rule and the release of tesseract: both decide the score.
func (t *Tesseract) Version() string { return "2-tesseract-" + t.version }

// Score returns the TextReward of the text that was read.
func (t *Tesseract) Score(ctx context.Context, in Input) (float64, error) {
	r := t.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail is Score with the text that was read.
func (t *Tesseract) ScoreDetail(ctx context.Context, in Input) Result {
	return t.ScoreBatch(ctx, []Input{in})[0]
}

// page is an image prepared for tesseract; its image is nil if the original has one colour.
type page struct {
	image  image.Image
	target string
	// options are those of the command line.
	options []string
}

// preparePage checks the params and the target of a sample, prepares its image, and builds the command line.
func (t *Tesseract) preparePage(ctx context.Context, in Input) (p page, err error) {
	img, err := in.image(ctx)
	if err != nil {
		return p, err
	}
	o, err := parseOCROptions(in.Params)
	if err != nil {
		return p, err
	}
	if p.target, err = Target(in.Prompt, in.GroundTruth); err != nil {
		return p, err
	}
	for lang := range strings.SplitSeq(o.lang, "+") {
		if !slices.Contains(t.langs, lang) {
			return p, fmt.Errorf("params: lang: %q; tesseract has no data for it here, only for %s", o.lang,
				strings.Join(t.langs, ", "))
		}
	}
	if p.image, err = o.prepareImage(img); err != nil || p.image == nil {
		return p, err
	}
	psm := o.psm
	if psm == 0 {
		psm = 6
		if b := p.image.Bounds(); 2*b.Dx() >= 3*b.Dy() {
			psm = 7
		}
	}
	p.options = []string{"stdout", "-l", o.lang, "--psm", strconv.Itoa(psm)}
	if o.whitelist != "" {
		p.options = append(p.options, "-c", "tessedit_char_whitelist="+o.whitelist)
	}
	return p, nil
}

// readAlone reads a page in a process of its own.
func (t *Tesseract) readAlone(ctx context.Context, p page) (string, error) {
	var file bytes.Buffer
	if err := encoder.Encode(&file, p.image); err != nil {
		return "", fmt.Errorf("encode image: %w", err)
	}
	release, err := t.acquireSlot(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	text, _, err := t.run(ctx, &file, append([]string{"stdin"}, p.options...)...)
	return text, err
}

// acquireSlot waits until another process may start; release ends its use.
func (t *Tesseract) acquireSlot(ctx context.Context) (release func(), err error) {
	select {
	case t.slots <- struct{}{}:
		return func() { <-t.slots }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a free process: %w", ctx.Err())
	}
}

// maxOCROutput bounds the output that is read from a process, in bytes.
const maxOCROutput = 1 << 20

// query returns what the program prints for an option such as --version; older releases print it on stderr.
func (t *Tesseract) query(what string) (string, error) {
	stdout, stderr, err := t.run(context.Background(), nil, what)
	if stdout == "" {
		return stderr, err
	}
	return stdout, err
}

// run runs the program to its end. It kills the program at the end of ctx, or after the timeout (ErrUnavailable: a
// retry may help).
func (t *Tesseract) run(ctx context.Context, stdin *bytes.Buffer, args ...string) (out, notes string, err error) {
	limited, cancel := context.WithTimeout(ctx, t.config.Timeout)
	defer cancel()
	c := exec.CommandContext(limited, t.config.Path, args...)
	c.Env = append(os.Environ(), "OMP_THREAD_LIMIT=1") // more threads cost more than they give
	c.WaitDelay = time.Second
	separate(c)
	stdout, stderr := &bounded{limit: maxOCROutput}, &bounded{limit: 4096}
	c.Stdout, c.Stderr = stdout, stderr
	if stdin != nil {
		c.Stdin = stdin
	}
	err = c.Run()
	switch {
	case ctx.Err() != nil:
		return "", "", fmt.Errorf("tesseract: %w", ctx.Err())
	case limited.Err() != nil:
		return "", "", fmt.Errorf("tesseract gave no answer in %v: %w", t.config.Timeout, ErrUnavailable)
	case err != nil:
		return "", "", fmt.Errorf("tesseract: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), stderr.String(), nil
}

// bounded keeps the first bytes written to it.
type bounded struct {
	bytes.Buffer
	limit int
}

func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), max(0, b.limit-b.Len()))])
	return len(p), nil
}

// ocrSettings are parsed params of OCR.
type ocrSettings struct {
	lang, whitelist string
	psm, margin     int // psm 0: by shape; margin below 0: by height
	plain           bool
}

var legalLang = regexp.MustCompile(`^[A-Za-z0-9_]+(\+[A-Za-z0-9_]+)*$`)

// parseOCROptions parses params. Unknown names and bad values are errors.
func parseOCROptions(params map[string]string) (ocrSettings, error) {
	o := ocrSettings{lang: "eng", margin: -1}
	for name, value := range params {
		var err error
		switch name {
		case "lang":
			if o.lang = value; len(value) > 64 || !legalLang.MatchString(value) {
				err = errors.New("must be languages such as eng or eng+deu")
			}
		case "psm":
			if o.psm, err = strconv.Atoi(value); err != nil || o.psm < 3 || o.psm > 13 {
				err = errors.New("must be a number from 3 to 13")
			}
		case "whitelist":
			if o.whitelist = value; strings.ContainsAny(value, "\x00\n\r") {
				err = errors.New("must be characters of one line")
			}
		case "margin":
			if o.margin, err = strconv.Atoi(value); err != nil || o.margin < 0 || o.margin > 4096 {
				err = errors.New("must be pixels from 0 to 4096")
			}
		case "prepare":
			if o.plain = value == "none"; value != "none" && value != "auto" {
				err = errors.New("must be auto or none")
			}
		default:
			return o, fmt.Errorf("params: %q; must be one of %s", name, strings.Join(ocrParams, ", "))
		}
		if err != nil {
			return o, fmt.Errorf("params: %s: %q; %w", name, value, err)
		}
	}
	return o, nil
}

// Tesseract reads best if capitals have 30 pixels or more and the text has an empty border.
const (
	ocrHeight = 200
	ocrBorder = 12
)

// prepareImage cuts the margin and makes the image easy to read: grey, dark on light, full contrast, enlarged, with
// a border. It returns nil for an image of one colour. With prepare: none it only cuts.
func (o ocrSettings) prepareImage(im *image.NRGBA) (image.Image, error) {
	margin := o.margin
	if margin < 0 {
		margin = 0
		if h := im.Rect.Dy(); h <= 128 && !o.plain {
			margin = 5 * h / 64
		}
	}
	box := im.Rect.Inset(margin)
	if o.margin > 0 && box.Empty() {
		return nil, fmt.Errorf("params: margin: %d; nothing is left of an image of %dx%d", o.margin, im.Rect.Dx(),
			im.Rect.Dy())
	}
	if o.plain {
		return im.SubImage(box), nil
	}
	grey := image.NewGray(image.Rect(0, 0, box.Dx(), box.Dy()))
	low, high, sum := uint8(255), uint8(0), 0
	for y := range box.Dy() {
		for x := range box.Dx() {
			v := uint8(luma(im.Pix[im.PixOffset(box.Min.X+x, box.Min.Y+y):]) / (1000 * 255))
			grey.Pix[grey.PixOffset(x, y)] = v
			low, high, sum = min(low, v), max(high, v), sum+int(v)
		}
	}
	if low == high {
		return nil, nil
	}
	// The background is the larger part of an image with text.
	dark := 2*sum < (int(low)+int(high))*len(grey.Pix)
	for i, v := range grey.Pix {
		v = uint8(255 * (int(v) - int(low)) / (int(high) - int(low)))
		if dark {
			v = 255 - v
		}
		grey.Pix[i] = v
	}
	scale := max(1, min((ocrHeight+box.Dy()-1)/box.Dy(), 8))
	inner := image.Rect(0, 0, scale*box.Dx(), scale*box.Dy())
	out := image.NewGray(inner.Inset(-ocrBorder).Add(image.Pt(ocrBorder, ocrBorder)))
	background := grey.GrayAt(min(2, box.Dx()-1), min(2, box.Dy()-1))
	draw.Draw(out, out.Rect, image.NewUniform(background), image.Point{}, draw.Src)
	inner = inner.Add(image.Pt(ocrBorder, ocrBorder))
	if scale == 1 { // the same pixels, without 32 bytes of memory for each
		draw.Draw(out, inner, grey, image.Point{}, draw.Src)
	} else {
		draw.CatmullRom.Scale(out, inner, grey, grey.Rect, draw.Src, nil)
	}
	return out, nil
}

// Images are read in batches: for a small image, starting the program takes most of the time.
const (
	ocrBatch = 16
	// ocrBatchArea is the most pixels of an image that shares a process with others.
	ocrBatchArea = 1 << 20
)

// MaxBatch returns how many images one process reads at most.
func (t *Tesseract) MaxBatch() int { return ocrBatch }

// ScoreBatch is ScoreDetail of each image. Images with the same options share a process. Results do not depend on
// the batch: a page that the shared process does not read is read alone.
func (t *Tesseract) ScoreBatch(ctx context.Context, in []Input) []Result {
	out := make([]Result, len(in))
	pages := make([]page, len(in))
	together := map[string][]int{}
	var order []string
	for i := range in {
		var err error
		switch pages[i], err = t.preparePage(ctx, in[i]); {
		case err != nil:
			out[i].Err = fmt.Errorf("ocr: %w", err)
		case pages[i].image == nil:
			out[i] = pageResult(pages[i].target, "", nil)
		default:
			key := strings.Join(pages[i].options, "\x00")
			if b := pages[i].image.Bounds(); b.Dx()*b.Dy() > ocrBatchArea {
				key = fmt.Sprint(i)
			}
			if together[key] == nil {
				order = append(order, key)
			}
			together[key] = append(together[key], i)
		}
	}
	for _, key := range order {
		which := together[key]
		texts := t.readTogether(ctx, pages, which)
		for k, i := range which {
			if k < len(texts) {
				out[i] = pageResult(pages[i].target, texts[k], nil)
				continue
			}
			text, err := t.readAlone(ctx, pages[i])
			out[i] = pageResult(pages[i].target, text, err)
		}
	}
	return out
}

// pageResult returns the result of a page: the reward of its text, or err.
func pageResult(target, text string, err error) Result {
	if err != nil {
		return Result{Err: fmt.Errorf("ocr: %w", err)}
	}
	return readResult(target, strings.Join(strings.Fields(text), " "))
}

// pageBreak is what the program prints between two pages; older releases print one behind the last page, too.
const pageBreak = "\f"

// splitPages returns the texts of n pages in one output; nil if it cannot tell them apart.
func (t *Tesseract) splitPages(out string, n int) []string {
	texts := strings.Split(out, pageBreak)
	blank := strings.TrimSpace(texts[len(texts)-1]) == ""
	switch {
	case len(texts) == n+1 && blank:
		return texts[:n]
	case len(texts) == n && !blank:
		t.newer.Store(true)
		return texts
	case len(texts) == n && t.newer.Load():
		return texts
	}
	return nil // or a page is missing, if this is an older release
}

// readTogether reads pages in one process and returns their texts; nil if the process did not read all of them.
func (t *Tesseract) readTogether(ctx context.Context, pages []page, which []int) []string {
	if len(which) < 2 {
		return nil
	}
	dir, err := os.MkdirTemp("", "meander-ocr-")
	if err != nil {
		return nil
	}
	defer os.RemoveAll(dir)
	var list []byte
	for k, i := range which {
		name := filepath.Join(dir, fmt.Sprintf("%d.png", k))
		if err := writePNG(name, pages[i]); err != nil {
			return nil
		}
		list = append(list, name+"\n"...)
	}
	names := filepath.Join(dir, "list.txt")
	if err := os.WriteFile(names, list, 0o600); err != nil {
		return nil
	}
	release, err := t.acquireSlot(ctx)
	if err != nil {
		return nil
	}
	defer release()
	text, _, err := t.run(ctx, nil, append([]string{names}, pages[which[0]].options...)...)
	if err != nil {
		return nil
	}
	return t.splitPages(text, len(which))
}

// encoder does not compress: the files are read immediately on this machine.
var encoder = png.Encoder{CompressionLevel: png.NoCompression}

// writePNG writes the image of one page to a new file for tesseract, uncompressed. A file that
// cannot be written is an error.
func writePNG(path string, p page) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := encoder.Encode(f, p.image); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
