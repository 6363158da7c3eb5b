package export

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// littleEndian returns integers as I64.
func littleEndian(x []int32) (b []byte) {
	for _, v := range x {
		b = binary.LittleEndian.AppendUint64(b, uint64(int64(v)))
	}
	return b
}

// numbers returns floats; NaN for those that are absent.
func numbers(x []*float64) (out []float32) {
	for _, v := range x {
		if v == nil {
			out = append(out, float32(math.NaN()))
			continue
		}
		out = append(out, float32(*v))
	}
	return out
}

// tarFile is a file in the layout of WebDataset: the files of a sample have one name up to the first dot.
type tarFile struct {
	file *os.File
	tar  *tar.Writer
}

func newTar(path string) (writer, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	return &tarFile{f, tar.NewWriter(f)}, nil
}

// add writes the files of a sample: its record, its media, and its arrays.
func (w *tarFile) add(s *sample) (int64, error) {
	record, err := json.Marshal(s.Record)
	if err != nil {
		return 0, err
	}
	var arrays bytes.Buffer
	tensors, err := s.tensors("")
	if err == nil && len(tensors) > 0 {
		err = safetensors.Write(&arrays, tensors, nil)
	}
	if err != nil {
		return 0, err
	}
	type part struct {
		end  string
		data []byte
	}
	parts := []part{
		{"json", record},
		{schemas.ImagePNG, s.media[schemas.KindImage]},
		{schemas.VideoAPNG, s.media[schemas.KindVideo]},
		{"mp4", s.mp4},
		{schemas.AudioWAV, s.media[schemas.KindAudio]},
		{"safetensors", arrays.Bytes()},
	}
	for _, c := range s.conditions {
		parts = append(parts, part{"condition." + c.Name + ".png", c.Bytes})
	}
	n := 0
	for _, part := range parts {
		if len(part.data) == 0 {
			continue
		}
		err := w.tar.WriteHeader(&tar.Header{Name: s.key() + "." + part.end, Mode: 0o644, Size: int64(len(part.data))})
		if err != nil {
			return 0, err
		}
		if _, err := w.tar.Write(part.data); err != nil {
			return 0, err
		}
		n += len(part.data)
	}
	return int64(n), nil
}

func (w *tarFile) Close() error { return errors.Join(w.tar.Close(), w.file.Close()) }

// row is a row of a Parquet file.
type row struct {
	Record
	// Image is in the form of datasets.Image.
	Image *mediaFile `parquet:"image,optional"`
	// Video is an animated PNG with all frames.
	Video []byte `parquet:"video,optional"`
	// MP4 is that in the form of datasets.Video.
	MP4 *mediaFile `parquet:"mp4,optional"`
	// Audio is in the form of datasets.Audio.
	Audio      *mediaFile      `parquet:"audio,optional"`
	Conditions []conditionFile `parquet:"conditions,list"`
	// Latents are float32, little-endian, of LatentsShape.
	Latents []byte `parquet:"latents,optional"`
}

// mediaFile is a struct of datasets.Image, datasets.Audio and datasets.Video.
type mediaFile struct {
	Bytes []byte `parquet:"bytes"`
	Path  string `parquet:"path"`
}

// parquetFile is a Parquet file.
type parquetFile struct {
	file *os.File
	rows *parquet.GenericWriter[row]
	held int64 // bytes of rows that are in memory
}

// rowGroupBytes is from which size on rows become a row group, and leave the memory.
const rowGroupBytes = 64 << 20

// newParquet creates a file whose large values are in no statistics.
func newParquet(path string) (writer, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	options := []parquet.WriterOption{parquet.Compression(&parquet.Zstd)}
	for _, path := range [][]string{
		{"image", "bytes"},
		{"video"},
		{"mp4", "bytes"},
		{"audio", "bytes"},
		{"latents"},
		{"conditions", "list", "element", "bytes"},
	} {
		// Statistics of a page have its largest value a second time.
		options = append(options, parquet.SkipPageBounds(path...), parquet.SkipPageStatistics(path...))
	}
	return &parquetFile{file: f, rows: parquet.NewGenericWriter[row](f, options...)}, nil
}

// add writes the row of a sample.
func (w *parquetFile) add(s *sample) (int64, error) {
	r := row{Record: s.Record, Video: s.media[schemas.KindVideo], Conditions: s.conditions}
	if file := s.media[schemas.KindImage]; file != nil {
		r.Image = &mediaFile{file, s.key() + ".png"}
	}
	if file := s.media[schemas.KindAudio]; file != nil {
		r.Audio = &mediaFile{file, s.key() + ".wav"}
	}
	if s.mp4 != nil {
		r.MP4 = &mediaFile{s.mp4, s.key() + ".mp4"}
	}
	if len(s.latents) > 0 {
		r.Latents = tensor.F32.AppendFloats(nil, s.latents)
	}
	n := int64(500 + len(r.Latents) + len(s.mp4) + 16*len(s.IDs) + len(s.Messages) + len(s.Turns))
	for _, file := range s.media {
		n += int64(len(file))
	}
	for _, c := range s.conditions {
		n += int64(len(c.Bytes))
	}
	_, err := w.rows.Write([]row{r})
	if w.held += n; err == nil && w.held >= rowGroupBytes {
		w.held, err = 0, w.rows.Flush()
	}
	return n, err
}

func (w *parquetFile) Close() error { return errors.Join(w.rows.Close(), w.file.Close()) }

// tensorFile is a safetensors file. It is written as a whole when it is closed.
type tensorFile struct {
	path    string
	tensors []safetensors.Tensor
	records []string
}

func newTensorFile(path string) (writer, error) { return &tensorFile{path: path}, nil }

// add keeps the tensors of a sample, its pixels and its record for Close. What is a tensor is not in the record:
// records are in the header, which readers want to be small.
func (w *tensorFile) add(s *sample) (n int64, err error) {
	prefix := fmt.Sprintf("%s/%v/", s.UID, s.of.Place())
	tensors, err := s.tensors(prefix)
	if err != nil {
		return 0, err
	}
	for i := range s.of.Media {
		of, shown := &s.of.Media[i], s.of.Shown()
		if of.Kind == schemas.KindImage && of != shown {
			continue // it is in the video
		}
		m, err := sampling.DecodeMedium(of, s.media[of.Kind])
		if err != nil {
			return 0, fmt.Errorf("%w: %s: %w", errUnreadable, of.Kind, err)
		}
		if of == shown {
			tensors = append(tensors, pixelsOf(prefix+"image", m, of.Kind == schemas.KindVideo))
			continue
		}
		tensors = append(tensors, safetensors.Tensor{
			Name: prefix + "audio", DType: tensor.F32, Shape: []int{int(of.Samples), int(of.Channels)},
			Data: tensor.F32.AppendFloats(nil, m.Sound.Values),
		})
	}
	for _, c := range s.conditions {
		m, err := media.DecodeInput(c.Bytes)
		if err != nil {
			return 0, fmt.Errorf("%w: condition %s: %w", errUnreadable, c.Name, err)
		}
		tensors = append(tensors, pixelsOf(prefix+"condition."+c.Name, m, m.Size().Frames > 1))
	}
	short := s.Record
	short.IDs, short.Mask, short.TokenLogProbs, short.ProcessedLogProbs = nil, nil, nil, nil
	record, err := json.Marshal(short)
	w.tensors, w.records = append(w.tensors, tensors...), append(w.records, string(record))
	for _, t := range tensors {
		n += int64(len(t.Data))
	}
	return n + headerShare*int64(len(record)), err
}

// headerShare is how much more a byte of the header counts than one of a tensor: a header may have 100 MB.
const headerShare = 4

// pixelsOf returns the pixels of an image [H, W, 3], of a video [F, H, W, 3].
func pixelsOf(name string, m media.Media, video bool) safetensors.Tensor {
	size := m.Size()
	shape := []int{size.Height, size.Width, 3}
	if video {
		shape = append([]int{size.Frames}, shape...)
	}
	return safetensors.Tensor{Name: name, DType: tensor.U8, Shape: shape, Data: m.RGB()}
}

// Close writes the file.
func (w *tensorFile) Close() error {
	return safetensors.WriteFile(w.path, w.tensors, map[string]string{"samples": strings.Join(w.records, "\n")})
}
