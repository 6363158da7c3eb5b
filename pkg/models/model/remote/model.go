package remote

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Model is a checkpoint whose network a worker computes.
type Model struct {
	*shared
	card   model.Card
	change *change // nil: the checkpoint
	closed sync.Once
}

// shared is what a model shares with those derived from it by weights.
type shared struct {
	link    *link
	users   atomic.Int32
	base    string // digest of the checkpoint
	limits  wire.Limits
	modules lora.Table
	tensors lora.Shapes
	files   bool // the worker can read files of this machine

	prompts  nn.LRU[promptKey, *model.Conditioning]
	encoding chan struct{} // a lock: prompts that come together are encoded once
	handles  sync.Map      // weak.Pointer[model.Conditioning] to its handle

	mu   sync.Mutex
	most map[model.Size]int // rows for which the worker's memory is enough
	used map[string]int     // users of the weights of each digest: models, and calls that load them again
	// unloads is closed when all unloads that have begun so far have ended; nil: none has begun.
	unloads <-chan struct{}
}

// promptKey is a prompt in the cache.
type promptKey [sha256.Size]byte

var (
	_ lora.Adaptable[model.Model] = (*Model)(nil)
	_ model.TextsEncoder          = (*Model)(nil)
)

// defaultPromptCache is Config.PromptCacheBytes where that is 0.
const defaultPromptCache = 256 << 20

// Open starts or joins a worker for the model in a folder of diffusers, which is read here for its schedule and for the
// digest of its weights; progress, which may be nil, is told. ctx bounds the opening, not the model.
func Open(ctx context.Context, dir string, cfg Config, progress model.Progress) (_ *Model, err error) {
	folder, err := open(dir, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	l := newLink(dir, cfg, false)
	type hashed struct {
		digest string
		err    error
	}
	hash := make(chan hashed, 1)
	go func() { // while the worker loads
		digest, err := digestOf(folder, cfg.Hashes, progress)
		hash <- hashed{digest, err}
	}()
	m, err := connect(ctx, l, folder, dir)
	h := <-hash
	if err = errors.Join(h.err, err); err != nil {
		l.close(ctx.Err() != nil)
		return nil, fmt.Errorf("open model %q: %w", dir, err)
	}
	m.base, m.card.WeightsDigest = h.digest, h.digest
	return nn.Adapted(m, cfg.Adapter, cfg.AdapterScale, m.adapted)
}

// open checks the settings and opens a folder, which must be of some class.
func open(dir string, cfg Config) (*safetensors.Folder, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	if class, err := classOf(dir); err != nil || class == "" {
		return nil, errors.Join(err, fmt.Errorf(
			"open model %q: model_index.json: _class_name: %q; must be the class of a pipeline", dir, class))
	}
	return safetensors.OpenFolder(dir)
}

// connect waits for the worker and asks it for card and modules.
func connect(ctx context.Context, l *link, folder *safetensors.Folder, dir string) (*Model, error) {
	p, err := l.open(ctx)
	if err != nil {
		return nil, explain(err)
	}
	h := &p.hello
	if err := checkClass(dir, h.Class); err != nil {
		return nil, err
	}
	card, err := cardOf(folder, dir, h.Card)
	if err == nil {
		err = setPrecision(&card, h.Backend, h.DType, false)
	}
	if err == nil {
		err = checkWeights(folder, h.Fingerprint)
	}
	if err == nil {
		err = card.Validate()
	}
	if err != nil {
		return nil, err
	}
	if l.cfg.Deterministic && !card.IndependentRows {
		return nil, fmt.Errorf("deterministic: the worker is not (%s); start it with --deterministic", h.Backend)
	}
	s := &shared{
		link: l, limits: h.Limits, files: p.network == "unix", encoding: make(chan struct{}, 1),
		most: map[model.Size]int{}, used: map[string]int{}, modules: lora.Table{}, tensors: lora.Shapes{},
	}
	s.prompts.Limit = max(0, l.cfg.PromptCacheBytes)
	if l.cfg.PromptCacheBytes == 0 {
		s.prompts.Limit = defaultPromptCache
	}
	var of wire.ModulesResult
	if _, err := l.call(ctx, nil, wire.CallModules, struct{}{}, nil, &of); err != nil {
		return nil, explain(err)
	}
	for name, shape := range of.Linear {
		s.modules[name] = shape
	}
	for name, shape := range of.Tensors {
		s.tensors[name] = append([]int{}, shape...)
	}
	s.users.Store(1)
	return &Model{shared: s, card: card}, nil
}

// checkClass fails where a worker computes another class than that of the folder.
func checkClass(dir, theirs string) error {
	class, err := classOf(dir)
	if err == nil && class != theirs {
		err = fmt.Errorf("the worker computes %.80q; must be %s: give it the same folder", theirs, class)
	}
	return err
}

// checkWeights fails where a worker reads other weights than those in the folder.
func checkWeights(folder *safetensors.Folder, theirs string) error {
	in, err := partsOf(folder)
	if err != nil {
		return err
	}
	ours, err := folder.Fingerprint(in...)
	if err == nil && ours != theirs {
		err = errors.New("the worker has other weights than this folder; give it the same folder")
	}
	return err
}

// Inspect describes the model in a folder without waiting until a worker has read its weights, unless cfg says so.
func Inspect(ctx context.Context, dir string, cfg Config) (_ *model.Info, err error) {
	folder, err := open(dir, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	var waits atomic.Value // what a caller whose ctx ends did not wait for
	log := cfg
	cfg.Log = func(e Event) {
		if e.Waiting && e.Text != "" {
			waits.Store(e.Text)
		}
		log.log(e)
	}
	l := newLink(dir, cfg, !cfg.Tested)
	defer l.close(true)
	var of wire.InspectResult
	p, err := l.open(ctx)
	if err == nil {
		_, err = l.call(ctx, nil, wire.CallInspect, struct{}{}, nil, &of)
	}
	if err != nil {
		if text, _ := waits.Load().(string); text != "" && ctx.Err() != nil {
			err = fmt.Errorf("%w: %s", err, text)
		}
		return nil, fmt.Errorf("inspect model %q: %w", dir, explain(err))
	}
	c := of.Card
	info := &model.Info{}
	if err := checkClass(dir, c.Class); err != nil {
		return nil, err
	}
	if info.Card, err = cardOf(folder, dir, c); err != nil {
		info.Problem(err)
		return info, nil
	}
	h := &p.hello
	info.Problem(setPrecision(&info.Card, h.Backend, h.DType, h.State == wire.Loading))
	info.Problem(info.Card.Validate())
	in, err := partsOf(folder)
	info.Problem(err)
	for _, part := range in {
		var config struct {
			Class         string   `json:"_class_name"`
			Architectures []string `json:"architectures"` // of a text encoder
		}
		info.Problem(nn.ReadJSON(folder, part+"/config.json", nn.Elsewhere, &config))
		nn.InspectPart(info, folder, part, strings.Join(append(config.Architectures, config.Class), ""), nil)
	}
	for i := range info.Parts {
		p := &info.Parts[i]
		p.MemoryBytes, p.FactorBytes = 4*p.Parameters, 2*p.Parameters
	}
	return info, nil
}

// explain makes an error of a call one for people: those of settings without their class.
func explain(err error) error {
	f, ok := errors.AsType[*wire.Fault](err)
	alone := err == error(f) //nolint:errorlint // a fault that nothing wraps, and so nothing explains
	switch {
	case !ok:
		return err
	case f.Class == wire.ClassPrompt:
		return fmt.Errorf("%w: %s", model.ErrPrompt, f.Message)
	case f.Class == wire.ClassLatents:
		return fmt.Errorf("%w: %s", model.ErrLatents, f.Message)
	case f.Class == wire.ClassConfig && alone:
		return fmt.Errorf("worker: %s", f.Message)
	case alone:
		return fmt.Errorf("worker: %w", f)
	}
	return err
}

// faultOf returns the class of a worker's error; empty for any other.
func faultOf(err error) string {
	if f, ok := errors.AsType[*wire.Fault](err); ok && !errors.Is(err, tensor.ErrDeviceLost) {
		return f.Class
	}
	return ""
}

// call is link.call. An error of class config is final: the device is lost.
func (s *shared) call(ctx context.Context, work work, call string, args any, tensors []wire.Tensor, result any,
) ([]wire.Tensor, error) {
	answer, err := s.link.call(ctx, work, call, args, tensors, result)
	if faultOf(err) == wire.ClassConfig {
		err = fmt.Errorf("%w: %w", tensor.ErrDeviceLost, explain(err))
	}
	return answer, err
}

// Card describes the model.
func (m *Model) Card() model.Card { return m.card }

// Away returns why the worker cannot be called now, such as that it is being started again; nil: it can.
func (m *Model) Away() error { return m.link.away() }

// Device returns the name of what the worker computes on, such as cuda:0.
func (m *Model) Device() string {
	m.link.mu.Lock()
	defer m.link.mu.Unlock()
	return m.link.first.Device
}

// Encode turns each prompt into a conditioning, alone: its bits do not depend on the prompts beside it.
func (m *Model) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.EncodeTexts(ctx, single(prompts), false)
}

// EncodeTruncated is Encode, but a prompt that is too long is cut.
func (m *Model) EncodeTruncated(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.EncodeTexts(ctx, single(prompts), true)
}

// single returns prompts of one text each.
func single(prompts []string) []model.Texts {
	texts := make([]model.Texts, len(prompts))
	for i, p := range prompts {
		texts[i] = model.Texts{p}
	}
	return texts
}

// keyOf returns the key of a prompt. The worker gives the first text to encoders without one of their own.
func keyOf(texts model.Texts) (key promptKey, shortest model.Texts) {
	for len(texts) > 1 && texts[len(texts)-1] == texts[0] {
		texts = texts[:len(texts)-1]
	}
	h := sha256.New()
	for _, text := range texts {
		fmt.Fprintf(h, "%d %s", len(text), text)
	}
	return promptKey(h.Sum(nil)), texts
}

// EncodeTexts is Encode, or EncodeTruncated, for prompts with a text for each text encoder.
func (m *Model) EncodeTexts(ctx context.Context, prompts []model.Texts, truncate bool) ([]*model.Conditioning, error) {
	select {
	case m.encoding <- struct{}{}:
		defer func() { <-m.encoding }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	out, made := make([]*model.Conditioning, len(prompts)), map[promptKey]*model.Conditioning{}
	for i, prompt := range prompts {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		key, texts := keyOf(prompt)
		c := made[key]
		if c == nil {
			c, _ = m.prompts.Get(key)
		}
		if c == nil {
			var err error
			if c, err = m.encodeOne(ctx, key, wire.EncodeArgs{
				Prompts:  [][]string{texts},
				Truncate: truncate,
			}); err != nil {
				return nil, err // it names the prompt
			}
		}
		if c.Cut > 0 && !truncate {
			return nil, fmt.Errorf("prompt %.80q: %w: %d tokens too long; must be at most %d", texts[0],
				model.ErrPrompt, c.Cut, m.card.MaxPromptTokens)
		}
		made[key], out[i] = c, c
	}
	return out, nil
}

// encodeOne has the worker encode one prompt, and adds it to the cache under its key.
func (m *Model) encodeOne(ctx context.Context, key promptKey, args wire.EncodeArgs) (*model.Conditioning, error) {
	prompt := args.Prompts[0][0]
	var of wire.EncodeResult
	tensors, err := m.call(ctx, oneWork(key[:], wire.CallEncode, key), wire.CallEncode, args, nil, &of)
	if err != nil {
		return nil, fmt.Errorf("prompt %.80q: %w", prompt, explain(err))
	}
	if len(of.Items) != 1 || len(of.Items[0].Tensors) != len(m.card.Conditioning) {
		return nil, fmt.Errorf("prompt %.80q: the worker gives %d items; must be 1 with %v", prompt, len(of.Items),
			m.card.Conditioning)
	}
	item := of.Items[0]
	c := &model.Conditioning{Prompt: prompt, Cut: item.Cut}
	bytes := 0
	for _, text := range args.Prompts[0] {
		bytes += len(text)
	}
	for k, i := range item.Tensors {
		if i < 0 || i >= len(tensors) || tensors[i].DType != wire.F32 || tensors[i].Name != m.card.Conditioning[k] {
			return nil, fmt.Errorf("prompt %.80q: tensor %d of the worker; must be %s in %s", prompt, i,
				m.card.Conditioning[k], wire.F32)
		}
		bytes += len(tensors[i].Data)
		c.Tensors = append(c.Tensors, tensorOf(&tensors[i]))
	}
	if handle := m.handleOf(c); handle != item.Handle {
		return nil, fmt.Errorf("prompt %.80q: handle %.16s of the worker; its tensors give %.16s", prompt, item.Handle,
			handle)
	}
	m.prompts.Put(key, c, bytes)
	return c, nil
}

// handleOf returns what the worker knows a conditioning by: the digest of its tensors, computed once.
func (s *shared) handleOf(c *model.Conditioning) string {
	key := weak.Make(c)
	if h, ok := s.handles.Load(key); ok {
		return h.(string)
	}
	h := wire.Handle(tensorsOf(c))
	s.remember(c, h)
	return h
}

// tensorsOf returns the tensors of a conditioning as they are sent.
func tensorsOf(c *model.Conditioning) []wire.Tensor {
	list := make([]wire.Tensor, len(c.Tensors))
	for i, t := range c.Tensors {
		list[i] = wire.Tensor{Name: t.Name, DType: wire.F32, Shape: t.Shape, Data: tensor.F32.AppendFloats(nil, t.Data)}
	}
	return list
}

// tensorOf returns a tensor as a conditioning has it.
func tensorOf(t *wire.Tensor) model.Tensor {
	return model.Tensor{Name: t.Name, Shape: append([]int{}, t.Shape...), Data: floatsOf(t.Data)}
}

// floatsOf decodes F32 bytes.
func floatsOf(b []byte) []float32 {
	x := make([]float32, len(b)/4)
	_ = tensor.F32.DecodeFloats(x, b) // the lengths agree
	return x
}

// MemoryBytes returns weights, and what the device reserves besides; both are 0 while the worker is busy or lost.
func (m *Model) MemoryBytes() (weights, working int) {
	ctx, stop := context.WithTimeout(m.link.life, time.Second)
	defer stop()
	var of wire.MemoryResult
	if _, err := m.call(ctx, nil, wire.CallMemory, struct{}{}, nil, &of); err != nil {
		return 0, 0
	}
	return of.Weights, max(0, of.Reserved-of.Weights) + m.prompts.Bytes()
}

// Close frees the model. The worker ends with the last of the models that share it, unless others started it.
func (m *Model) Close() error {
	m.closed.Do(func() {
		if m.change != nil {
			m.release(m.change)
		}
		if m.users.Add(-1) == 0 {
			if m.link.cfg.Address != "" && m.link.away() == nil { // it goes on, with what is not freed
				ctx, stop := context.WithTimeout(m.link.life, unloadWithin)
				_ = m.awaitUnloads(ctx)
				stop()
			}
			m.link.end()
			_ = m.awaitUnloads(context.Background()) // which end with the link
			m.link.close(false)
		}
	})
	return nil
}

// Families returns the classes that only workers compute, so that a program which finds a folder of one can say so:
// their Open and Inspect are errors with what to do. Open and Inspect of this package take folders of any class.
func Families() (list model.Registry) {
	for _, is := range [][2]string{
		{"flux1", "FluxPipeline"},
		{"flux2", "Flux2Pipeline"},
		{"flux2-klein", "Flux2KleinPipeline"},
		{"hunyuan-video", "HunyuanVideoPipeline"},
		{"krea2", "Krea2Pipeline"},
		{"ltx", "LTXPipeline"},
		{"sd3", "StableDiffusion3Pipeline"},
		{"wan", "WanPipeline"},
		{"z-image", "ZImagePipeline"},
	} {
		name, class := is[0], is[1]
		refuse := func(dir string) error {
			return fmt.Errorf("model %q: %s is computed by the torch engine: --engine torch; %s", dir, class, Install)
		}
		list = append(list, model.Family{
			Name: name, Class: class,
			Open:    func(dir string, _ model.Options) (model.Model, error) { return nil, refuse(dir) },
			Inspect: func(dir string) (*model.Info, error) { return nil, refuse(dir) },
		})
	}
	return list
}
