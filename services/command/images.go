package command

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// images are the images that samples start from: those of --start-image, or the arguments of scheduled.
type images struct {
	flag  string
	files []string
	// groups are the files of each prompt; nil: filesOf distributes files.
	groups [][]string
}

// noImages stands for the images while the flags are checked; each prompt gets its own later.
var noImages = map[string]any{"images": []any{map[string]any{"data": []byte{0}}}}

// imageFiles returns the PNGs that a path names; of a folder in the order of their names, without contact sheets. It
// fails if there are none.
func imageFiles(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		name := strings.ToLower(e.Name())
		if strings.HasSuffix(name, ".png") && !strings.HasSuffix(name, "-sheet.png") && e.Type().IsRegular() {
			files = append(files, filepath.Join(path, e.Name()))
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no PNG in it; must be a PNG or a folder of PNGs", path)
	}
	return files, nil
}

// filesOf returns the image files of prompt k of n. Numbers of images and prompts that do not fit together are an
// error.
func (x *images) filesOf(k, n int) ([]string, error) {
	switch {
	case x.groups != nil:
		return x.groups[k], nil
	case len(x.files) == 1 || n == 1:
		return x.files, nil
	case len(x.files) == n:
		return x.files[k : k+1], nil
	}
	return nil, fmt.Errorf("%s: %d images for %d prompts; must be one image, one for each prompt, or with one prompt "+
		"one for each sample", x.flag, len(x.files), n)
}

// setStart gives prompt k of n, counted from 0, its images to start from, unless the prompt has a start of its own. The
// images also set its size, and several of them its group size, if it does not say them. It fails if the number of
// images does not fit, or a file is no PNG or of another size than the prompt or the images before.
func (x *images) setStart(p prompt, own bool, k, n int) error {
	if x == nil || own {
		return nil
	}
	files, err := x.filesOf(k, n)
	if err != nil {
		return err
	}
	var list []any
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("%s: %w", x.flag, err)
		}
		size, err := media.ReadSize(data)
		if err != nil {
			return fmt.Errorf("%s: %s: %w; must be a PNG", x.flag, name, err)
		}
		if err := setSize(p.body, size, len(list) == 0); err != nil {
			return fmt.Errorf("%s: %s: %w", x.flag, name, err)
		}
		list = append(list, map[string]any{"data": data})
	}
	if len(list) > 1 && p.body["group_size"] == nil {
		p.body["group_size"] = int64(len(list))
	}
	start := maps.Clone(startOf(p.body)) // prompts share what the flags say
	start["data"] = map[string]any{"images": list}
	p.body["start"] = start
	return nil
}

// setSize gives a prompt the size of its file unless it says one; first says that no other file came before. It fails
// if the size is another than that of the prompt or of the files before.
func setSize(body map[string]any, size media.Size, first bool) error {
	for _, side := range []struct {
		field string
		n     int
	}{{"frames", size.Frames}, {"width", size.Width}, {"height", size.Height}} {
		is, want := int64(side.n), body[side.field]
		switch {
		case want != nil:
		case side.field != "frames", first && is > 1:
			want, body[side.field] = is, is
		default:
			want = int64(1) // of an image, which a prompt need not say
		}
		if n, whole := want.(int64); whole && n != is { // intake refuses what is no whole number
			return fmt.Errorf("%s %d; must be %d, as the others have or the prompt says", side.field, is, n)
		}
	}
	return nil
}

// inlineImages returns the images that a prompt carries itself, as maps of an event, and their size in bytes.
func inlineImages(body map[string]any) (list []map[string]any, size int) {
	data, _ := startOf(body)["data"].(map[string]any)
	items, _ := data["images"].([]any)
	for _, item := range items {
		m, _ := item.(map[string]any)
		if file, ok := m["data"].([]byte); ok {
			list, size = append(list, m), size+len(file)
		}
	}
	return list, size
}

// groupByCaption groups images by their caption, as the samples of one prompt: the caption is the text of NAME.txt
// beside NAME.png, else *text. The captions are in the order of the images. It fails if an image has neither, a text
// cannot be read, or a group is too large.
func groupByCaption(files []string, text *string) (captions []string, groups [][]string, err error) {
	for _, name := range files {
		var caption string
		beside := strings.TrimSuffix(name, filepath.Ext(name)) + ".txt"
		data, err := os.ReadFile(beside)
		switch {
		case err == nil:
			caption = strings.TrimSpace(string(data))
		case !errors.Is(err, os.ErrNotExist):
			return nil, nil, err
		case text == nil:
			return nil, nil, fmt.Errorf("%s: no caption; must have one in %s, or give --prompt, '' to train without "+
				"captions", name, beside)
		default:
			caption = *text
		}
		k := slices.Index(captions, caption)
		if k < 0 {
			k = len(captions)
			captions, groups = append(captions, caption), append(groups, nil)
		}
		if len(groups[k]) == schemas.MaxGroupSize {
			return nil, nil, fmt.Errorf("%s: more than %d images have the same caption; roll them in several runs",
				name, schemas.MaxGroupSize)
		}
		groups[k] = append(groups[k], name)
	}
	return captions, groups, nil
}
