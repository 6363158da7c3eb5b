package ui_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/ui"
)

// serveModel starts all services with a model of the project.
func (s *served) serveModel(t *testing.T, name string) *bustest.Service {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model = name
	return s.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return pipeline.Run(ctx, b, config, zerolog.Nop())
	})
}

const models = "../../deploy/models/"

// startWorld serves a page of a pipeline of images and texts, with runs of each kind: images of two data sources (signs
// and again), a tree, samples of several stages, scheduled sampling, texts with logits, samples that wait for verdicts,
// a pushed policy and dead letters.
func startWorld(t *testing.T) *served {
	t.Helper()
	words, err := tokenizer.Load(models + "sums")
	if err != nil {
		t.Fatal(err)
	}
	s := servePage(t, func(c *ui.Config) {
		c.Admin, c.Where, c.Piece = true, "nats://127.0.0.1:4222", words.Piece
		c.Again = func(run schemas.Run, prompts []view.Given, _ bool) *view.Again {
			return &view.Again{
				Command: fmt.Sprintf("meander run --run %s-again # %d prompts", run, len(prompts)),
				Python:  "import meander\n", Notes: []string{"A note with 'meander up' in it."},
			}
		}
		c.Doctor = func(context.Context) any {
			return []object{
				{"area": "streams", "state": "fault", "says": "MDR_STEPS is full: 8.0 GiB of 8.0 GiB", "fix": "free old groups with 'meander gc --gc-age 24h'"},
				{"area": "server", "state": "ok", "says": "answers in 1 ms"},
			}
		}
	}, bustest.TCP)
	s.serveModel(t, models+"signs")
	s.serveModel(t, models+"sums")
	bustest.Await(t, s.Bus, 2, schemas.StreamPolicies)
	adapter, err := lora.Open("../../deploy/demo/adapter")
	if err != nil {
		t.Fatal(err)
	}
	push := client.Push{Lane: "signs", By: "ann", Note: "the first adapter"}
	c := client.New(s.Bus)
	pushed, err := c.PushPolicy(t.Context(), adapter, push)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.AwaitPolicy(t.Context(), pushed); err != nil {
		t.Fatal(err)
	}
	closed := s.publishSigns(t) + s.publishSums(t) + s.publishStages(t)
	s.publishRefused(t)
	bustest.Await(t, s.Bus, closed, schemas.StreamAdvantages)
	bustest.Await(t, s.Bus, 3, schemas.StreamTrajectories, schemas.TrajectoryFilter("judged", "*"))
	bustest.Dead(t, s.Bus, 2)
	return s
}

// publishSigns publishes prompts for images, and returns how many groups of them close.
func (s *served) publishSigns(t *testing.T) (closed int) {
	t.Helper()
	signs := func(run schemas.Run, uid schemas.UID, text string, change func(*schemas.Prompt)) {
		s.publish(t, run, uid, text, func(p *schemas.Prompt) {
			p.Model, p.GroupSize, p.Reward = "signs", new(int64(4)), []schemas.RewardSpec{{Name: "glyph"}}
			p.NumInferenceSteps, p.Height, p.Width, p.Rollout = new(int64(10)), nil, nil, schemas.Rollout{}
			if change != nil {
				change(p)
			}
		})
	}
	for _, run := range []schemas.Run{"again", "signs"} {
		for i, word := range []string{"EXIT", "OPEN", "4071", "SCHOOL", "BAKERY", "17", "TAXI", "308", "QKZ", "5562"} {
			closed++
			colour := []string{"red", "blue", "green", "black"}[i%4]
			signs(run, schemas.UID(fmt.Sprintf("p%02d", i)), fmt.Sprintf("a %s sign that says %q", colour, word),
				func(p *schemas.Prompt) {
					source := map[bool]string{true: "numbers", false: "words"}[strings.ContainsAny(word, "0123456789")]
					p.Seed = new(int64(i + map[schemas.Run]int{"again": 100}[run]))
					var err error
					if p.Metadata, err = schemas.MetadataFrom(map[string]any{"data_source": source}); err != nil {
						t.Fatal(err)
					}
					if i == 4 { // one whose rewards differ
						p.Prompt, p.Seed, p.GroupSize = `a black sign that says "QKZ"`, new(*p.Seed+1), new(int64(12))
					}
				})
		}
	}
	signs("tree", "t", `a red sign that says "OPEN"`, func(p *schemas.Prompt) {
		p.GroupSize, p.Tree = nil, &schemas.Tree{Branches: []schemas.BranchPoint{
			{StepIndex: 3, Width: 2},
			{StepIndex: 5, Width: 2},
		}}
	})
	signs("scheduled", "s", `a red sign that says "OPEN"`, func(p *schemas.Prompt) {
		p.GroupSize, p.NumInferenceSteps = new(int64(2)), nil
		p.Reward = []schemas.RewardSpec{{Name: "jpeg_compressibility"}}
		p.Start = &schemas.Start{Data: &schemas.Data{Images: []schemas.DataImage{
			{Data: grey(t, 64, 64)},
			{Data: grey(t, 64, 64)},
		}}}
		p.ScheduledSampling = &schemas.ScheduledSampling{
			Probability: new(1.0), MaxStepOffset: new(int64(5)),
			BaseTimesteps: []float64{20, 30}, Timesteps: new(int64(50)), Decode: true,
		}
	})
	signs("judged", "v", `a blue sign that says "TAXI"`, func(p *schemas.Prompt) {
		p.GroupSize, p.Reward, p.Deadline = new(int64(3)), []schemas.RewardSpec{{Name: "external:taste"}},
			new(time.Now().Add(time.Hour).UnixNano())
	})
	return closed + 2 // the tree, and scheduled sampling
}

// publishSums publishes prompts for texts, and returns how many groups of them close.
func (s *served) publishSums(t *testing.T) (closed int) {
	t.Helper()
	for i, sum := range []string{"347+58=?", "612-274=?", "805-806=?"} {
		closed++
		s.publish(t, "sums", schemas.UID(fmt.Sprintf("q%d", i)), sum, func(p *schemas.Prompt) {
			p.Model, p.ImageSettings, p.GroupSize, p.Reward = "sums", schemas.ImageSettings{}, new(int64(4)), nil
			p.Text = &schemas.Text{Logits: &schemas.Logits{Form: schemas.LogitsTopK}}
		})
	}
	return closed
}

// publishRefused publishes prompts that intake refuses.
func (s *served) publishRefused(t *testing.T) {
	t.Helper()
	for i := range 2 {
		bad := &schemas.Prompt{UID: "x", Prompt: "a sign"}
		bad.Model, bad.Height = "signs", new(int64(17+i))
		data, err := schemas.Encode(bad)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.PublishPrompt(t.Context(), "odd", data, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// startAllButSamplers starts intake and the reward service.
func (s *served) startAllButSamplers(t *testing.T) {
	t.Helper()
	s.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return intake.Run(ctx, intake.DefaultConfig(), b, zerolog.Nop())
	})
	s.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return reward.Run(ctx, reward.DefaultConfig(), b, zerolog.Nop())
	})
	bustest.Until(t, "the reward service is there", func() error {
		if got := fmt.Sprint(get[object](t, s, "system")["present"]); !strings.Contains(got, "reward") ||
			strings.Contains(got, "sampler") {
			return errors.New(got)
		}
		return nil
	})
}

// grey returns a grey image as a PNG.
func grey(t *testing.T, width, height int) []byte {
	t.Helper()
	var buf bytes.Buffer
	if err := png.Encode(&buf, image.NewGray(image.Rect(0, 0, width, height))); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}
