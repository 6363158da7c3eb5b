package qwen2

import (
	"errors"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

const (
	familyName = "qwen2"
	class      = "Qwen2ForCausalLM"
)

// Family returns the family of folders of the class Qwen2ForCausalLM, for the registry in
// pkg/models/lm/families.
func Family() lm.Family {
	return lm.Family{
		Name: familyName, Class: class,
		Open: func(dir string, o lm.Options) (lm.Model, error) {
			m, err := Open(dir, o)
			if err != nil {
				return nil, err
			}
			return nn.Adapted[lm.Model](m, o.Adapter, o.AdapterScale, m.Adapted)
		},
		Language: openLanguage,
		Inspect:  inspect,
	}
}

// Bounds if the options have none.
const (
	defaultCacheBytes = 1 << 30
	mostPositions     = 1 << 15
)

// Open loads a checkpoint in the layout of transformers: config.json, generation_config.json,
// a tokenizer, a chat template, and weights in F32, F16 or BF16, whole or in shards. Nothing
// outside dir is read. The error names whatever is missing, unexpected, mis-shaped or not
// supported. The adapter of the options is not added.
func Open(dir string, o lm.Options) (*Model, error) {
	return nn.Open(dir, func(folder *safetensors.Folder) (*Model, error) { return open(folder, dir, o) })
}

// open is Open for an open folder; dir is its path, for the name of the model. It reads
// configurations, tokenizer, template and weights. On an error what it opened is closed.
func open(folder *safetensors.Folder, dir string, o lm.Options) (*Model, error) {
	c, err := readConfigs(folder)
	if err != nil {
		return nil, err
	}
	positions := min(c.decoder.MaxPositions, mostPositions)
	if o.MaxPositions != 0 {
		var f nn.Faults
		f.Within("MaxPositions", o.MaxPositions, 1, positions)
		if err := f.Of("model options"); err != nil {
			return nil, err
		}
		positions = o.MaxPositions
	}
	s := &shared{device: o.Device}
	if s.chatCodec, err = readChatCodec(folder, c); err != nil {
		return nil, err
	}
	digest, err := newDigest(folder)
	if err != nil {
		return nil, err
	}
	digest.Share(o.Hashes)
	if s.device == nil {
		if s.device, err = cpu.NewDevice(cpu.Options{Threads: o.Threads}); err != nil {
			return nil, err
		}
		s.ownDevice = true
	}
	m := &Model{shared: s}
	err = nn.LoadPart(folder, s.device, ".", digest, o.Progress,
		func(l *nn.Loader) { m.decoder, m.head = load(l, c.decoder, positions) })
	if err != nil {
		return nil, errors.Join(err, s.closeDevice())
	}
	if o.CacheBytes <= 0 {
		o.CacheBytes = defaultCacheBytes
	}
	m.cache.init(s.device, &m.caches, c.decoder.CacheCols(), o.CacheBytes)
	s.users.Store(1)
	s.base, s.baseHead, s.baseDigest = m.decoder, m.head, digest.Hex()
	s.config, s.positions = c.decoder, positions
	m.card = c.card(dir, positions, m.cache.pages.Tokens())
	m.card.Dated = s.template.dated
	m.card.WeightsDigest, m.card.Backend = s.baseDigest, s.device.Name()
	return m, nil
}

// inspect implements Family.Inspect: it describes a folder without reading its weights.
func inspect(dir string) (_ *lm.Info, err error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("inspect model: %w", err)
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	var found model.Info
	info := &lm.Info{
		Card:       lm.Card{Name: model.NameOf(dir), Source: hub.Source(dir), Family: familyName},
		CacheBytes: defaultCacheBytes,
	}
	c, err := readConfigs(folder)
	found.Problem(err)
	var read func(*nn.Loader)
	if c != nil {
		positions := min(c.decoder.MaxPositions, mostPositions)
		info.CacheTokenBytes = 4 * c.decoder.CacheCols()
		info.Card = c.card(dir, positions, lm.NewPages(info.CacheBytes/info.CacheTokenBytes).Tokens())
		read = func(l *nn.Loader) { load(l, c.decoder, positions) }
		s, err := readChatCodec(folder, c)
		if found.Problem(err); err == nil {
			info.Tokens, info.Template = s.tokenizer.Size(), s.template.String()
			info.Card.Dated = s.template.dated
		}
	}
	nn.InspectPart(&found, folder, ".", class, read)
	info.Parts, info.Problems = found.Parts, found.Problems
	return info, nil
}

// load reads the weights of decoder and head. A head that is tied to the embedding becomes a second
// copy of it, stored for matrix products. Where the files have a head, too, that is used, as in transformers, which
// ties only equal ones. Errors are kept in l.
func load(l *nn.Loader, c *nn.DecoderConfig, positions int) (*nn.Decoder, nn.Linear) {
	l.Prefix, l.FewRows = "model.", true
	d := l.Decoder(c, positions)
	head := "embed_tokens"
	if l.Prefix = ""; !c.Tied || l.Has("lm_head.weight") {
		head = "lm_head"
	} else {
		l.Prefix = "model."
	}
	out := l.Linear(c.Width, false, nn.Out(head, c.Vocabulary))
	l.Ignored = func(name string) bool {
		return strings.HasSuffix(name, ".rotary_emb.inv_freq") // from rope_theta
	}
	return d, out
}
