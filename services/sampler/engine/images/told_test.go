package images_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// A schedule of another library that differs by one bit is named, and so is one that it cannot make.
func TestScheduleDiffers(t *testing.T) {
	card := model.Card{
		Name: "m", SchedulerConfig: []byte(`{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}`),
		Grid: model.GridLinspace, Mu: model.MuNone, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
		Size: model.Size{Frames: 1, Height: 64, Width: 64}, NumInferenceSteps: 4, TrueCFGScale: 1,
	}
	schedule, err := sampling.Schedule(images.PolicyOf(card))
	if err != nil {
		t.Fatal(err)
	}
	ours, err := schedule.Sigmas(4, 16)
	if err != nil {
		t.Fatal(err)
	}
	told := func(change func(*model.Told)) string {
		x := model.Told{Steps: 4}
		for _, sigma := range ours {
			x.Sigmas = append(x.Sigmas, float64(sigma))
		}
		change(&x)
		card.Told = []model.Told{x}
		return images.ScheduleDiffers(card)
	}
	if got := told(func(*model.Told) {}); got != "" {
		t.Errorf("equal bits: %q", got)
	}
	for want, change := range map[string]func(*model.Told){
		"sigma 2 of 4 steps is":          func(x *model.Told) { x.Sigmas[2] = float64(float32(x.Sigmas[2]) + 6e-8) },
		"makes 4 sigmas, meander 5":      func(x *model.Told) { x.Sigmas = x.Sigmas[:4] },
		"makes no schedule of scheduler": func(x *model.Told) { x.Sigmas, x.Why = nil, "AttributeError: no such class" },
	} {
		if got := told(change); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A pipeline that is not tested yet has no grid, but that its scheduler is one whose grid is not computed is known.
func TestCheckSchedule_Untested(t *testing.T) {
	card := model.Card{
		Name: "m", Grid: model.GridPipeline, Mu: model.MuNone, LatentChannels: 64, PixelsPerToken: 16, NumInferenceSteps: 4,
		Size: model.Size{Frames: 1, Height: 64, Width: 64}, Pipeline: &model.Pipeline{Class: "EditPipeline"},
		SchedulerConfig: []byte(`{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}`),
	}
	if err := images.CheckSchedule(card); err != nil {
		t.Errorf("flow: %v", err)
	}
	card.Grid = model.GridDiffusion
	for want, scheduler := range map[string]string{
		"use_exponential_sigmas: true":     `{"_class_name": "EulerDiscreteScheduler", "use_exponential_sigmas": true}`,
		`_class_name: "EDMEulerScheduler"`: `{"_class_name": "EDMEulerScheduler"}`,
	} {
		card.SchedulerConfig = []byte(scheduler)
		if err := images.CheckSchedule(card); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// small is a pipeline that was tested at 8 x 8, where it may have other states than its card says.
type small struct {
	editor
	others bool
	sizes  *[]model.Size
}

func (small) Card() model.Card {
	return model.Card{
		LatentChannels: 4, PixelsPerToken: 8, MaxPixels: 1 << 20, Size: media.ImageSize(64, 64),
		Pipeline: &model.Pipeline{Admitted: media.ImageSize(8, 8)},
	}
}

func (s small) Velocity(_ context.Context, _ []model.Row, size model.Size) error {
	*s.sizes = append(*s.sizes, size)
	if s.others && size.Height == 8 {
		return model.ErrLatents
	}
	return nil
}

// A canary takes no longer than a turn of the test that the pipeline has passed.
func TestCanary_SizeOfTheTest(t *testing.T) {
	for others, want := range map[bool][]model.Size{
		false: {media.ImageSize(8, 8)}, true: {media.ImageSize(8, 8), media.ImageSize(64, 64)},
	} {
		var sizes []model.Size
		n := &images.Network{Model: small{others: others, sizes: &sizes}}
		if _, err := n.Canary(t.Context()); err != nil || !slices.Equal(sizes, want) {
			t.Errorf("others %v: at %v, want %v: %v", others, sizes, want, err)
		}
	}
}
