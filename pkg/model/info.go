package model

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// Info describes a model folder without loading it.
type Info struct {
	Name, Family string
	// Parts are text_encoder, transformer and vae, as far as they could be read.
	Parts []PartInfo
	// Vocabulary is the number of token ids of the tokenizer, 0 where it cannot be read.
	Vocabulary int
	// LatentChannels, PixelsPerToken and the defaults are those of the Card; 0 where the
	// configurations cannot be read.
	LatentChannels, PixelsPerToken   int
	Height, Width, NumInferenceSteps int
	TrueCFGScale                     float64
	Reward                           []string
	// SchedulerConfig is the scheduler_config.json, unread but for being JSON; nil where
	// there is none.
	SchedulerConfig []byte
	// Problems is everything for which OpenQwenImage would refuse the folder: files,
	// tensors and fields that are missing, mis-shaped, unexpected or not supported. None
	// means that it loads.
	Problems []string
}

// PartInfo describes the checkpoint of one network.
type PartInfo struct {
	Name, Class string
	// Parameters is the elements of all tensors in the files, whether they are used or not.
	Parameters int
	// DTypes are the element types in the files, sorted.
	DTypes []string
	// Files is the number of files and FileBytes their size.
	Files, FileBytes int
	// MemoryBytes is what the loaded weights take.
	MemoryBytes int
}

// InspectQwenImage reads configurations and headers of a folder in the diffusers layout.
// An error means that it is no such folder at all; everything else is in Problems.
func InspectQwenImage(dir string) (_ *Info, err error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("inspect model: %w", err)
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	info := &Info{Name: NameOf(dir), Family: QwenImageFamily}
	problem := func(err error) {
		if err != nil {
			info.Problems = append(info.Problems, flatten(err)...)
		}
	}
	c, err := readConfigs(folder)
	if c == nil {
		return nil, fmt.Errorf("inspect model %q: %w", dir, err)
	}
	problem(err)
	if tok, err := loadTokenizer(folder, "tokenizer"); err != nil {
		problem(err)
	} else {
		info.Vocabulary = tok.Size()
		if c.text != nil {
			problem(c.fitTokenizer(tok))
		}
	}
	d := c.defaults
	info.Height, info.Width, info.NumInferenceSteps, info.TrueCFGScale, info.Reward = d.Height, d.Width, d.NumInferenceSteps, d.TrueCFGScale, d.Reward
	info.SchedulerConfig = c.scheduler
	if c.transformer != nil && c.vae != nil {
		info.LatentChannels, info.PixelsPerToken = c.transformer.In, c.pixelsPerToken()
	}
	for _, p := range []struct {
		name, class string
		check       func(a *safetensors.Archive) (int, error) // nil without a configuration
	}{
		{"text_encoder", "Qwen2_5_VLForConditionalGeneration", dryRun(c.text, loadTextEncoder)},
		{"transformer", "QwenImageTransformer2DModel", dryRun(c.transformer, loadMMDiT)},
		{"vae", "AutoencoderKLQwenImage", dryRun(c.vae, loadAutoencoder)},
	} {
		a, err := folder.Archive(p.name)
		if err != nil {
			problem(err)
			continue
		}
		part := PartInfo{Name: p.name, Class: p.class}
		part.Parameters, part.DTypes = count(a)
		for _, f := range a.Files() {
			part.Files++
			part.FileBytes += len(f.Bytes)
		}
		if p.check != nil {
			part.MemoryBytes, err = p.check(a)
			problem(err)
		}
		problem(a.Close())
		info.Parts = append(info.Parts, part)
	}
	return info, nil
}

// dryRun returns a check of a checkpoint against the table of its loader, which returns
// the memory that the weights would take.
func dryRun[C, M any](c *C, load func(*loader, *C) *M) func(*safetensors.Archive) (int, error) {
	if c == nil {
		return nil
	}
	return func(a *safetensors.Archive) (int, error) {
		l := newLoader(a, nil)
		load(l, c)
		return 4 * l.kept, l.finish()
	}
}

// flatten returns the lines of joined errors.
func flatten(err error) []string {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		var lines []string
		for _, e := range many.Unwrap() {
			lines = append(lines, flatten(e)...)
		}
		return lines
	}
	return []string{err.Error()}
}
