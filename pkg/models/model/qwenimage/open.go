package qwenimage

import (
	"errors"
	"runtime"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// Family opens folders of the QwenImagePipeline class.
func Family() model.Family {
	return model.Family{
		Name: familyName, Class: pipelineClass, Inspect: Inspect,
		Open: func(dir string, o model.Options) (model.Model, error) {
			m, err := Open(dir, Options{Options: o})
			if err != nil {
				return nil, err
			}
			return nn.Adapted[model.Model](m, o.Adapter, o.AdapterScale, m.Adapted)
		},
	}
}

const familyName = "qwen-image"

// Options are settings that a checkpoint does not fix; the adapter is not added.
type Options struct {
	model.Options
	// MaxPromptTokens bounds a conditioning, the five tokens of the template's end included;
	// default 512, at most 1024.
	MaxPromptTokens int
}

// Open loads a checkpoint in the diffusers layout: model_index.json, scheduler/,
// tokenizer/, text_encoder/, transformer/ and vae/, weights in F32, F16 or BF16, whole or
// in shards. Nothing outside dir is read. The error names whatever is missing, unexpected,
// mis-shaped or not supported.
func Open(dir string, o Options) (*Model, error) {
	return nn.Open(dir, func(folder *safetensors.Folder) (*Model, error) { return open(folder, dir, o) })
}

// open is Open for an open folder; dir is its path, for the name of the model.
func open(folder *safetensors.Folder, dir string, o Options) (*Model, error) {
	c, err := readConfigs(folder)
	if err != nil {
		return nil, err
	}
	if err := o.setDefaults(&c.defaults); err != nil {
		return nil, err
	}
	tok, err := tokenizer.Read(folder, "tokenizer")
	if err != nil {
		return nil, err
	}
	if err := c.fitTokenizer(tok); err != nil {
		return nil, err
	}
	digest, err := newDigest(folder)
	if err != nil {
		return nil, err
	}
	digest.Share(o.Hashes)
	s := &shared{tokenizer: tok, device: o.Device}
	s.indices.New = func() any { return &nn.Indices{} }
	if s.device == nil {
		if s.device, err = cpu.NewDevice(cpu.Options{Threads: o.Threads}); err != nil {
			return nil, err
		}
		s.ownDevice = true
	}
	m := &Model{shared: s}
	err = s.chooseTextDevice(folder, c, o)
	if err == nil {
		err = m.load(folder, dir, o, c, digest)
	}
	if err != nil {
		return nil, errors.Join(err, s.closeDevices())
	}
	return m, nil
}

// load reads the weights onto the devices and sets all fields that depend on them.
func (m *Model) load(folder *safetensors.Folder, dir string, o Options, c *modelConfigs,
	digest *safetensors.Digest,
) error {
	s := m.shared
	var errs [3]error
	errs[0] = nn.LoadPart(folder, s.textDevice, "text_encoder", digest, o.Progress,
		func(l *nn.Loader) { s.text = loadTextEncoder(l, c.text) })
	errs[1] = nn.LoadPart(folder, s.device, "transformer", digest, o.Progress,
		func(l *nn.Loader) { m.transformer = loadMMDiT(l, c.transformer) })
	errs[2] = nn.LoadPart(folder, s.device, "vae", digest, o.Progress,
		func(l *nn.Loader) { s.vae = loadAutoencoder(l, c.vae) })
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	s.users.Store(1)
	s.base, s.baseDigest = m.transformer, digest.Hex()
	s.prompts.Limit = o.PromptCacheBytes
	s.ropes.Limit = ropeCacheBytes
	m.modulations.Limit = modulationCacheRows * 4 * m.transformer.modulationSize()
	m.card = c.card(dir, o)
	m.card.WeightsDigest, m.card.Backend = s.baseDigest, s.backend()
	if d, ok := s.device.(tensor.Factored); ok && d.Factors() == tensor.BF16 {
		m.card.LatentsDType = tensor.BF16
	}
	return m.card.Validate()
}

// setDefaults replaces zero fields by their defaults, and checks all fields and the defaults of prompts.
func (o *Options) setDefaults(d *nn.Defaults) error {
	o.Threads = orDefault(o.Threads, runtime.GOMAXPROCS(0))
	o.MaxPromptTokens = orDefault(o.MaxPromptTokens, 512)
	o.PromptCacheBytes = max(0, orDefault(o.PromptCacheBytes, 32<<20))
	var f nn.Faults
	f.Within("Threads", o.Threads, 1, 4096)
	f.Within("Height", d.Height, 1, 1<<15)
	f.Within("Width", d.Width, 1, 1<<15)
	f.Within("NumInferenceSteps", d.NumInferenceSteps, 1, 1000)
	f.Within("MaxPromptTokens", o.MaxPromptTokens, 1, promptTokensLimit)
	f.Check(d.TrueCFGScale > 0 && d.TrueCFGScale <= 1000, "TrueCFGScale: %g; must be more than 0, at most 1000",
		d.TrueCFGScale)
	if len(f) == 0 {
		f.Within("MaxPixels", maxPixels(d), d.Height*d.Width, 1<<28)
	}
	return f.Of("model options")
}

// maxPixels bounds height*width of images.
func maxPixels(d *nn.Defaults) int { return max(2048*2048, d.Height*d.Width) }

func orDefault(v, d int) int {
	if v == 0 {
		return d
	}
	return v
}
