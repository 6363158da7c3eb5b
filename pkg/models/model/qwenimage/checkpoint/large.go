package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Changes say how a checkpoint differs from the published one. Zero fields change nothing.
type Changes struct {
	Layers, TextLayers, Vocabulary int
	Size                           int    // default height and width of images, in pixels
	Seed                           uint64 // of the weights
	// Hollow writes large tensors as holes in the files: they read as zeros and need no disk space.
	Hollow bool
	// Progress is called before each file is written.
	Progress func(file string, bytes int)
}

// WritePublished writes a checkpoint of the published size, with the changes of r.
func WritePublished(dir string, r Changes) error {
	c := Published()
	for _, f := range []struct {
		to   *int
		from int
	}{
		{&c.Depth, r.Layers},
		{&c.TextDepth, r.TextLayers},
		{&c.Vocabulary, r.Vocabulary},
		{&c.Height, r.Size},
		{&c.Width, r.Size},
	} {
		if f.from != 0 {
			*f.to = f.from
		}
	}
	c.Seed, c.Hollow, c.Progress = r.Seed, r.Hollow, r.Progress
	return Write(dir, c)
}

// normalCount is how many normal numbers are drawn for tensors with more elements: these repeat the numbers, each
// from a start of its own.
const normalCount = 1 << 22

// normalPool returns these numbers; the first call draws them.
func (b *builder) normalPool() []float32 {
	if b.normals == nil {
		b.normals = make([]float32, normalCount)
		r := rand.New(rand.NewPCG(1, 2))
		for i := range b.normals {
			b.normals[i] = float32(r.NormFloat64())
		}
	}
	return b.normals
}

// largeTensor returns a tensor whose data is made when it is written, a piece at a time.
func (b *builder) largeTensor(name string, mean, std float64, n int, shape []int) safetensors.Tensor {
	from, dtype := b.rng.IntN(normalCount), b.dtype
	return safetensors.Tensor{Name: name, DType: dtype, Shape: shape, Source: func(w io.Writer) error {
		if h, ok := w.(*sparseFile); ok && b.hollow {
			return h.skip(n * dtype.Size())
		}
		normals := b.normalPool()
		x, piece := make([]float32, 1<<16), []byte(nil)
		for left := n; left > 0; {
			m := min(len(x), left)
			for i := range m {
				x[i] = float32(mean) + float32(std)*normals[from]
				if from++; from == len(normals) {
					from = 0
				}
			}
			piece = dtype.AppendFloats(piece[:0], x[:m])
			if _, err := w.Write(piece); err != nil {
				return err
			}
			left -= m
		}
		return nil
	}}
}

// sparseFile is a file in which skipped parts need no disk space.
type sparseFile struct{ *os.File }

func (h *sparseFile) skip(n int) error {
	at, err := h.Seek(int64(n), io.SeekCurrent)
	if err != nil {
		return err
	}
	return h.Truncate(at)
}

// writeShards writes the tensors of a part to one file, or to several files with an index, as
// diffusers and transformers do.
func writeShards(dir, file string, tensors []safetensors.Tensor, c Config) error {
	var shards [][]safetensors.Tensor
	var sizes []int
	for _, t := range tensors {
		n, err := t.Bytes()
		if err != nil {
			return err
		}
		last := len(shards) - 1
		if last < 0 || c.ShardBytes > 0 && sizes[last]+n > c.ShardBytes {
			shards, sizes = append(shards, nil), append(sizes, 0)
			last++
		}
		shards[last], sizes[last] = append(shards[last], t), sizes[last]+n
	}
	index := map[string]string{}
	total := 0
	for i, shard := range shards {
		name := file + ".safetensors"
		if len(shards) > 1 {
			name = fmt.Sprintf("%s-%05d-of-%05d.safetensors", file, i+1, len(shards))
		}
		for _, t := range shard {
			index[t.Name] = filepath.Base(name)
		}
		total += sizes[i]
		if c.Progress != nil {
			c.Progress(name, sizes[i])
		}
		if err := writeFile(filepath.Join(dir, name), shard); err != nil {
			return err
		}
	}
	if len(shards) == 1 {
		return nil
	}
	text, err := json.MarshalIndent(map[string]any{
		"metadata":   map[string]int{"total_size": total},
		"weight_map": index,
	}, "", "  ")
	if err != nil {
		return err
	}
	return write(dir, file+".safetensors.index.json", text)
}

// writeFile writes one safetensors file. Tensors with a Source go into a sparse file, which takes
// no space for their zeros. A file that cannot be written is an error.
func writeFile(name string, tensors []safetensors.Tensor) error {
	metadata := map[string]string{"format": "pt"}
	if !slices.ContainsFunc(tensors, func(t safetensors.Tensor) bool { return t.Source != nil }) {
		return safetensors.WriteFile(name, tensors, metadata)
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(safetensors.Write(&sparseFile{f}, tensors, metadata), f.Close())
}
