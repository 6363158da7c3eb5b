package export_test

import (
	"bytes"
	"context"
	"image"
	"os"
	"path/filepath"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// serveClass starts a pipeline whose worker computes a class.
func serveClass(t *testing.T, class string) *bustest.Plane {
	t.Helper()
	plane, dir := bustest.New(t), remotetest.Folder(t, class, 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Engine = dir, "torch="+address
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	return plane
}

// Each format has the files that a sample was conditioned on, several of one name in their order.
func TestWrite_Conditions(t *testing.T) {
	plane := serveClass(t, remotetest.EditClass)
	var given [3][]byte
	var list []schemas.Condition
	for i, name := range []string{"image", "references", "references"} {
		img := image.NewNRGBA(image.Rect(0, 0, 3, 2))
		for k := range img.Pix {
			img.Pix[k] = []byte{byte(10 * i), 20, 30, 255}[k%4]
		}
		var err error
		if given[i], err = media.EncodePNG(img); err != nil {
			t.Fatal(err)
		}
		list = append(list, schemas.Condition{Name: name, DataImage: schemas.DataImage{Data: given[i]}})
	}
	add(t, plane.Bus, "g", func(p *schemas.Prompt) { p.Conditions = list })
	file := func(name string) string {
		folder := t.TempDir()
		x := write(t, plane.Bus, export.DatasetOptions{Format: name, Folder: folder, Bytes: 1 << 30})
		if x.Totals().Samples != 2 {
			t.Fatalf("%s: %+v", name, x)
		}
		return filepath.Join(folder, x.Shards[0].File)
	}

	parts := untar(t, file("webdataset"))
	for i, name := range []string{"image", "references", "references.1"} {
		if !bytes.Equal(parts["g_000001.condition."+name+".png"], given[i]) {
			t.Errorf("webdataset: another file as condition %s", name)
		}
	}
	rows, err := parquet.ReadFile[struct {
		Conditions []struct {
			Name  string `parquet:"name"`
			Type  string `parquet:"type"`
			Bytes []byte `parquet:"bytes"`
		} `parquet:"conditions,list"`
	}](file("parquet"))
	if err != nil || len(rows) != 2 || len(rows[1].Conditions) != 3 {
		t.Fatalf("parquet: %v, %d rows", err, len(rows))
	}
	if c := rows[1].Conditions[2]; c.Name != "references.1" || c.Type != "image" || !bytes.Equal(c.Bytes, given[2]) {
		t.Errorf("parquet: condition %s of type %s", c.Name, c.Type)
	}
	data, err := os.ReadFile(file("safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	tensors, err := safetensors.Parse("", data)
	if err != nil {
		t.Fatal(err)
	}
	pixels, err := tensors.Bytes("g/1/condition.references.1")
	if err != nil || len(pixels) != 18 || pixels[0] != 20 {
		t.Errorf("safetensors: %v, %v", pixels, err)
	}
}
