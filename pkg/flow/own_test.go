package flow

import (
	"slices"
	"strings"
	"testing"
)

func TestOwn(t *testing.T) {
	own := &Own{Sigmas: [][]float32{{1, 0.75, 0}, {1, 0.9, 0.5, 0.25, 0}}, Tokens: 16}
	s := Schedule{Grid: GridPipeline, Own: own}
	got, err := s.Sigmas(2, 16)
	if err != nil || !slices.Equal(got, own.Sigmas[0]) {
		t.Errorf("sigmas of two steps: %v, %v", got, err)
	}
	for what, c := range map[string]struct {
		steps, tokens int
		want          string
	}{
		"other steps":  {3, 16, "must be one of 2, 4"},
		"another size": {2, 64, "must be the 16 of the default size"},
	} {
		if _, err := s.Sigmas(c.steps, c.tokens); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
	own.Tokens = 0
	if _, err := s.Sigmas(2, 64); err != nil {
		t.Errorf("sigmas of any size: %v", err)
	}
	if _, err := s.Shifted([]float64{1, 0.5}, 16); err == nil || !strings.Contains(err.Error(), "shift of its own") {
		t.Errorf("sigmas of a prompt: %v", err)
	}
	for what, bad := range map[string]Schedule{
		"no list":           {Grid: GridPipeline, Own: &Own{}},
		"a list that rises": {Grid: GridPipeline, Own: &Own{Sigmas: [][]float32{{0.5, 0.75, 0}}}},
		"above 1":           {Grid: GridPipeline, Own: &Own{Sigmas: [][]float32{{1.5, 0}}}},
		"of no pipeline":    {Grid: GridPipeline, NumTrainTimesteps: 1000, Shift: 1},
	} {
		if err := bad.Validate(); err == nil {
			t.Errorf("%s: valid", what)
		}
	}
}
