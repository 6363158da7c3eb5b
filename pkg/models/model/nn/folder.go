package nn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
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
	// Arguments are those of a pipeline's call, which its worker reads.
	Arguments json.RawMessage `json:"arguments"`
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

// MaxConfigFile bounds a JSON file of a model folder, in bytes.
const MaxConfigFile = 1 << 20

// Elsewhere is for readers of a part of a file: another reader accounts for all its keys.
var Elsewhere = strictjson.Unused{"*": "another reader of the file accounts for it"}

// ReadJSON decodes a file of a folder, of at most MaxConfigFile bytes, into each of the targets. A key that none
// of them takes, and that is not unused, is an error.
func ReadJSON(folder *safetensors.Folder, name string, unused strictjson.Unused, into ...any) error {
	b, err := folder.Read(name, MaxConfigFile)
	if err != nil {
		return err
	}
	if err := strictjson.Unmarshal(b, unused, into...); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// ReadOptionalJSON is ReadJSON of a file that may be absent: the targets are left as they are then.
func ReadOptionalJSON(folder *safetensors.Folder, name string, unused strictjson.Unused, into ...any) error {
	if err := ReadJSON(folder, name, unused, into...); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Faults collects what is wrong with a file, field by field.
type Faults []error

// Check notes a fault if ok is false.
func (f *Faults) Check(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Errorf(format, args...))
	}
}

// Within notes a fault if v is outside least to most.
func (f *Faults) Within(field string, v, least, most int) {
	f.Check(least <= v && v <= most, "%s: %d; must be %d to %d", field, v, least, most)
}

// Of returns the faults as one error about a file, or nil.
func (f Faults) Of(name string) error {
	if len(f) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", name, errors.Join(f...))
}
