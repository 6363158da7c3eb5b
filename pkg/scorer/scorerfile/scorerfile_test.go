package scorerfile_test

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/scorer/httpscore"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
	"github.com/meander-rl/meander/pkg/scorer/scorerfile"
)

func write(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scorers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoad(t *testing.T) {
	path := write(t, `
# comments are fine
http:
  clip:
    url: "http://127.0.0.1:8900/score"
    format: msgpack
    image: jpeg
    headers: {Authorization: "Bearer ${CLIP_TOKEN}", X-Team: "7"}
    timeout: 20s
    concurrency: 2
    rate: 0.5
    retries: 0
    retry_wait: 250ms
    max_batch: 8
    version: "3"
  plain: {url: http://localhost/}
nats:
  pickscore: {timeout: 1m30s, concurrency: 4, image: jpeg, version: v2}
  defaults:
`)
	got, err := scorerfile.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	plain := httpscore.DefaultConfig()
	plain.URL = "http://localhost/"
	want := scorerfile.File{
		HTTP: map[string]httpscore.Config{"plain": plain, "clip": {
			URL: "http://127.0.0.1:8900/score", Format: "msgpack", Image: "jpeg",
			Headers: map[string]string{"Authorization": "Bearer ${CLIP_TOKEN}", "X-Team": "7"},
			Timeout: 20 * time.Second, Concurrency: 2, Rate: 0.5, RetryWait: 250 * time.Millisecond, MaxBatch: 8, Version: "3",
		}},
		NATS: map[string]natsscore.Config{
			"pickscore": {
				Image: "jpeg", Timeout: 90 * time.Second, Concurrency: 4, Version: "v2",
			}, "defaults": natsscore.DefaultConfig(),
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestLoad_Empty(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "http:\nnats: {}\n"} {
		if f, err := scorerfile.Load(write(t, text)); err != nil || len(f.HTTP)+len(f.NATS) != 0 {
			t.Errorf("%q: %v, %v; want no names", text, f, err)
		}
	}
}

func TestLoad_Refuses(t *testing.T) {
	tests := []struct{ name, text, fault string }{
		{"kind", "htttp: {}", "line 1: htttp: unknown; must be one of http, nats"},
		{
			"key", "http:\n  clip:\n    url: http://h/\n    timout: 3s",
			"line 4: http.clip.timout: unknown; must be one of url, format, image, frames, headers, timeout,",
		},
		{
			"key of another kind", "nats: {a: {url: x}}",
			"line 1: nats.a.url: unknown; must be one of image, frames, timeout, concurrency, version",
		},
		{"instance", "nats: {a.b: {}}", `nats.a.b: name: "a.b"; must be 1 to 64 letters`},
		{"twice", "nats: {a: {}, a: {}}", "nats.a: comes twice"},
		{"field twice", "nats: {a: {timeout: 1s, timeout: 2s}}", "nats.a.timeout: comes twice"},
		{
			"duration without unit", "nats: {a: {timeout: 20}}",
			`nats.a.timeout: "20"; must be a duration with its unit, such as 20s`,
		},
		{"fraction", "nats: {a: {concurrency: 1.0}}", `nats.a.concurrency: "1.0"; must be a whole number`},
		{"quoted number", `nats: {a: {concurrency: "1"}}`, `nats.a.concurrency: "1"; must be a whole number`},
		{"beyond an int", "nats: {a: {concurrency: 99999999999999999999}}", "must be a whole number"},
		{"bare number for a text", "nats: {a: {version: 3}}", `nats.a.version: "3"; must be a text, in quotes`},
		{"null", "nats: {a: {concurrency: }}", `nats.a.concurrency: ""; must be a whole number`},
		{"rate", "http: {a: {url: http://h/, rate: fast}}", `http.a.rate: "fast"; must be a number`},
		{"infinite rate", "http: {a: {url: http://h/, rate: .inf}}", `http.a.rate: ".inf"; must be a number`},
		{"map for a text", "http: {a: {url: {b: c}}}", "http.a.url: must be a text"},
		{"text for a map", "http: {a: http://h/}", "http.a: must be a map"},
		{"a list at the top", "- http", "must be a map"},
		{
			"headers", "http: {a: {url: http://h/, headers: {A: 31415926535897}}}",
			"http.a.headers.A: must be a text, in quotes",
		},
		{"alias", "nats:\n  a: &x {}\n  b: *x", "nats.b: aliases and composed keys are not read"},
		{"merge", "nats:\n  a: &x {}\n  b: {<<: *x}", "aliases"},
		{"composed key", "{[a]: b}", "composed keys"},
		{"two documents", "http: {}\n---\nnats: {}", "more than one document"},
		{"no YAML", "http: {", "line 1"},
		{"tabs", "http:\n\tclip: {}", "found character that cannot start any token"},
		{"rule", "http: {clip: {}}", "http.clip.url: missing; must be http://"},
		{
			"rules", "http: {b: {url: x, retries: -1}}\nnats: {a: {timeout: 0s}}",
			"http.b.retries: -1; must be between 0 and 16\nnats.a.timeout: 0s; must be above 0s",
		},
		{"two unknown", "nats: {a: {x: 1, y: 2}}", "nats.a.y: unknown"},
		{"large", strings.Repeat("#", 1<<20+1), "is larger than 1048576 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := write(t, tt.text)
			_, err := scorerfile.Load(path)
			if err == nil || !strings.Contains(err.Error(), tt.fault) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v\nwant  %q and the file", err, tt.fault)
			}
			if err != nil && strings.Contains(err.Error(), "31415926535897") {
				t.Errorf("error %v shows a header", err)
			}
		})
	}
	if _, err := scorerfile.Load("no/such/file.yaml"); err == nil ||
		!strings.Contains(err.Error(), "no/such/file.yaml") {
		t.Errorf("no file: %v", err)
	}
}

func TestFile_Open(t *testing.T) {
	t.Setenv("CLIP_TOKEN", "secret")
	f, err := scorerfile.Load(write(t, `
http: {clip: {url: "http://u:pass3141@h/?key=3141", headers: {A: "${CLIP_TOKEN}", B: bare3141}}, b: {url: http://h/}}
nats: {a: {}}`))
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	if shown := fmt.Sprintf("%v %+v %#v %s", f, f, f, data); strings.Contains(shown, "3141") ||
		!strings.Contains(shown, "http://h/") {
		t.Errorf("a file prints as %s", shown)
	}
	scorers, err := f.Open(nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range scorers {
		names = append(names, s.Name())
		if c, ok := s.(io.Closer); ok {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if want := []string{"http:b", "http:clip", "nats:a"}; !slices.Equal(names, want) {
		t.Errorf("opened %v, want %v", names, want)
	}

	f, err = scorerfile.Load(write(t, `
http: {clip: {url: http://h/, headers: {A: "${NO_SUCH_VARIABLE}"}}, fine: {url: http://h/}}
nats: {a: {}}`))
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Open(nil)
	if want := "http:clip: headers.A: environment variable NO_SUCH_VARIABLE is not set"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q in it", err, want)
	}
}

// The example that ships reads.
func TestLoad_Example(t *testing.T) {
	f, err := scorerfile.Load(filepath.Join("..", "..", "..", "deploy", "scorers", "scorers.yaml"))
	if _, bright := f.HTTP["bright"]; err != nil || !bright || len(f.HTTP) != 1 || len(f.NATS) != 1 {
		t.Errorf("%+v, %v; want http:bright and nats:colour", f, err)
	}
}

// FuzzLoad: a file is refused, or it is valid and says so again.
func FuzzLoad(f *testing.F) {
	for _, seed := range []string{
		"http: {clip: {url: http://h/, headers: {A: b}, timeout: 3s}}",
		"nats: {a: }", "a: &x [*x]", "? {a: b}\n: c",
	} {
		f.Add([]byte(seed))
	}
	path := write(f, "")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := scorerfile.Load(path)
		if err != nil {
			return
		}
		if err := file.Validate(); err != nil {
			t.Errorf("loaded, then %v", err)
		}
	})
}
