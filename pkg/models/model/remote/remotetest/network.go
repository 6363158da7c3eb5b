package remotetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// The one layer of the network, its tensor, and the file that has it.
const (
	proj        = "proj"
	projWeight  = proj + ".weight"
	weightsFile = "diffusion_pytorch_model.safetensors"
)

// families are the classes that the worker knows.
var families = map[string]string{
	"FluxPipeline": "flux1", "StableDiffusion3Pipeline": "sd3", "ZImagePipeline": "z-image", "WanPipeline": "wan",
	EditClass: "pipeline", TracksClass: "pipeline",
}

// EditClass is a whole pipeline, which takes an image to edit.
const EditClass = "FluxKontextPipeline"

// SoundRate is that of the sound of TracksClass, in Hz.
const SoundRate = 8000

// TracksClass is a whole pipeline whose states have two tracks. It makes frames with a sound.
const TracksClass = "LTX2Pipeline"

// readIndex returns the class of the pipeline in the folder of a model. A folder without
// model_index.json, and a class that the worker does not know, are errors.
func readIndex(dir string) (class string, err error) {
	var index struct {
		Class string `json:"_class_name"`
	}
	b, err := os.ReadFile(filepath.Join(dir, "model_index.json"))
	if err == nil {
		err = json.Unmarshal(b, &index)
	}
	if err == nil && families[index.Class] == "" {
		err = fmt.Errorf("%s: a class that the worker does not know", index.Class)
	}
	return index.Class, err
}

// cardOf is the card of a class. FluxPipeline has a guidance input; WanPipeline makes videos, by default of 9 frames.
func cardOf(class string) (c wire.Card) {
	c.Class, c.Family = class, families[class]
	c.Latent.Channels, c.Latent.Patch, c.Latent.Scale, c.Latent.Temporal = 4, [3]int{1, 2, 2}, 8, 1
	c.Size.Frames, c.Size.Height, c.Size.Width = 1, 64, 64
	c.NumInferenceSteps, c.TrueCFGScale, c.CFGRule, c.NegativePrompt = 6, 1.5, "plain", " "
	if class == "FluxPipeline" {
		c.Guidance, c.TrueCFGScale = 3.5, 1
	}
	if class == "WanPipeline" {
		c.Size.Frames, c.MaxFrames, c.FPS, c.Latent.Temporal = 9, 33, 8, 4
	}
	c.Conditioning = []wire.Named{{Name: "prompt_embeds", Mask: "prompt_embeds_mask"}, {Name: "pooled_prompt_embeds"}}
	c.MaxPromptTokens, c.Prompts, c.MaxPixels = MaxTokens, 2, 512*512
	c.ConditioningTokenBytes, c.ConditioningBytes = 4, 4*(MaxTokens+Channels)
	c.Grid, c.Mu, c.FramesRule = "linspace", "none", c.Latent.Temporal
	if class == EditClass {
		c.CFGRule, c.Conditioning = model.CFGInside, nil
		c.Pipeline = &model.Pipeline{
			Class: class, Prediction: "flow", RandomAccess: model.AccessExact, Guidance: "true_cfg_scale",
			Conditions: []model.Input{
				{Name: "image", Type: model.InputImage, Required: true},
				{Name: "mask_image", Type: model.InputMask},
				{Name: "references", Type: model.InputImages},
				{Name: "caption", Type: model.InputText},
			},
			Arguments: []model.Input{
				{Name: "true_cfg_scale", Type: model.InputNumber, Default: 1.5},
				{Name: "negative_prompt", Type: model.InputText},
				{Name: "strength", Type: model.InputNumber},
				{Name: "max_sequence_length", Type: model.InputInteger},
				{Name: "clean", Type: model.InputBoolean},
			},
			Tracks:  []model.Track{{Name: "latents", Elements: 16 * Channels, Shape: []int{1, 16, Channels}}},
			Encodes: true,
		}
	}
	if class == TracksClass {
		c.CFGRule, c.Conditioning, c.ConditioningTokenBytes, c.ConditioningBytes = model.CFGInside, nil, 0, 0
		c.Pipeline = &model.Pipeline{
			Class: class, Prediction: "flow", RandomAccess: model.AccessExact, Guidance: "true_cfg_scale",
			Arguments: []model.Input{{Name: "true_cfg_scale", Type: model.InputNumber, Default: 1.5}},
			Tracks: []model.Track{
				{Name: "video", Elements: 12 * Channels, Shape: []int{3, 4, Channels}},
				{Name: "sound", Elements: 4 * Channels, Shape: []int{4 * Channels}},
			},
			Media: []string{"image", "audio"},
		}
	}
	return c
}

// weights are the network: its layer [Channels, Channels].
type weights struct {
	proj  []float32
	whole bool // in the place of the checkpoint, not an adapter beside it
}

func readWeights(file string) (*weights, error) {
	a, err := safetensors.Open(file)
	if err != nil {
		return nil, err
	}
	x, err := a.Floats(projWeight)
	return &weights{proj: x}, errors.Join(err, a.Close())
}

// answer computes a call.
func (w *Worker) answer(m *wire.Message, greeted bool) *wire.Message {
	if m.Call == wire.CallHello {
		return w.hello(m)
	}
	if !greeted {
		return fault(wire.ClassProtocol, "%s: before hello", m.Call)
	}
	w.compute.Lock()
	defer w.compute.Unlock()
	switch m.Call {
	case wire.CallInspect:
		return result(wire.InspectResult{Card: w.card})
	case wire.CallEncode:
		return w.encode(m)
	case wire.CallCond:
		return w.condition(m)
	case wire.CallPut:
		if args, bad := decode[wire.PutArgs](m); bad != nil || args.Recipe != nil {
			return w.putRecipe(args.Recipe, bad)
		}
		handle := wire.Handle(m.Tensors)
		w.keep(handle, m.Tensors)
		return result(wire.PutResult{Handle: handle})
	case wire.CallVelocity:
		return w.velocity(m)
	case wire.CallDecode:
		return w.decodeMedia(m)
	case wire.CallEncodeM:
		return w.encodeMedia(m)
	case wire.CallModules:
		return result(wire.ModulesResult{
			Linear:  map[string][2]int{proj: {Channels, Channels}},
			Tensors: map[string][]int{projWeight: {Channels, Channels}},
		})
	case wire.CallLoad:
		return w.load(m)
	case wire.CallUnload:
		args, bad := decode[wire.UnloadArgs](m)
		if bad == nil {
			w.mu.Lock()
			delete(w.loaded, args.Weights)
			w.mu.Unlock()
			bad = result(struct{}{})
		}
		return bad
	case wire.CallMemory:
		return result(wire.MemoryResult{Weights: 1000, Reserved: 1500, Peak: 2000})
	case "health":
		return result(map[string]any{"state": wire.Ready, "call": "", "since_s": 0.0, "pid": os.Getpid()})
	}
	return fault(wire.ClassProtocol, "%s: no such call", m.Call)
}

// hello answers the first call of a client: what the worker has loaded, or that it is loading, as
// often as Options.Polls says. A wrong token is a fault.
func (w *Worker) hello(m *wire.Message) *wire.Message {
	args, bad := decode[wire.HelloArgs](m)
	switch {
	case bad != nil:
		return bad
	case args.Token != w.o.Token:
		return fault(wire.ClassConfig, "token: wrong; give the one of the worker")
	}
	h := wire.Hello{
		Protocol: wire.Protocol, Class: w.card.Class, Card: w.card, Device: w.o.Device, DType: w.o.DType,
		Limits: w.o.Limits,
		State:  wire.Ready, Backend: "torch-0.0.0/" + w.o.Device + "/" + w.o.DType + "/nondeterministic",
	}
	if w.o.Deterministic {
		h.Backend = "torch-0.0.0/" + w.o.Device + "/" + w.o.DType + "/deterministic"
	}
	if w.o.Compiled {
		h.Backend = "torch-0.0.0/" + w.o.Device + "/" + w.o.DType + "/compiled/nondeterministic"
	}
	for part, said := range map[string]bool{
		"vae-tiling": w.o.VAETiling, "generic": w.o.Generic, "trust-class": w.o.TrustClass,
		"family-" + strings.TrimPrefix(filepath.Ext(w.o.Family), ".py:") + "-0": w.o.Family != "",
		w.o.Network + "-0": w.o.Network != "",
	} {
		if said {
			h.Backend = strings.Replace(h.Backend, "/"+w.o.DType+"/", "/"+w.o.DType+"/"+part+"/", 1)
		}
	}
	if at := w.o.TextEncoderDevice; at != "" {
		h.Backend = strings.Replace(h.Backend, "/"+w.o.DType+"/", "/"+w.o.DType+"/encoders-"+at+"/", 1)
	}
	folder, err := safetensors.OpenFolder(w.o.Dir)
	if err == nil {
		h.Fingerprint, err = folder.Fingerprint("text_encoder", "transformer", "vae")
		err = errors.Join(err, folder.Close())
	}
	if err != nil {
		return fault(wire.ClassWorker, "%v", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.o.Polls > 0 {
		w.o.Polls--
		h.State, h.Detail, h.DType = wire.Loading, "loading transformer", "auto"
	}
	return result(h)
}

func (w *Worker) keep(handle string, tensors []wire.Tensor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handles[handle] = tensors
}

// encode gives a prompt its bytes as embeddings [L, 1], and values of the digest of its second text, or else of the
// first, as the pooled one [Channels].
func (w *Worker) encode(m *wire.Message) *wire.Message {
	if w.card.Pipeline != nil {
		args, bad := decode[wire.RecipeArgs](m)
		handle, bad := w.begin(&args, bad)
		if bad != nil {
			return bad
		}
		made := result(wire.EncodeResult{Items: []wire.Encoded{{Handle: handle, Tensors: []int{}}}})
		if w.card.Pipeline.Encodes { // and names what it encodes of texts
			made = result(wire.EncodeResult{Items: []wire.Encoded{{Handle: handle, Tensors: []int{0, 1}}}})
			made.Tensors = w.handles[handle]
		}
		return made
	}
	args, bad := decode[wire.EncodeArgs](m)
	if bad != nil {
		return bad
	}
	var of wire.EncodeResult
	var tensors []wire.Tensor
	for _, texts := range args.Prompts {
		text, cut := texts[0], max(0, len(texts[0])-MaxTokens)
		if cut > 0 && !args.Truncate {
			return fault(wire.ClassPrompt, "%d tokens; must be at most %d", len(text), MaxTokens)
		}
		text = text[:len(text)-cut]
		embeds, pooled := make([]float32, len(text)), make([]float32, Channels)
		for i := range text {
			embeds[i] = float32(text[i]) / 256
		}
		pools := text
		if len(texts) > 1 {
			pools = texts[1]
		}
		for i, d := range []byte(digest([]byte(pools)))[:Channels] {
			pooled[i] = float32(d) / 256
		}
		mine := []wire.Tensor{
			floats("prompt_embeds", embeds, len(text), 1),
			floats("pooled_prompt_embeds", pooled, Channels),
		}
		handle := wire.Handle(mine)
		w.keep(handle, mine)
		of.Items = append(of.Items, wire.Encoded{
			Handle: handle, Cut: cut,
			Tensors: []int{len(tensors), len(tensors) + 1},
		})
		tensors = append(tensors, mine...)
	}
	return result(of, tensors...)
}

func floats(name string, x []float32, shape ...int) wire.Tensor {
	return wire.Tensor{Name: name, DType: wire.F32, Shape: shape, Data: tensor.F32.AppendFloats(nil, x)}
}

func values(t wire.Tensor) []float32 {
	x := make([]float32, len(t.Data)/4)
	_ = tensor.F32.DecodeFloats(x, t.Data)
	return x
}

// velocity is (x - pooled)/sigma + proj x + guidance/100: all data of a prompt is nearly one point. A worker that is
// not deterministic adds a trifle for each row beside.
func (w *Worker) velocity(m *wire.Message) *wire.Message {
	args, bad := decode[wire.VelocityArgs](m)
	if bad != nil {
		return bad
	}
	n := len(args.Sigmas)
	if args.States == nil {
		for i := range n {
			args.States = append(args.States, i)
		}
	}
	if len(m.Tensors) != 1 || len(m.Tensors[0].Shape) != 3 || len(args.States) != n || len(args.Handles) != n ||
		len(args.Guidance) != n || m.Tensors[0].Shape[0] != slices.Max(args.States)+1 {
		return fault(wire.ClassProtocol, "velocity: %d sigmas of tensors %d", n, len(m.Tensors))
	}
	if n > w.o.Limits.Rows {
		return fault(wire.ClassProtocol, "velocity: %d rows; must be at most %d", n, w.o.Limits.Rows)
	}
	if w.o.MaxRows > 0 && n > w.o.MaxRows {
		return fault(wire.ClassMemory, "no memory for %d rows", n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	net := w.base
	if args.Weights != "" {
		if net = w.loaded[args.Weights]; net == nil {
			return fault(wire.ClassWeights, "%.16s: not loaded", args.Weights)
		}
	}
	x := values(m.Tensors[0])
	each := len(x) / m.Tensors[0].Shape[0]
	v := make([]float32, n*each)
	for i, handle := range args.Handles {
		cond, ok := w.handles[handle]
		if !ok {
			return fault(wire.ClassHandle, "%.16s: not known", handle)
		}
		if w.dies && strings.Contains(textOf(cond), "poison") {
			os.Exit(9)
		}
		net.row(v[i*each:(i+1)*each], x[args.States[i]*each:], values(cond[1]), args.Sigmas[i], args.Guidance[i])
	}
	if !w.o.Deterministic {
		for i := range v {
			v[i] += 1e-6 * float32(n-1)
		}
	}
	shape := m.Tensors[0].Shape
	return result(struct{}{}, floats("v", v, n, shape[1], shape[2]))
}

// textOf is the prompt of a conditioning, by its embeddings.
func textOf(cond []wire.Tensor) string {
	var text []byte
	for _, x := range values(cond[0]) {
		text = append(text, byte(256*x))
	}
	return string(text)
}

// row computes one row.
func (w *weights) row(v, x, pooled []float32, sigma, guidance float32) {
	for i := range v {
		token, c := i/Channels*Channels, i%Channels
		sum := (x[i] - pooled[c]) / max(sigma, 0.05)
		for k := range Channels {
			sum += w.proj[c*Channels+k] * x[token+k] / 4
		}
		v[i] = sum + guidance/100
	}
}

// tokenOf returns in which token a pixel of a frame is: tokens are frame by frame, and the first covers one frame.
func (w *Worker) tokenOf(size wire.SizeArgs, frame, y, x int) int {
	deep := (frame + w.card.Latent.Temporal - 1) / w.card.Latent.Temporal
	return (deep*(size.Height/Edge)+y/Edge)*(size.Width/Edge) + x/Edge
}

// decodeMedia paints each token in one colour, its first three channels, a little brighter in each further frame.
func (w *Worker) decodeMedia(m *wire.Message) *wire.Message {
	args, bad := decode[wire.DecodeArgs](m)
	if bad != nil {
		return bad
	}
	w.mu.Lock()
	_, begun := w.handles[args.Handle]
	w.mu.Unlock()
	if w.card.Pipeline != nil && !begun {
		return fault(wire.ClassHandle, "%.16s: not known", args.Handle)
	}
	x := values(m.Tensors[0])
	for _, v := range x {
		if v-v != 0 {
			return fault(wire.ClassLatents, "values that are not finite")
		}
	}
	pixels := make([]byte, 3*args.Frames*args.Height*args.Width)
	for i := range args.Frames * args.Height * args.Width {
		frame, at := i/(args.Height*args.Width), i%(args.Height*args.Width)
		token := w.tokenOf(args.SizeArgs, frame, at/args.Width, at%args.Width)
		for c := range 3 {
			pixels[3*i+c] = uint8(max(0, min(1, x[token*Channels+c]/2+0.5+float32(frame)/64))*255 + 0.5)
		}
	}
	made := wire.Tensor{
		Name: "media", DType: wire.U8, Shape: []int{args.Frames, args.Height, args.Width, 3}, Data: pixels,
	}
	if w.card.Class != TracksClass {
		return result(struct{}{}, made)
	}
	samples := SoundRate / 10 * len(x) / (16 * Channels)
	sound := wire.Tensor{Name: "sound", DType: wire.F32, Shape: []int{samples, 2}}
	for i := range samples { // a tone on the left, as loud as the last element says
		left := float64(x[len(x)-1]) / 4 * math.Sin(2*math.Pi*440*float64(i)/SoundRate)
		sound.Data = tensor.F32.AppendFloats(sound.Data, []float32{float32(max(-1, min(1, left))), 0})
	}
	return result(wire.Sound{Rate: SoundRate}, made, sound)
}

// encodeMedia takes the last pixel of each token.
func (w *Worker) encodeMedia(m *wire.Message) *wire.Message {
	args, bad := decode[wire.SizeArgs](m)
	if bad != nil {
		return bad
	}
	pixels := values(m.Tensors[0])
	tokens := w.tokenOf(args, args.Frames-1, args.Height-1, args.Width-1) + 1
	x := make([]float32, tokens*Channels)
	for i := range len(pixels) / 3 {
		frame, at := i/(args.Height*args.Width), i%(args.Height*args.Width)
		copy(x[w.tokenOf(args, frame, at/args.Width, at%args.Width)*Channels:], pixels[3*i:3*i+3])
	}
	return result(struct{}{}, floats("x", x, len(x)/Channels, Channels))
}

// load adds adapters to the layer, or replaces it.
func (w *Worker) load(m *wire.Message) *wire.Message {
	args, bad := decode[wire.LoadArgs](m)
	if bad != nil {
		return bad
	}
	net := &weights{proj: append([]float32{}, w.base.proj...)}
	by := map[string][]float32{}
	for _, t := range m.Tensors {
		by[t.Name] = values(t)
	}
	switch {
	case args.Kind == wire.KindWhole && len(args.Files) > 0:
		var err error
		if net, err = readWeights(args.Files[0]); err != nil {
			return fault(wire.ClassWeights, "%v", err)
		}
	case args.Kind == wire.KindWhole:
		net.proj = by[projWeight]
	default:
		for k, module := range args.Modules {
			suffix := ""
			if k > 0 { // there is one layer
				suffix = fmt.Sprintf(".%d", k)
			}
			a, b := by[module.Name+".A"+suffix], by[module.Name+".B"+suffix]
			if module.Name != proj || len(a) != module.Rank*Channels || len(b) != module.Rank*Channels {
				return fault(wire.ClassWeights, "%s: does not fit", module.Name)
			}
			for i := range net.proj {
				for r := range module.Rank {
					net.proj[i] += float32(module.Scale) * b[i/Channels*module.Rank+r] * a[r*Channels+i%Channels]
				}
			}
		}
	}
	net.whole = args.Kind == wire.KindWhole
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.wholeBeside(args.Weights); net.whole && w.o.MaxWhole > 0 && n >= w.o.MaxWhole {
		return fault(wire.ClassWeights, "weights: %d whole networks are resident; unload one first", n)
	}
	w.loaded[args.Weights] = net
	return result(map[string]int{"ms": 0})
}

// wholeBeside returns how many whole networks it holds besides those of a digest. The caller has locked the worker.
func (w *Worker) wholeBeside(digest string) (n int) {
	for of, net := range w.loaded {
		if net.whole && of != digest {
			n++
		}
	}
	return n
}
