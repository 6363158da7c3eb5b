package qwenimage

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// passBytes returns model.Info.Pass: the memory of the matrices that mmdit.forward,
// nn.Decoder.Forward or autoencoder.decode allocates, whichever is most. A device runs one
// of them at a time.
func (c *modelConfigs) passBytes(promptTokens int) func(size model.Size, rows, factorBytes int) int {
	return func(size model.Size, rows, factorBytes int) int {
		t, l := c.transformer, c.text
		d, pixels := t.width(), c.pixelsPerToken()
		image := size.Height / pixels * (size.Width / pixels)
		tokens := rows * (promptTokens + image)
		// The residual stream, and the outputs of norms, projections and attention.
		velocity := tokens * (4*d + factorBytes*(1+3+1+4)*d)
		velocity += rows * (promptTokens*(4+factorBytes)*t.TextWidth + 2*4*image*t.In) // embeddings and latents
		velocity += rows * 4 * (12*t.Layers + 2) * d                                   // modulations

		text := l.PassBytes(promptTokens+promptTokensDropped, factorBytes)

		levels := c.vae.levels()
		lh, lw := size.Height>>levels, size.Width>>levels
		top := c.vae.Base * c.vae.Mult[levels]
		decode := (3*4+2*factorBytes)*c.vae.decodeElements(lh, lw) + 4*lh*lw*(2*c.vae.Latents+4*top)
		return max(velocity, text, decode)
	}
}

// loraBytes returns model.Info.LoRA. Projections that are stacked share their factors, with zeros where one does not
// change the rows of another.
func (c *transformerConfig) loraBytes(rank, factorBytes int) int {
	type stack struct{ modules, n, k int }
	stacks := map[*nn.Linear]stack{}
	for _, p := range loadMMDiT(nn.NewLoader(&safetensors.Archive{}, nil), c).projections() {
		s := stacks[p.In]
		stacks[p.In] = stack{s.modules + 1, s.n + p.N, p.K}
	}
	numbers := 0
	for _, s := range stacks {
		numbers += s.modules * rank * (s.n + s.k)
	}
	return factorBytes * numbers
}

// memoryNeeds is the memory in bytes of the weights of each part on a device, and of a pass.
type memoryNeeds struct{ text, transformer, vae, pass int }

// needsOf computes memoryNeeds from the headers of the files. Faults of a part are found later, when it is loaded.
func needsOf(folder *safetensors.Folder, c *modelConfigs, o Options, factorBytes int) (n memoryNeeds, err error) {
	for _, p := range []struct {
		name  string
		load  func(*nn.Loader)
		bytes *int
	}{
		{"text_encoder", func(l *nn.Loader) { loadTextEncoder(l, c.text) }, &n.text},
		{"transformer", func(l *nn.Loader) { loadMMDiT(l, c.transformer) }, &n.transformer},
		{"vae", func(l *nn.Loader) { loadAutoencoder(l, c.vae) }, &n.vae},
	} {
		a, err := folder.Archive(p.name)
		if err != nil {
			return n, err
		}
		l := nn.NewLoader(a, nil)
		p.load(l)
		*p.bytes = l.Bytes(factorBytes)
		if err := a.Close(); err != nil {
			return n, err
		}
	}
	n.pass = c.passBytes(o.MaxPromptTokens)(media.ImageSize(c.defaults.Height, c.defaults.Width), 1, factorBytes)
	return n, nil
}

// chooseTextDevice sets the device of the text encoder: the model's device, or a CPU if the memory of that
// is too small for all networks. The text encoder runs once per prompt, the others at every step. It fails
// if the memory is too small for the others.
func (s *shared) chooseTextDevice(folder *safetensors.Folder, c *modelConfigs, o Options) error {
	s.textDevice = s.device
	limited, ok := s.device.(tensor.Limited)
	if !ok {
		return nil
	}
	free, factorBytes, err := limited.FreeSpace()
	if err != nil {
		return err
	}
	n, err := needsOf(folder, c, o, factorBytes)
	if err != nil {
		return err
	}
	least := n.transformer + n.vae + n.pass
	if least > free {
		return fmt.Errorf("device %s: %s of memory; must be %s: transformer %s, vae %s, a pass at %dx%d %s (the text "+
			"encoder's %s can go to the processor); "+
			"take a GPU with more memory, or free what others hold of it",
			s.device.Name(), formatBytes(free), formatBytes(least), formatBytes(n.transformer), formatBytes(n.vae),
			c.defaults.Width, c.defaults.Height, formatBytes(n.pass), formatBytes(n.text))
	}
	if least+n.text <= free {
		return nil
	}
	s.textDevice, err = cpu.NewDevice(cpu.Options{Threads: o.Threads})
	return err
}

// closeDevices closes the devices that the model opened, not one of the caller.
func (s *shared) closeDevices() error {
	var err error
	if s.textDevice != nil && s.textDevice != s.device {
		err = s.textDevice.Close()
	}
	if s.ownDevice {
		err = errors.Join(err, s.device.Close())
	}
	return err
}

// backend returns the names of the devices that compute.
func (s *shared) backend() string {
	if s.textDevice != s.device {
		return s.device.Name() + ", text " + s.textDevice.Name()
	}
	return s.device.Name()
}

// formatBytes formats a size for people.
func formatBytes(bytes int) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}
