package recorder_test

import (
	"image"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// processorTime is what this process has used of processors, its own and the system's for it.
func processorTime(b *testing.B) time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// What a sample of [16, 128, 128], 1024 x 1024 pixels, costs besides the network, part by part: MB in a second of a
// processor, and how many times the time of a copy of the same memory. A step is 1 MiB in F32, an image 3 MiB.
func BenchmarkParts(b *testing.B) {
	const elements = 16 * 128 * 128
	noise, x, v, next, mean := make([]float32, elements), make([]float32, elements), make([]float32, elements),
		make([]float32, elements), make([]float32, elements)
	flow.InitialNoise(x, 1)
	flow.InitialNoise(v, 2)
	step := flow.StepTransition{Transition: flow.SDE, A: 0.9, B: -0.1, NoiseStd: 0.2}
	img := image.NewNRGBA(image.Rect(0, 0, 1024, 1024))
	for i := range img.Pix {
		img.Pix[i] = uint8(128 + i%4096/200 + i/4096/20 + int(3*x[i%elements])) // a gradient and a little noise
		if i%4 == 3 {
			img.Pix[i] = 255
		}
	}
	file, err := media.EncodePNG(img)
	if err != nil {
		b.Fatal(err)
	}
	data, other := tensor.F32.AppendFloats(nil, x), make([]byte, 4*elements)
	event := &schemas.Step{Latents: []schemas.IndexedTensor{{Tensor: schemas.Tensor{
		DType: "F32", Shape: []int64{4096, 64}, Data: data,
	}}}}
	disk := filepath.Join(b.TempDir(), "disk")
	parts := []struct {
		name string
		size int
		run  func() error
	}{
		{"memcpy", 4 * elements, func() error { copy(other, data); return nil }},
		{"blake3", 4 * elements, func() error { schemas.BLAKE3.Sum(data); return nil }},
		{"disk", 4 * elements, func() error { return os.WriteFile(disk, data, 0o600) }},
		{"noise", 4 * elements, func() error { flow.StepNoise(noise, 1, 2); return nil }},
		{"draw/F32", 4 * elements, func() error { return step.Draw(next, mean, x, v, noise, tensor.F32) }},
		{"draw/BF16", 4 * elements, func() error { return step.Draw(next, mean, x, v, noise, tensor.BF16) }},
		{"log_prob", 4 * elements, func() error { _, err := step.LogProb(flow.Density, x, v, next); return err }},
		{"tensor/F32", 4 * elements, func() error { other = tensor.F32.AppendFloats(other[:0], x); return nil }},
		{"tensor/BF16", 4 * elements, func() error { other = tensor.BF16.AppendFloats(other[:0], x); return nil }},
		{"event", 4 * elements, func() error { other, err = schemas.AppendEncode(other[:0], event); return err }},
		{"pixels_digest", 3 << 20, func() error { media.Of(img).Digest(); return nil }},
		{"png", 3 << 20, func() error { _, err := media.EncodePNG(img); return err }},
		{"png_decode", 3 << 20, func() error { _, err := media.Decode(file, media.ImageSize(1024, 1024)); return err }},
	}
	var memcpy float64
	for _, p := range parts {
		b.Run(p.name, func(b *testing.B) {
			began := processorTime(b)
			for b.Loop() {
				if err := p.run(); err != nil {
					b.Fatal(err)
				}
			}
			perByte := (processorTime(b) - began).Seconds() / float64(b.N) / float64(p.size)
			if p.name == "memcpy" {
				memcpy = perByte
			}
			b.ReportMetric(1e-6/perByte, "MB/cpu-s")
			b.ReportMetric(perByte/memcpy, "x-memcpy")
		})
	}
}
