package scorer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// Rewards of sounds, in dB of full scale: a sine of amplitude 1 has -3.01. They are computed in float64, and need no
// model.
const (
	// Loudness is 10 log10 of the mean square over all samples and channels, at least -120: no weight by frequency.
	Loudness = "loudness"
	// Silence is the share of windows of 20 ms, the last one shorter, whose loudness is below -50, 0 to 1. Params:
	//
	//	below  another bound, -120 to 0
	Silence = "silence"
)

const (
	leastLoudness = -120
	silentBelow   = -50
	windowsASec   = 50
)

var silenceParams = []string{"below"}

// sound is a function of the sound of a sample; params are checked.
type sound struct {
	name  string
	score func(in Input) (float64, error)
}

func (s sound) Name() string { return s.name }

func (sound) Version() string { return "1" }

// Score rates the sound of a sample. One without a sound, or whose values are not finite, is an error.
func (s sound) Score(ctx context.Context, in Input) (score float64, err error) {
	switch err = ctx.Err(); {
	case err != nil:
	case in.Media.Sound.Empty():
		err = errors.New("no sound")
	default:
		score, err = s.score(in)
	}
	if err == nil && (math.IsNaN(score) || math.IsInf(score, 0)) {
		err = errors.New("the sound has values that are not finite")
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", s.name, err)
	}
	return score, nil
}

// scoreLoudness computes Loudness.
func scoreLoudness(in Input) (float64, error) {
	return level(in.Media.Sound.Values), in.noParams()
}

// scoreSilence computes Silence.
func scoreSilence(in Input) (float64, error) {
	below, err := silenceBound(in.Params)
	if err != nil {
		return 0, err
	}
	s := in.Media.Sound
	window := max(1, s.Rate/windowsASec) * s.Channels
	silent, windows := 0.0, 0.0
	for at := 0; at < len(s.Values); at += window {
		of := level(s.Values[at:min(at+window, len(s.Values))])
		if windows++; of < below {
			silent++
		}
		if math.IsNaN(of) || math.IsInf(of, 0) {
			return of, nil
		}
	}
	return silent / windows, nil
}

// silenceBound returns the param below. Other params are errors.
func silenceBound(params map[string]string) (float64, error) {
	below := float64(silentBelow)
	for name, value := range params {
		if name != silenceParams[0] {
			return 0, fmt.Errorf("params: %q; must be %s", name, silenceParams[0])
		}
		var err error
		if below, err = strconv.ParseFloat(value, 64); err != nil || !(below >= leastLoudness && below <= 0) {
			return 0, fmt.Errorf("params.below: %q; must be a number from %d to 0", value, leastLoudness)
		}
	}
	return below, nil
}

// level returns the loudness of values.
func level(values []float32) float64 {
	sum := 0.0
	for _, x := range values {
		sum += float64(x) * float64(x)
	}
	db := 10 * math.Log10(sum/float64(len(values)))
	if db < leastLoudness {
		return leastLoudness
	}
	return db
}
