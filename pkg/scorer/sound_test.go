package scorer_test

import (
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

// tone returns a second of a sine in two channels, of which one has half the amplitude.
func tone(amplitude, hertz float64) media.Sound {
	s := media.Sound{Channels: 2, Rate: 8000}
	for i := range s.Rate {
		x := amplitude * math.Sin(2*math.Pi*hertz*float64(i)/float64(s.Rate))
		s.Values = append(s.Values, float32(x), float32(x/2))
	}
	return s
}

// joined returns one sound after the other.
func joined(sounds ...media.Sound) media.Sound {
	all := media.Sound{Channels: sounds[0].Channels, Rate: sounds[0].Rate}
	for _, s := range sounds {
		all.Values = append(all.Values, s.Values...)
	}
	return all
}

// The mean square of whole waves of a sine of amplitude a is a^2 / 2; with a channel of half of it 5 a^2 / 16.
func TestSound(t *testing.T) {
	constant := media.Sound{Values: []float32{1, -1, 1, -1}, Channels: 1, Rate: 4}
	nothing := media.Sound{Values: make([]float32, 16000), Channels: 2, Rate: 8000}
	short := joined(tone(1, 440), media.Sound{Values: make([]float32, 2), Channels: 2, Rate: 8000}) // of 51 windows
	for name, c := range map[string]struct {
		in     scorer.Input
		of     string
		want   float64
		within float64
	}{
		"full scale":            {scorer.Input{Media: media.Media{Sound: constant}}, scorer.Loudness, 0, 0},
		"a sine":                {scorer.Input{Media: media.Media{Sound: tone(1, 440)}}, scorer.Loudness, 10 * math.Log10(5.0/16), 1e-7},
		"an eighth of it":       {scorer.Input{Media: media.Media{Sound: tone(0.125, 1000)}}, scorer.Loudness, 10 * math.Log10(5.0/1024), 1e-7},
		"nothing":               {scorer.Input{Media: media.Media{Sound: nothing}}, scorer.Loudness, -120, 0},
		"half of it":            {scorer.Input{Media: media.Media{Sound: joined(nothing, tone(1, 440))}}, scorer.Loudness, 10 * math.Log10(5.0/32), 1e-7},
		"silence of nothing":    {scorer.Input{Media: media.Media{Sound: nothing}}, scorer.Silence, 1, 0},
		"silence of a sine":     {scorer.Input{Media: media.Media{Sound: tone(1, 440)}}, scorer.Silence, 0, 0},
		"silence of a half":     {scorer.Input{Media: media.Media{Sound: joined(nothing, tone(1, 440))}}, scorer.Silence, 0.5, 0},
		"silence in the end":    {scorer.Input{Media: media.Media{Sound: short}}, scorer.Silence, 1.0 / 51, 0},
		"silence below -20":     {scorer.Input{Media: media.Media{Sound: tone(0.1, 1000)}, Params: map[string]string{"below": "-20"}}, scorer.Silence, 1, 0},
		"no silence below -120": {scorer.Input{Media: media.Media{Sound: nothing}, Params: map[string]string{"below": "-120"}}, scorer.Silence, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := open(t, c.of).Score(t.Context(), c.in)
			if err != nil || math.Abs(got-c.want) > c.within {
				t.Errorf("%s: %v, %v; want %v", c.of, got, err, c.want)
			}
		})
	}
}

func TestSound_Refuses(t *testing.T) {
	for _, of := range []string{scorer.Loudness, scorer.Silence} {
		for _, bad := range []float64{math.NaN(), math.Inf(-1)} {
			s := tone(1, 440)
			s.Values[37] = float32(bad)
			_, err := open(t, of).Score(t.Context(), scorer.Input{Media: media.Media{Sound: s}})
			if err == nil || !strings.Contains(err.Error(), of+": the sound has values that are not finite") {
				t.Errorf("%s of %v: %v", of, bad, err)
			}
		}
		for _, c := range []struct {
			media []scorer.Medium
			fault string
		}{
			{[]scorer.Medium{scorer.MediumImage}, "rates sounds, and it would judge images"},
			{[]scorer.Medium{scorer.MediumText}, "rates images"},
			{[]scorer.Medium{scorer.MediumSound}, ""},
			{[]scorer.Medium{scorer.MediumVideo, scorer.MediumSound}, ""},
		} {
			err := scorer.CheckMedium(of, c.media...)
			if (err == nil) != (c.fault == "") || err != nil && !strings.Contains(err.Error(), c.fault) {
				t.Errorf("%s of %v: %v; want %q", of, c.media, err, c.fault)
			}
		}
	}
	if err := scorer.CheckMedium(scorer.Glyph, scorer.MediumSound); err == nil ||
		!strings.Contains(err.Error(), "would judge sounds") {
		t.Errorf("glyph of sounds: %v", err)
	}
	if err := scorer.Check(scorer.Silence, "", "", map[string]string{"below": "1"}); err == nil ||
		!strings.Contains(err.Error(), `params.below: "1"; must be a number from -120 to 0`) {
		t.Errorf("a bound above full scale: %v", err)
	}
}
