package export_test

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

const side = 64 // of the images, in pixels

// serve starts a pipeline of the model synthetic, and makes a run of so many groups of two samples.
func serve(t *testing.T, groups int) *bus.Bus {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	for i := range groups {
		add(t, plane.Bus, schemas.UID(fmt.Sprintf("g%d", i)))
	}
	return plane.Bus
}

// add makes one more group of the run.
func add(t *testing.T, b *bus.Bus, uid schemas.UID, change ...func(*schemas.Prompt)) {
	t.Helper()
	c := client.New(b)
	p := &schemas.Prompt{
		UID: uid, Prompt: "a fox, " + string(uid), Seed: new(int64(5)), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(3)), Height: new(int64(side)), Width: new(int64(side)),
			Rollout: schemas.Rollout{SDEStepIndices: []int64{1}},
		},
	}
	for _, f := range change {
		f(p)
	}
	if _, err := c.Publish(t.Context(), "r", p); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "the group has closed", func() error {
		_, err := b.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
		return err
	})
}

// write exports the run.
func write(t *testing.T, b *bus.Bus, o export.DatasetOptions) *export.Index {
	t.Helper()
	x, err := export.WriteDataset(t.Context(), b, "r", o)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// trajectory reads one sample.
func trajectory(t *testing.T, b *bus.Bus, uid schemas.UID, index int64) *schemas.Trajectory {
	t.Helper()
	var e schemas.Trajectory
	m, err := b.Last(t.Context(), schemas.StreamTrajectories,
		schemas.TrajectorySubject("r", uid, index, schemas.StageMain))
	if err == nil {
		err = schemas.Decode(m.Data, &e)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &e
}

// files returns the contents of a folder by name.
func files(t *testing.T, folder string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := fs.WalkDir(os.DirFS(folder), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var data []byte
			data, err = os.ReadFile(filepath.Join(folder, name))
			out[name] = string(data)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// settings returns the settings of a sample as records have them.
func settings(t *testing.T, of *schemas.Trajectory) string {
	t.Helper()
	text, err := json.Marshal((*schemas.Settings)(&of.Sampling))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// found is sample 1 of g1 as a file has it.
type found struct {
	export.Record
	png     []byte
	latents []float32
}

// readers read that sample from a file of each format.
var readers = map[string]func(t *testing.T, path string) found{
	"webdataset": func(t *testing.T, path string) (f found) {
		parts := untar(t, path)
		if err := json.Unmarshal(parts["g1_000001.json"], &f.Record); err != nil || len(parts) != 12 {
			t.Fatalf("%v, files %v", err, slices.Sorted(maps.Keys(parts)))
		}
		f.png, f.latents = parts["g1_000001.png"], floats(t, parts["g1_000001.safetensors"], "latents")
		return f
	},
	"parquet": func(t *testing.T, path string) found {
		type row struct {
			export.Record
			Image struct {
				Bytes []byte `parquet:"bytes"`
			} `parquet:"image,optional"`
			Latents []byte `parquet:"latents,optional"`
		}
		rows, err := parquet.ReadFile[row](path)
		if err != nil || len(rows) != 4 {
			t.Fatalf("%d rows, %v", len(rows), err)
		}
		r := rows[slices.IndexFunc(rows, func(r row) bool { return r.UID == "g1" && r.SampleIndex == 1 })]
		f := found{r.Record, r.Image.Bytes, make([]float32, len(r.Latents)/4)}
		if err := tensor.F32.DecodeFloats(f.latents, r.Latents); err != nil {
			t.Fatal(err)
		}
		return f
	},
	"safetensors": func(t *testing.T, path string) (f found) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		a, err := safetensors.Parse(path, data)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(a.Metadata()["samples"]) {
			if s := new(export.Record); json.Unmarshal([]byte(line), s) == nil && s.UID == "g1" && s.SampleIndex == 1 {
				f.Record = *s
			}
		}
		pixels, err := a.Bytes("g1/1/image")
		if err != nil {
			t.Fatal(err)
		}
		img := image.NewNRGBA(image.Rect(0, 0, side, side))
		for i := range side * side {
			copy(img.Pix[4*i:], append(slices.Clone(pixels[3*i:3*i+3]), 255))
		}
		if f.png, err = media.EncodePNG(img); err != nil {
			t.Fatal(err)
		}
		f.latents = floats(t, data, "g1/1/latents")
		return f
	},
}

// floats reads a tensor of a safetensors file.
func floats(t *testing.T, file []byte, name string) []float32 {
	t.Helper()
	a, err := safetensors.Parse("", file)
	if err != nil {
		t.Fatal(err)
	}
	x, err := a.Floats(name)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// Each format has each sample with its image, its numbers and its stored states.
func TestWrite_Formats(t *testing.T) {
	b := serve(t, 2)
	want := trajectory(t, b, "g1", 1)
	png, err := client.New(b).Medium(t.Context(), want, schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := client.New(b).Latents(t.Context(), want)
	if err != nil {
		t.Fatal(err)
	}
	var states []float32
	for _, i := range want.LatentStepIndices {
		states = append(states, kept[i]...)
	}
	shape := []int64{int64(len(want.LatentStepIndices)), want.LatentsShape[0], want.LatentsShape[1]}
	for _, name := range export.Datasets() {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			x := write(t, b, export.DatasetOptions{Format: name, Folder: folder, Bytes: 1 << 30, Latents: true})
			if all := x.Totals(); len(x.Shards) != 1 || all.Groups != 2 || all.Samples != 4 || all.LeftOut != 0 {
				t.Fatalf("%+v", x)
			}
			if again, err := export.CheckDataset(folder); err != nil || again.Totals() != x.Totals() {
				t.Errorf("check: %+v, %v", again, err)
			}
			r := readers[name](t, filepath.Join(folder, x.Shards[0].File))
			if r.Prompt != "a fox, g1" || r.Reward == nil || r.Advantage == nil || len(r.Scores) != 1 ||
				r.GroupStatus != schemas.StatusComplete || r.SampleSeed != want.SampleSeed ||
				r.Settings != settings(t, want) || r.ContentDigest != want.ContentDigest {
				t.Errorf("record %+v", r.Record)
			}
			if len(r.LogProbs) != 3 || r.LogProbs[0] != nil || r.LogProbs[1] == nil ||
				*r.LogProbs[1] != *want.LogProbs[1] {
				t.Errorf("log-probs %v; want those of %v", r.LogProbs, want.LogProbs)
			}
			if string(r.png) != string(png) || !slices.Equal(r.latents, states) ||
				!slices.Equal(r.LatentsShape, shape) {
				t.Errorf("%d bytes of image, %d of states %v; want %d, %d of %v", len(r.png), len(r.latents),
					r.LatentsShape, len(png), len(states), shape)
			}
		})
	}
}

// untar returns the files of a tar.
func untar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	out := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err == nil {
			out[h.Name], err = io.ReadAll(r)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// An export that was stopped goes on where it stopped, and comes to the same bytes; a later one adds what has closed
// since, and leaves full files alone.
func TestWrite_GoesOn(t *testing.T) {
	b := serve(t, 5)
	for _, name := range export.Datasets() {
		t.Run(name, func(t *testing.T) {
			whole, parts := t.TempDir(), t.TempDir()
			o := export.DatasetOptions{Format: name, Folder: whole, Bytes: 60_000, Latents: true}
			if x := write(t, b, o); len(x.Shards) < 2 || x.Shards[0].Groups < 2 || x.Totals().Groups != 5 {
				t.Fatalf("%+v; want files of some groups", x)
			}
			o.Folder = parts
			ctx, stop := context.WithCancel(t.Context())
			o.Written = func(export.Shard) { stop() }
			if _, err := export.WriteDataset(ctx, b, "r", o); !errors.Is(err, context.Canceled) {
				t.Fatalf("stopped after a file: %v", err)
			}
			if err := os.WriteFile(filepath.Join(parts, "00001.tar.part"), []byte("left by a kill"),
				0o600); err != nil {
				t.Fatal(err)
			}
			first, err := os.Stat(filepath.Join(parts, "00000"+filepath.Ext(onlyFile(t, parts))))
			if err != nil {
				t.Fatal(err)
			}
			o.Written = nil
			write(t, b, o)
			after, err := os.Stat(filepath.Join(parts, first.Name()))
			if err != nil || !after.ModTime().Equal(first.ModTime()) {
				t.Errorf("the whole file was written again: %v", err)
			}
			got := files(t, parts)
			delete(got, "00001.tar.part")
			if want := files(t, whole); !maps.Equal(got, want) {
				t.Errorf("files %v, want %v, or their bytes differ", slices.Sorted(maps.Keys(got)),
					slices.Sorted(maps.Keys(want)))
			}
		})
	}
	before := t.TempDir()
	o := export.DatasetOptions{Format: "webdataset", Folder: before, Bytes: 1 << 30}
	write(t, b, o)
	add(t, b, "late")
	if x := write(t, b, o); x.Totals().Groups != 6 || len(x.Shards) != 2 || x.Shards[1].LastUID != "late" {
		t.Errorf("after another group: %+v", x)
	}
	have := files(t, before)
	if write(t, b, o); !maps.Equal(files(t, before), have) {
		t.Error("an export without anything new changes files")
	}
	if _, err := b.Purge(t.Context(), "r"); err != nil {
		t.Fatal(err)
	}
	add(t, b, "much-later")
	if _, err := export.WriteDataset(t.Context(), b, "r", o); !errors.Is(err, export.ErrBegun) ||
		!strings.Contains(err.Error(), "group late is no longer stored") || !maps.Equal(files(t, before), have) {
		t.Errorf("after the run was removed: %v; want no change of the files", err)
	}
}

// onlyFile returns the name of the one file besides the index and parts.
func onlyFile(t *testing.T, folder string) string {
	t.Helper()
	for name := range files(t, folder) {
		if name != export.IndexFile && !strings.HasSuffix(name, ".part") {
			return name
		}
	}
	t.Fatal("no file")
	return ""
}

// Of samples that were scored again under another run, the trajectories are those of the first.
func TestWrite_Rescored(t *testing.T) {
	b := serve(t, 1)
	m, err := b.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", "g0"))
	if err != nil {
		t.Fatal(err)
	}
	var a schemas.Advantage
	if err := schemas.Decode(m.Data, &a); err != nil {
		t.Fatal(err)
	}
	a.Run, a.SourceRun = "again", "r"
	if _, err := b.Publish(t.Context(), &a); err != nil {
		t.Fatal(err)
	}
	o := export.DatasetOptions{Format: "webdataset", Folder: t.TempDir(), Bytes: 1 << 30, Latents: true}
	if x, err := export.WriteDataset(t.Context(), b, "again", o); err != nil || x.Totals().Samples != 2 ||
		x.Totals().LeftOut != 0 {
		t.Errorf("%+v, %v; want both samples", x, err)
	}
}

// A folder with anything else is not written to, and a file that has changed is found.
func TestWrite_Refuses(t *testing.T) {
	b := serve(t, 1)
	folder := t.TempDir()
	o := export.DatasetOptions{Format: "parquet", Folder: folder, Bytes: 1, Latents: true}
	write(t, b, o)
	other := func(change func(*export.DatasetOptions)) export.DatasetOptions {
		o := o
		change(&o)
		return o
	}
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "notes"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		o    export.DatasetOptions
		run  schemas.Run
		is   error
		says string
	}{
		"another format": {other(func(o *export.DatasetOptions) { o.Format = "webdataset" }), "r", export.ErrBegun, "as parquet"},
		"mp4":            {other(func(o *export.DatasetOptions) { o.MP4 = true }), "r", export.ErrBegun, "mp4 false"},
		"mp4 of pixels":  {other(func(o *export.DatasetOptions) { o.Format, o.MP4 = "safetensors", true }), "r", nil, "mp4: set; must be absent"},
		"no latents":     {other(func(o *export.DatasetOptions) { o.Latents = false }), "r", export.ErrBegun, "latents true"},
		"another size":   {other(func(o *export.DatasetOptions) { o.Bytes = 5 }), "r", export.ErrBegun, "files of 1 bytes"},
		"another run":    {o, "s", export.ErrBegun, "run r"},
		"other files":    {other(func(o *export.DatasetOptions) { o.Folder = full }), "r", export.ErrBegun, "name an empty folder"},
		"no format":      {other(func(o *export.DatasetOptions) { o.Format = "zip" }), "r", nil, "must be one of"},
	} {
		if _, err := export.WriteDataset(t.Context(), b, c.run, c.o); err == nil || c.is != nil &&
			!errors.Is(err, c.is) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", what, err, c.says)
		}
	}
	if _, err := export.WriteDataset(t.Context(), serve(t, 1), "r", o); err != nil && !errors.Is(err, export.ErrBegun) {
		t.Errorf("another store: %v", err)
	}
	name := filepath.Join(folder, "00000.parquet")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := export.CheckDataset(folder); !errors.Is(err, export.ErrChanged) ||
		!strings.Contains(err.Error(), name) {
		t.Errorf("check: %v; want ErrChanged, by name", err)
	}
	if _, err := export.WriteDataset(t.Context(), b, "r", o); !errors.Is(err, export.ErrChanged) {
		t.Errorf("write: %v; want ErrChanged", err)
	}
}
