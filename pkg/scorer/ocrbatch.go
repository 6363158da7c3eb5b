package scorer

import (
	"context"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Most of what reading a small image takes is the start of the program.
const (
	ocrBatch = 16
	// ocrBatchArea is the most pixels of an image that shares a process with others.
	ocrBatchArea = 1 << 20
)

// MaxBatch is how many images go to one process.
func (t *Tesseract) MaxBatch() int { return ocrBatch }

// ScoreBatch is ScoreDetail of each image; those that are read with the same options share a
// process. What one reads is the same in company: a page that does not come out of it is read alone.
func (t *Tesseract) ScoreBatch(ctx context.Context, in []Input) []Result {
	out := make([]Result, len(in))
	pages := make([]page, len(in))
	together := map[string][]int{}
	var order []string
	for i := range in {
		var err error
		switch pages[i], err = t.page(ctx, in[i]); {
		case err != nil:
			out[i].Err = fmt.Errorf("ocr: %w", err)
		case pages[i].image == nil:
			out[i] = outcome(pages[i].target, "", nil)
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
		texts := t.inCompany(ctx, pages, which)
		for k, i := range which {
			if k < len(texts) {
				out[i] = outcome(pages[i].target, texts[k], nil)
				continue
			}
			text, err := t.alone(ctx, pages[i])
			out[i] = outcome(pages[i].target, text, err)
		}
	}
	return out
}

// outcome is the result of a page.
func outcome(target, text string, err error) Result {
	if err != nil {
		return Result{Err: fmt.Errorf("ocr: %w", err)}
	}
	return reads(target, strings.Join(strings.Fields(text), " "))
}

// pageEnd is what the program prints behind each page.
const pageEnd = "\f"

// inCompany reads pages in one process and returns their texts; fewer, be it none, where the process did not
// read all of them to the end.
func (t *Tesseract) inCompany(ctx context.Context, pages []page, which []int) []string {
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
	release, err := t.slot(ctx)
	if err != nil {
		return nil
	}
	defer release()
	text, _, err := t.run(ctx, nil, append([]string{names}, pages[which[0]].options...)...)
	texts := strings.Split(text, pageEnd)
	if err != nil || len(texts) != len(which)+1 {
		return nil // which of them it was cannot be told: it skips what it cannot open
	}
	return slices.Delete(texts, len(which), len(texts))
}

func writePNG(path string, p page) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := png.Encode(f, p.image); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
