package nn

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// MaxConfigFile bounds a JSON file of a model folder, in bytes.
const MaxConfigFile = 1 << 20

// ReadJSON decodes a file of a folder, of at most MaxConfigFile bytes, into v.
func ReadJSON(folder *safetensors.Folder, name string, v any) error {
	b, err := folder.Read(name, MaxConfigFile)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// ReadOptionalJSON is ReadJSON of a file that may be absent: v is left as it is then.
func ReadOptionalJSON(folder *safetensors.Folder, name string, v any) error {
	if err := ReadJSON(folder, name, v); !errors.Is(err, fs.ErrNotExist) {
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
