// Package remotelmtest has servers of language models for tests. They replay bytes that real servers sent, and break
// off, hang or send wrong answers if a test says so. The model is deploy/models/sums.
package remotelmtest

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// recorded holds answers of vLLM 0.32.0 to the prompt Prompt, one for each route and mode, its answers to the probes
// of a client, and answers in the form of SGLang 0.5.23.
//
//go:embed testdata
var recorded embed.FS

// Prompt is the prompt of the recorded answers, before the template of the model is applied.
const Prompt = "347+58=?"

// Recorded is one of the files of testdata.
func Recorded(t testing.TB, name string) []byte {
	t.Helper()
	data, err := recorded.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Modes of a vLLM server.
const (
	LogProbs    = "logprobs"    // raw_logprobs by its token route
	Logits      = "logits"      // raw_logits by its token route
	Completions = "completions" // raw_logprobs without its token route
	SGLang      = "sglang"      // /generate of SGLang
)

// Server is a test server that replays recordings.
type Server struct {
	*httptest.Server
	// Mode is how it was started.
	Mode string
	// MaxTop is how many numbers of a token it gives at most, as --max-logprobs of vLLM; 0: all. Row changes the logits
	// of a probe that asks for more than two numbers; nil: they stay. Both are set before a client asks.
	MaxTop int
	Row    func(logits []float64)
	// NoAdapters makes it answer as one that was started without --enable-lora. It is set before a client asks.
	NoAdapters bool
	// DevMode opens the routes by which the weights of vLLM change; those of SGLang always are. Stale has it say that
	// it has loaded weights, and draw with the old ones. Both are set before a client asks.
	DevMode, Stale bool
	// CPU has vLLM in DevMode say that it computes on one.
	CPU bool
	t   testing.TB

	mu      sync.Mutex
	answers []Answer
	asked   []map[string]any
	// adapters has the folder of each adapter that a client has loaded, as vLLM with --enable-lora.
	adapters map[string]string
	has      weights
	resets   int
	down     atomic.Bool
	wake     chan struct{}

	paused, pausedInStream atomic.Bool
}

// Answer writes the response to a request for tokens.
type Answer func(w http.ResponseWriter, body map[string]any)

// New starts a server that gives answers in turn, the last one again and again; without answers, the recorded one.
func New(t testing.TB, mode string, answers ...Answer) *Server {
	t.Helper()
	s := &Server{Mode: mode, t: t, answers: answers, wake: make(chan struct{})}
	if len(answers) == 0 {
		s.answers = []Answer{Whole(s.Stream())}
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		close(s.wake)
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// Engine returns the value for the flag --engine.
func (s *Server) Engine() string {
	if s.Mode == SGLang {
		return "sglang=" + s.URL
	}
	return "vllm=" + s.URL
}

// Stream returns the recorded answer in the mode of the server.
func (s *Server) Stream() []byte {
	if s.Mode == SGLang {
		return Recorded(s.t, "sglang-cumulative.sse")
	}
	return Recorded(s.t, "vllm-"+s.Mode+".sse")
}

// Pause makes the server answer requests for tokens as vLLM 0.33 does between /pause and /resume; inStream, after the
// headers of a stream.
func (s *Server) Pause(paused, inStream bool) {
	s.paused.Store(paused)
	s.pausedInStream.Store(inStream)
}

// Down makes the server answer every request with 503, or ends that.
func (s *Server) Down(down bool) { s.down.Store(down) }

// Asked returns the bodies of the requests for tokens so far, without probes.
func (s *Server) Asked() []map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]map[string]any{}, s.asked...)
}

// ServeHTTP answers as the server of its mode does.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.down.Load() {
		http.Error(w, `{"error":{"message":"the engine is dead","code":503}}`, http.StatusServiceUnavailable)
		return
	}
	switch path := r.URL.Path; {
	case path == "/health", path == "/abort_request":
	case s.Mode == SGLang && (path == "/server_info" || path == "/model_info"):
		_, _ = w.Write(Recorded(s.t, "sglang"+strings.ReplaceAll(path, "/", "-")+".json"))
	case s.Mode != SGLang && path == "/version":
		_, _ = w.Write(Recorded(s.t, "vllm-version.json"))
	case path == "/v1/models":
		s.listModels(w)
	case s.DevMode && path == "/weight_info":
		fmt.Fprint(w, `{"weight_version":"default"}`)
	case s.DevMode && s.CPU && path == "/server_info":
		fmt.Fprint(w, `{"vllm_config":{"device_config":{"device":"cpu"}}}`)
	case s.isWeightsRoute(path):
		s.changeWeights(w, r)
	case s.Mode != SGLang && path == "/is_paused":
		fmt.Fprintf(w, `{"is_paused":%v}`, s.paused.Load())
	case s.paused.Load() && (path == "/v1/completions" || path == "/inference/v1/generate"):
		paused := Recorded(s.t, "vllm-paused.json")
		if !s.pausedInStream.Load() {
			http.Error(w, string(paused), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", bytes.TrimSpace(paused))
	case strings.TrimPrefix(path, s.adapterPrefix()) == "/load_lora_adapter",
		strings.TrimPrefix(path, s.adapterPrefix()) == "/unload_lora_adapter":
		s.changeAdapter(w, r)
	case s.Mode == Completions && path == "/inference/v1/generate":
		http.Error(w, `{"error":{"message":"not enabled","code":403}}`, http.StatusForbidden)
	case path == "/v1/completions", path == "/inference/v1/generate", path == "/generate":
		s.generate(w, r)
	default:
		http.NotFound(w, r)
	}
}

// generate answers a request for tokens: a probe with its recording, else with the next Answer.
func (s *Server) generate(w http.ResponseWriter, r *http.Request) {
	var body map[string]any
	if data, err := io.ReadAll(r.Body); err != nil || json.Unmarshal(data, &body) != nil {
		http.Error(w, `{"error":{"message":"no JSON","code":400}}`, http.StatusBadRequest)
		return
	}
	model, _ := body[s.AdapterField()].(string)
	if _, loaded := s.Adapters()[model]; strings.HasPrefix(model, "meander-") && !loaded {
		status, says := http.StatusNotFound, "The model %q does not exist."
		if s.Mode == SGLang {
			status, says = http.StatusBadRequest, "Got LoRA adapter that has never been loaded: %s"
		}
		text, _ := json.Marshal(fmt.Sprintf(says, model))
		http.Error(w, fmt.Sprintf(`{"error":{"message":%s,"code":%d}}`, text, status), status)
		return
	}
	if version, loads := s.Version(); loads > 0 || version != "default" {
		w = named{w, version}
	}
	id := fmt.Sprint(body["request_id"], body["rid"])
	if strings.Contains(id, "meander-canary") {
		s.answerCanary(w, model)
		return
	}
	if strings.Contains(id, "meander-probe") {
		s.answerProbe(w, body)
		return
	}
	s.mu.Lock()
	answer := s.answers[min(len(s.asked), len(s.answers)-1)]
	s.asked = append(s.asked, body)
	s.mu.Unlock()
	answer(w, body)
}

// answerProbe answers the requests by which Dial finds out what the numbers are.
func (s *Server) answerProbe(w http.ResponseWriter, body map[string]any) {
	sampling := body
	for _, name := range []string{"sampling_params"} {
		if in, ok := body[name].(map[string]any); ok {
			sampling = in
		}
	}
	top, _ := sampling["logprobs"].(float64)
	if n, asked := body["top_logprobs_num"].(float64); asked {
		top = n
	}
	switch all := top < 0 || s.Mode == SGLang && top == vocabulary; {
	case s.MaxTop > 0 && (all || int(top) > s.MaxTop):
		const refused = `data: {"error":{"message":"Requested sample logprobs of %v, which is greater than ` +
			`max allowed: %d","code":400}}` + "\n\ndata: [DONE]\n\n"
		fmt.Fprintf(w, refused,
			top, s.MaxTop) // vLLM refuses it in the stream
	case all:
		s.row(vocabulary)(w, body)
	case top > 2:
		s.row(int(top))(w, body)
	case s.Mode == SGLang:
		Whole(Recorded(s.t, fmt.Sprintf("sglang-probe-%v.sse", sampling["temperature"])))(w, body)
	default:
		Whole(Recorded(s.t, fmt.Sprintf("vllm-%s-probe-%v.sse", s.Mode, sampling["temperature"])))(w, body)
	}
}

// vocabulary is that of the model.
const vocabulary = 320

// row answers with one token and the numbers of the likeliest, in the form of the server's mode: the recorded logits,
// or the log-probs that follow from them.
func (s *Server) row(top int) Answer {
	var in struct {
		Choices []struct {
			LogProbs struct {
				Content []struct {
					Top []struct {
						ID    int     `json:"token_id"`
						Value float64 `json:"logprob"`
					} `json:"top_logprobs"`
				} `json:"content"`
			} `json:"logprobs"`
		} `json:"choices"`
	}
	first := Events(Recorded(s.t, "vllm-logits-probe-all.sse"))[0]
	if err := json.Unmarshal(bytes.TrimPrefix(first, []byte("data: ")), &in); err != nil {
		s.t.Error(err)
	}
	row := make([]float64, vocabulary)
	for _, e := range in.Choices[0].LogProbs.Content[0].Top {
		row[e.ID] = e.Value
	}
	if s.Row != nil {
		s.Row(row)
	}
	scale := 1 + float64(s.checksum())/(1<<32)
	for i := range row {
		row[i] *= scale
	}
	if s.Mode != Logits {
		sum := 0.0
		for _, z := range row {
			sum += math.Exp(z)
		}
		for i := range row {
			row[i] = float64(float32(row[i] - math.Log(sum)))
		}
	}
	ids := make([]int, vocabulary)
	for i := range ids {
		ids[i] = i
	}
	slices.SortStableFunc(ids, func(a, b int) int { return cmp.Compare(row[b], row[a]) })
	content, named, listed := []any{}, map[string]float64{}, []any{}
	for _, id := range ids[:top] {
		content = append(content, map[string]any{"token_id": id, "logprob": row[id]})
		named[fmt.Sprintf("token_id:%d", id)] = row[id]
		listed = append(listed, []any{row[id], id, nil})
	}
	best := ids[0]
	choice := map[string]any{"index": 0, "finish_reason": "length", "token_ids": []int{best}}
	event := map[string]any{"choices": []any{choice}}
	switch s.Mode {
	case SGLang:
		event = map[string]any{"output_ids": []int{best}, "meta_info": map[string]any{
			"completion_tokens": 1, "finish_reason": map[string]any{"type": "length"},
			"output_token_logprobs": listed[:1],
			"output_top_logprobs":   []any{listed},
		}}
	case Completions:
		choice["logprobs"] = map[string]any{"token_logprobs": []float64{row[best]}, "top_logprobs": []any{named}}
	default:
		choice["logprobs"] = map[string]any{"content": []any{map[string]any{
			"token_id": best, "logprob": row[best],
			"top_logprobs": content,
		}}}
	}
	data, err := json.Marshal(event)
	if err != nil {
		s.t.Error(err)
	}
	return Whole(fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", data))
}

// Whole answers with all of a stream.
func Whole(stream []byte) Answer {
	return func(w http.ResponseWriter, _ map[string]any) { _, _ = w.Write(stream) }
}

// Bytewise sends a stream byte by byte, so that tokens, and the characters in them, are split over chunks.
func Bytewise(stream []byte) Answer {
	return func(w http.ResponseWriter, _ map[string]any) {
		for i := range stream {
			_, _ = w.Write(stream[i : i+1])
			w.(http.Flusher).Flush()
		}
	}
}

// Cut sends the first events of a stream, and half of the next, and drops the connection.
func Cut(stream []byte, events int) Answer {
	return func(w http.ResponseWriter, _ map[string]any) {
		list := Events(stream)
		_, _ = w.Write(bytes.Join(list[:events], nil))
		_, _ = w.Write(list[events][:len(list[events])/2])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

// Hang sends the first events of a stream, and then nothing until the test ends.
func (s *Server) Hang(stream []byte, events int) Answer {
	return func(w http.ResponseWriter, _ map[string]any) {
		_, _ = w.Write(bytes.Join(Events(stream)[:events], nil))
		w.(http.Flusher).Flush()
		<-s.wake
	}
}

// Fail answers with a status.
func Fail(status int, body string) Answer {
	return func(w http.ResponseWriter, _ map[string]any) { http.Error(w, body, status) }
}

// Tail is a stream without its first events.
func Tail(stream []byte, events int) []byte { return bytes.Join(Events(stream)[events:], nil) }

// Events are those of a stream, each with the blank line behind it.
func Events(stream []byte) (list [][]byte) {
	for _, e := range bytes.SplitAfter(stream, []byte("\n\n")) {
		if len(bytes.TrimSpace(e)) > 0 {
			list = append(list, e)
		}
	}
	return list
}

// Then replaces the answers in the middle of a test: the first of them comes next.
func (s *Server) Then(answers ...Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers, s.asked = answers, nil
}
