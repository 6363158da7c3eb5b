// Package scorerfile reads the YAML file with the settings of reward functions that run outside this process:
//
//	http:
//	  clip: {url: "http://127.0.0.1:8900/score", headers: {Authorization: "Bearer ${CLIP_TOKEN}"}, max_batch: 8}
//	nats:
//	  pickscore: {timeout: 30s}
//
// makes http:clip and nats:pickscore. Keys are those of the Config of httpscore and natsscore; a missing key has the
// value of DefaultConfig. Reading is strict: an unknown key, a key that repeats, a duration without a unit, and an
// alias are errors with their line.
package scorerfile

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/httpscore"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
)

// maxFile bounds the file in bytes.
const maxFile = 1 << 20

// File is the content of a file: the settings of each instance, by its name.
type File struct {
	HTTP map[string]httpscore.Config
	NATS map[string]natsscore.Config
}

// Load reads and checks a file. It does not read the environment, connect, or open other files: Open does.
func Load(path string) (File, error) {
	data, err := readFile(path)
	if err != nil {
		return File{}, fmt.Errorf("scorers file: %w", err)
	}
	f, err := parse(data)
	if err == nil {
		err = f.Validate()
	}
	if err != nil {
		return File{}, fmt.Errorf("scorers file %q: %w", path, err)
	}
	return f, nil
}

// readFile returns the content of the file at path, at most maxFile bytes.
func readFile(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%q is larger than %d bytes", path, maxFile)
	}
	return data, err
}

// Validate joins all faults, each with its path in the file, such as http.clip.timeout.
func (f File) Validate() error {
	return errors.Join(checkConfigs(scorer.HTTP, f.HTTP), checkConfigs(scorer.NATS, f.NATS))
}

// checkConfigs joins the faults of all instances of one kind, each with its path in the file.
func checkConfigs[C interface{ Validate() error }](kind string, configs map[string]C) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		for _, err := range single(configs[name].Validate()) {
			errs = append(errs, fmt.Errorf("%s.%s.%w", kind, name, err))
		}
	}
	return errors.Join(errs...)
}

// single returns the faults that are joined in an error.
func single(err error) (each []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	switch {
	case err == nil:
		return nil
	case !ok:
		return []error{err}
	}
	for _, err := range joined.Unwrap() {
		each = append(each, single(err)...)
	}
	return each
}

// Open creates the scorers, sorted by name. Those of nats use nc; it may be nil if the file is only checked.
// The caller closes scorers that implement io.Closer. After an error no scorer stays open.
func (f File) Open(nc *nats.Conn) ([]scorer.Scorer, error) {
	var scorers []scorer.Scorer
	var errs []error
	add := func(s scorer.Scorer, err error) {
		if err != nil {
			errs = append(errs, err)
		} else {
			scorers = append(scorers, s)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.HTTP)) {
		add(httpscore.New(name, f.HTTP[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(f.NATS)) {
		add(natsscore.New(nc, name, f.NATS[name]))
	}
	if len(errs) > 0 {
		for _, s := range scorers {
			if c, ok := s.(io.Closer); ok {
				errs = append(errs, c.Close())
			}
		}
		return nil, errors.Join(errs...)
	}
	return scorers, nil
}
