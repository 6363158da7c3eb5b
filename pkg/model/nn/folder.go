package nn

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/safetensors"
)

// Open opens the model in a folder, which is closed again.
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

// Adapted returns a model plus the LoRA called name, which takes its place: adapt makes it, and
// what both share stays. scale 0 is 1; without a name it is the model itself.
func Adapted[M io.Closer](base M, name string, scale float64, adapt func(...lora.Weighted) (M, error)) (m M, err error) {
	if name == "" {
		return base, nil
	}
	defer func() { _ = base.Close() }()
	adapter, err := lora.Open(name)
	if err != nil {
		return m, err
	}
	if scale == 0 {
		scale = 1
	}
	return adapt(lora.Weighted{Adapter: adapter, Weight: scale})
}

// Files that a folder of any family has beside its networks.
const (
	// schedulerFile is that of diffusers.
	schedulerFile = "scheduler/scheduler_config.json"
	// DefaultsFile is optional, and diffusers ignores it.
	DefaultsFile = "meander.json"
)

// Defaults is what to paint where a prompt does not say.
type Defaults struct {
	Height            int     `json:"height"` // pixels
	Width             int     `json:"width"`  // pixels
	NumInferenceSteps int     `json:"num_inference_steps"`
	TrueCFGScale      float64 `json:"true_cfg_scale"`
	// Reward names reward functions that suit the images.
	Reward []string `json:"reward"`
}

// Read takes what the folder's DefaultsFile says, if there is one, and leaves the rest.
func (d *Defaults) Read(folder *safetensors.Folder) error {
	if err := ReadJSON(folder, DefaultsFile, d); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ReadScheduler returns the folder's schedulerFile, unread but for being JSON.
func ReadScheduler(folder *safetensors.Folder) ([]byte, error) {
	b, err := folder.Read(schedulerFile, MaxConfigFile)
	if err == nil && !json.Valid(b) {
		return nil, fmt.Errorf("read %s: not JSON", schedulerFile)
	}
	return b, err
}
