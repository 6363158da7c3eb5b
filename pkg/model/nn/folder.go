package nn

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/meander-rl/meander/pkg/safetensors"
)

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
