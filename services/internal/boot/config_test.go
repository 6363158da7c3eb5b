package boot_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/services/internal/boot"
)

type inner struct {
	Depth int `koanf:"depth" help:"how deep"`
}

type config struct {
	Slots   int           `koanf:"slots" help:"work at once"`
	Ratio   float64       `koanf:"ratio" help:"a share"`
	Wait    time.Duration `koanf:"wait" help:"patience"`
	Window  boot.Bytes    `koanf:"window" help:"memory"`
	Names   []string      `koanf:"names" help:"who"`
	Steps   []int         `koanf:"steps" help:"which"`
	Verbose bool          `koanf:"verbose" help:"say more"`
	Model   string        `koanf:"model" help:"what to run"`
	Secret  string        `koanf:"secret" secret:"true" help:"hush"`
	Inner   inner         `koanf:"inner"`
	NATS    boot.NATS     `koanf:"nats" env:"MEANDER_NATS_"`
}

func (c config) Validate() error {
	if c.Slots < 1 {
		return fmt.Errorf("slots: %d; must be at least 1", c.Slots)
	}
	return c.NATS.Validate()
}

func defaults() config {
	return config{
		Slots: 4, Ratio: 0.5, Wait: 30 * time.Second, Window: 64 * boot.MiB, Names: []string{"a", "b"},
		Model: "synthetic", Inner: inner{Depth: 2}, NATS: boot.DefaultNATS(),
	}
}

// load runs the whole chain: yaml is the file's text ("" for none).
func load(t *testing.T, yaml string, environ []string, args ...string) (config, error) {
	t.Helper()
	if yaml != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	if err := boot.AddFlags(fs, "meander-thing", defaults()); err != nil {
		t.Fatal(err)
	}
	if err := fs.Parse(args); err != nil {
		return config{}, boot.Usage(err)
	}
	return boot.Load("meander-thing", defaults(), fs, environ)
}

func TestLoad_Precedence(t *testing.T) {
	yaml := "slots: 5\nratio: 0.25\nnames: [c]\ninner:\n  depth: 3\n"
	environ := []string{"MEANDER_THING_SLOTS=6", "MEANDER_THING_INNER__DEPTH=4", "PATH=/bin", "MEANDER_OTHER_X=1"}
	for _, tc := range []struct {
		name      string
		yaml      string
		env, args []string
		want      config
	}{
		{name: "defaults", want: defaults()},
		{name: "file over default", yaml: yaml, want: func() config {
			c := defaults()
			c.Slots, c.Ratio, c.Names, c.Inner.Depth = 5, 0.25, []string{"c"}, 3
			return c
		}()},
		{name: "environment over file", yaml: yaml, env: environ, want: func() config {
			c := defaults()
			c.Slots, c.Ratio, c.Names, c.Inner.Depth = 6, 0.25, []string{"c"}, 4
			return c
		}()},
		{
			name: "flag over environment", yaml: yaml, env: environ,
			args: []string{"--slots=7", "--names", "x,y", "--names=z", "--steps=1,2", "--verbose", "--wait=5s", "--window=1GiB"},
			want: func() config {
				c := defaults()
				c.Slots, c.Ratio, c.Inner.Depth, c.Verbose, c.Wait, c.Window = 7, 0.25, 4, true, 5*time.Second, boot.GiB
				c.Names, c.Steps = []string{"x", "y", "z"}, []int{1, 2}
				return c
			}(),
		},
		{name: "a flag that repeats the default still wins", yaml: yaml, args: []string{"--slots=4"}, want: func() config {
			c := defaults()
			c.Ratio, c.Names, c.Inner.Depth = 0.25, []string{"c"}, 3
			return c
		}()},
		{
			name: "shared variables and an empty list", yaml: "names: []\n",
			env: []string{"MEANDER_NATS_URL=nats://a:1 nats://b:2", "MEANDER_NATS_TOKEN=s"},
			want: func() config {
				c := defaults()
				c.Names, c.NATS.URL, c.NATS.Token = []string{}, "nats://a:1 nats://b:2", "s"
				return c
			}(),
		},
		{name: "an element with a comma survives in a file", yaml: "names: ['a, b', c]\n", want: func() config {
			c := defaults()
			c.Names = []string{"a, b", "c"}
			return c
		}()},
		{name: "an empty section changes nothing", yaml: "inner:\nnats: {}\n", want: defaults()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := load(t, tc.yaml, tc.env, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got  %+v\nwant %+v", got, tc.want)
			}
		})
	}
}

func TestLoad_Refuses(t *testing.T) {
	for _, tc := range []struct {
		name      string
		yaml      string
		env, args []string
		want      []string // all must appear in the error
	}{
		{name: "unknown key", yaml: "slotz: 1\nfoo: 2\n", want: []string{"c.yaml", "slotz: unknown key; did you mean slots?", "foo: unknown key"}},
		{name: "unknown nested key", yaml: "inner: {deep: 1}\n", want: []string{"inner.deep: unknown key; did you mean inner.depth?"}},
		{name: "section for a value", yaml: "slots: {a: 1}\n", want: []string{"slots.a: unknown key"}},
		{name: "value for a section", yaml: "inner: 3\n", want: []string{"inner: unknown key"}},
		{name: "null", yaml: "slots:\n", want: []string{"slots: null; must be an integer"}},
		{name: "fraction for integer", yaml: "slots: 3.5\n", want: []string{`slots: "3.5"; must be an integer`}},
		{name: "bool for integer", yaml: "slots: true\n", want: []string{`slots: "true"; must be an integer`}},
		{name: "list for integer", yaml: "slots: [1]\n", want: []string{"slots: a list; must be an integer"}},
		{name: "scalar for list", yaml: "names: a\n", want: []string{"names: a text; must be a list"}},
		{name: "duration without unit", yaml: "wait: 30\n", want: []string{`wait: "30"; must be a duration with its unit`}},
		{name: "size without unit", yaml: "window: 64\n", want: []string{"window:", "must be a size with its unit"}},
		{name: "not a number", yaml: "ratio: .nan\n", want: []string{"ratio:", "must be a finite number"}},
		{name: "duplicate key", yaml: "slots: 1\nslots: 2\n", want: []string{"c.yaml", "already defined"}},
		{name: "printed secret", yaml: "secret: '***'\n", want: []string{"secret: ***; this is how a secret is printed"}},
		{name: "file is a directory", args: []string{"--config", "."}, want: []string{`config file "."`}},
		{name: "no such file", args: []string{"--config", "no/such.yaml"}, want: []string{`config file "no/such.yaml"`, "no such file"}},
		{name: "unknown variable", env: []string{"MEANDER_THING_SLOTZ=1"}, want: []string{"MEANDER_THING_SLOTZ: unknown variable; did you mean MEANDER_THING_SLOTS?"}},
		{name: "unknown shared variable", env: []string{"MEANDER_NATS_USER=1"}, want: []string{"MEANDER_NATS_USER: unknown variable"}},
		{name: "bad variable", env: []string{"MEANDER_THING_SLOTS=many"}, want: []string{"MEANDER_THING_SLOTS", `slots: "many"; must be an integer`}},
		{name: "bad flag", args: []string{"--slots=many"}, want: []string{"--slots", `"many"; must be an integer`}},
		{name: "unknown flag", args: []string{"--slotz=1"}, want: []string{"slotz"}},
		{name: "validate is asked", args: []string{"--slots=0"}, want: []string{"slots: 0; must be at least 1"}},
		{name: "all faults at once", yaml: "foo: 1\n", env: []string{"MEANDER_THING_RATIO=x"}, want: []string{"foo", "MEANDER_THING_RATIO"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := load(t, tc.yaml, tc.env, tc.args...)
			if err == nil {
				t.Fatal("got no error")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %q, want it to say %q", err, want)
				}
			}
			if got := boot.ExitCode(err); got != boot.ExitUsage {
				t.Errorf("exit code %d, want %d", got, boot.ExitUsage)
			}
		})
	}
}

func TestLoad_FileTooLarge(t *testing.T) {
	_, err := load(t, "# "+strings.Repeat("x", 1<<20)+"\n", nil)
	if err == nil || !strings.Contains(err.Error(), "more than 1MiB") {
		t.Errorf("got %v, want a bound on the file", err)
	}
}

func TestPrint_RoundTrip(t *testing.T) {
	c := defaults()
	c.Names = []string{"no", "1e3", "with, comma", ""}
	c.Steps, c.Verbose, c.Model, c.Ratio = []int{3, -4}, true, `C:\x "quoted" # not a comment`, 1e-7
	c.Inner.Depth, c.Wait, c.Window = -1, 90*time.Minute, 1500
	var printed bytes.Buffer
	if err := boot.Print(&printed, c); err != nil {
		t.Fatal(err)
	}
	got, err := load(t, printed.String(), nil)
	if err != nil {
		t.Fatalf("%v in\n%s", err, &printed)
	}
	if !reflect.DeepEqual(got, c) {
		t.Errorf("got  %+v\nwant %+v\nfrom\n%s", got, c, &printed)
	}
	for _, want := range []string{"# work at once\nslots: 4\n", "wait: 1h30m0s\n", "window: 1500B\n"} {
		if !strings.Contains(printed.String(), want) {
			t.Errorf("printed\n%s\nwithout %q", &printed, want)
		}
	}
}

func TestPrint_HidesSecrets(t *testing.T) {
	c := defaults()
	c.Secret, c.NATS.Token, c.NATS.URL = "hunter2", "hunter2", "nats://me:hunter2@host:4222"
	var printed bytes.Buffer
	if err := boot.Print(&printed, c); err != nil {
		t.Fatal(err)
	}
	if got := printed.String(); strings.Contains(got, "hunter2") || !strings.Contains(got, `secret: "***"`) {
		t.Errorf("printed\n%s", got)
	}
}

func TestAddFlags_Help(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	if err := boot.AddFlags(fs, "thing", defaults()); err != nil {
		t.Fatal(err)
	}
	usage := fs.FlagUsages()
	for _, want := range []string{
		"--slots int", "work at once [$MEANDER_THING_SLOTS] (default 4)", "--inner-depth int",
		"[$MEANDER_THING_INNER__DEPTH]", "--window size", "(default 64MiB)", "(default 30s)",
		"--nats-url string", "[$MEANDER_NATS_URL]", "--names strings", "--print-config",
	} {
		if !strings.Contains(usage, want) {
			t.Errorf("help without %q:\n%s", want, usage)
		}
	}
}

func TestAddFlags_RefusesBadStructs(t *testing.T) {
	type noKey struct{ A int }
	type badType struct {
		A map[string]string `koanf:"a"`
	}
	type twice struct {
		A int `koanf:"a_b"`
		B struct {
			B int `koanf:"b"`
		} `koanf:"a"`
	}
	type clash struct {
		A inner  `koanf:",squash"`
		B string `koanf:"depth"`
	}
	for name, def := range map[string]any{"no key": noKey{}, "type": badType{}, "same flag": twice{}, "same key": clash{}, "not a struct": 3, "nil": nil} {
		if err := boot.AddFlags(pflag.NewFlagSet("test", pflag.ContinueOnError), "thing", def); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

// Two structs side by side may share a key: one flag, one variable, one value.
func TestLoad_SquashSharesKeys(t *testing.T) {
	type left struct {
		Depth int    `koanf:"depth" help:"left"`
		Name  string `koanf:"name" help:"name"`
	}
	type both struct {
		Left  left  `koanf:",squash"`
		Right inner `koanf:",squash"`
	}
	def := both{left{Depth: 1, Name: "n"}, inner{Depth: 9}}
	got, err := boot.Load("thing", def, nil, nil)
	if want := (both{left{1, "n"}, inner{1}}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v: the first default decides", got, err, want)
	}
	got, err = boot.Load("thing", def, nil, []string{"MEANDER_THING_DEPTH=3"})
	if want := (both{left{3, "n"}, inner{3}}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

// Parts is embedded in a configuration.
type Parts struct {
	Depth int   `koanf:"depth" help:"how deep"`
	Inner inner `koanf:"inner"`
}

// Embedded parts change no name: flag, variable and key are those of the field.
func TestLoad_EmbeddedParts(t *testing.T) {
	type whole struct {
		Name string `koanf:"name" help:"name"`
		Parts
	}
	def := whole{Name: "n", Parts: Parts{Depth: 1}}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	if err := boot.AddFlags(fs, "thing", def); err != nil {
		t.Fatal(err)
	}
	if err := fs.Parse([]string{"--depth=3"}); err != nil {
		t.Fatal(err)
	}
	got, err := boot.Load("thing", def, fs, []string{"MEANDER_THING_DEPTH=2", "MEANDER_THING_INNER__DEPTH=4"})
	if want := (whole{"n", Parts{3, inner{4}}}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	var printed bytes.Buffer
	if err := boot.Print(&printed, got); err != nil || !strings.Contains(printed.String(), "\ndepth: 3\n") {
		t.Errorf("printed\n%s, %v; want the key depth at the top", &printed, err)
	}
}

func TestExitCode(t *testing.T) {
	base := errors.New("x")
	for _, tc := range []struct {
		name string
		err  error
		want int
	}{
		{"nil", nil, 0},
		{"usage of nil", boot.Usage(nil), 0},
		{"plain", base, 1},
		{"usage", boot.Usage(base), 2},
		{"wrapped usage", fmt.Errorf("w: %w", boot.Usage(base)), 2},
	} {
		if got := boot.ExitCode(tc.err); got != tc.want {
			t.Errorf("%s: got %d, want %d", tc.name, got, tc.want)
		}
	}
	if !errors.Is(boot.Usage(base), base) {
		t.Error("usage hides its cause")
	}
}

func TestBytes(t *testing.T) {
	for _, tc := range []struct {
		text string
		want boot.Bytes
		show string
	}{
		{"0", 0, "0B"},
		{"1B", 1, "1B"},
		{"1KB", 1000, "1000B"},
		{"1KiB", 1024, "1KiB"},
		{"64 MiB", 64 * boot.MiB, "64MiB"},
		{"1.5GiB", 1536 * boot.MiB, "1536MiB"},
		{"2TiB", 2 * boot.TiB, "2TiB"},
		{"9007199254740993B", 9007199254740993, "9007199254740993B"},
	} {
		var got boot.Bytes
		if err := got.UnmarshalText([]byte(tc.text)); err != nil || got != tc.want {
			t.Errorf("%q: got %d, %v; want %d", tc.text, got, err, tc.want)
		}
		if got.String() != tc.show {
			t.Errorf("%q prints as %q, want %q", tc.text, got, tc.show)
		}
		var again boot.Bytes
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("%q: round trip gave %d, %v", got, again, err)
		}
	}
	for _, bad := range []string{"", "B", "64", "-1B", "1.5B", "-1MiB", "1MiBB", "1e400GiB", "NaNB", "InfB", "9EiB", "99999999TiB", "0x10B", "1_0B", "64mib"} {
		var got boot.Bytes
		if err := got.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q: got %d, want an error", bad, got)
		}
	}
}

func TestNATS_Validate(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*boot.NATS)
		want string // "" for none
	}{
		{"default", func(*boot.NATS) {}, ""},
		{"several", func(n *boot.NATS) { n.URL = "nats://a:1, tls://b:2" }, ""},
		{"empty", func(n *boot.NATS) { n.URL = " " }, "nats.url: empty"},
		{"scheme", func(n *boot.NATS) { n.URL = "http://a" }, `nats.url: "http://a"; must be nats://`},
		{"no host", func(n *boot.NATS) { n.URL = "localhost" }, "nats.url"},
		{"no password in the message", func(n *boot.NATS) { n.URL = "http://u:hunter2@a" }, "***@a"},
		{"token and creds", func(n *boot.NATS) { n.Token, n.CredsFile = "a", "b" }, "nats.token"},
		{"key without certificate", func(n *boot.NATS) { n.TLSKey = "k" }, "nats.tls_cert"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := boot.DefaultNATS()
			tc.edit(&n)
			err := n.Validate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestLog_Validate(t *testing.T) {
	if err := boot.DefaultLog().Validate(); err != nil {
		t.Error(err)
	}
	err := boot.Log{Level: "loud", Format: "xml"}.Validate()
	for _, want := range []string{`log.level: "loud"; must be one of trace, debug`, `log.format: "xml"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
