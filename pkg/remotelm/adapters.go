package remotelm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

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
