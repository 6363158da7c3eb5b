package httpscore_test

import (
	"bufio"
	"context"
	"image"
	"image/color"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

// The server in Python that ships as an example reads our images as we do.
func TestExampleServer(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3 on PATH: the example server did not run")
	}
	server := exec.CommandContext(context.WithoutCancel(t.Context()), python,
		filepath.Join("..", "..", "..", "deploy", "scorers", "http_server.py"), "--port", "0")
	server.Env, server.Stderr = append(os.Environ(), "SCORE_TOKEN=s3cret"), os.Stderr
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	_, url, ok := strings.Cut(strings.TrimSpace(line), "listening on ")

	t.Run("scores", func(t *testing.T) {
		if !ok {
			t.Fatalf("the server says %q", line)
		}
		t.Setenv("SCORE_TOKEN", "s3cret")
		cfg := config(url)
		cfg.Headers, cfg.MaxBatch = map[string]string{"Authorization": "Bearer ${SCORE_TOKEN}"}, 4
		s := open(t, cfg)
		noise := scorer.Input{Media: media.Of(image.NewNRGBA(image.Rect(0, 0, 37, 19)))}
		smooth := scorer.Input{Media: media.Of(image.NewNRGBA(image.Rect(0, 0, 37, 19)))} // other filters of PNG
		rng := rand.New(rand.NewPCG(1, 2))
		var sums [2]float64
		for y := range 19 {
			for x := range 37 {
				for i, c := range []color.NRGBA{
					{uint8(rng.Uint32()), uint8(rng.Uint32()), uint8(rng.Uint32()), 255},
					{uint8(3 * x), uint8(5*y + x), uint8(x * y / 3), 255},
				} {
					[]scorer.Input{noise, smooth}[i].Media.Frames[0].SetNRGBA(x, y, c)
					sums[i] += 0.299*float64(c.R) + 0.587*float64(c.G) + 0.114*float64(c.B)
				}
			}
		}
		results := s.ScoreBatch(t.Context(), []scorer.Input{
			noise, smooth,
			flat(color.NRGBA{R: 255, G: 255, B: 255, A: 255}),
		})
		for i, want := range []float64{sums[0] / (255 * 37 * 19), sums[1] / (255 * 37 * 19), 1} {
			if r := results[i]; r.Err != nil || math.Abs(r.Value-want) > 1e-12 {
				t.Errorf("image %d: %+v, want %v", i, r, want)
			}
		}
		cfg.Image = "jpeg" // which this server does not read
		if _, err := open(t, cfg).Score(t.Context(), noise); err == nil ||
			!strings.Contains(err.Error(), "no PNG file") {
			t.Errorf("a JPEG image: %v", err)
		}
		cfg.Headers = nil
		if _, err := open(t, cfg).Score(t.Context(), noise); err == nil ||
			!strings.Contains(err.Error(), "status 401") {
			t.Errorf("without the token: %v", err)
		}
	})
	if err := server.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if err := server.Wait(); err != nil {
		t.Errorf("the server ends with %v, want a clean exit", err)
	}
}
