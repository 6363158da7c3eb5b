package qwenimage

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cpu"
)

// pass is model.Info.Pass: the matrices that mmdit.forward, nn.Decoder.Forward and
// autoencoder.decode take, of which a device has one after the other.
func (c *modelConfigs) pass(promptTokens int) func(height, width, rows, factorBytes int) int {
	return func(height, width, rows, factorBytes int) int {
		t, l := c.transformer, c.text
		d, pixels := t.width(), c.pixelsPerToken()
		image := height / pixels * (width / pixels)
		tokens := rows * (promptTokens + image)
		// The residual stream; what norms, projections and attention hand on.
		velocity := tokens * (4*d + factorBytes*(1+3+1+4)*d)
		velocity += rows * (promptTokens*(4+factorBytes)*t.TextWidth + 2*4*image*t.In) // embeddings and latents
		velocity += rows * 4 * (12*t.Layers + 2) * d                                   // modulations

		text := l.PassBytes(promptTokens+promptTokensDropped, factorBytes)

		levels := c.vae.levels()
		lh, lw := height>>levels, width>>levels
		top := c.vae.Base * c.vae.Mult[levels]
		decode := (3*4+2*factorBytes)*c.vae.decodeElements(lh, lw) + 4*lh*lw*(2*c.vae.Latents+4*top)
		return max(velocity, text, decode)
	}
}

// needs is the memory of weights on a device, by part.
type needs struct{ text, transformer, vae, pass int }

// needsOf reads headers and no weights. What is wrong with a part is found when it is loaded.
func needsOf(folder *safetensors.Folder, c *modelConfigs, o Options, factorBytes int) (n needs, err error) {
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
	n.pass = c.pass(o.MaxPromptTokens)(o.Height, o.Width, 1, factorBytes)
	return n, nil
}

// place says where the text encoder goes: with the rest, or, where a device has no room for
// all, to a processor: it reads a prompt once, and the others are there for every step. It
// fails when there is no room for these either.
func (s *shared) place(folder *safetensors.Folder, c *modelConfigs, o Options) error {
	s.textDevice = s.device
	limited, ok := s.device.(tensor.Limited)
	if !ok {
		return nil
	}
	room, factorBytes, err := limited.Room()
	if err != nil {
		return err
	}
	n, err := needsOf(folder, c, o, factorBytes)
	if err != nil {
		return err
	}
	least := n.transformer + n.vae + n.pass
	if least > room {
		return fmt.Errorf("device %s: %s of memory; must be %s: transformer %s, vae %s, a pass at %dx%d %s (the text encoder's %s can go to the processor); "+
			"take a GPU with more memory, or free what others hold of it", s.device.Name(), size(room), size(least), size(n.transformer), size(n.vae),
			o.Height, o.Width, size(n.pass), size(n.text))
	}
	if least+n.text <= room {
		return nil
	}
	s.textDevice, err = cpu.NewDevice(cpu.Options{Threads: o.Threads})
	return err
}

// closeDevices ends what the model started.
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

// backend names what computes.
func (s *shared) backend() string {
	if s.textDevice != s.device {
		return s.device.Name() + ", text " + s.textDevice.Name()
	}
	return s.device.Name()
}

// size is bytes as people read them.
func size(bytes int) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}
