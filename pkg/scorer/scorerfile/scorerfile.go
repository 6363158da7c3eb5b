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
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/httpscore"
	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
	"github.com/meander-rl/meander/schemas"
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

// parse reads one YAML document from its nodes. The decoder of the library is not strict enough: it reads 1.0 as an
// integer and 20 as nanoseconds, and expands aliases.
func parse(data []byte) (File, error) {
	f := File{HTTP: map[string]httpscore.Config{}, NATS: map[string]natsscore.Config{}}
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return f, nil
	case err != nil:
		return File{}, err
	}
	var more yaml.Node
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return File{}, errors.New("more than one document")
	}
	err := eachEntry("", doc.Content[0], func(key string, node *yaml.Node) error {
		switch key {
		case "http":
			return readSection(key, node, f.HTTP, httpscore.DefaultConfig)
		case "nats":
			return readSection(key, node, f.NATS, natsscore.DefaultConfig)
		}
		return errors.New("unknown; must be one of http, nats")
	})
	return f, err
}

// readSection reads the instances of one kind.
func readSection[C any](kind string, node *yaml.Node, into map[string]C, def func() C) error {
	return eachEntry(kind, node, func(name string, node *yaml.Node) error {
		if err := wire.CheckName(name); err != nil {
			return err
		}
		cfg := def()
		err := setFields(kind+"."+name, node, reflect.ValueOf(&cfg).Elem())
		into[name] = cfg
		return err
	})
}

// setFields sets the fields of a struct from a map, by their keys.
func setFields(path string, node *yaml.Node, into reflect.Value) error {
	return eachEntry(path, node, func(key string, node *yaml.Node) error {
		var known []string
		for _, f := range schemas.Fields(into.Type()) {
			if f.Name == key {
				return setValue(path+"."+key, node, f.In(into))
			}
			known = append(known, f.Name)
		}
		return fmt.Errorf("unknown; must be one of %s", strings.Join(known, ", "))
	})
}

// eachEntry calls visit for each entry of a map and joins the faults, each with its line and path. null is an empty
// map.
func eachEntry(path string, node *yaml.Node, visit func(key string, node *yaml.Node) error) error {
	if node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
		return nil
	}
	if node.Kind != yaml.MappingNode {
		return withLine(node, path, errors.New("must be a map"))
	}
	var errs []error
	seen := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		inner := strings.TrimPrefix(path+"."+key.Value, ".")
		switch {
		case key.Kind != yaml.ScalarNode || value.Kind == yaml.AliasNode:
			errs = append(errs, withLine(key, inner, errors.New("aliases and composed keys are not read")))
		case seen[key.Value]:
			errs = append(errs, withLine(key, inner, errors.New("comes twice")))
		default:
			seen[key.Value] = true
			errs = append(errs, withLine(key, inner, visit(key.Value, value)))
		}
	}
	return errors.Join(errs...)
}

// fault is an error that knows its line.
type fault struct{ error }

// withLine adds line and path to an error, unless it has them from further down.
func withLine(node *yaml.Node, path string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ Unwrap() []error }); ok {
		return err // faults further down
	}
	if _, ok := errors.AsType[fault](err); ok {
		return err
	}
	return fault{fmt.Errorf("line %d: %s: %w", node.Line, path, err)}
}

var duration = reflect.TypeFor[time.Duration]()

// setValue sets a field from a node, by the type of the field.
func setValue(path string, node *yaml.Node, into reflect.Value) error {
	tag := node.ShortTag()
	refuse := func(want string) error {
		if node.Kind != yaml.ScalarNode {
			return fmt.Errorf("must be %s", want)
		}
		return fmt.Errorf("%s; must be %s", wire.Quote(node.Value), want)
	}
	switch {
	case into.Type() == duration:
		d, err := time.ParseDuration(node.Value)
		if err != nil || node.Kind != yaml.ScalarNode {
			return refuse("a duration with its unit, such as 20s")
		}
		into.SetInt(int64(d))
	case into.Kind() == reflect.String:
		if tag != "!!str" {
			return refuse("a text, in quotes")
		}
		into.SetString(node.Value)
	case into.Kind() == reflect.Int:
		n, err := strconv.Atoi(node.Value)
		if tag != "!!int" || err != nil {
			return refuse("a whole number")
		}
		into.SetInt(int64(n))
	case into.Kind() == reflect.Float64:
		x, err := strconv.ParseFloat(node.Value, 64)
		if tag != "!!int" && tag != "!!float" || err != nil {
			return refuse("a number")
		}
		into.SetFloat(x)
	case into.Type() == reflect.TypeFor[map[string]string]():
		m := map[string]string{}
		err := eachEntry(path, node, func(key string, node *yaml.Node) error {
			if node.ShortTag() != "!!str" {
				return errors.New("must be a text, in quotes") // without the value: it may be a secret
			}
			m[key] = node.Value
			return nil
		})
		into.Set(reflect.ValueOf(m))
		return err
	default:
		return fmt.Errorf("a field of type %v cannot be read", into.Type())
	}
	return nil
}
