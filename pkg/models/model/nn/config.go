package nn

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

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
