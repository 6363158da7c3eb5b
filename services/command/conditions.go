package command

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/jpeg"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// conditionFlags are what pipelines are given besides texts, as flags.
type conditionFlags struct {
	files, values []string
	read          conditionFiles
}

// conditionFiles are the files that conditions name, by their digests, so that they can be read again once they are
// stored: a path, or the bytes that a record had.
type conditionFiles struct {
	by    map[string]conditionFile
	known map[string]map[string]any // references, by path
}

type conditionFile struct {
	path string
	data []byte
}

func (c *conditionFlags) addFlags(f *pflag.FlagSet) {
	f.StringArrayVar(&c.files, "condition", nil,
		"file that a pipeline is given: NAME=PATH, e.g. image=photo.png; a PNG, JPEG, or an animated PNG of a video")
	f.StringArrayVar(&c.values, "set", nil,
		"argument of a pipeline: NAME=VALUE, e.g. true_cfg_scale=4; 'meander model info' lists them")
}

// setFields sets conditions and arguments of the flags in the fields of a prompt. An error names the flag.
func (c *conditionFlags) setFields(d map[string]any, names map[string]string) error {
	var errs []error
	by := map[string]any{}
	for _, given := range c.files {
		name, path, ok := strings.Cut(given, "=")
		if !ok || name == "" || path == "" {
			errs = append(errs, fmt.Errorf("--condition: %q; must be NAME=PATH, e.g. image=photo.png", given))
			continue
		}
		list, _ := by[name].([]any)
		by[name] = append(list, path)
	}
	if len(by) > 0 {
		list, err := c.read.conditions(by, "")
		if err != nil {
			errs = append(errs, fmt.Errorf("--condition: %w", err))
		}
		d["conditions"], names["conditions"] = list, "condition"
	}
	values := map[string]any{}
	for _, given := range c.values {
		name, value, ok := strings.Cut(given, "=")
		if _, twice := values[name]; !ok || name == "" || twice {
			errs = append(errs, fmt.Errorf("--set: %q; must be NAME=VALUE, each name once, e.g. true_cfg_scale=4",
				given))
			continue
		}
		values[name] = value
	}
	if len(values) > 0 {
		d["arguments"], names["arguments"] = values, "set"
	}
	return errors.Join(errs...)
}

// prepare makes conditions and arguments of a record those of a prompt: files by name become references, numbers
// texts. Paths are relative to dir.
func (x *conditionFiles) prepare(r *dataset.Record, dir string) error {
	if values, ok := r.Fields["arguments"].(map[string]any); ok {
		texts := make(map[string]any, len(values))
		for name, v := range values {
			switch v.(type) {
			case map[string]any, []any, nil:
				return fmt.Errorf("arguments.%s: %v; must be a number, a text, true or false", name, v)
			}
			texts[name] = fmt.Sprint(v)
		}
		r.Fields["arguments"] = texts
	}
	by, ok := r.Fields["conditions"].(map[string]any)
	if !ok {
		return nil // absent, or as events have them: its reader checks it
	}
	list, err := x.conditions(by, dir)
	if err != nil {
		return fmt.Errorf("conditions: %w", err)
	}
	r.Fields["conditions"] = list
	return nil
}

// conditions returns files by name as a prompt has them; several of one name are a list.
func (x *conditionFiles) conditions(by map[string]any, dir string) (list []any, err error) {
	for _, name := range slices.Sorted(maps.Keys(by)) {
		given, several := by[name].([]any)
		if !several {
			given = []any{by[name]}
		}
		for _, file := range given {
			ref, err := x.refOf(file, dir)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			list = append(list, map[string]any{"name": name, "ref": ref})
		}
	}
	return list, nil
}

// refOf returns the reference of a file: a path, bytes, or an object with bytes or one of path and image, as data sets
// have them.
func (x *conditionFiles) refOf(file any, dir string) (map[string]any, error) {
	switch v := file.(type) {
	case []byte:
		data, err := inputFile(v)
		if err != nil {
			return nil, err
		}
		return x.add(conditionFile{data: data}, data), nil
	case map[string]any:
		for _, key := range []string{"bytes", "path", "image"} {
			if text, ok := v[key].(string); ok && key == "bytes" && text != "" { // JSON has no bytes
				data, err := base64.StdEncoding.DecodeString(text)
				if err != nil {
					return nil, fmt.Errorf("bytes: %w; must be base64", err)
				}
				return x.refOf(data, dir)
			}
			if v[key] != nil && v[key] != "" {
				return x.refOf(v[key], dir)
			}
		}
	case string:
		path := strings.TrimPrefix(v, "file://")
		if strings.Contains(path, "://") {
			return nil, fmt.Errorf("%.100q: a URL; must be a file: download it", v)
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if ref := x.known[path]; ref != nil {
			return ref, nil
		}
		data, err := readInput(path)
		if err != nil {
			return nil, err
		}
		ref := x.add(conditionFile{path: path}, data)
		if x.known == nil {
			x.known = map[string]map[string]any{}
		}
		x.known[path] = ref
		return ref, nil
	}
	return nil, fmt.Errorf("%.100q; must be the path of a file, or its bytes", fmt.Sprint(file))
}

// add notes where a file is found again, and returns its reference.
func (x *conditionFiles) add(f conditionFile, data []byte) map[string]any {
	sum := sha256.Sum256(data)
	digest := hex.EncodeToString(sum[:])
	if x.by == nil {
		x.by = map[string]conditionFile{}
	}
	x.by[digest] = f
	return map[string]any{"bucket": schemas.BlobBucket, "digest": digest, "size": int64(len(data))}
}

// store stores the files of a prompt's conditions that were read here. An error is of the server, or of a file that has
// changed since.
func (x *conditionFiles) store(ctx context.Context, b *bus.Bus, body map[string]any) error {
	list, _ := body["conditions"].([]any)
	for _, c := range list {
		m, _ := c.(map[string]any)
		ref, _ := m["ref"].(map[string]any)
		digest, _ := ref["digest"].(string)
		f, ours := x.by[digest]
		if !ours {
			continue
		}
		data := f.data
		if f.path != "" {
			var err error
			if data, err = readInput(f.path); err != nil {
				return fmt.Errorf("conditions: %v: %w", m["name"], err)
			}
		}
		put, err := b.PutBlob(ctx, data)
		if err != nil {
			return fmt.Errorf("store the condition %v: %w", m["name"], err)
		}
		if put.Digest != digest {
			return fmt.Errorf("conditions: %v: %s has changed since it was read", m["name"], f.path)
		}
		if f.path == "" {
			delete(x.by, digest) // it is stored: other prompts with it find it there
		}
	}
	return nil
}

// maxInput bounds a file that is given to a pipeline, as intake does.
const maxInput = 32 << 20

// readInput reads a file that is given to a pipeline, as a PNG.
func readInput(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxInput {
		return nil, fmt.Errorf("%s: %d bytes; must be a file of at most %d", path, info.Size(), maxInput)
	}
	file, err := os.ReadFile(path)
	if err == nil {
		if file, err = inputFile(file); err != nil {
			err = fmt.Errorf("%s: %w", path, err)
		}
	}
	return file, err
}

// inputFile returns a PNG as it is, and a JPEG as a PNG of its pixels.
func inputFile(file []byte) ([]byte, error) {
	if bytes.HasPrefix(file, []byte("\xff\xd8")) {
		_, exif, _ := bytes.Cut(file[:min(len(file), 1<<16)], []byte("Exif\x00\x00"))
		if n := media.Orientation(exif); n > 1 {
			return nil, fmt.Errorf("a JPEG that is turned by its EXIF data (orientation %d); save it upright", n)
		}
		c, err := jpeg.DecodeConfig(bytes.NewReader(file))
		if err == nil && c.Width*c.Height > media.MaxInputPixels {
			err = fmt.Errorf("%dx%d pixels; must be at most %d", c.Width, c.Height, media.MaxInputPixels)
		}
		if err != nil {
			return nil, err
		}
		decoded, err := jpeg.Decode(bytes.NewReader(file))
		if err != nil {
			return nil, err
		}
		img := image.NewNRGBA(decoded.Bounds())
		draw.Draw(img, img.Rect, decoded, decoded.Bounds().Min, draw.Src)
		return media.EncodePNG(img)
	}
	if _, err := media.ReadInput(file); err != nil {
		return nil, fmt.Errorf("%w; must be a PNG or a JPEG", err)
	}
	return file, nil
}
