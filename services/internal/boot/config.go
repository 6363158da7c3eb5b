package boot

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// Names of the flags AddFlags adds besides the fields.
const (
	flagConfig      = "config"
	flagPrintConfig = "print-config"
)

// maxConfigFile bounds the configuration file.
const maxConfigFile = 1 << 20

// secretMask stands for a secret in the printed configuration.
const secretMask = "***"

// EnvPrefix is the start of the environment variables of a program: "meander-intake"
// and "intake" both give "MEANDER_INTAKE_".
func EnvPrefix(name string) string {
	name = strings.TrimPrefix(name, "meander-")
	return "MEANDER_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")) + "_"
}

// AddFlags adds --config, --print-config and one flag per field of the struct def
// to fs. The values of def are the defaults shown. An error is a mistake in the
// struct: a field without a key, of a type no text can set, or two of one name.
func AddFlags(fs *pflag.FlagSet, name string, def any) error {
	v := reflect.ValueOf(def)
	if !v.IsValid() {
		return errors.New("config is nil; must be a struct")
	}
	fields, err := fieldsOf(v.Type(), EnvPrefix(name))
	if err != nil {
		return err
	}
	fs.String(flagConfig, "", "YAML `file` with settings; the environment and flags override it")
	fs.Bool(flagPrintConfig, false, "print the settings in effect as YAML and exit")
	for _, f := range fields {
		if fs.Lookup(f.flag) != nil {
			return fmt.Errorf("setting %q: there is a flag --%s already; it must have another name", f.path, f.flag)
		}
		help := f.help + " [$" + f.env + "]"
		text := f.text(f.get(v))
		if f.secret && text != "" {
			text = secretMask
		}
		flag := fs.VarPF(&flagValue{field: f, text: text}, f.flag, "", help)
		if f.typ.Kind() == reflect.Bool {
			flag.NoOptDefVal = "true"
		}
	}
	return nil
}

// flagValue checks a flag's text against its field while the command line is parsed,
// so that a bad value is reported with the flag's name.
type flagValue struct {
	field *field
	text  string
	set   bool
}

func (v *flagValue) String() string { return v.text }
func (v *flagValue) Type() string   { return v.field.typeName() }

// Set reads the text; a list grows when its flag is repeated.
func (v *flagValue) Set(text string) error {
	if v.field.list() && v.set && v.text != "" {
		text = v.text + "," + text
	}
	if _, err := v.field.parse(text); err != nil {
		return err
	}
	v.text, v.set = text, true
	return nil
}

// Load returns the settings in effect: def, overridden by the file named by
// --config, by environ (as of os.Environ) and by the flags of fs, which AddFlags
// made and which has been parsed (nil: no flags, no file). If T has a method
// Validate() error, it decides last. All faults found are joined; each names the
// field and where the value came from, and the error is a usage error (ExitCode 2).
func Load[T any](name string, def T, fs *pflag.FlagSet, environ []string) (T, error) {
	fields, err := fieldsOf(reflect.TypeFor[T](), EnvPrefix(name))
	if err != nil {
		return def, err
	}
	k := koanf.New(".")
	err = errors.Join(loadFile(k, fields, fs), loadEnv(k, fields, name, environ), loadFlags(k, fields, fs))
	if err != nil {
		return def, Usage(err)
	}
	cfg := def
	v := reflect.ValueOf(&cfg).Elem()
	for _, f := range fields {
		value := f.get(v)
		if k.Exists(f.path) {
			given, fault := f.decode(k.Get(f.path))
			if fault != nil {
				err = errors.Join(err, fault)
				continue
			}
			value = given
		}
		f.set(v, value)
		if f.secret && f.text(value) == secretMask {
			err = errors.Join(err, fmt.Errorf("%s: %s; this is how a secret is printed, not the secret", f.path,
				secretMask))
		}
	}
	if c, ok := any(cfg).(interface{ Validate() error }); ok {
		err = errors.Join(err, c.Validate())
	}
	if err != nil {
		return cfg, Usage(err)
	}
	return cfg, nil
}

// loadFile adds the settings of the file that --config names to k; without the flag it adds nothing. Unknown keys and
// bad values are all reported, joined.
func loadFile(k *koanf.Koanf, fields []*field, fs *pflag.FlagSet) error {
	path := ""
	if fs != nil {
		path, _ = fs.GetString(flagConfig)
	}
	if path == "" {
		return nil
	}
	file := koanf.New(".")
	if err := file.Load(boundedFile(path), yaml.Parser()); err != nil {
		return fmt.Errorf("config file %q: %w", path, err)
	}
	byPath := make(map[string]*field, len(fields))
	for _, f := range fields {
		byPath[f.path] = f
	}
	var errs []error
	fault := func(err error) { errs = append(errs, fmt.Errorf("config file %q: %w", path, err)) }
	for _, key := range slices.Sorted(maps.Keys(file.All())) {
		raw := file.Get(key)
		f, ok := byPath[key]
		if !ok {
			if isEmpty(raw) && isSection(fields, key) {
				continue
			}
			fault(fmt.Errorf("%s: unknown key%s", key, didYouMean(key, fields)))
			continue
		}
		value, err := f.decode(raw)
		if err != nil {
			fault(err)
			continue
		}
		if err := k.Set(key, f.mergeValue(value)); err != nil {
			fault(err)
		}
	}
	return errors.Join(errs...)
}

// boundedFile is a koanf provider that refuses files larger than maxConfigFile.
type boundedFile string

// ReadBytes reads the whole configuration file for koanf. It fails if the file cannot be read, or is larger than a
// configuration can be.
func (p boundedFile) ReadBytes() ([]byte, error) {
	f, err := os.Open(string(p))
	if err != nil {
		return nil, errors.Unwrap(err) // the caller names the file
	}
	data, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(data) > maxConfigFile {
		return nil, fmt.Errorf("more than %v", Bytes(maxConfigFile))
	}
	return data, nil
}

// Read is not used: koanf calls ReadBytes when there is a parser.
func (p boundedFile) Read() (map[string]any, error) {
	return nil, errors.New("needs a parser")
}

// loadEnv adds the settings of the environment, environ, to k. An unknown variable with the prefix of the program, or
// of a section, is an error: it is most likely misspelled. All faults are reported, joined.
func loadEnv(k *koanf.Koanf, fields []*field, name string, environ []string) error {
	byEnv := make(map[string]*field, len(fields))
	prefixes := map[string]bool{EnvPrefix(name): true}
	for _, f := range fields {
		byEnv[f.env] = f
		// A section with a prefix of its own (MEANDER_NATS_) has all variables with that prefix.
		if last := strings.LastIndexByte(f.path, '.'); last >= 0 {
			leaf := strings.ToUpper(f.path[last+1:])
			prefixes[strings.TrimSuffix(f.env, leaf)] = true
		}
	}
	var errs []error
	err := k.Load(env.Provider(".", env.Opt{
		EnvironFunc: func() []string { return environ },
		TransformFunc: func(variable, text string) (string, any) {
			f, ok := byEnv[variable]
			if !ok {
				for p := range prefixes {
					if strings.HasPrefix(variable, p) {
						errs = append(errs, fmt.Errorf("environment: %s: unknown variable%s", variable,
							didYouMeanEnv(variable, fields)))
						break
					}
				}
				return "", nil
			}
			value, err := f.parse(text)
			if err != nil {
				errs = append(errs, fmt.Errorf("environment: %s: %w", variable, err))
				return "", nil
			}
			return f.path, f.mergeValue(value)
		},
	}), nil)
	return errors.Join(append(errs, err)...)
}

// loadFlags adds the flags that were given on the command line to k; flags with their default stay out. Bad values are
// all reported, joined.
func loadFlags(k *koanf.Koanf, fields []*field, fs *pflag.FlagSet) error {
	if fs == nil {
		return nil
	}
	byFlag := make(map[string]*field, len(fields))
	for _, f := range fields {
		byFlag[f.flag] = f
	}
	var errs []error
	err := k.Load(posflag.ProviderWithFlag(fs, ".", nil, func(flag *pflag.Flag) (string, any) {
		f, ok := byFlag[flag.Name]
		if !ok || !flag.Changed {
			return "", nil
		}
		value, err := f.parse(flag.Value.String())
		if err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", flag.Name, err))
			return "", nil
		}
		return f.path, f.mergeValue(value)
	}), nil)
	return errors.Join(append(errs, err)...)
}

// setByPath sets the setting at a path in a configuration that was loaded already; text is parsed as from a flag. A
// program calls it for settings that it makes up when they were not given. It fails if the text is no value of the
// setting.
func setByPath[T any](cfg *T, path, text string) error {
	fields, err := fieldsOf(reflect.TypeFor[T](), "")
	if err != nil {
		return err
	}
	for _, f := range fields {
		if f.path == path {
			value, err := f.parse(text)
			if err != nil {
				return err
			}
			f.set(reflect.ValueOf(cfg).Elem(), value)
		}
	}
	return nil
}
