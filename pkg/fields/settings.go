package fields

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/schemas"
)

const (
	// maxFile bounds a file of settings.
	maxFile = 1 << 20
	// secretMask stands for a secret in what is printed.
	secretMask = "***"
)

// Load writes what the variables, of environ (as of os.Environ), and the file (empty: none) say to the settings that no
// flag has given; variables come before the file. All faults are joined; each names the setting and where it is from.
func (s *Set) Load(file string, environ []string) error {
	err := s.loadEnv(environ)
	if file != "" {
		err = errors.Join(s.loadFile(file), err)
	}
	for _, v := range s.flags {
		if v.field.Secret == "true" && v.given == secretMask {
			err = errors.Join(err, fmt.Errorf("%s: %s; this is how a secret is printed, not the secret", v.field.Name,
				secretMask))
		}
	}
	return err
}

// foreignSection is the section of variables that others have too: no name in it is misspelt. pythonVariable is read by
// what starts Python, in whichever program.
const foreignSection, pythonVariable = "NATS_", "MEANDER_PYTHON"

// loadEnv takes settings from the environment. An unknown variable with the prefix of the program, or of a section
// (MEANDER_NATS_), is a fault: it is most likely misspelt.
func (s *Set) loadEnv(environ []string) error {
	var errs []error
	for _, line := range environ {
		name, text, _ := strings.Cut(line, "=")
		i := slices.IndexFunc(s.flags, func(v *flagValue) bool { return v.env == name })
		switch {
		case i >= 0:
			if err := s.flags[i].offer(text); err != nil {
				errs = append(errs, fmt.Errorf("environment: %s: %w", name, err))
			}
		case name != pythonVariable && slices.ContainsFunc(s.flags, func(v *flagValue) bool {
			leaf := strings.ToUpper(v.field.Name[strings.LastIndexByte(v.field.Name, '.')+1:])
			section := strings.TrimSuffix(v.env, leaf)
			return section != foreignSection && strings.HasPrefix(name, section)
		}):
			errs = append(errs, fmt.Errorf("environment: %s: unknown variable%s", name,
				s.didYouMean(name, func(v *flagValue) string { return v.env })))
		}
	}
	return errors.Join(errs...)
}

// didYouMean suggests what is nearest to an unknown name, by the names that the settings have.
func (s *Set) didYouMean(unknown string, nameOf func(*flagValue) string) string {
	var names []string
	for _, v := range s.flags {
		names = append(names, nameOf(v))
	}
	if near := schemas.Nearest(unknown, names); near != "" {
		return "; did you mean " + near + "?"
	}
	return ""
}

// offer sets a setting that was not given to what texts say: one, or the items of a list. Faults are reported even so.
func (v *flagValue) offer(texts ...string) error {
	taken := *v
	taken.to, taken.given = nil, nil
	if len(texts) == 0 {
		taken.text, taken.given = "", []string{}
	}
	for _, text := range texts {
		if err := taken.Set(text); err != nil {
			return fmt.Errorf("%s: %w", v.field.Name, err)
		}
	}
	if v.given == nil {
		v.give(taken.text, taken.given)
	}
	return nil
}

// loadFile takes settings from a YAML file. Unknown keys and bad values are faults.
func (s *Set) loadFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("config file %q: %w", path, errors.Unwrap(err))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	err = errors.Join(err, f.Close())
	if len(data) > maxFile {
		err = errors.Join(err, errors.New("more than 1MiB"))
	}
	file := map[string]any{}
	if err == nil {
		err = yaml.Unmarshal(data, &file)
	}
	if err != nil {
		return fmt.Errorf("config file %q: %w", path, err)
	}
	var errs []error
	for key, value := range flatten("", file) {
		if err := s.loadKey(key, value); err != nil {
			errs = append(errs, fmt.Errorf("config file %q: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// flatten yields the values of a section and of those in it, by their keys, sorted: "nats.url". An empty section is a
// value.
func flatten(prefix string, section map[string]any) func(yield func(string, any) bool) {
	return func(yield func(string, any) bool) {
		for _, key := range slices.Sorted(maps.Keys(section)) {
			value := section[key]
			if inner, ok := value.(map[string]any); ok && len(inner) > 0 {
				for key, value := range flatten(prefix+key+".", inner) {
					if !yield(key, value) {
						return
					}
				}
			} else if !yield(prefix+key, value) {
				return
			}
		}
	}
}

// loadKey takes one setting from a file. The error names the key, what was given and what it must be.
func (s *Set) loadKey(key string, value any) error {
	v := s.named(key)
	if v == nil {
		empty, isSection := value.(map[string]any)
		if (value == nil || isSection && len(empty) == 0) && slices.ContainsFunc(s.flags, func(v *flagValue) bool {
			return strings.HasPrefix(v.field.Name, key+".")
		}) {
			return nil
		}
		near := s.didYouMean(key, func(v *flagValue) string { return v.field.Name })
		return fmt.Errorf("%s: unknown key%s", key, near)
	}
	items, isList := value.([]any)
	wantsList := v.field.Type.Kind() == reflect.Slice
	if !isList {
		items = []any{value}
	}
	texts := make([]string, len(items))
	for i, item := range items {
		switch item.(type) {
		case string, bool, int, int64, uint64, float64:
			texts[i] = fmt.Sprint(item)
		default:
			return fmt.Errorf("%s: %s; must be %s", key, yamlKind(item), v.rule())
		}
	}
	if isList != wantsList {
		return fmt.Errorf("%s: %s; must be %s", key, yamlKind(value), v.rule())
	}
	return v.offer(texts...)
}

// rule says in words what a setting must be.
func (v *flagValue) rule() string {
	if v.field.Type.Kind() == reflect.Slice {
		return "a list of texts"
	}
	names := map[string]string{"int": "an integer", "bool": "true or false", "string": "a text", "float": "a number"}
	return cmp.Or(names[v.codec.Kind], "a "+v.codec.Kind)
}

// yamlKind says what a YAML value is, for errors.
func yamlKind(raw any) string {
	switch raw.(type) {
	case nil:
		return "null"
	case []any:
		return "a list"
	case map[string]any:
		return "a section"
	case string:
		return "a text"
	default:
		return fmt.Sprint(raw)
	}
}

// Print writes the settings as YAML that Load reads back: in the order of the struct, each with its help as a comment,
// and without secrets.
func (s *Set) Print(w io.Writer) error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	sections := map[string]*yaml.Node{}
	for _, v := range s.flags {
		section, name, key := root, "", v.field.Name
		if at := strings.LastIndexByte(key, '.'); at >= 0 {
			if name, key = key[:at], key[at+1:]; sections[name] == nil {
				sections[name] = &yaml.Node{Kind: yaml.MappingNode}
				root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: name}, sections[name])
			}
			section = sections[name]
		}
		section.Content = append(section.Content,
			&yaml.Node{Kind: yaml.ScalarNode, Value: key, HeadComment: v.field.Help}, v.yaml(v.to[0]))
	}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return fmt.Errorf("print config: %w", err)
	}
	return enc.Close()
}

// credentials are those of a URL.
var credentials = regexp.MustCompile(`(://)[^\s,"]*@`)

// yaml returns the YAML node of a value; a secret is masked. A text is quoted where YAML would read the plain text as
// something else ("no", "1e3").
func (v *flagValue) yaml(value reflect.Value) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: textOf(value)}
	switch {
	case value.Kind() == reflect.Slice:
		n = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for i := range value.Len() {
			n.Content = append(n.Content, v.yaml(value.Index(i)))
		}
	case value.Kind() == reflect.String:
		text := n.Value
		if v.field.Secret == "true" && text != "" {
			text = secretMask
		} else if v.field.Secret == schemas.SecretURL {
			text = credentials.ReplaceAllString(text, "${1}***@")
		}
		n = &yaml.Node{}
		n.SetString(text)
		if n.Style == 0 && n.Tag == "!!str" {
			n.Style = yaml.DoubleQuotedStyle
		}
	}
	return n
}

// FlagError explains an error of the command line like all other errors: which values a flag allows, and for an
// unknown flag the nearest flag of fs. other maps the names that other tools use, with dashes, to flags of fs. An
// error of another kind is returned as it is.
func FlagError(err error, fs *pflag.FlagSet, other map[string]string) error {
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f := invalid.GetFlag()
		fault := invalid.Unwrap().Error()
		if !strings.Contains(fault, "; ") { // the library's own, which does not say what the flag takes
			fault = fmt.Sprintf("%q; must be %s", invalid.GetValue(), allowedValues(f.Value.Type()))
			if f.Value.Type() == "duration" {
				_, err := parseDuration(invalid.GetValue())
				fault = err.Error()
			}
		}
		return fmt.Errorf("--%s: %s", f.Name, fault)
	}
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return err
	}
	near := NearFlag(unknown.GetSpecifiedName(), fs, other)
	if near == "" {
		return err
	}
	return fmt.Errorf("%w; did you mean --%s?", err, near)
}

// NearFlag returns the flag of fs that an unknown one stands for, by its spelling or another name, as FlagError has it;
// empty: none.
func NearFlag(name string, fs *pflag.FlagSet, other map[string]string) string {
	name = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
	ifDefined := func(name string) string {
		if fs.Lookup(name) == nil {
			return ""
		}
		return name
	}
	var names []string
	fs.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	near := cmp.Or(ifDefined(name), ifDefined(other[name]))
	if near == "" && len(name) > 1 {
		near = schemas.Nearest(name, names)
	}
	return near
}

// allowedValues says which values a flag of the library's type kind allows.
func allowedValues(kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"):
		return "an integer"
	case strings.HasPrefix(kind, "uint"):
		return "an integer of at least 0"
	case strings.HasPrefix(kind, "float"):
		return "a number"
	case kind == "bool":
		return "true or false"
	}
	return "a " + kind
}
