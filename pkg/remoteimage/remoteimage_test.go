package remoteimage_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/pkg/remoteimage/remoteimagetest"
)

// request asks for what sde_all.msgpack has.
func request(change ...func(q *remoteimage.Request)) *remoteimage.Request {
	q := &remoteimage.Request{
		Prompt: remoteimagetest.Prompt, CFG: 1, Seed: remoteimagetest.Seed, Height: remoteimagetest.Height,
		Width: remoteimagetest.Width, Tokens: 8, Channels: 64, Sigmas: remoteimagetest.Sigmas(),
		Type: "sde", NoiseLevel: 0.7, SDESteps: []int{0, 1, 2, 3}, Return: []int{0, 1, 2, 3, 4},
	}
	for _, c := range change {
		c(q)
	}
	return q
}

func config(urls ...string) remoteimage.Config {
	return remoteimage.Config{
		Server: remoteimage.SGLangDiffusion + "=" + strings.Join(urls, ","), Probe: *request(), Pipeline: "QwenImagePipeline",
		Same: func(a, b *remoteimage.Answer, _ string) error {
			if !slices.Equal(a.Latents[4], b.Latents[4]) {
				return errors.New("other weights")
			}
			return nil
		},
	}
}

// dial returns the pool of servers that are well.
func dial(t *testing.T, servers ...*remoteimagetest.Server) *remoteimage.Pool {
	t.Helper()
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.URL)
	}
	p, err := remoteimage.NewPool(config(urls...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestGenerate_Recorded reads what a real server sent: each kind of rollout with its states, log-probs and tensors.
func TestGenerate_Recorded(t *testing.T) {
	p := dial(t, remoteimagetest.New(t))
	if f := p.Facts(); f.Version != "0.5.23" || f.Precision != remoteimage.FP32 {
		t.Errorf("facts: %+v", f)
	}
	for name, c := range map[string]struct {
		change   func(q *remoteimage.Request)
		logProbs []float32
		texts    []int
	}{
		"sde": {func(*remoteimage.Request) {}, []float32{-1.0031823, -0.97806346, -0.44098842, 2.8738062}, nil},
		"debug": {
			func(q *remoteimage.Request) { q.Debug, q.Conditioning = true, true },
			[]float32{-1.0031823, -0.97806346, -0.44098842, 2.8738062},
			[]int{16},
		},
		"guided": {
			func(q *remoteimage.Request) { q.Debug, q.Conditioning, q.CFG, q.Negative = true, true, 2.5, "red" },
			[]float32{-1.0031823, -0.97806346, -0.44098842, 2.8738062},
			[]int{16, 7},
		},
		"window": {func(q *remoteimage.Request) {
			q.Debug, q.SDESteps, q.Return = true, []int{1, 2}, []int{1, 2, 3}
		}, []float32{0, -0.9618739, -0.41548118, 0}, nil},
		"cps": {func(q *remoteimage.Request) {
			q.Debug, q.Type, q.NoiseLevel, q.Squared = true, "cps", 0.8, true
		}, []float32{-0.44042748, -0.14918704, -0.00034922108, 0}, nil},
		"ode": {func(q *remoteimage.Request) { q.Type, q.SDESteps = remoteimage.ODE, nil }, []float32{0, 0, 0, 0}, nil},
		"few": {
			func(q *remoteimage.Request) { q.Return = []int{0, 3, 4} },
			[]float32{-1.0031823, -0.97806346, -0.44098842, 2.8738062},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := request(c.change)
			a, err := p.Generate(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(a.LogProbs, c.logProbs) || len(a.Latents) != len(q.Return) ||
				!slices.Equal(a.Image.Shape, []int{3, 1, q.Height, q.Width}) {
				t.Errorf("log-probs %v, want %v; %d states, image %v", a.LogProbs, c.logProbs, len(a.Latents),
					a.Image.Shape)
			}
			var texts []int
			for _, x := range []*remoteimage.Tensor{a.Prompt, a.Negative} {
				if x != nil {
					texts = append(texts, x.Shape[0])
				}
			}
			if !slices.Equal(texts, c.texts) {
				t.Errorf("texts of %v tokens; want %v", texts, c.texts)
			}
			checkDraws(t, q, a)
		})
	}
}

// checkDraws draws x_T and all noise again: the bits must be those of the server.
func checkDraws(t *testing.T, q *remoteimage.Request, a *remoteimage.Answer) {
	t.Helper()
	x, noise := q.Draws()
	if got := a.Latents[0]; got != nil && !slices.Equal(got, x) {
		t.Error("x_T is another than that of the seed")
	}
	if len(noise) != len(q.SDESteps) {
		t.Errorf("noise of %d steps; want %d", len(noise), len(q.SDESteps))
	}
	for i, eps := range noise {
		if a.Debug != nil && !slices.Equal(a.Debug.Noise[i*len(x):(i+1)*len(x)], eps) {
			t.Errorf("the noise of step %d is another than that of the seed", i)
		}
	}
}

// TestGenerate_Errors: each error of the server has its class, and terminal ones are not asked again.
func TestGenerate_Errors(t *testing.T) {
	s := remoteimagetest.New(t)
	p := dial(t, s)
	whole := remoteimagetest.Recorded(t, "sde_all.msgpack")
	other := func(from, to string) []byte { return bytes.Replace(whole, []byte(from), []byte(to), 1) }
	file := func(name string) []byte { return remoteimagetest.Recorded(t, name) }
	for name, c := range map[string]struct {
		status int
		body   []byte
		change func(q *remoteimage.Request)
		class  error
		says   string
	}{
		"argument":   {400, file("err400_noise.json"), nil, remotehttp.ErrRefused, "must be non-negative"},
		"types":      {422, file("err422_types.json"), nil, remotehttp.ErrRefused, "valid integer"},
		"no noise":   {500, file("err500_noise0.json"), nil, remotehttp.ErrRefused, "non-zero noise level"},
		"ode":        {500, file("err500_ode_const.json"), nil, remotehttp.ErrRefused, "rollout_log_prob_no_const"},
		"a fault":    {500, file("sde_lora_shape.json"), nil, nil, "shapes cannot be multiplied"},
		"plain text": {500, file("err_no_seed.txt"), nil, nil, "Internal Server Error"},
		"NaN": {
			200, file("cps_const_nan.msgpack"), nil,
			remoteimage.ErrNotFinite, "rollout_log_probs: element 3 is NaN",
		},
		"sigmas": {
			200, whole, func(q *remoteimage.Request) { q.Sigmas = []float32{1, 0.75, 0.5, 0.25, 0} },
			remoteimage.ErrSchedule, "the server has 0.74",
		},
		"steps": {
			200, whole, func(q *remoteimage.Request) { q.Sigmas = q.Sigmas[1:] },
			remotehttp.ErrGarbage, "rollout_log_probs: shape [4]; must be [3]",
		},
		"size": {
			200, whole, func(q *remoteimage.Request) { q.Width = 128 },
			remotehttp.ErrGarbage, "generated_output: shape [3 1 32 64]",
		},
		"window": {
			200, whole, func(q *remoteimage.Request) { q.SDESteps = []int{1} },
			remotehttp.ErrGarbage, "at step 0, which draws no noise",
		},
		"states": {
			200, whole, func(q *remoteimage.Request) { q.Return = []int{4} },
			remotehttp.ErrGarbage, "latents: shape [5 8 64]",
		},
		"seed": {200, whole, func(q *remoteimage.Request) { q.Seed = 6 }, remotehttp.ErrGarbage, "seed: 5"},
		"no debug": {
			200, whole, func(q *remoteimage.Request) { q.Debug = true },
			remotehttp.ErrGarbage, "rollout_debug_tensors: <nil>",
		},
		"cut":   {200, whole[:9000], nil, remotehttp.ErrGarbage, "ends early"},
		"more":  {200, append(slices.Clone(whole), 0), nil, remotehttp.ErrGarbage, "1 bytes after"},
		"large": {200, make([]byte, 4<<20), nil, remotehttp.ErrGarbage, "more than"},
		"no tensor": {
			200, other("rollout_log_probs", "rollout_log_prob_"), nil,
			remotehttp.ErrGarbage, "rollout_log_probs: <nil>; must be a tensor",
		},
		"two keys":    {200, other("inference_time_s", "generated_output"), nil, remotehttp.ErrGarbage, "comes twice"},
		"not msgpack": {200, []byte("<html>"), nil, remotehttp.ErrGarbage, "bytes after"},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(s.Asked())
			s.SetAnswer(remoteimagetest.Say(c.status, c.body))
			q := request()
			if c.change != nil {
				c.change(q)
			}
			_, err := p.Generate(t.Context(), q)
			if err == nil || c.class != nil && !errors.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want %q, a %v", err, c.says, c.class)
			}
			for _, class := range []error{remotehttp.ErrRefused, remotehttp.ErrGarbage, pool.ErrAway} {
				if c.class == nil && errors.Is(err, class) {
					t.Errorf("%v; must be no %v", err, class)
				}
			}
			if n := len(s.Asked()) - before; n != 1 {
				t.Errorf("asked %d times", n)
			}
		})
	}
}

// TestPool_Failover: a server whose worker dies while it makes an image is left, another makes the image, and the first
// is used again once it is well and makes the probe.
func TestPool_Failover(t *testing.T) {
	a, b := remoteimagetest.New(t), remoteimagetest.New(t)
	p := dial(t, a, b)
	file := func(name string) []byte { return remoteimagetest.Recorded(t, name) }
	killed := remoteimagetest.Say(http.StatusInternalServerError, file("killed_worker_inflight.json"))
	a.SetAnswer(killed)
	a.SetHealth(remoteimagetest.Say(http.StatusServiceUnavailable, file("killed_health.json")))
	if _, err := p.Generate(t.Context(), request()); err != nil {
		t.Fatal(err)
	}
	if len(a.Asked()) != 2 || len(b.Asked()) != 2 {
		t.Fatalf("asked %d and %d times; want the probe and one more of each", len(a.Asked()), len(b.Asked()))
	}
	b.SetAnswer(killed)
	_, err := p.Generate(t.Context(), request())
	if !errors.Is(err, pool.ErrAway) || !strings.Contains(err.Error(), "a process of the server has ended") {
		t.Fatalf("%v; want ErrAway, and why", err)
	}
	b.SetHealth(remoteimagetest.Say(http.StatusServiceUnavailable, file("health_503_broker_exited.json")))
	if err := p.Check(t.Context()); err == nil || errors.Is(err, remotehttp.ErrRefused) ||
		!strings.Contains(err.Error(), "Scheduler worker exited") ||
		!strings.Contains(err.Error(), "Offline request broker exited") {
		t.Fatalf("check: %v", err)
	}
	a.SetHealth(nil)
	if err := p.Check(t.Context()); err == nil {
		t.Fatal("a server that cannot make the probe is used")
	}
	a.SetAnswer(nil)
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Generate(t.Context(), request()); err != nil {
		t.Error(err)
	}
}

// TestPool_Refuses: addresses that are none, a pipeline without trajectories, and servers of different weights.
func TestPool_Refuses(t *testing.T) {
	for address, says := range map[string]string{
		"sglang-diffusion=127.0.0.1:1": "must be NAME=URL", "vllm=http://a": "must be sglang-diffusion=",
		"sglang-diffusion=http://a,http://a/": "twice", "sglang-diffusion=": "must be NAME=URL",
	} {
		if _, err := remoteimage.NewPool(remoteimage.Config{Server: address}); err == nil ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", address, err, says)
		}
	}
	a, b := remoteimagetest.New(t), remoteimagetest.New(t)
	fallback := config(a.URL)
	fallback.Pipeline = "OtherPipeline"
	if p, err := remoteimage.NewPool(fallback); err != nil {
		t.Fatal(err)
	} else if err := p.Check(t.Context()); !errors.Is(err, remotehttp.ErrRefused) ||
		!strings.Contains(err.Error(), "must be OtherPipeline") {
		t.Errorf("a server of another pipeline: %v", err)
	}
	said := map[string]error{}
	c := config(a.URL, b.URL)
	c.Same = func(*remoteimage.Answer, *remoteimage.Answer, string) error { return errors.New("other weights") }
	c.Changed = func(server string, err error) { said[server] = err }
	p, err := remoteimage.NewPool(c)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := p.Generate(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
	}
	why := said["sglang-diffusion at "+b.URL]
	if n := len(b.Asked()); n != 1 || len(said) != 1 || why == nil || why.Error() != "other weights" {
		t.Errorf("the server of other weights was asked %d times; want the probe alone; said %v", n, said)
	}
}

// TestPool_Cancelled: who waits for a free server stops with its context.
func TestPool_Cancelled(t *testing.T) {
	s := remoteimagetest.New(t)
	p := dial(t, s)
	begun, release := make(chan struct{}), make(chan struct{})
	s.SetAnswer(func(http.ResponseWriter, *http.Request) { close(begun); <-release })
	done := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		_, err := p.Generate(ctx, request())
		done <- err
	}()
	<-begun
	waiting, give := context.WithCancel(t.Context())
	give()
	if _, err := p.Generate(waiting, request()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(release)
}

// FuzzAnswer: no bytes of a server make the client panic, and an answer that it takes has finite numbers.
func FuzzAnswer(f *testing.F) {
	f.Add(remoteimagetest.Recorded(f, "sde_all.msgpack"))
	f.Add([]byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Add(bytes.Repeat([]byte{0x91}, 100))
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := remoteimage.DecodeAnswer(body, request())
		if err != nil {
			return
		}
		for _, x := range a.LogProbs {
			if math.IsNaN(float64(x)) {
				t.Error("NaN")
			}
		}
	})
}
