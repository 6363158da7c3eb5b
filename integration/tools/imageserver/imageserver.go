// Package imageserver plays a server of SGLang-Diffusion in tests. It computes what the real one does, with the
// networks of pkg/models/model and torch's noise, and answers in the same bytes; its tests compare it with recorded
// answers of a real one. It dies, hangs, or serves other weights if a test says so.
package imageserver

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// What a server says of itself, and once a process of it has ended.
const (
	Version   = "0.5.23"
	precision = "fp32"
	exited    = `{"error":"Scheduler worker exited; restart the server."}`
)

// Server is a server of one model. Its URL is that of the server.
type Server struct {
	*httptest.Server
	model model.Model

	turn sync.Mutex // held by the request that is worked on: one at a time
	held held       // turn guards it

	mu     sync.Mutex
	dead   bool
	hang   chan struct{} // closed when requests go on; nil: they do
	hung   chan struct{} // gets a value for each request that hangs
	asked  []Request
	models map[string]any // what /models says
	other  bool           // noise of another seed is drawn
}

// Request is the body of a request for an image.
type Request struct {
	Prompt       string  `json:"prompt"`
	Negative     string  `json:"negative_prompt"`
	Seed         *uint64 `json:"seed"`
	Width        int     `json:"width"`
	Height       int     `json:"height"`
	Steps        int     `json:"num_inference_steps"`
	Outputs      int     `json:"num_outputs_per_prompt"`
	CFG          float64 `json:"true_cfg_scale"`
	Type         string  `json:"rollout_sde_type"`
	NoiseLevel   float64 `json:"rollout_noise_level"`
	Squared      bool    `json:"rollout_log_prob_no_const"`
	Debug        bool    `json:"rollout_debug_mode"`
	Conditioning bool    `json:"rollout_return_denoising_env"`
	SDESteps     []int   `json:"rollout_sde_step_indices"`
	Return       []int   `json:"rollout_return_step_indices"`
}

// New starts a server of the model in a folder; o may add an adapter to it.
func New(t testing.TB, folder string, o model.Options) *Server {
	t.Helper()
	m, err := families.All().Open(folder, o)
	if err != nil {
		t.Fatal(err)
	}
	_, family, err := families.All().Find(folder)
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{model: m, hung: make(chan struct{}, 64), models: map[string]any{
		"model_path": folder, "dit_precision": precision, "vae_precision": precision,
		"pipeline_name": family.Class,
	}}
	s.StartAgain()
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.Release()
		s.CloseClientConnections()
		s.Close()
		_ = m.Close()
	})
	return s
}

// Engine is the address of servers.
func Engine(servers ...*Server) string {
	address := remoteimage.SGLangDiffusion
	for i, s := range servers {
		address += []string{"=", ","}[min(i, 1)] + s.URL
	}
	return address
}

// Kill ends the process that computes, while HTTP goes on: requests fail until Restart.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = true
	s.release()
}

// Restart ends what Kill began.
func (s *Server) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = false
}

// Hang has requests for images wait until Release, or until the server is killed.
func (s *Server) Hang() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hang = make(chan struct{})
}

// Hung gets a value for each request that hangs.
func (s *Server) Hung() <-chan struct{} { return s.hung }

// Release ends what Hang began.
func (s *Server) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release()
}

func (s *Server) release() {
	if s.hang != nil {
		close(s.hang)
		s.hang = nil
	}
}

// DrawOther has the server draw the noise of another seed than that which it is given and says.
func (s *Server) DrawOther() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.other = true
}

// Say has /models say something else.
func (s *Server) Say(name string, value any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.models[name] = value
}

// Asked returns the requests for images so far.
func (s *Server) Asked() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request{}, s.asked...)
}

func (s *Server) isDead() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dead
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fail := func(status int, text string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(text))
	}
	switch r.URL.Path {
	case "/health":
		if s.isDead() {
			fail(http.StatusServiceUnavailable, exited)
		}
	case "/models":
		s.mu.Lock()
		defer s.mu.Unlock()
		_ = json.NewEncoder(w).Encode(s.models)
	case "/server_info":
		fail(http.StatusOK, `{"version":"`+Version+`"}`)
	case "/rollout/generate":
		if s.isDead() {
			fail(http.StatusServiceUnavailable, exited)
			return
		}
		var q Request
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || q.Seed == nil || q.Outputs != 1 {
			fail(http.StatusUnprocessableEntity, `{"detail":"not what this server plays"}`)
			return
		}
		s.mu.Lock()
		s.asked = append(s.asked, q)
		hang := s.hang
		s.mu.Unlock()
		s.turn.Lock()
		defer s.turn.Unlock()
		if hang != nil {
			s.hung <- struct{}{}
			<-hang
		}
		if s.isDead() {
			fail(http.StatusInternalServerError, `{"detail":"Scheduler worker exited; restart the server."}`)
			return
		}
		body, err := s.generate(r.Context(), &q)
		if err != nil {
			fail(http.StatusInternalServerError, fmt.Sprintf(`{"detail":%q}`, err))
			return
		}
		w.Header().Set("Content-Type", "application/msgpack")
		_, _ = w.Write(body)
	default:
		if !s.changeWeights(w, r) {
			http.NotFound(w, r)
		}
	}
}

// values collects a tensor of all steps.
type values struct {
	shape []int
	data  []float32
}

func (v *values) add(x []float32) { v.data = append(v.data, x...) }

// generate computes the body of an answer.
func (s *Server) generate(ctx context.Context, q *Request) ([]byte, error) {
	card, size := s.held.now.Card(), media.ImageSize(q.Height, q.Width)
	tokens, err := card.Tokens(size)
	if err != nil {
		return nil, err
	}
	schedule, err := flow.ParseSchedule(card.SchedulerConfig)
	if err != nil {
		return nil, err
	}
	sigmas, err := schedule.Sigmas(q.Steps, tokens)
	if err != nil {
		return nil, err
	}
	texts := []string{q.Prompt}
	if q.CFG > 1 {
		texts = append(texts, q.Negative)
	}
	conds, err := s.held.now.EncodeTruncated(ctx, texts)
	if err != nil {
		return nil, err
	}
	draw := remoteimage.Request{
		Seed: *q.Seed, Height: q.Height, Width: q.Width, Tokens: tokens, Channels: card.LatentChannels,
		SDESteps: q.SDESteps,
	}
	s.mu.Lock()
	if s.other {
		draw.Seed++
	}
	s.mu.Unlock()
	x, noise := draw.Draws()
	step := []int{q.Steps, tokens, card.LatentChannels}
	r := &rollout{
		x: x, latents: values{shape: []int{len(q.Return), tokens, card.LatentChannels}},
		logProbs: values{shape: []int{q.Steps}}, stds: values{shape: []int{q.Steps, 1}},
		eps: values{shape: step}, means: values{shape: step}, outputs: values{shape: step},
	}
	if err := s.denoise(ctx, q, size, sigmas, conds, noise, r); err != nil {
		return nil, err
	}
	made, err := s.held.now.Decode(ctx, r.x, size)
	if err != nil {
		return nil, err
	}
	answer := map[string]any{
		"prompt": q.Prompt, "seed": *q.Seed, "generated_output": encode(pixels(made, size)),
		"rollout_log_probs": encode(r.logProbs),
		"dit_trajectory": map[string]any{"latents": encode(r.latents), "sigmas": encode(values{
			[]int{len(sigmas)},
			sigmas,
		})},
	}
	if q.Debug {
		answer["rollout_debug_tensors"] = map[string]any{
			"rollout_variance_noises": encode(r.eps), "rollout_prev_sample_means": encode(r.means),
			"rollout_noise_std_devs": encode(r.stds), "rollout_model_outputs": encode(r.outputs),
		}
	}
	if q.Conditioning {
		env := map[string]any{}
		for i, c := range conds {
			t := c.Tensors[0]
			env[[]string{"pos_cond_kwargs", "neg_cond_kwargs"}[i]] = map[string]any{
				"encoder_hidden_states": []any{encode(values{t.Shape, t.Data})},
			}
		}
		answer["denoising_env"] = env
	}
	return appendMsgpack(nil, []any{answer}), nil
}

// rollout is what an answer says of the steps: latents [k, tokens, channels] of the states asked for, and of each step
// the noise, mean and velocity [tokens, channels], log-prob and standard deviation.
type rollout struct {
	x                                            []float32 // the newest state, [tokens, channels]
	latents, logProbs, stds, eps, means, outputs values
}

// denoise runs all steps from r.x, with the noise [tokens, channels] of each stochastic step.
func (s *Server) denoise(ctx context.Context, q *Request, size media.Size, sigmas []float32,
	conds []*model.Conditioning, noise map[int][]float32, r *rollout,
) error {
	x := r.x
	n := len(x)
	velocities := images.NewVelocities(s.held.now)
	keep := func(i int, x []float32) {
		for _, of := range q.Return {
			if of == i {
				r.latents.add(x)
			}
		}
	}
	keep(0, x)
	for i := range q.Steps {
		kind := flow.ODE
		if noise[i] != nil {
			kind = flow.Transition(q.Type)
		}
		k, err := flow.NewStepTransition(kind, q.NoiseLevel, sigmas, i)
		if err != nil {
			return err
		}
		v, mean, next := make([]float32, n), make([]float32, n), make([]float32, n)
		row := images.GuidedRow{Row: model.Row{X: x, Sigma: sigmas[i], Conditioning: conds[0], Dst: v}, Scale: q.CFG}
		if len(conds) > 1 {
			row.Negative = conds[1]
		}
		faults, err := velocities.Eval(ctx, []images.GuidedRow{row}, size)
		if err == nil {
			err = faults[0]
		}
		if err == nil {
			err = k.Draw(next, mean, x, v, noise[i], tensor.F32)
		}
		if err != nil {
			return err
		}
		p := flow.LogProb{}
		if noise[i] == nil {
			r.eps.add(make([]float32, n))
		} else {
			logProb := flow.Density
			if q.Squared {
				logProb = flow.Squared
			}
			if p, err = k.LogProb(logProb, x, v, next); err != nil {
				return err
			}
			r.eps.add(noise[i])
		}
		r.logProbs.add([]float32{float32(p.Mean)})
		r.stds.add([]float32{float32(k.NoiseStd)})
		r.means.add(mean)
		r.outputs.add(v)
		keep(i+1, next)
		x = next
	}
	r.x = x
	return nil
}

// pixels returns an image as [3, 1, height, width] of 0 to 1.
func pixels(m media.Media, size media.Size) values {
	v := values{shape: []int{3, 1, size.Height, size.Width}}
	for c := range 3 {
		for i := range size.Height * size.Width {
			v.data = append(v.data, float32(m.Frames[0].Pix[4*i+c])/255)
		}
	}
	return v
}

// encode returns a tensor as the server sends it: a safetensors file with the tensor t.
func encode(v values) map[string]any {
	var file bytes.Buffer
	t, err := safetensors.FloatTensor("t", tensor.F32, v.shape, v.data)
	if err == nil {
		err = safetensors.Write(&file, []safetensors.Tensor{t}, nil)
	}
	if err != nil {
		panic(err)
	}
	return map[string]any{"__tensor__": true, "data": file.Bytes(), "shape": v.shape, "dtype": "torch.float32"}
}

// appendMsgpack appends a value in msgpack, in the forms with 32-bit lengths and 64-bit numbers.
func appendMsgpack(b []byte, v any) []byte {
	sized := func(kind byte, n int) []byte { return binary.BigEndian.AppendUint32(append(b, kind), uint32(n)) }
	switch v := v.(type) {
	case bool:
		return append(b, map[bool]byte{false: 0xc2, true: 0xc3}[v])
	case int:
		return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(v))
	case uint64:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	case string:
		return append(sized(0xdb, len(v)), v...)
	case []byte:
		return append(sized(0xc6, len(v)), v...)
	case []int:
		b = sized(0xdd, len(v))
		for _, x := range v {
			b = appendMsgpack(b, x)
		}
		return b
	case []any:
		b = sized(0xdd, len(v))
		for _, x := range v {
			b = appendMsgpack(b, x)
		}
		return b
	case map[string]any:
		b = sized(0xdf, len(v))
		for name, x := range v {
			b = appendMsgpack(appendMsgpack(b, name), x)
		}
		return b
	}
	panic(fmt.Sprintf("no msgpack of %T", v))
}
