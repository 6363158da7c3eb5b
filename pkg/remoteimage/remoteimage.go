// Package remoteimage is a client of servers that make images by flow matching: SGLang-Diffusion, by its route
// /rollout/generate. A request asks for one image; the answer has it whole, with its latents and log-probs. All that a
// server sends is checked against the request (answer.go).
//
// A Pool is several servers of the same weights. Each makes one image at a time, as the engine does itself. What a
// server cannot make because it is away another makes, from the same seed: a request may be sent again at any time.
package remoteimage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/torchrandom"
)

// SGLangDiffusion is the name of the kind of server.
const SGLangDiffusion = "sglang-diffusion"

// ODE is the Request.Type of a rollout without noise.
const ODE = "ode"

// Request asks for one image.
type Request struct {
	Prompt, Negative string
	// CFG is the scale of classifier-free guidance; up to 1: there is none, and Negative is not used.
	CFG float64
	// Seed seeds the generator of x_T and of all noise. The server uses its 32 low bits: see torchrandom.
	Seed          uint64
	Height, Width int
	// Tokens and Channels are S and C of the latents.
	Tokens, Channels int
	// Sigmas [T+1] are those that the server must step over: it computes them itself.
	Sigmas []float32
	// Type is the transition of SDESteps, the steps that draw noise, ascending; NoiseLevel is its a. All others are
	// Euler steps. ODE: there are no such steps.
	Type       string
	NoiseLevel float64
	SDESteps   []int
	// Squared asks for -(x'-mean)^2 in place of the log-density.
	Squared bool
	// Return are the indices of the states to send, ascending, at least one.
	Return []int
	// Weights is the name of the weights to make it with, see Pool.AddWeights; empty: those that the server was started
	// with.
	Weights string
	// Debug asks for the noise, mean and velocity of all steps, Conditioning for the encoded texts.
	Debug, Conditioning bool
}

// Steps returns T.
func (q *Request) Steps() int { return len(q.Sigmas) - 1 }

func (q *Request) guided() bool { return q.CFG > 1 }

// seed returns the seed as the server has it.
func (q *Request) seed() uint64 { return q.Seed & (1<<63 - 1) }

// body returns the request in the server's words. Nothing is left to the server's defaults.
func (q *Request) body() map[string]any {
	b := map[string]any{
		"prompt": q.Prompt, "seed": q.seed(), "generator_device": "cpu", "width": q.Width, "height": q.Height,
		"num_inference_steps": q.Steps(), "num_outputs_per_prompt": 1, "true_cfg_scale": max(1, q.CFG), "rollout": true,
		"rollout_sde_type": q.Type, "rollout_noise_level": q.NoiseLevel,
		"rollout_log_prob_no_const":    q.Squared || q.Type == ODE, // the server wants it of ODE
		"rollout_debug_mode":           q.Debug,
		"rollout_return_denoising_env": q.Conditioning, "rollout_return_dit_trajectory": true,
		"rollout_sde_step_indices": append([]int{}, q.SDESteps...), "rollout_return_step_indices": q.Return,
		"suppress_logs": true, "extra_sampling_params": map[string]any{"quality": "exact"},
	}
	if q.guided() {
		b["negative_prompt"] = q.Negative
	}
	return b
}

// Sizes of what an answer has besides latents and pixels, in bytes; of an encoded text with its tables.
const (
	answerBytes = 1 << 20
	textBytes   = 256 << 20
)

// limit returns the most bytes that the answer may have.
func (q *Request) limit() int64 {
	state := int64(4 * q.Tokens * q.Channels)
	n := answerBytes + state*int64(len(q.Return)) + int64(3*4*q.Height*q.Width)
	if q.Debug {
		n += 4 * state * int64(q.Steps())
	}
	if q.Conditioning {
		n += textBytes
	}
	return n
}

// Facts are what a server says of itself.
type Facts struct {
	// Version is its release, Model the name or folder of its model.
	Version, Model string
	// Precision is the element type of its network: fp32 or bf16.
	Precision string
}

// FP32 is the Facts.Precision of a server whose images can be computed again closely.
const FP32 = "fp32"

// server is one server.
type server struct {
	http *remotehttp.Client
	// path is its name for the model that it was started with. full is the folder of the whole transformer that it has;
	// empty: that of the model. Both are set when it joins, then by who has its lease.
	path, full string
}

func (s *server) String() string { return SGLangDiffusion + " at " + s.http.Base }

// discover asks the server what it is. It is refused if it runs another pipeline than that of the model: then it makes
// images without trajectories.
func (s *server) discover(ctx context.Context, pipeline string) (f Facts, err error) {
	if err := s.http.Health(ctx); err != nil {
		return f, err
	}
	var models struct {
		Path     string `json:"model_path"`
		DiT      string `json:"dit_precision"`
		VAE      string `json:"vae_precision"`
		Pipeline string `json:"pipeline_name"`
	}
	var info struct {
		Version string `json:"version"`
	}
	if err := s.http.Ask(ctx, http.MethodGet, "/models", nil, &models); err != nil {
		return f, err
	}
	if err := s.http.Ask(ctx, http.MethodGet, "/server_info", nil, &info); err != nil {
		return f, err
	}
	s.path = models.Path
	if models.Pipeline != pipeline {
		return f, fmt.Errorf("%w: it runs the pipeline %.80q; must be %s: start it with the --model-id of the model",
			remotehttp.ErrRefused, models.Pipeline, pipeline)
	}
	return Facts{Version: short(info.Version), Model: short(models.Path), Precision: short(models.DiT)}, nil
}

// short cuts a text of the server to what events take.
func short(s string) string { return fmt.Sprintf("%.100s", strings.ToValidUTF8(s, "?")) }

// permanentSays are parts of what the server says with status 500 of a request that it can never make.
var permanentSays = []string{"requires a non-zero noise level", "rollout_log_prob_no_const", "log_prob is meaningless"}

// exitedSays is part of what it says when a process of it has ended: it accepts requests, and makes none.
const exitedSays = "exited; restart the server"

// ErrExited says that a process of the server has ended, while its port answers: it must be restarted.
var ErrExited = errors.New("a process of the server has ended; restart the server")

// classify returns an error of the server in the classes of this package.
func classify(err error) error {
	status, says := remotehttp.Answered(err), fmt.Sprint(err)
	if status == 0 {
		return err
	}
	if strings.Contains(says, exitedSays) {
		return fmt.Errorf("%w: %w", ErrExited, err)
	}
	for _, part := range permanentSays {
		if status == http.StatusInternalServerError && strings.Contains(says, part) {
			return fmt.Errorf("%w: %w", remotehttp.ErrRefused, err)
		}
	}
	return err
}

// away reports whether an error says that the server cannot make images now, whatever the request.
func away(err error) bool {
	switch status := remotehttp.Answered(err); {
	case errors.Is(err, ErrExited), errors.Is(err, remotehttp.ErrSilent):
		return true
	case status > 0:
		return status == http.StatusServiceUnavailable || status == http.StatusBadGateway
	}
	return !errors.Is(err, remotehttp.ErrGarbage) && !errors.Is(err, ErrNotFinite) && !errors.Is(err, ErrSchedule) &&
		!errors.Is(err, remotehttp.ErrRefused) // what is left is an error of the connection
}

// longest bounds how long one image may take: an engine may work on the requests of others before.
const longest = time.Hour

// generate sends a request, and checks its answer.
func (s *server) generate(ctx context.Context, q *Request) (*Answer, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, longest, fmt.Errorf("%w for %v", remotehttp.ErrSilent, longest))
	defer cancel()
	named := func(err error) error {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("%s: %w", s, classify(err))
	}
	resp, err := s.http.Do(ctx, http.MethodPost, "/rollout/generate", q.body())
	if err != nil {
		return nil, named(err)
	}
	defer resp.Body.Close()
	limit := q.limit()
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case err != nil:
		return nil, named(err)
	case int64(len(body)) > limit:
		return nil, fmt.Errorf("%s: %w", s, garbage("more than %d bytes", limit))
	}
	a, err := decodeAnswer(body, q)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	return a, nil
}

// patch is the side of the square of latent pixels that a token has.
const patch = 2

// Draws draws what a server in float32 draws for the request: x_T [S, C], and the noise [S, C] of each of SDESteps. The
// bits are those of the server. One generator draws x_T, as an image [C/4, h, w], and then each noise in turn, of
// tokens; steps without noise draw nothing.
func (q *Request) Draws() (x []float32, noise map[int][]float32) {
	g, n := torchrandom.New(q.Seed), q.Tokens*q.Channels
	image := make([]float32, n)
	g.Randn(image)
	x, noise = make([]float32, n), map[int][]float32{}
	q.pack(x, image)
	for _, i := range q.SDESteps {
		noise[i] = make([]float32, n)
		g.Randn(noise[i])
	}
	return x, noise
}

// pack sets x [S, C] to the tokens of an image of latents [C/4, h, w]. Channel 4c + 2i + j of a token is row i and
// column j of its square in plane c.
func (q *Request) pack(x, image []float32) {
	edge := 1 // of a token, in pixels
	for edge*edge*q.Tokens < q.Height*q.Width {
		edge++
	}
	h, w := q.Height/edge*patch, q.Width/edge*patch
	for i, v := range image {
		plane, row, column := i/(h*w), i/w%h, i%w
		token := row/patch*(w/patch) + column/patch
		x[token*q.Channels+plane*patch*patch+row%patch*patch+column%patch] = v
	}
}
