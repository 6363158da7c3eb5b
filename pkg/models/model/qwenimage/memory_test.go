package qwenimage_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// limited is a device with so much memory left, and factors of some bytes.
type limited struct {
	tensor.Device
	room, factorBytes int
}

func (l limited) FreeSpace() (bytes, factorBytes int, err error) { return l.room, l.factorBytes, nil }

// published is a folder of the published size. Its weights are holes.
func published(t *testing.T) string {
	t.Helper()
	c := checkpoint.Published()
	c.Hollow = true
	dir := filepath.Join(t.TempDir(), "published")
	if err := checkpoint.Write(dir, c); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The published configuration loads by its table, and its table says what it takes.
func TestPublished_MemoryTable(t *testing.T) {
	info, err := qwenimage.Inspect(published(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Problems) > 0 {
		t.Errorf("it does not load: %q", info.Problems)
	}
	if got, want := info.Parts[1].Parameters, 20_430_401_088; got != want { // as published
		t.Errorf("%d parameters of the transformer, want %d", got, want)
	}
	weights := 0
	for _, p := range info.Parts {
		weights += p.FactorBytes
	}
	if most := weights + info.Pass(media.ImageSize(1328, 1328), 16, 2); most > 76<<30 {
		t.Errorf("%d bytes for 8 images of 1328x1328, more than a GPU of 80 GB has", most)
	}
	if lora := info.LoRA(64, 2); lora < 1<<30 || lora > 2<<30 || info.LoRA(64, 4) != 2*lora {
		t.Errorf("a LoRA of rank 64 takes %d bytes", lora)
	}
	if alone := info.Parts[0].FactorBytes; weights < 50<<30 || alone < 13<<30 {
		t.Errorf("weights are %d bytes, %d of them of the text encoder", weights, alone)
	}
	for _, rows := range []int{1, 2, 16} {
		if a, b := info.Pass(media.ImageSize(512, 512), rows, 2),
			info.Pass(media.ImageSize(1024, 1024), rows, 2); a >= b {
			t.Errorf("%d rows take %d bytes at 512 pixels, %d at 1024", rows, a, b)
		}
	}
}

// A device that is too small is refused before any weight is read, with what each part takes.
func TestPublished_SaysWhatIsMissing(t *testing.T) {
	dir := published(t)
	c, err := cpu.NewDevice(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Device: limited{c, 24 << 30, 2}}})
	if err == nil {
		t.Fatal("it loads on 24 GiB")
	}
	for _, want := range []string{
		"24.0 GiB of memory; must be 41.3 GiB", "transformer 38.1 GiB", "vae 167.6 MiB",
		"a pass at 1024x1024 3.1 GiB", "text encoder's 13.2 GiB",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
}

// Where all does not fit on the device, the text encoder is on the processor, and the model
// says so; what it makes is the same.
func TestOpen_TextEncoderGoesWhereThereIsRoom(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{DType: tensor.BF16, Vocabulary: 20_000})
	info, err := qwenimage.Inspect(dir)
	if err != nil {
		t.Fatal(err)
	}
	text, others := info.Parts[0].FactorBytes, info.Parts[1].FactorBytes+info.Parts[2].FactorBytes
	pass := info.Pass(info.Size, 1, 2)
	c, err := cpu.NewDevice(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var embeds [][]float32
	for _, tt := range []struct {
		room    int
		backend string // of the text, where it has one of its own
	}{
		{text + others + pass, ""},
		{text + others + pass - 1, ", text " + c.Name()},
		{others + pass, ", text " + c.Name()},
		{others + pass - 1, "refused"},
	} {
		m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{
			Device: limited{c, tt.room, 2}, Threads: 1,
		}})
		if err != nil {
			if tt.backend != "refused" {
				t.Errorf("room %d: %v", tt.room, err)
			}
			continue
		}
		if got, want := m.Card().Backend, c.Name()+tt.backend; got != want {
			t.Errorf("room %d: backend %q, want %q", tt.room, got, want)
		}
		var cond []*model.Conditioning
		if cond, err = m.Encode(t.Context(), []string{"a red fox"}); err != nil {
			t.Fatal(err)
		}
		embeds = append(embeds, cond[0].Tensors[0].Data)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(embeds) != 3 || !slices.Equal(embeds[0], embeds[1]) || !slices.Equal(embeds[0], embeds[2]) {
		t.Errorf("%d of 3 opened, with the same embeddings: want all", len(embeds))
	}
}

// Loading says how far each network is, up to its end, and its digest does not depend on
// whether anybody listens.
func TestOpen_TellsItsProgress(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{})
	var parts []string
	at := 0
	m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{
		Threads: 1,
		Progress: func(part string, done, total int) {
			if len(parts) == 0 || parts[len(parts)-1] != part {
				if parts, at = append(parts, part), 0; total <= 0 {
					t.Errorf("%s has %d bytes", part, total)
				}
			}
			if done < at || done > total {
				t.Errorf("%s: %d of %d bytes, after %d", part, done, total, at)
			}
			if at = done; done == total {
				parts[len(parts)-1] = part + ", whole"
				parts = append(parts, part)
			}
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	quiet, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.Close()
	if m.Card().WeightsDigest != quiet.Card().WeightsDigest {
		t.Error("the digests differ")
	}
	for _, part := range []string{"text_encoder, whole", "transformer, whole", "vae, whole"} {
		if !slices.Contains(parts, part) {
			t.Errorf("heard of %q, want %q among them", parts, part)
		}
	}
}
