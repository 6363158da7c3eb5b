package scorer

import (
	"context"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"strings"
)

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
