package fields_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
)

// size is a number of MiB that reads itself from text.
type size int64

func (s size) String() string               { return strconv.FormatInt(int64(s), 10) + "MiB" }
func (s size) Type() string                 { return "size" }
func (s size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
func (s *size) UnmarshalText(text []byte) error {
	number, ok := strings.CutSuffix(string(text), "MiB")
	n, err := strconv.ParseInt(number, 10, 64)
	if !ok || err != nil || n < 0 {
		return fmt.Errorf("%q; must be a size with its unit, such as 64MiB", text)
	}
	*s = size(n)
	return nil
}

type inner struct {
	Depth int `key:"inner.depth" help:"how deep"`
}

type Server struct {
	URL   string `key:"nats.url" env:"MEANDER_NATS_URL" secret:"url" help:"where"`
	Token string `key:"nats.token" env:"MEANDER_NATS_TOKEN" secret:"true" help:"hush"`
}

type config struct {
	Slots   int            `key:"slots" range:"1..256" help:"work at once"`
	Ratio   float64        `key:"ratio" help:"a share"`
	Wait    time.Duration  `key:"wait" range:"1s.." help:"patience"`
	Window  size           `key:"window" help:"memory"`
	Names   []string       `key:"names" help:"who"`
	Lanes   []schemas.Lane `key:"lanes" form:"token" help:"which"`
	Verbose bool           `key:"verbose" help:"say more"`
	Model   string         `key:"model" help:"what to run"`
	Format  string         `key:"format" enum:"json,console" help:"form of lines"`
	Secret  string         `key:"secret" secret:"true" help:"hush"`
	Inner   inner
	Server
}

func defaults() config {
	return config{
		Slots: 4, Ratio: 0.5, Wait: 30 * time.Second, Window: 64, Names: []string{"a", "b"},
		Model: "synthetic", Format: "json", Inner: inner{Depth: 2}, Server: Server{URL: "nats://127.0.0.1:4222"},
	}
}

// load runs the whole chain: yaml is the file's text ("" for none).
func load(t *testing.T, yaml string, environ []string, args ...string) (config, error) {
	t.Helper()
	path := ""
	if yaml != "" {
		path = filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return loadFile(path, environ, args...)
}

func loadFile(path string, environ []string, args ...string) (config, error) {
	cfg := defaults()
	set := fields.Bind("MEANDER_THING_", &cfg)
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	set.Register(fs)
	err := fs.Parse(args)
	if err == nil {
		err = set.Load(path, environ)
	}
	if err == nil {
		err = schemas.CheckFields(&cfg)
	}
	return cfg, err
}

// One environment may be of several programs: which Python there is is no setting, and no misspelt one.
func TestLoad_Python(t *testing.T) {
	cfg := struct {
		LogLevel string `key:"log_level" env:"MEANDER_LOG_LEVEL" help:"what is said"`
	}{}
	set := fields.Bind("MEANDER_THING_", &cfg)
	if err := set.Load("", []string{"MEANDER_PYTHON=python3"}); err != nil {
		t.Errorf("MEANDER_PYTHON: %v", err)
	}
	if err := set.Load("", []string{"MEANDER_PYTHONS=python3"}); err == nil {
		t.Error("MEANDER_PYTHONS: no error")
	}
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
			args: []string{"--slots=7", "--names", "x,y", "--names=z", "--lanes=p,q", "--format=console", "--verbose", "--wait=5s", "--window=1024MiB"},
			want: func() config {
				c := defaults()
				c.Slots, c.Ratio, c.Inner.Depth, c.Verbose, c.Wait, c.Window = 7, 0.25, 4, true, 5*time.Second, 1024
				c.Names, c.Lanes, c.Format = []string{"x,y", "z"}, []schemas.Lane{"p", "q"}, "console"
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
				c.Names, c.URL, c.Token = []string{}, "nats://a:1 nats://b:2", "s"
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
		{name: "not a number", yaml: "ratio: .nan\n", want: []string{"ratio: NaN; must be finite"}},
		{name: "duplicate key", yaml: "slots: 1\nslots: 2\n", want: []string{"c.yaml", "already defined"}},
		{name: "printed secret", yaml: "secret: '***'\n", want: []string{"secret: ***; this is how a secret is printed"}},
		{name: "unknown variable", env: []string{"MEANDER_THING_SLOTZ=1"}, want: []string{"MEANDER_THING_SLOTZ: unknown variable; did you mean MEANDER_THING_SLOTS?"}},
		{name: "unknown shared variable", env: []string{"MEANDER_NATS_USER=1"}, want: []string{"MEANDER_NATS_USER: unknown variable"}},
		{name: "bad variable", env: []string{"MEANDER_THING_SLOTS=many"}, want: []string{"MEANDER_THING_SLOTS", `slots: "many"; must be an integer`}},
		{name: "bad flag", args: []string{"--slots=many"}, want: []string{"--slots", `"many"; must be an integer`}},
		{name: "unknown flag", args: []string{"--slotz=1"}, want: []string{"slotz"}},
		{name: "out of range", args: []string{"--slots=0"}, want: []string{"slots: 0; must be between 1 and 256"}},
		{name: "a short duration", yaml: "wait: 1ms\n", want: []string{"wait: 1ms; must be at least 1s"}},
		{name: "no such value", yaml: "format: xml\n", want: []string{`format: "xml"; must be one of json, console`}},
		{name: "not a token", yaml: "lanes: [a.b]\n", want: []string{`lanes[0]: "a.b"; must be 1 to`}},
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
		})
	}
}

func TestLoad_RefusesFiles(t *testing.T) {
	for _, path := range []string{".", "no/such.yaml"} {
		if _, err := loadFile(path, nil); err == nil || !strings.Contains(err.Error(), `config file "`+path+`"`) {
			t.Errorf("%s: got %v", path, err)
		}
	}
	_, err := load(t, "# "+strings.Repeat("x", 1<<20)+"\n", nil)
	if err == nil || !strings.Contains(err.Error(), "more than 1MiB") {
		t.Errorf("got %v, want a bound on the file", err)
	}
}

func TestPrint_RoundTrip(t *testing.T) {
	c := defaults()
	c.Names = []string{"no", "1e3", "with, comma", ""}
	c.Lanes, c.Verbose, c.Model, c.Ratio = []schemas.Lane{"x", "y"}, true, `C:\x "quoted" # not a comment`, 1e-7
	c.Inner.Depth, c.Wait, c.Window = -1, 90*time.Minute, 15
	printed := printed(t, &c)
	got, err := load(t, printed, nil)
	if err != nil {
		t.Fatalf("%v in\n%s", err, printed)
	}
	if !reflect.DeepEqual(got, c) {
		t.Errorf("got  %+v\nwant %+v\nfrom\n%s", got, c, printed)
	}
	for _, want := range []string{"# work at once\nslots: 4\n", "wait: 1h30m0s\n", "window: 15MiB\n"} {
		if !strings.Contains(printed, want) {
			t.Errorf("printed\n%s\nwithout %q", printed, want)
		}
	}
}

func printed(t *testing.T, c *config) string {
	t.Helper()
	var b bytes.Buffer
	if err := fields.Bind("", c).Print(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestPrint_HidesSecrets(t *testing.T) {
	c := defaults()
	c.Secret, c.Token, c.URL = "hunter2", "hunter2", "nats://me:hunter2@host:4222"
	if got := printed(t, &c); strings.Contains(got, "hunter2") || !strings.Contains(got, `secret: "***"`) {
		t.Errorf("printed\n%s", got)
	}
}

func TestBind_Help(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	c := defaults()
	fields.Bind("MEANDER_THING_", &c).Register(fs)
	usage := fs.FlagUsages()
	for _, want := range []string{
		"--slots int", "work at once; between 1 and 256 [$MEANDER_THING_SLOTS] (default 4)", "--inner-depth int",
		"[$MEANDER_THING_INNER__DEPTH]", "--window size", "(default 64MiB)", "(default 30s)", "form of lines: json, console",
		"--nats-url string", "[$MEANDER_NATS_URL]", "--lanes strings",
	} {
		if !strings.Contains(usage, want) {
			t.Errorf("help without %q:\n%s", want, usage)
		}
	}
}

func TestBind_RefusesBadStructs(t *testing.T) {
	type noKey struct{ A int }
	type badType struct {
		A map[string]string `key:"a"`
	}
	for name, settings := range map[string]any{"no key": &noKey{}, "type": &badType{}} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("does not panic")
				}
			}()
			fields.Bind("", settings)
		})
	}
}

// Two structs side by side may share a key: one flag, one variable, one value.
func TestBind_SharesKeys(t *testing.T) {
	type left struct {
		Depth int    `key:"depth" help:"left"`
		Name  string `key:"name" help:"name"`
	}
	type right struct {
		Depth int `key:"depth"`
	}
	type both struct {
		Left  left
		Right right
	}
	c := both{left{Depth: 1, Name: "n"}, right{9}}
	set := fields.Bind("MEANDER_THING_", &c)
	if err := set.Load("", []string{"MEANDER_THING_DEPTH=3"}); err != nil || c != (both{left{3, "n"}, right{3}}) {
		t.Errorf("got %+v, %v", c, err)
	}
	if !set.Given("depth") || set.Given("name") {
		t.Error("what was given is not known")
	}
}
