package remote

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// Tolerances of samples that are computed again, by the element type of the network.
const (
	toleranceF32 = 1e-5
	toleranceF16 = 5e-2 // f16 and bf16
)

// maxFrames bounds the frames of a video: events have no more.
const maxFrames = 1 << 10

// deterministic is the part of a backend's name which says that bits do not depend on the rows beside.
const deterministic = "/deterministic"

// classOf returns the class of the pipeline in a folder.
func classOf(dir string) (string, error) {
	var index struct {
		Class string `json:"_class_name"`
	}
	err := model.ReadIndex(dir, model.IndexFile, &index)
	return index.Class, err
}

// cardOf makes a card, without digest and backend; defaults in the folder's meander.json come first.
func cardOf(folder *safetensors.Folder, dir string, c wire.Card) (card model.Card, err error) {
	d := nn.Defaults{
		Frames: c.Size.Frames, Height: c.Size.Height, Width: c.Size.Width, NumInferenceSteps: c.NumInferenceSteps,
		TrueCFGScale: c.TrueCFGScale,
	}
	if err := d.Read(folder); err != nil {
		return card, err
	}
	scheduler, err := nn.ReadScheduler(folder)
	if err != nil {
		return card, err
	}
	p := c.Latent.Patch
	var f nn.Faults
	f.Check(p[0] == 1, "patch: %v; must be 1 frame deep: tokens of several latent frames are not supported", p)
	f.Within("temporal", c.Latent.Temporal, 1, 64)
	f.Check(c.FramesRule == c.Latent.Temporal, "frames_rule: %d; must be %d, as temporal", c.FramesRule,
		c.Latent.Temporal)
	f.Within("max_frames", c.MaxFrames, 0, maxFrames)
	f.Check(p[1] == p[2], "patch: %v; must be square", p)
	f.Within("channels", c.Latent.Channels, 1, 1<<24)
	f.Within("patch", p[1], 1, 64)
	f.Within("scale", c.Latent.Scale, 1, 1<<10)
	f.Check(c.Prompts >= 1 && c.Prompts <= 3, "prompts: %d; must be 1 to 3", c.Prompts)
	f.Check(c.Scheduler == "" || json.Valid([]byte(c.Scheduler)), "scheduler: %.80q; must be JSON", c.Scheduler)
	if err := f.Of("card of the worker"); err != nil {
		return card, err
	}
	card = c.Card
	card.Name, card.Source = model.NameOf(dir), hub.Source(dir)
	card.SchedulerConfig, card.Reward = scheduler, d.Reward
	if c.Scheduler != "" {
		card.SchedulerConfig = json.RawMessage(c.Scheduler)
	}
	card.LatentChannels, card.PixelsPerToken = c.Latent.Channels*p[1]*p[2], c.Latent.Scale*p[1]
	card.FramesPerToken, card.MaxFrames = c.Latent.Temporal, max(c.MaxFrames, d.Frames)
	card.Size = media.Size{Frames: d.Frames, Height: d.Height, Width: d.Width}
	card.NumInferenceSteps, card.TrueCFGScale = d.NumInferenceSteps, d.TrueCFGScale
	card.MaxPixels, card.Masks = max(c.MaxPixels, d.Height*d.Width), map[string]string{}
	for _, t := range c.Conditioning {
		card.Conditioning = append(card.Conditioning, t.Name)
		if t.Mask != "" {
			card.Masks[t.Name] = t.Mask
		}
	}
	return card, nil
}

// setPrecision sets what depends on what computes. A worker that loads may choose its element type yet.
func setPrecision(card *model.Card, backend, dtype string, loading bool) error {
	card.Backend, card.LatentsDType = backend, ""
	if dtype == "bf16" { // the network casts states before it computes
		card.LatentsDType = tensor.BF16
	}
	card.IndependentRows = strings.HasSuffix(backend, deterministic) || strings.Contains(backend, deterministic+"/")
	switch {
	case backend == "" || len(backend) > 200:
		return fmt.Errorf("backend of the worker: %.200q; must be 1 to 200 bytes", backend)
	case card.IndependentRows:
		card.Tolerance = 0
	case dtype == "f32":
		card.Tolerance = toleranceF32
	case dtype == "f16" || dtype == "bf16" || loading: // it may not have chosen yet
		card.Tolerance = toleranceF16
	default:
		return fmt.Errorf("dtype of the worker: %.40q; must be f32, f16 or bf16", dtype)
	}
	return nil
}

// parts are the networks in a folder of diffusers, tokenizers the folders of its tokenizers, as far as there.
var (
	parts      = []string{"text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "transformer_2", "vae"}
	tokenizers = []string{"tokenizer", "tokenizer_2", "tokenizer_3"}
	// tokenizerFiles are what a tokenizer is read from.
	tokenizerFiles = []string{
		"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json", "spiece.model",
		"chat_template.jinja",
	}
)

// partsOf returns the networks of a folder that model_index.json does not go without.
func partsOf(folder *safetensors.Folder) (in []string, err error) {
	var index map[string]json.RawMessage
	if err := nn.ReadOptionalJSON(folder, model.IndexFile, nn.Elsewhere, &index); err != nil {
		return nil, err
	}
	for _, part := range append(slices.Clone(parts), others(index)...) {
		if strings.HasPrefix(part, "tokenizer") {
			continue
		}
		var names []*string
		if json.Unmarshal(index[part], &names) == nil && len(names) == 2 && names[1] == nil {
			continue
		}
		_, err := folder.Stat(part + "/config.json")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		in = append(in, part)
	}
	if len(in) == 0 {
		return nil, fmt.Errorf("no networks; must have %s, each with a config.json", strings.Join(parts, ", "))
	}
	return in, nil
}

// digestOf returns the digest of a folder's configurations, tokenizers and weights, and of how model_index.json has
// networks used: where this program computes the class, too, it is that of its own family. It reads all weights.
func digestOf(folder *safetensors.Folder, hashes *safetensors.Hashes, progress model.Progress) (string, error) {
	in, err := partsOf(folder)
	if err != nil {
		return "", err
	}
	d := safetensors.NewDigest()
	d.Share(hashes)
	var names []string
	for _, part := range in {
		names = append(names, part+"/config.json")
	}
	for _, t := range tokenizers {
		for _, file := range tokenizerFiles {
			names = append(names, t+"/"+file)
		}
	}
	var index map[string]json.RawMessage
	if err := nn.ReadOptionalJSON(folder, model.IndexFile, nn.Elsewhere, &index); err != nil {
		return "", err
	}
	for _, other := range others(index) {
		if !slices.Contains(in, other) { // a processor, or one more tokenizer
			for _, file := range append([]string{"preprocessor_config.json"}, tokenizerFiles...) {
				names = append(names, other+"/"+file)
			}
		}
	}
	if err := d.Files(folder, tokenizer.MaxFile, names...); err != nil {
		return "", err
	}
	if err := addIndex(d, folder); err != nil {
		return "", err
	}
	for _, part := range in {
		a, err := folder.Archive(part)
		if err != nil {
			return "", err
		}
		total, done := 0, 0
		for _, f := range a.Files() {
			total += len(f.Bytes)
		}
		d.Archive(part, a, func(bytes int) {
			if done += bytes; progress != nil {
				progress(part, done, total)
			}
		})
		if err := a.Close(); err != nil {
			return "", err
		}
	}
	return d.Hex(), nil
}

// addIndex adds what the networks compute by, and is in none of their files: from where a second network takes over,
// the layers of a text encoder that are read, and the frames of a second, which pipelines of LTX and SVD take.
func addIndex(d *safetensors.Digest, folder *safetensors.Folder) error {
	var index struct {
		Class         string   `json:"_class_name"`
		BoundaryRatio *float64 `json:"boundary_ratio"`
		Layers        []int    `json:"text_encoder_select_layers"`
	}
	var defaults struct {
		FPS *float64 `json:"fps"`
	}
	if err := errors.Join(nn.ReadOptionalJSON(folder, model.IndexFile, nn.Elsewhere, &index),
		nn.ReadOptionalJSON(folder, nn.DefaultsFile, nn.Elsewhere, &defaults)); err != nil {
		return err
	}
	if index.BoundaryRatio != nil {
		fmt.Fprintf(d, "boundary_ratio %g\n", *index.BoundaryRatio)
	}
	if index.Layers != nil {
		fmt.Fprintf(d, "text_encoder_select_layers %d\n", index.Layers)
	}
	takesFPS := strings.HasPrefix(index.Class, "LTX") || index.Class == "StableVideoDiffusionPipeline"
	if defaults.FPS != nil && takesFPS {
		fmt.Fprintf(d, "fps %g\n", *defaults.FPS)
	}
	return nil
}
