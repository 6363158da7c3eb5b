package nn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Open opens the folder dir, calls open with it, and closes the folder again.
func Open[M any](dir string, open func(*safetensors.Folder) (M, error)) (m M, err error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return m, fmt.Errorf("open model: %w", err)
	}
	opened, err := open(folder)
	if err = errors.Join(err, folder.Close()); err != nil {
		return m, fmt.Errorf("open model %q: %w", dir, err)
	}
	return opened, nil
}

// Adapted adds the LoRA in a file or folder, path, to base: adapt makes the new model, with the LoRA times scale; 0
// means 1. An empty path returns base itself. Otherwise base is closed, also after an error; what the new model shares
// with it stays open until that is closed, too. It is called by families that open a model with an adapter. It fails
// when the LoRA cannot be read, and as adapt does.
func Adapted[M io.Closer](base M, path string, scale float64, adapt func(...lora.Weighted) (M, error)) (m M,
	err error,
) {
	if path == "" {
		return base, nil
	}
	defer func() { _ = base.Close() }()
	adapter, err := lora.Open(path)
	if err != nil {
		return m, err
	}
	if scale == 0 {
		scale = 1
	}
	return adapt(lora.Weighted{Adapter: adapter, Weight: scale})
}

// Files in the folder of any family, besides its networks.
const (
	// schedulerFile is the scheduler configuration of diffusers.
	schedulerFile = "scheduler/scheduler_config.json"
	// DefaultsFile holds Defaults. It is optional, and diffusers ignores it.
	DefaultsFile = "meander.json"
)

// Defaults are the settings of images if a prompt has none.
type Defaults struct {
	Frames            int     `json:"frames"` // 1 for an image
	Height            int     `json:"height"` // pixels
	Width             int     `json:"width"`  // pixels
	NumInferenceSteps int     `json:"num_inference_steps"`
	TrueCFGScale      float64 `json:"true_cfg_scale"`
	// FPS is the frames of a second, of a video.
	FPS *float64 `json:"fps"`
	// Reward names reward functions that suit the images.
	Reward []string `json:"reward"`
}

// Read sets the fields that are in the folder's DefaultsFile, if there is one, and keeps the others.
func (d *Defaults) Read(folder *safetensors.Folder) error {
	return ReadOptionalJSON(folder, DefaultsFile, nil, d)
}

// ReadScheduler returns the folder's schedulerFile. It only checks that it is JSON, and of the class that
// model.IndexFile names: diffusers takes that one.
func ReadScheduler(folder *safetensors.Folder) ([]byte, error) {
	b, err := folder.Read(schedulerFile, MaxConfigFile)
	if err != nil {
		return nil, err
	}
	// diffusers writes so that nothing is clipped, which is not JSON and has no effect on sigmas.
	b = bytes.Replace(b, []byte(`"lambda_min_clipped": -Infinity`), []byte(`"lambda_min_clipped": null`), 1)
	if !json.Valid(b) {
		return nil, fmt.Errorf("read %s: not JSON", schedulerFile)
	}
	var config struct {
		Class string `json:"_class_name"`
	}
	_ = json.Unmarshal(b, &config) // faults are reported where the schedule is parsed
	var index struct {
		Scheduler []string `json:"scheduler"`
	}
	if err := ReadOptionalJSON(folder, model.IndexFile, Elsewhere, &index); err != nil {
		return nil, err
	}
	if s := index.Scheduler; len(s) == 2 && s[1] != "" && config.Class != "" && s[1] != config.Class {
		return nil, fmt.Errorf("%s: _class_name: %q; must be %q, as in %s", schedulerFile, config.Class, s[1],
			model.IndexFile)
	}
	return b, nil
}
