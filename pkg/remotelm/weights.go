package remotelm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

const (
	// pushed begins the names of all whole weights that clients like this one have servers load.
	pushed = "meander-"
	// loading is what a server calls its weights while they change, and after a load that failed: no request asks for
	// it.
	loading = pushed + "loading"
	// asStarted is the name of the weights that a server was started with.
	asStarted = "default"
	// maxDeaths is how often in a row a server may be lost while it loads weights before it is asked no more for them.
	maxDeaths = 3
	// longest bounds how long a server loads weights, or works off the requests of others before.
	longest = time.Hour
)

// ErrChanged says that a server drew an answer with other weights than those that were asked for.
var ErrChanged = errors.New("drawn with other weights than those that were asked for: the server was started again, " +
	"or another client changes them")

// WeightsName returns the name of whole weights of a digest. Two clients of a server have the same for the same.
func WeightsName(digest string) string { return fmt.Sprintf("%s%.32s", pushed, digest) }

// AddWeights lets requests name whole weights: safetensors under their names in a checkpoint, in a folder that the
// servers can read by this path. A server loads them when the first such request comes to it, and works off the
// requests for others before.
func (p *Pool) AddWeights(name, folder string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.weights[name] = folder
}

// RemoveWeights forgets weights that no request names any more. A server keeps them until it gets others.
func (p *Pool) RemoveWeights(name, folder string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.weights[name] == folder { // else the same were added again since
		delete(p.weights, name)
		delete(p.numbers, name)
	}
}

// switchTo has a server that draws nothing load the whole weights of a name. It is no error that it has them. It must
// then say so of an answer, and give the numbers of the first server that loaded them.
func (p *Pool) switchTo(ctx context.Context, m *member, name string) error {
	s := m.now.Load()
	if m.has == name {
		return nil
	}
	p.mu.Lock()
	folder, known := p.weights[name]
	p.mu.Unlock()
	switch {
	case name == asStarted:
		folder = s.root
	case !known:
		return fmt.Errorf("%w: weights %s: removed", ErrRefused, name)
	}
	if p.config.Loading != nil {
		p.config.Loading(m.String(), folder)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, longest, fmt.Errorf("%w for %v", ErrSilent, longest))
	defer cancel()
	m.has = loading
	if err := s.dialect.reload(ctx, s, folder, name); err != nil {
		if m.died++; m.died >= maxDeaths && disconnected(err) {
			err = fmt.Errorf("%w: lost %d times in a row while it loaded them: %w", ErrRefused, m.died, err)
			m.died = 0
		}
		return fmt.Errorf("load the weights of %s: %w", folder, err)
	}
	m.died = 0
	next, err := newServer(ctx, p.config, p.name, m.http)
	if err != nil {
		return err
	}
	if next.version != name {
		return fmt.Errorf("%w: it names its weights %q after it has loaded %s", ErrChanged, next.version, name)
	}
	next.facts.Adapters = s.facts.Adapters
	if err := p.compare(next, name); err != nil {
		return err
	}
	m.now.Store(next)
	m.has = name
	return nil
}

// weightsOf returns the name of the weights that a server says it has.
func weightsOf(version string) string {
	if strings.HasPrefix(version, pushed) {
		return version
	}
	return asStarted // whatever its owner calls them
}

// compare returns an error if a server has other numbers than the first one that had weights of that name. The only
// server of a pool may have: its owner may have changed those that it is started with.
func (p *Pool) compare(s *Server, name string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first := p.numbers[name]; first != nil && len(p.all) > 1 {
		return s.sameNumbers(first)
	}
	if _, known := p.weights[name]; known || name == asStarted {
		p.numbers[name] = s.numbers
	}
	return nil
}

// drawnWith returns ErrChanged unless spans are of the weights that a request asks for.
func (r *Request) drawnWith(spans []Span) error {
	for _, w := range spans {
		if weightsOf(w.Version) != r.weights() {
			return fmt.Errorf("%w: tokens %d to %d with %s; must be %s", ErrChanged, w.Begin, w.End, w.Version,
				r.weights())
		}
	}
	return nil
}

// weights returns the name of the request's weights.
func (r *Request) weights() string {
	if r.Weights == "" {
		return asStarted
	}
	return r.Weights
}

// reloadVLLM has vLLM read weights into its model, layer by layer, and forget what it has cached of others. It calls
// them loading before: a load that fails leaves a part of them.
func reloadVLLM(ctx context.Context, s *Server, folder, name string) error {
	call := func(name string) error {
		return s.http.Ask(ctx, http.MethodPost, "/update_weight_version", map[string]any{"new_version": name}, nil)
	}
	if err := call(loading); err != nil {
		return err
	}
	err := s.http.AskSlow(ctx, http.MethodPost, "/collective_rpc", map[string]any{
		"method": "reload_weights", "kwargs": map[string]any{"weights_path": folder},
	}, nil)
	if remotehttp.Answered(err) == http.StatusInternalServerError { // it ends then, and must be started again
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	for err == nil {
		var reset struct {
			Success bool `json:"success"`
		}
		err = s.http.Ask(ctx, http.MethodPost, "/reset_prefix_cache", nil, &reset)
		if err == nil && reset.Success {
			return call(name)
		}
		select { // a request that we have left holds a part of the cache until the server notices
		case <-time.After(s.config.Pause):
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return err
}

// reloadSGLang has SGLang change its weights at once, or keep those that it has, and flush its cache.
func reloadSGLang(ctx context.Context, s *Server, folder, name string) error {
	return s.http.AskSlow(ctx, http.MethodPost, "/update_weights_from_disk", map[string]any{
		"model_path": folder, "weight_version": name, "flush_cache": true,
	}, nil)
}

// LoadAdapter makes the servers load a LoRA from a folder in PEFT's form, which they must be able to read, and call it
// name: those that can be used now, and each that is back later. It is no error that a server has one of that name. An
// error that wraps ErrRefused says that a server takes no adapters, or not this one. A server that fails otherwise is
// not used before it has the adapter, if another one has it.
func (p *Pool) LoadAdapter(ctx context.Context, name, folder string) error {
	p.AddAdapter(name, folder)
	servers := p.Members()
	failed := map[*member]error{}
	err := ErrAway
	for _, m := range servers {
		why := m.now.Load().loadAdapter(ctx, name, folder)
		if why != nil {
			why = fmt.Errorf("%s: %w", m, why)
			failed[m] = why
		}
		if err = why; errors.Is(err, ErrRefused) {
			break
		}
	}
	if errors.Is(err, ErrRefused) || len(failed) == len(servers) {
		p.UnloadAdapter(ctx, name)
		return err
	}
	for m, why := range failed {
		p.Out(m, why)
	}
	return nil
}

// AddAdapter is LoadAdapter for the servers that join from now on.
func (p *Pool) AddAdapter(name, folder string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.adapters[name] = folder
}

// UnloadAdapter makes the servers forget an adapter, as far as they answer.
func (p *Pool) UnloadAdapter(ctx context.Context, name string) {
	p.mu.Lock()
	delete(p.adapters, name)
	p.mu.Unlock()
	var wait sync.WaitGroup
	for _, m := range p.all {
		wait.Go(func() {
			_ = m.http.Ask(ctx, http.MethodPost, dialects[m.kind].unload, map[string]any{"lora_name": name}, nil)
		})
	}
	wait.Wait()
}

// errNoAdapters says that a server was started so that it takes no adapters.
var errNoAdapters = errors.New("it takes no adapters")

// loadAdapter is Pool.LoadAdapter for one server.
func (s *Server) loadAdapter(ctx context.Context, name, folder string) error {
	models, err := s.models(ctx)
	if err == nil && !slices.ContainsFunc(models, func(m servedModel) bool { return m.ID == name }) {
		err = s.http.Ask(ctx, http.MethodPost, s.dialect.load, map[string]any{"lora_name": name, "lora_path": folder},
			nil)
	}
	switch status := remotehttp.Answered(err); {
	case err == nil:
		return nil
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed,
		status > 0 && strings.Contains(err.Error(), "not enabled"):
		return fmt.Errorf("%w: %w; it takes them if it is started with %s, and must be able to read %s", errNoAdapters,
			err, s.dialect.need, folder)
	case status > 0 && strings.Contains(err.Error(), "add_lora"): // with status 500: what its worker says of the files
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return fmt.Errorf("load adapter: %w", err)
}

// lost reports whether the error of a request says that the server does not have its adapter, such as one that was
// started again.
func lost(err error, r Request) bool {
	status := remotehttp.Answered(err)
	return r.Adapter != "" && (status == http.StatusNotFound ||
		status > 0 && strings.Contains(err.Error(), "has never been loaded")) // SGLang's 400
}
