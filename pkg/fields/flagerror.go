package fields

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
)

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
