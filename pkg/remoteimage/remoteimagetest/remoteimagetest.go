// Package remoteimagetest has a server of images for tests. It replays bytes that SGLang-Diffusion 0.5.23 sent, in
// float32 on a CPU, of deploy/models/signs; it hangs, fails or sends wrong bytes if a test says so.
package remoteimagetest

import (
	"embed"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

//go:embed testdata
var recorded embed.FS

// Prompt is the prompt, Seed the seed of all recorded images. They are 64 x 32 pixels, of 4 steps.
const (
	Prompt        = `a blue sign that says "4071"`
	Seed          = 5
	Width, Height = 64, 32
	Steps         = 4
)

// Sigmas returns the schedule of all recorded images, [Steps+1].
func Sigmas() []float32 { return []float32{1, 0.7430818, 0.42475128, 0.01999992, 0} }

// Recorded is one of the files of testdata.
func Recorded(t testing.TB, name string) []byte {
	t.Helper()
	data, err := recorded.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Server replays recordings. Its URL is that of a server.
type Server struct {
	*httptest.Server
	t  testing.TB
	by map[string][]byte // answers by what was asked

	mu     sync.Mutex
	health Answer
	answer Answer
	asked  []map[string]any
}

// Answer writes a response.
type Answer func(w http.ResponseWriter, r *http.Request)

// New starts a server.
func New(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, by: map[string][]byte{}}
	files, err := recorded.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".msgpack")
		if !ok || name == "sde_lora_nan" { // it asks what sde_all asks, of broken weights
			continue
		}
		var asked map[string]any
		if err := json.Unmarshal(Recorded(t, name+".request.json"), &asked); err != nil {
			t.Fatal(err)
		}
		s.by[meaning(asked)] = Recorded(t, f.Name())
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// meaning returns what a request asks for, with the defaults of the server, as a text that can be compared.
func meaning(asked map[string]any) string {
	of := map[string]any{
		"rollout_sde_type": "sde", "rollout_noise_level": 0.7, "rollout_log_prob_no_const": false,
		"rollout_debug_mode": true, "rollout_return_denoising_env": false,
	}
	for name, v := range asked {
		of[name] = v
	}
	steps, _ := of["num_inference_steps"].(float64)
	for name, n := range map[string]int{
		"rollout_sde_step_indices": int(steps), "rollout_return_step_indices": int(steps) + 1,
	} {
		set := map[string]bool{}
		list, given := of[name].([]any)
		for _, i := range list {
			set[fmt.Sprint(i)] = true
		}
		for i := 0; i < n && !given; i++ {
			set[fmt.Sprint(i)] = true
		}
		of[name] = set
	}
	if of["rollout_sde_type"] == "ode" {
		delete(of, "rollout_sde_step_indices")
		delete(of, "rollout_noise_level")
	}
	for _, name := range []string{"suppress_logs", "extra_sampling_params", "rollout"} {
		delete(of, name)
	}
	text, err := json.Marshal(of)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// SetHealth has the server answer its health check by h; nil: it is well.
func (s *Server) SetHealth(h Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.health = h
}

// SetAnswer has the server answer requests for images by a; nil: with its recordings.
func (s *Server) SetAnswer(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = a
}

// Asked returns the requests for images so far.
func (s *Server) Asked() []map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]map[string]any{}, s.asked...)
}

// Say is an answer of bytes.
func Say(status int, body []byte) Answer {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	health, answer := s.health, s.answer
	s.mu.Unlock()
	switch r.URL.Path {
	case "/health":
		if health != nil {
			health(w, r)
		}
	case "/models", "/server_info":
		_, _ = w.Write(Recorded(s.t, "get_"+r.URL.Path[1:]+".json"))
	case "/rollout/generate":
		var asked map[string]any
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			http.Error(w, err.Error(), http.StatusUnprocessableEntity)
			return
		}
		s.mu.Lock()
		s.asked = append(s.asked, asked)
		s.mu.Unlock()
		if answer != nil {
			answer(w, r)
			return
		}
		body, ok := s.by[meaning(asked)]
		if !ok {
			http.Error(w, `{"detail":"not recorded: `+fmt.Sprintf("%q", meaning(asked))[1:]+`}`, http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/msgpack")
		_, _ = w.Write(body)
	default:
		http.NotFound(w, r)
	}
}
