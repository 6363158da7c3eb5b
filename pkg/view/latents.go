package view

import (
	"context"
	"fmt"
	"image"
	"math"
	"sync"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// latentGrid returns the rows and columns of tokens of an image's latents; false: they are no grid.
func latentGrid(t *schemas.Trajectory) (rows, columns int, ok bool) {
	if len(t.LatentsShape) != 2 || t.LatentsShape[0] <= 0 || t.LatentsShape[1] <= 0 || t.Height <= 0 || t.Width <= 0 {
		return 0, 0, false
	}
	tokens := float64(t.LatentsShape[0])
	side := math.Sqrt(float64(t.Height) * float64(t.Width) / tokens)
	rows, columns = int(math.Round(float64(t.Height)/side)), int(math.Round(float64(t.Width)/side))
	return rows, columns, rows > 0 && columns > 0 && int64(rows*columns) == t.LatentsShape[0]
}

// IsGrid reports whether the states of a sample are those of an image, whose tokens are a grid.
func IsGrid(t *schemas.Trajectory) bool {
	_, _, grid := latentGrid(t)
	return grid && t.Frames <= 1
}

// StateImage draws a stored state of a sample with IsGrid in false colours: red, green and blue are its projections on
// the three principal components of the sample's last stored state, one pixel for each token. It needs no decoder, and
// shows where structure appears.
func (r *Reader) StateImage(ctx context.Context, t *schemas.Trajectory, index int64) ([]byte, error) {
	states, err := r.client.Latents(ctx, t)
	if err != nil {
		return nil, err
	}
	rows, columns, _ := latentGrid(t) // IsGrid has checked it
	last := t.LatentStepIndices[0]
	for _, i := range t.LatentStepIndices {
		last = max(last, i)
	}
	channels := int(t.LatentsShape[1])
	axes := principalAxes(states[last], channels)
	img := image.NewNRGBA(image.Rect(0, 0, columns, rows))
	for k, axis := range axes {
		values := make([]float64, rows*columns)
		for i := range values {
			for c, weight := range axis {
				values[i] += weight * float64(states[index][i*channels+c])
			}
		}
		mean, std := moments(values)
		for i, v := range values {
			level := 128 + 64*(v-mean)/max(std, 1e-9)
			img.Pix[4*i+k] = uint8(min(255, max(0, level)))
			img.Pix[4*i+3] = 255
		}
	}
	return media.EncodePNG(img)
}

// moments returns the mean and the standard deviation (by n) of values.
func moments(values []float64) (mean, std float64) {
	for _, v := range values {
		mean += v / float64(len(values))
	}
	for _, v := range values {
		std += (v - mean) * (v - mean) / float64(len(values))
	}
	return mean, math.Sqrt(std)
}

// principalAxes returns the three unit vectors [channels] along which the tokens of a state [S, channels] vary most, by
// power iteration with deflation on their covariance. The same state gives the same axes.
func principalAxes(state []float32, channels int) (axes [3][]float64) {
	n := len(state) / channels
	mean := make([]float64, channels)
	for i, v := range state {
		mean[i%channels] += float64(v) / float64(n)
	}
	covariance := make([]float64, channels*channels)
	row := make([]float64, channels)
	for i := range n {
		for c := range row {
			row[c] = float64(state[i*channels+c]) - mean[c]
		}
		for a, x := range row {
			for b, y := range row {
				covariance[a*channels+b] += x * y / float64(n)
			}
		}
	}
	for k := range axes {
		v := make([]float64, channels)
		for c := range v {
			v[c] = 1 / float64(1+(c+k)%channels)
		}
		value := 0.0
		for range 64 {
			next := make([]float64, channels)
			norm := 0.0
			for a := range next {
				for b := range v {
					next[a] += covariance[a*channels+b] * v[b]
				}
				norm += next[a] * next[a]
			}
			if value = math.Sqrt(norm); value < 1e-12 {
				break
			}
			for a := range next {
				v[a] = next[a] / value
			}
		}
		axes[k] = v
		for a := range v {
			for b := range v {
				covariance[a*channels+b] -= value * v[a] * v[b]
			}
		}
	}
	return axes
}

// maxSeenBytes is how many bytes of predictions a Reader keeps.
const maxSeenBytes = 32 << 20

// seen are the predictions that were asked for, the oldest first.
type seen struct {
	mu    sync.Mutex
	at    map[string][]byte
	order []string
	held  int
}

// Seen is Seen of a client, for a state of StatesOf; what was asked for before is kept for a while.
func (r *Reader) Seen(ctx context.Context, t *schemas.Trajectory, index int64) ([]byte, error) {
	key := fmt.Sprintf("%s %s %d", t.ContentDigest, t.WeightsDigest, index)
	r.seen.mu.Lock()
	data := r.seen.at[key]
	r.seen.mu.Unlock()
	if data != nil {
		return data, nil
	}
	data, err := r.client.Seen(ctx, t, index)
	if err == nil {
		r.seen.keep(key, data)
	}
	return data, err
}

// keep keeps a prediction, and drops the oldest ones that no longer fit.
func (s *seen) keep(key string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string][]byte{}
	}
	if s.at[key] != nil || len(data) > maxSeenBytes {
		return
	}
	s.at[key], s.order, s.held = data, append(s.order, key), s.held+len(data)
	for s.held > maxSeenBytes {
		s.held -= len(s.at[s.order[0]])
		delete(s.at, s.order[0])
		s.order = s.order[1:]
	}
}
