package model

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"path"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// modelConfigs is everything that a folder says besides its tensors.
type modelConfigs struct {
	text        *textConfig
	transformer *transformerConfig
	vae         *vaeConfig
	scheduler   []byte
	defaults    sampleDefaults
}

// sampleDefaults is meander.json, an optional file that diffusers ignores: what to paint
// where a prompt does not say.
type sampleDefaults struct {
	Height            int     `json:"height"`
	Width             int     `json:"width"`
	NumInferenceSteps int     `json:"num_inference_steps"`
	TrueCFGScale      float64 `json:"true_cfg_scale"`
	// Reward names reward functions that suit the pictures.
	Reward []string `json:"reward"`
}

// Paths in a model folder.
const (
	schedulerFile = "scheduler/scheduler_config.json"
	defaultsFile  = "meander.json"
)

// pixelsPerToken is the edge of what a token covers: a 2x2 patch of latents.
func (c *modelConfigs) pixelsPerToken() int { return 2 << c.vae.levels() }

// fitTokenizer checks that every token has an embedding.
func (c *modelConfigs) fitTokenizer(t *Tokenizer) error {
	if t.Size() > c.text.Vocabulary {
		return fmt.Errorf("tokenizer: ids up to %d, but text_encoder has vocab_size %d", t.Size()-1, c.text.Vocabulary)
	}
	return nil
}

// readConfigs reads and checks all configurations, reporting the faults of all. Without a
// model_index.json there are none, and it returns nil; otherwise a configuration with
// faults is nil.
func readConfigs(folder *safetensors.Folder) (*modelConfigs, error) {
	if _, err := readIndexConfig(folder); err != nil {
		return nil, err
	}
	c := &modelConfigs{defaults: sampleDefaults{Height: 1024, Width: 1024, NumInferenceSteps: 50, TrueCFGScale: 4}}
	var errs [5]error
	c.text, errs[0] = readTextConfig(folder, "text_encoder")
	c.transformer, errs[1] = readTransformerConfig(folder, "transformer")
	c.vae, errs[2] = readVAEConfig(folder, "vae")
	c.scheduler, errs[3] = folder.Read(schedulerFile, maxConfigFile)
	if errs[3] == nil && !json.Valid(c.scheduler) {
		c.scheduler, errs[3] = nil, fmt.Errorf("read %s: not JSON", schedulerFile)
	}
	if errs[4] = readJSON(folder, defaultsFile, &c.defaults); errors.Is(errs[4], fs.ErrNotExist) {
		errs[4] = nil
	}
	if err := errors.Join(errs[:]...); err != nil {
		return c, err
	}
	var f faults
	f.check(c.transformer.TextWidth == c.text.Width,
		"transformer joint_attention_dim = %d, but text_encoder hidden_size = %d", c.transformer.TextWidth, c.text.Width)
	f.check(c.transformer.Out == c.vae.Latents,
		"transformer out_channels = %d, but vae z_dim = %d", c.transformer.Out, c.vae.Latents)
	return c, errors.Join(f...)
}

// digest is the SHA-256 of a model: name, length and contents of every file that decides
// its results, in a fixed order.
type digest struct{ h hash.Hash }

// newDigest starts with configurations and tokenizer.
func newDigest(folder *safetensors.Folder) (*digest, error) {
	d := &digest{sha256.New()}
	for _, name := range []string{
		"text_encoder/config.json", "transformer/config.json", "vae/config.json",
		"tokenizer/tokenizer.json", "tokenizer/vocab.json", "tokenizer/merges.txt",
		"tokenizer/tokenizer_config.json", "tokenizer/added_tokens.json",
	} {
		b, err := folder.Read(name, maxTokenizerFile)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		d.file(name, b)
	}
	return d, nil
}

func (d *digest) file(name string, b []byte) {
	fmt.Fprintf(d.h, "%s %d\n", name, len(b))
	d.h.Write(b)
}

// archive adds the files of a checkpoint, headers included.
func (d *digest) archive(part string, a *safetensors.Archive) {
	for _, f := range a.Files() {
		d.file(path.Join(part, f.Name), f.Bytes)
	}
}

func (d *digest) hex() string { return hex.EncodeToString(d.h.Sum(nil)) }
