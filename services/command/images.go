package command

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
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

// states are the states in a safetensors file that samples start from.
type states struct {
	path    string
	archive *safetensors.Archive
	// read caches tensors by name, as maps of an event.
	read map[string]map[string]any
}

// noStates stands for the states while the flags are checked; each prompt gets those of its group later.
var noStates = map[string]any{"dtype": "F32", "shape": []int64{1, 1, 1}, "data": make([]byte, 4)}

func (p *promptFlags) openStates(path string) error {
	a, err := safetensors.Open(path)
	if err != nil {
		return fmt.Errorf("--start-latents: %w", err)
	}
	p.states = &states{path: path, archive: a, read: map[string]map[string]any{}}
	return nil
}

func (s *states) close() {
	if s != nil {
		_ = s.archive.Close() // mapped for reading
	}
}

// latentsOf returns the latents that group uid starts with, of the file of --start-latents, before a step (-1:
// unknown). It looks for the tensors "<uid>.latents.<step>" and "latents.<step>", as --save-latents writes them, then
// "latents", then for the only tensor of the file or of its only group. It fails if there is none of these.
func (s *states) latentsOf(uid schemas.UID, step int64) (map[string]any, error) {
	names := s.archive.Names()
	var wanted []string
	if step >= 0 {
		wanted = []string{fmt.Sprintf("%s.latents.%d", uid, step), fmt.Sprintf("latents.%d", step)}
	}
	wanted = append(wanted, "latents")
	for _, name := range wanted {
		if slices.Contains(names, name) {
			return s.readTensor(name)
		}
	}
	if len(names) == 1 {
		return s.readTensor(names[0])
	}
	if theirs := onlyLatents(names, step); theirs != "" {
		return s.readTensor(theirs)
	}
	return nil, fmt.Errorf("--start-latents: %s has %s, among them %q; must have %s, or one tensor alone",
		s.path, present.Count(len(names), "tensor"), names[:min(len(names), 8)], strings.Join(wanted, " or "))
}

// onlyLatents returns the name of the tensor of latents before a step (-1: any) if the file has exactly one; else "".
func onlyLatents(names []string, step int64) string {
	var found []string
	for _, name := range names {
		if _, index, ok := strings.Cut(name, ".latents."); ok && (step < 0 || index == fmt.Sprint(step)) {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		return ""
	}
	return found[0]
}

// readTensor reads a tensor of the file as [n, S, C]; [S, C] becomes [1, S, C], one state for all samples.
func (s *states) readTensor(name string) (map[string]any, error) {
	if t := s.read[name]; t != nil {
		return t, nil
	}
	info, _ := s.archive.Info(name)
	data, err := s.archive.Bytes(name)
	if err != nil {
		return nil, fmt.Errorf("--start-latents: %w", err)
	}
	var shape []int64
	if len(info.Shape) == 2 {
		shape = []int64{1}
	}
	for _, d := range info.Shape {
		shape = append(shape, int64(d))
	}
	t := map[string]any{"dtype": string(info.DType), "shape": shape, "data": slices.Clone(data)}
	s.read[name] = t
	return t, nil
}

// startOf returns the field start of a prompt; nil if there is none.
func startOf(body map[string]any) map[string]any {
	start, _ := body["start"].(map[string]any)
	return start
}

// setStart gives a prompt its latents of the file, unless the prompt has a start of its own. It fails if the file has
// none for it.
func (s *states) setStart(p prompt, own bool) error {
	if s == nil || own {
		return nil
	}
	start := maps.Clone(startOf(p.body)) // prompts share what the flags say
	step := int64(0)
	if start["sigma"] != nil {
		step = -1
	} else if n, ok := start["step_index"].(int64); ok {
		step = n
	}
	var err error
	start["latents"], err = s.latentsOf(p.uid, step)
	p.body["start"] = start
	return err
}

// maxInlineLatents is the most bytes of states or images that a prompt carries itself.
const maxInlineLatents = 64 << 10

// moveToObjectStore moves large latents or images that a prompt starts with, and files of its conditions, to the object
// store, because a message is limited in size. An error is of the server.
func (p prompt) moveToObjectStore(ctx context.Context, b *bus.Bus) error {
	if p.files != nil {
		if err := p.files.store(ctx, b, p.body); err != nil {
			return err
		}
	}
	if images, size := inlineImages(p.body); size > maxInlineLatents {
		for _, m := range images {
			if err := moveToBlob(ctx, b, m, "images"); err != nil {
				return err
			}
		}
	}
	t, ok := startOf(p.body)["latents"].(map[string]any)
	if !ok {
		return nil
	}
	data, ok := t["data"].([]byte)
	if !ok || len(data) <= maxInlineLatents {
		return nil
	}
	return moveToBlob(ctx, b, t, "states")
}

// moveToBlob stores the data of a map in the object store, and puts a reference in their place.
func moveToBlob(ctx context.Context, b *bus.Bus, t map[string]any, what string) error {
	ref, err := b.PutBlob(ctx, t["data"].([]byte))
	if err != nil {
		return fmt.Errorf("store the %s to start with: %w", what, err)
	}
	delete(t, "data")
	t["ref"] = map[string]any{"bucket": ref.Bucket, "digest": ref.Digest, "size": ref.Size}
	return nil
}
