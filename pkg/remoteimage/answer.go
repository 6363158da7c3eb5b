package remoteimage

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/strictmsgpack"
)

// Errors of answers. Both are terminal: the same request gives the same answer again.
var (
	// ErrSchedule says that the server steps over other sigmas than the request expects.
	ErrSchedule = errors.New("another schedule")
	// ErrNotFinite says that latents, log-probs or pixels have a NaN or an infinity, as those of broken weights have.
	ErrNotFinite = errors.New("not finite")
)

// sigmaTolerance is how far a sigma of the server may be from that of the request: it computes them in another order.
const sigmaTolerance = 1e-6

// Tensor is an array in C order.
type Tensor struct {
	Shape []int
	Data  []float32
}

// Debug are the tensors of all T steps, [T, S, C] each; Std is [T].
type Debug struct{ Noise, Mean, Velocity, Std []float32 }

// Answer is one image that a server made, as its checked answer says.
type Answer struct {
	// Image is [3, 1, height, width], of 0 to 1.
	Image Tensor
	// LogProbs [T] are means over the elements; 0 where a step draws no noise.
	LogProbs []float32
	// Latents are the states [S, C] by their index in the schedule: those of Request.Return.
	Latents map[int][]float32
	// Debug is nil unless the request asks for it.
	Debug *Debug
	// Prompt and Negative are the encoded texts [L, D] where the request asks for them; Negative is nil without
	// guidance.
	Prompt, Negative *Tensor
}

// row is one output in an answer, with the first error of its fields in err.
type row struct {
	fields map[string]any
	err    error
}

// garbage returns an error for an answer that is not what the request asks for.
func garbage(format string, args ...any) error {
	return fmt.Errorf("%w: %w", remotehttp.ErrGarbage, fmt.Errorf(format, args...))
}

// decodeAnswer decodes the body of an answer, and checks it against the request: one output of the seed, the sizes of
// all tensors, the sigmas, and that all numbers are finite. What it does not use it does not read.
func decodeAnswer(body []byte, q *Request) (*Answer, error) {
	v, err := strictmsgpack.Decode(body)
	if err != nil {
		return nil, garbage("%w", err)
	}
	outputs, _ := v.([]any)
	if len(outputs) != 1 {
		return nil, garbage("%d outputs; must be one", len(outputs))
	}
	fields, ok := outputs[0].(map[string]any)
	if !ok {
		return nil, garbage("an output that is no map")
	}
	r := &row{fields: fields}
	if seed, ok := asInt(fields["seed"]); !ok || uint64(seed) != q.seed() {
		return nil, garbage("seed: %v; must be %d, the request's", fields["seed"], q.seed())
	}
	a := &Answer{Image: r.tensor("generated_output", 3, 1, q.Height, q.Width)}
	a.LogProbs = r.tensor("rollout_log_probs", q.Steps()).Data
	r.trajectory(a, q)
	if q.Debug {
		r.debug(a, q)
	}
	if q.Conditioning {
		r.conditioning(a, q)
	}
	if r.err != nil {
		return nil, r.err
	}
	for i, p := range a.LogProbs {
		if p != 0 && !slices.Contains(q.SDESteps, i) {
			return nil, garbage("rollout_log_probs: %g at step %d, which draws no noise", p, i)
		}
	}
	return a, nil
}

// fail keeps the first error.
func (r *row) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// in returns the map in a field as a row with the same errors.
func (r *row) in(name string) *row {
	m, ok := r.fields[name].(map[string]any)
	if !ok {
		r.fail(garbage("%s: %T; must be a map", name, r.fields[name]))
	}
	return &row{m, r.err}
}

// tensor returns the tensor in a field. Its shape must be as given, where -1 stands for any size, and its numbers
// finite.
func (r *row) tensor(name string, shape ...int) Tensor {
	t, err := parseTensor(r.fields[name])
	if err != nil {
		r.fail(garbage("%s: %w", name, err))
		return Tensor{}
	}
	if !slices.EqualFunc(t.Shape, shape, func(is, want int) bool { return is == want || want < 0 }) {
		r.fail(garbage("%s: shape %v; must be %v", name, t.Shape, shape))
		return Tensor{}
	}
	if i := slices.IndexFunc(t.Data, func(x float32) bool { return x-x != 0 }); i >= 0 {
		r.fail(fmt.Errorf("%s: element %d is %v: %w", name, i, t.Data[i], ErrNotFinite))
	}
	return t
}

// trajectory sets the latents, and checks the sigmas.
func (r *row) trajectory(a *Answer, q *Request) {
	d := r.in("dit_trajectory")
	sigmas := d.tensor("sigmas", len(q.Sigmas))
	latents := d.tensor("latents", len(q.Return), q.Tokens, q.Channels)
	if r.err = d.err; r.err != nil {
		return
	}
	for i, s := range sigmas.Data {
		if off := math.Abs(float64(s) - float64(q.Sigmas[i])); !(off <= sigmaTolerance) {
			r.fail(fmt.Errorf("sigmas[%d]: the server has %g, the request %g: %w; the scheduler_config.json of "+
				"--model must be that which the server serves", i, s, q.Sigmas[i], ErrSchedule))
			return
		}
	}
	a.Latents = map[int][]float32{}
	n := q.Tokens * q.Channels
	for i, index := range q.Return {
		a.Latents[index] = latents.Data[i*n : (i+1)*n : (i+1)*n]
	}
}

// debug sets the tensors of all steps.
func (r *row) debug(a *Answer, q *Request) {
	d := r.in("rollout_debug_tensors")
	all := func(name string) []float32 { return d.tensor(name, q.Steps(), q.Tokens, q.Channels).Data }
	a.Debug = &Debug{
		Noise: all("rollout_variance_noises"), Mean: all("rollout_prev_sample_means"),
		Velocity: all("rollout_model_outputs"),
		Std:      d.tensor("rollout_noise_std_devs", q.Steps(), 1).Data,
	}
	r.err = d.err
}

// conditioning sets the encoded texts.
func (r *row) conditioning(a *Answer, q *Request) {
	env := r.in("denoising_env")
	of := func(name string) *Tensor {
		k := env.in(name)
		list, _ := k.fields["encoder_hidden_states"].([]any)
		if len(list) != 1 {
			k.fail(garbage("%s: encoder_hidden_states of %d texts; must be one", name, len(list)))
			list = []any{nil}
		}
		k.fields = map[string]any{"encoder_hidden_states": list[0]}
		t := k.tensor("encoder_hidden_states", -1, -1)
		env.err = k.err
		return &t
	}
	a.Prompt = of("pos_cond_kwargs")
	if q.guided() {
		a.Negative = of("neg_cond_kwargs")
	}
	r.err = env.err
}

// asInt returns a whole number of msgpack.
func asInt(v any) (int64, bool) {
	switch n := v.(type) {
	case int64:
		return n, true
	case uint64:
		return int64(n), n <= math.MaxInt64
	}
	return 0, false
}

// parseTensor decodes {"__tensor__": true, "data": a safetensors file with the tensor t, "shape": [...], "dtype": ...}.
func parseTensor(v any) (t Tensor, err error) {
	m, ok := v.(map[string]any)
	if is, _ := m["__tensor__"].(bool); !ok || !is {
		return t, fmt.Errorf("%T; must be a tensor", v)
	}
	file, ok := m["data"].([]byte)
	if !ok {
		return t, errors.New("data: must be bytes")
	}
	archive, err := safetensors.Parse("answer", file)
	if err != nil {
		return t, err
	}
	defer archive.Close()
	info, ok := archive.Info("t")
	if !ok {
		return t, errors.New("data: must have the tensor t")
	}
	said, _ := m["shape"].([]any)
	for _, n := range said {
		n, _ := asInt(n)
		t.Shape = append(t.Shape, int(n))
	}
	if !slices.Equal(t.Shape, info.Shape) {
		return t, fmt.Errorf("shape: %v; the data has %v", t.Shape, info.Shape)
	}
	t.Data, err = archive.Floats("t")
	return t, err
}
