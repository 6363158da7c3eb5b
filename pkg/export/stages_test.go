package export_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// Each stage of a sample has a row: what samples share has one, with their mean reward; each has its own advantage.
func TestWriteDataset_Stages(t *testing.T) {
	b := serve(t, 0)
	size := schemas.ImageSettings{NumInferenceSteps: new(int64(3)), Height: new(int64(side)), Width: new(int64(side))}
	add(t, b, "g", func(p *schemas.Prompt) {
		p.ImageSettings, p.GroupSize = schemas.ImageSettings{}, new(int64(4))
		p.Stages = []schemas.StageSpec{
			{Name: "draft", Frozen: true, ImageSettings: size},
			{Name: "paint", Children: new(int64(2)), Prompt: "{prompt}, better", ImageSettings: size},
		}
	})
	for _, format := range export.Datasets() {
		folder := filepath.Join(t.TempDir(), format)
		x := write(t, b, export.DatasetOptions{Format: format, Folder: folder, Bytes: 1 << 30})
		if got := x.Totals(); got.Samples != 6 || got.LeftOut != 0 || got.Groups != 1 {
			t.Errorf("%s: %+v", format, got)
		}
	}
	folder := t.TempDir()
	write(t, b, export.DatasetOptions{Format: "parquet", Folder: folder, Bytes: 1 << 30})
	rows, err := parquet.ReadFile[export.Record](filepath.Join(folder, "00000.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	rewards := map[int64]float64{}
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%d.%s of %d: %s, advantage %t", r.SampleIndex, r.Stage, r.Samples, r.Prompt,
			r.Advantage != nil))
		if r.Stage == "paint" {
			rewards[r.SampleIndex] = *r.Reward
		}
	}
	want := []string{
		"0.draft of 2: a fox, g, advantage false", "0.paint of 1: a fox, g, better, advantage true",
		"1.paint of 1: a fox, g, better, advantage true", "2.draft of 2: a fox, g, advantage false",
		"2.paint of 1: a fox, g, better, advantage true", "3.paint of 1: a fox, g, better, advantage true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows %q", got)
	}
	for _, r := range rows {
		if mean := (rewards[r.SampleIndex] + rewards[r.SampleIndex+1]) / 2; r.Stage == "draft" && *r.Reward != mean {
			t.Errorf("reward %v of what leads to rewards with the mean %v", *r.Reward, mean)
		}
	}
}
