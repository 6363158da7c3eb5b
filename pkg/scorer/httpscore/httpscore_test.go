package httpscore_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	_ "image/jpeg"
	"image/png"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/httpscore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ scorer.BatchScorer = (*httpscore.Scorer)(nil)

// request is what a server in another language would read.
type request struct {
	V       int    `json:"v" msgpack:"v"`
	Name    string `json:"name" msgpack:"name"`
	Samples []struct {
		Prompt      string            `json:"prompt" msgpack:"prompt"`
		GroundTruth string            `json:"ground_truth" msgpack:"ground_truth"`
		Params      map[string]string `json:"params" msgpack:"params"`
		Metadata    map[string]any    `json:"metadata" msgpack:"metadata"`
		Image       []byte            `json:"image" msgpack:"image"`
		ImageFormat string            `json:"image_format" msgpack:"image_format"`
	} `json:"samples" msgpack:"samples"`
}

func config(url string) httpscore.Config {
	cfg := httpscore.DefaultConfig()
	cfg.URL, cfg.RetryWait, cfg.Timeout, cfg.Retries = url, time.Millisecond, 5*time.Second, 2
	return cfg
}

func open(t testing.TB, cfg httpscore.Config) *httpscore.Scorer {
	t.Helper()
	s, err := httpscore.New("clip", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func serve(t testing.TB, handle http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handle)
	t.Cleanup(server.Close)
	return server.URL
}

func flat(c color.NRGBA) scorer.Input {
	img := image.NewNRGBA(image.Rect(0, 0, 12, 8))
	for i := 0; i < len(img.Pix); i += 4 {
		copy(img.Pix[i:], []uint8{c.R, c.G, c.B, c.A})
	}
	return scorer.Input{Media: media.Of(img), Prompt: "a fox"}
}

// What the server reads is what was given, in both formats and both kinds of images,
// and what it answers comes back in order.
func TestScorer_RoundTrip(t *testing.T) {
	for _, format := range []string{"json", "msgpack"} {
		for _, encoding := range []string{"png", "jpeg"} {
			t.Run(format+", "+encoding, func(t *testing.T) {
				url := serve(t, func(w http.ResponseWriter, r *http.Request) {
					var req request
					body, err := io.ReadAll(r.Body)
					unmarshal, marshal := json.Unmarshal, json.Marshal
					if format == "msgpack" {
						unmarshal, marshal = msgpack.Unmarshal, msgpack.Marshal
					}
					if err == nil {
						err = unmarshal(body, &req)
					}
					if kind := r.Header.Get("Content-Type"); err != nil || r.Method != http.MethodPost ||
						kind != "application/"+format || req.V != 1 || req.Name != "clip" {
						t.Errorf("%s of %s, v %d, name %q, error %v", r.Method, kind, req.V, req.Name, err)
					}
					// The score is the mean of the red channel, as the server sees the image.
					reply := map[string]any{"took_ms": 3, "errors": []any{}}
					var scores, details []any
					for _, s := range req.Samples {
						img, name, err := image.Decode(bytes.NewReader(s.Image))
						if opaque, ok := img.(interface{ Opaque() bool }); err != nil || name != encoding ||
							s.ImageFormat != encoding ||
							!ok || !opaque.Opaque() {
							t.Errorf("image in %s, said to be %s, error %v", name, s.ImageFormat, err)
							return
						}
						var sum float64
						for y := range img.Bounds().Dy() {
							for x := range img.Bounds().Dx() {
								r, _, _, _ := img.At(x, y).RGBA()
								sum += float64(r) / 257
							}
						}
						scores = append(scores, sum/float64(img.Bounds().Dx()*img.Bounds().Dy()))
						details = append(details, fmt.Sprintf("%s|%s|%s|%v", s.Prompt, s.GroundTruth, s.Params["k"],
							s.Metadata))
					}
					reply["scores"], reply["details"] = scores, details
					data, err := marshal(reply)
					if err != nil {
						t.Error(err)
					}
					fmt.Fprintf(w, "%s", data)
				})
				cfg := config(url)
				cfg.Format, cfg.Image, cfg.MaxBatch = format, encoding, 2
				s := open(t, cfg)
				in := []scorer.Input{
					flat(color.NRGBA{R: 10, A: 255}), flat(color.NRGBA{R: 200, A: 255}),
					flat(color.NRGBA{R: 200, A: 51}),
				}
				in[1].Prompt, in[1].GroundTruth, in[1].Params = "ein Fuchs \"é\"", "x", map[string]string{"k": "v"}
				in[1].Metadata = map[string]any{"include": []any{map[string]any{"class": "fox", "count": int64(2)}}}
				results := s.ScoreBatch(t.Context(), in)
				// 200 at alpha 51/255 over black is 40.
				for i, want := range []scorer.Result{
					{Value: 10, Detail: "a fox|||map[]"},
					{Value: 200, Detail: "ein Fuchs \"é\"|x|v|map[include:[map[class:fox count:2]]]"},
					{Value: 40, Detail: "a fox|||map[]"},
				} {
					if got := results[i]; got.Err != nil || math.Abs(got.Value-want.Value) > 1 || encoding == "png" &&
						got.Value != want.Value || got.Detail != want.Detail {
						t.Errorf("sample %d: %+v, want %+v", i, got, want)
					}
				}
				if one, err := s.Score(t.Context(), in[0]); err != nil || math.Abs(one-10) > 1 {
					t.Errorf("one sample: %v, %v", one, err)
				}
			})
		}
	}
}

// Metadata of msgpack that JSON cannot have fails its sample alone.
func TestScorer_MetadataIsNoJSON(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"scores":[0.5]}`) })
	cfg := config(url)
	cfg.MaxBatch = 2
	in := []scorer.Input{flat(color.NRGBA{A: 255}), flat(color.NRGBA{A: 255})}
	in[0].Metadata = map[string]any{"x": math.NaN()}
	got := open(t, cfg).ScoreBatch(t.Context(), in)
	if err := got[0].Err; err == nil || !strings.Contains(err.Error(), "metadata: json: unsupported value: NaN") {
		t.Errorf("error %v, want one of metadata", err)
	}
	if got[1].Err != nil || got[1].Value != 0.5 {
		t.Errorf("the other sample: %+v", got[1])
	}
}

func TestScorer_Batches(t *testing.T) {
	var sizes []int
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var req request
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			t.Error(err)
		}
		sizes = append(sizes, len(req.Samples))
		fmt.Fprintf(w, `{"scores":[%s]}`, strings.Join(slices.Repeat([]string{"0"}, len(req.Samples)), ","))
	})
	cfg := config(url)
	cfg.MaxBatch = 4
	s := open(t, cfg)
	in := make([]scorer.Input, 6)
	for i := range in {
		in[i] = flat(color.NRGBA{A: 255})
	}
	in[2].Media = media.Media{}
	for i, r := range s.ScoreBatch(t.Context(), in) {
		if (r.Err != nil) != (i == 2) || i == 2 && !strings.Contains(r.Err.Error(), "no image") {
			t.Errorf("sample %d: %v", i, r.Err)
		}
	}
	if fmt.Sprint(sizes) != "[3 2]" || s.MaxBatch() != 4 {
		t.Errorf("requests of %v samples, at most %d; want [3 2], 4", sizes, s.MaxBatch())
	}
	if r := s.ScoreBatch(t.Context(), in[2:3]); r[0].Err == nil || len(sizes) != 2 {
		t.Errorf("a request without an image was sent: %v, %v", r, sizes)
	}
}

// Every reply to two samples that is not two finite numbers is a failure that says so,
// final, for the samples it is about and no others.
func TestScorer_Replies(t *testing.T) {
	tests := []struct {
		name, reply   string
		first, second string // faults; empty: scored
	}{
		{"two scores", `{"scores":[0.5,2]}`, "", ""},
		{"null", `{"scores":[0.5,null]}`, "", "score null; must be a finite number"},
		{"an error of one", `{"scores":[0.5,null],"errors":[null,"no face"]}`, "", `server: "no face"`},
		{"an error beside a score", `{"scores":[0.5,1],"errors":["","no face"]}`, "", `server: "no face"`},
		{
			"NaN as Python writes it", `{"scores":[0.5, NaN],"details":["NaN: \"NaN\"","b"]}`, "",
			`score "NaN"; must be a finite number`,
		},
		{"infinities", `{"scores":[Infinity,-Infinity]}`, `"Infinity"`, `"-Infinity"`},
		{"beyond a float", `{"scores":[1e999,-1]}`, `score "1e999": beyond`, ""},
		{"a text", `{"scores":["0.5",1]}`, `score "0.5"; must be a finite number`, ""},
		{"nested", `{"scores":[[0.5],{"a":1}]}`, "score a list of 1", "score a map"},
		{"true", `{"scores":[true,1]}`, "score true", ""},
		{"its version", `{"v":1,"scores":[0.5,1]}`, "", ""},
		{"another version", `{"v":2,"scores":[0.5,1]}`, "v: 2; must be 1, or left out", "v: 2"},
		{"a version in words", `{"v":"1","error":"x"}`, `v: "1"; must be 1`, "must be 1"},
		{"too few", `{"scores":[0.5]}`, "scores: 1 items for 2 samples", "1 items"},
		{"too many", `{"scores":[1,2,3]}`, "scores: 3 items for 2 samples", "3 items"},
		{"errors of another number", `{"scores":[1,2],"errors":["x"]}`, "errors: 1 items", "errors: 1 items"},
		{"scores that are no list", `{"scores":0.5}`, "scores: 0.5; must be a list", "must be a list"},
		{"no scores", `{"score":[1,2]}`, "no scores for 2 samples", "no scores"},
		{"an error", `{"error":"out of memory"}`, `server: "out of memory"`, `server: "out of memory"`},
		{"an error that is no text", `{"error":{"code":3}}`, "server: a map", "server: a map"},
		{"null alone", `null`, "no json map", "no json map"},
		{"empty", ``, "no json map: EOF", "no json map"},
		{"cut", `{"scores":[0.5,`, "no json map", "no json map"},
		{"two maps", `{"scores":[1,2]}{}`, "bytes after the map", "bytes after"},
		{"a page", "<html>\x1b[31mhello</html>", `"<html>\x1b[31mhello</html>"`, "no json map"},
		{"deep", `{"scores":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}", "more than 16 levels", "levels"},
		{"brackets in a text", `{"scores":[0.5,1],"details":["\"` + strings.Repeat("[", 100) + `",""]}`, "", ""},
		{"long garbage is shown in part", strings.Repeat("x", 1000), `"` + strings.Repeat("x", 200) + `"...`, ""},
		{
			"huge", `{"scores":[1,2],"pad":"` + strings.Repeat("x", 1<<20) + `"}`, "reply is larger than 1048576 bytes",
			"larger",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var requests atomic.Int32
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				fmt.Fprint(w, tt.reply)
			})
			cfg := config(url)
			cfg.MaxBatch = 2
			results := open(t, cfg).ScoreBatch(t.Context(),
				[]scorer.Input{flat(color.NRGBA{A: 255}), flat(color.NRGBA{A: 255})})
			for i, fault := range []string{tt.first, tt.second} {
				err := results[i].Err
				if tt.first == "" || fault != "" {
					if (err == nil) != (fault == "") || err != nil && !strings.Contains(err.Error(), fault) {
						t.Errorf("sample %d: %v, want %q", i, err, fault)
					}
				}
				if err != nil && (results[i].Value != 0 || errors.Is(err, scorer.ErrUnavailable) ||
					!strings.HasPrefix(err.Error(), "http:clip: ")) {
					t.Errorf("sample %d: value %v with error %v, want none, final, by name", i, results[i].Value, err)
				}
			}
			if requests.Load() != 1 {
				t.Errorf("%d requests, want 1: a reply is final", requests.Load())
			}
		})
	}
}

func TestScorer_MsgpackReplies(t *testing.T) {
	tests := []struct {
		name  string
		reply []byte
		want  float64
		fault string
	}{
		{"float32", []byte("\x81\xa6scores\x91\xca\x3e\x80\x00\x00"), 0.25, ""},
		{"negative", []byte("\x81\xa6scores\x91\xd0\x80"), -128, ""},
		{"large", []byte("\x81\xa6scores\x91\xcf\x80\x00\x00\x00\x00\x00\x00\x00"), 1 << 63, ""},
		{"NaN", []byte("\x81\xa6scores\x91\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"), 0, "score NaN; must be a finite number"},
		{"infinity", []byte("\x81\xa6scores\x91\xca\xff\x80\x00\x00"), 0, "score -Inf"},
		{"nil", []byte("\x81\xa6scores\x91\xc0"), 0, "score null"},
		{"bytes", []byte("\x81\xa6scores\x91\xc4\x02ab"), 0, "score 2 bytes"},
		{"a length that is not there", []byte("\x81\xa6scores\xdd\xff\xff\xff\xff"), 0, "ends early"},
		{"a map of four thousand million", []byte("\xdf\xff\xff\xff\xff"), 0, "ends early"},
		{"a key twice", []byte("\x82\xa1a\x01\xa1a\x02"), 0, `key "a" comes twice`},
		{"a key that is no text", []byte("\x81\x01\x02"), 0, "key 1; must be a text"},
		{"text that is no UTF-8", []byte("\x81\xa1a\xa1\xff"), 0, "not UTF-8"},
		{"an extension", []byte("\x81\xa1a\xd4\x01\x01"), 0, "code 0xd4"},
		{"a list", []byte("\x91\x01"), 0, "a list of 1, not a map"},
		{"bytes after it", []byte("\x80\x00"), 0, "1 bytes after"},
		{"deep", []byte("\x81\xa1a" + strings.Repeat("\x91", 100)), 0, "more than 16 levels"},
		{"JSON", []byte(`{"scores":[1]}`), 0, "not a map"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s", tt.reply) }))
			cfg.Format = "msgpack"
			got, err := open(t, cfg).Score(t.Context(), flat(color.NRGBA{A: 255}))
			if got != tt.want || (err == nil) != (tt.fault == "") || err != nil &&
				!strings.Contains(err.Error(), tt.fault) {
				t.Errorf("%v, %v; want %v, %q", got, err, tt.want, tt.fault)
			}
		})
	}
}

// No failure, and no way to print a config, shows what a header or the address hides,
// even when the server sends back what it got.
func TestSecrets(t *testing.T) {
	const token, password, key = "tok-3141592653", "pass-2718281828", "key-1414213562"
	secrets := []string{token, password, key, "Zm9vOnBhc3MtMjcxODI4MTgyOA==" /* foo:password */}
	t.Setenv("CLIP_TOKEN", token)
	echo := func(code int, format string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			got := r.Header.Get("Authorization") + r.Header.Get("X-Key") + r.URL.RawQuery
			if !strings.Contains(got, token) || !strings.Contains(got, key) {
				t.Errorf("the server got %q without the secrets", got)
			}
			w.WriteHeader(code)
			fmt.Fprintf(w, format, got+strings.Join(secrets, " ")) // and what it knows from elsewhere
		}
	}
	refused := func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }
	long := strings.Repeat("x", 190) // so that a cut falls into the secret
	for name, handle := range map[string]http.HandlerFunc{
		"echo in 400":           echo(400, "bad: %s"),
		"echo in 400, cut":      echo(400, long+"%s"),
		"echo in 503":           echo(503, "bad: %s"),
		"echo as error":         echo(200, `{"error":"bad: %s"}`),
		"echo as sample error":  echo(200, `{"scores":[null],"errors":["`+long+`%s"]}`),
		"echo as score":         echo(200, `{"scores":["`+long+`%s"]}`),
		"echo as garbage":       echo(200, long+"%s"),
		"echo as scores":        echo(200, `{"scores":"`+long+`%s"}`),
		"no reply":              refused,
		"echo in a detail only": echo(200, `{"scores":[1],"details":["seen: %s"]}`),
	} {
		t.Run(name, func(t *testing.T) {
			address := serve(t, handle)
			cfg := config(strings.Replace(address, "http://", "http://foo:"+password+"@", 1) + "/score?key=" + key)
			cfg.Headers = map[string]string{"X-Key": "${CLIP_TOKEN}", "Authorization": "Bearer ${CLIP_TOKEN}"}
			s := open(t, cfg)
			r := s.ScoreDetail(t.Context(), flat(color.NRGBA{A: 255}))
			shown := []string{
				r.Detail, cfg.String(), fmt.Sprintf("%v %+v %#v %s", cfg, cfg, cfg, &cfg),
				fmt.Sprintf("%v %+v %#v", s, s, s),
			}
			if data, err := json.Marshal(map[string]any{"cfg": cfg}); err != nil {
				t.Error(err)
			} else {
				shown = append(shown, string(data))
			}
			if r.Err != nil {
				shown = append(shown, r.Err.Error(), fmt.Sprintf("%+v", r.Err))
			} else if !strings.Contains(r.Detail, "***") {
				t.Errorf("detail %q", r.Detail)
			}
			for _, text := range shown {
				for _, secret := range secrets {
					for cut := len(secret); cut > 6; cut-- {
						if strings.Contains(text, secret[:cut]) {
							t.Fatalf("%q shows %q", text, secret[:cut])
						}
					}
				}
			}
			if !strings.Contains(cfg.String(), "Authorization") || !strings.Contains(cfg.String(), "/score") {
				t.Errorf("config %s shows neither header names nor the path", cfg)
			}
		})
	}
	t.Run("not to another host", func(t *testing.T) {
		var visited atomic.Bool
		other := serve(t, func(http.ResponseWriter, *http.Request) { visited.Store(true) })
		cfg := config(serve(t, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other, http.StatusTemporaryRedirect)
		}))
		cfg.Headers = map[string]string{"X-Key": "${CLIP_TOKEN}"}
		if _, err := open(t, cfg).Score(t.Context(), flat(color.NRGBA{A: 255})); err == nil || visited.Load() {
			t.Errorf("error %v, visited %v; want a redirect refused", err, visited.Load())
		}
	})
}

func TestNew_Refuses(t *testing.T) {
	t.Setenv("EMPTY", "")
	t.Setenv("LINES", "a\r\nX-Other: b")
	tests := []struct {
		name   string
		change func(*httpscore.Config)
		fault  string
	}{
		{"no address", func(c *httpscore.Config) { c.URL = "" }, "url: missing"},
		{"no scheme", func(c *httpscore.Config) { c.URL = "127.0.0.1:80" }, "url: no address that can be read"},
		{"another scheme", func(c *httpscore.Config) { c.URL = "ftp://a:b@host/x" }, "url: ftp://host/x; must be http"},
		{"no host", func(c *httpscore.Config) { c.URL = "http:///score" }, "url: http:///score; must be http"},
		{"format", func(c *httpscore.Config) { c.Format = "pickle" }, `format: "pickle"; must be one of json, msgpack`},
		{"image", func(c *httpscore.Config) { c.Image = "gif" }, `image: "gif"; must be one of png, jpeg`},
		{"header name", func(c *httpscore.Config) { c.Headers = map[string]string{"a b": ""} }, `headers: "a b" is no name`},
		{
			"header twice", func(c *httpscore.Config) { c.Headers = map[string]string{"X-A": "", "x-a": ""} },
			"headers.x-a: comes twice",
		},
		{
			"reserved header", func(c *httpscore.Config) { c.Headers = map[string]string{"content-type": "x"} },
			"headers.content-type: is set by",
		},
		{
			"no variable", func(c *httpscore.Config) { c.Headers = map[string]string{"A": "${1x}"} },
			"headers.A: ${1x} is no name",
		},
		{
			"open brace", func(c *httpscore.Config) { c.Headers = map[string]string{"A": "secret ${B"} },
			"headers.A: ${ without its }",
		},
		{
			"unset", func(c *httpscore.Config) { c.Headers = map[string]string{"A": "Bearer ${NO_SUCH_VARIABLE}"} },
			"headers.A: environment variable NO_SUCH_VARIABLE is not set",
		},
		{
			"empty", func(c *httpscore.Config) { c.Headers = map[string]string{"A": "${EMPTY}"} },
			"environment variable EMPTY is not set",
		},
		{
			"line break", func(c *httpscore.Config) { c.Headers = map[string]string{"A": "${LINES}"} },
			"headers.A: the value has a line break",
		},
		{"timeout", func(c *httpscore.Config) { c.Timeout = 0 }, "timeout: 0s; must be above 0s and at most 1h0m0s"},
		{"concurrency", func(c *httpscore.Config) { c.Concurrency = 0 }, "concurrency: 0; must be between 1 and 1024"},
		{"rate", func(c *httpscore.Config) { c.Rate = math.NaN() }, "rate: NaN; must not be negative"},
		{"retries", func(c *httpscore.Config) { c.Retries = -1 }, "retries: -1; must be between 0 and 16"},
		{
			"retry_wait", func(c *httpscore.Config) { c.RetryWait = time.Minute },
			"retry_wait: 1m0s; must be above 0s and at most 30s",
		},
		{"max_batch", func(c *httpscore.Config) { c.MaxBatch = 0 }, "max_batch: 0; must be between 1 and 256"},
		{
			"two faults", func(c *httpscore.Config) { c.MaxBatch, c.Retries = 0, 99 },
			"retries: 99; must be between 0 and 16\nmax_batch: 0",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config("http://127.0.0.1:8900/score")
			tt.change(&cfg)
			_, err := httpscore.New("clip", cfg)
			if err == nil || !strings.Contains(err.Error(), tt.fault) ||
				!strings.HasPrefix(err.Error(), "http:clip: ") {
				t.Errorf("error %v, want http:clip and %q", err, tt.fault)
			}
			if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "X-Other") ||
				strings.Contains(err.Error(), "a:b")) {
				t.Errorf("error %q shows a secret", err)
			}
		})
	}
	for _, name := range []string{"", "a.b", "a b", strings.Repeat("x", 65), "http:clip"} {
		if _, err := httpscore.New(name, config("http://127.0.0.1/")); err == nil {
			t.Errorf("name %q was taken", name)
		}
	}
}

func TestScorer_Names(t *testing.T) {
	cfg := config("http://127.0.0.1:8900/score")
	if s := open(t, cfg); s.Name() != "http:clip" || s.Version() != "http-1" || s.Concurrency() != 4 {
		t.Errorf("%s, version %s, concurrency %d", s.Name(), s.Version(), s.Concurrency())
	}
	cfg.Version = "ViT-L-14"
	if s := open(t, cfg); s.Version() != "http-1+ViT-L-14" {
		t.Errorf("version %s", s.Version())
	}
}

// FuzzReply: whatever a server answers, there is one result per sample, each a finite
// number or a final error in valid text.
func FuzzReply(f *testing.F) {
	for _, seed := range []string{
		`{"scores":[1,2]}`, `{"scores":[NaN,-Infinity],"errors":[null,"\""]}`, `{"error":"x"}`,
		"\x82\xa6scores\x92\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\xa6errors\x92\xc0\xa1x", "\xdf\xff\xff\xff\xff", "[[[[",
	} {
		f.Add(seed, false)
		f.Add(seed, true)
	}
	var reply atomic.Pointer[string]
	url := serve(f, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, *reply.Load()) })
	var scorers []*httpscore.Scorer
	for _, format := range []string{"json", "msgpack"} {
		cfg := config(url)
		cfg.Format, cfg.MaxBatch = format, 2
		scorers = append(scorers, open(f, cfg))
	}
	in := []scorer.Input{flat(color.NRGBA{A: 255}), flat(color.NRGBA{R: 9, A: 255})}
	f.Fuzz(func(t *testing.T, body string, packed bool) {
		reply.Store(&body)
		s := scorers[0]
		if packed {
			s = scorers[1]
		}
		for _, r := range s.ScoreBatch(t.Context(), in) {
			if r.Err == nil && (math.IsNaN(r.Value) || math.IsInf(r.Value, 0)) || len(r.Detail) > scorer.MaxDetail {
				t.Errorf("value %v, detail of %d bytes", r.Value, len(r.Detail))
			}
			if r.Err != nil && (errors.Is(r.Err, scorer.ErrUnavailable) || len(r.Err.Error()) > 2000) {
				t.Errorf("error %v", r.Err)
			}
		}
	})
}

func ExampleNew() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req request
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		img, err := png.DecodeConfig(bytes.NewReader(req.Samples[0].Image))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, `{"scores": [%d]}`, img.Width)
	}))
	defer server.Close()
	cfg := httpscore.DefaultConfig()
	cfg.URL = server.URL
	s, err := httpscore.New("width", cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	value, err := s.Score(context.Background(),
		scorer.Input{Media: media.Of(image.NewNRGBA(image.Rect(0, 0, 64, 32))), Prompt: "a fox"})
	fmt.Println(s.Name(), value, err)
	// Output: http:width 64 <nil>
}
