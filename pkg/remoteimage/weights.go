package remoteimage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Weights are what servers make images with in place of the weights that they were started with: one of the two. Both
// are folders that the servers can read, by the same path.
type Weights struct {
	// Adapter has a LoRA in PEFT's form.
	Adapter string
	// Full has a folder "transformer" with a whole transformer in the form of diffusers.
	Full string
}

// unknown is the server.full of a server that may have any transformer.
const unknown = "?"

// ErrChanged says that another client has changed the weights of a server.
var ErrChanged = errors.New("its weights were changed by another client: a server belongs to one sampler that " +
	"changes them")

// AddWeights lets requests name weights. A server loads them when the first such request comes to it.
func (p *Pool) AddWeights(name string, w Weights) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.weights[name] = w
}

// RemoveWeights forgets weights that no request names any more. A server keeps them until it gets others.
func (p *Pool) RemoveWeights(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.weights, name)
}

// weightsOf returns weights by their name.
func (p *Pool) weightsOf(name string) (Weights, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w, ok := p.weights[name]
	if !ok && name != "" {
		return w, fmt.Errorf("weights %s: removed", name)
	}
	return w, nil
}

// switchTo has a server use the weights of a name.
func (p *Pool) switchTo(ctx context.Context, s *server, name string) error {
	w, err := p.weightsOf(name)
	if err != nil {
		return fmt.Errorf("%w: %w", remotehttp.ErrRefused, err)
	}
	return s.use(ctx, w)
}

// nickname is that of all adapters: the server keeps each that has another in memory for good.
const nickname = "meander"

// setBack has a server that joins use the weights that it was started with: a client before, or another one, may have
// changed them. Where changes is false they stay as they are, and an adapter that a client like this left is refused.
func (s *server) setBack(ctx context.Context, changes bool) error {
	if changes {
		s.full = unknown
		if err := s.use(ctx, Weights{}); err != nil {
			return fmt.Errorf("set it back to the weights that it was started with: %w", err)
		}
		return nil
	}
	_, used, err := s.adapters(ctx)
	switch {
	case remotehttp.Answered(err) == http.StatusNotFound:
		return nil // a release that has no adapters
	case err != nil:
		return err
	case slices.ContainsFunc(used, func(a string) bool { return strings.HasPrefix(a, nickname+" ") }):
		return fmt.Errorf("%w: it has an adapter that a sampler pushed, %q: restart it", remotehttp.ErrRefused, used)
	}
	return nil
}

// SetBack takes the adapters of all servers away, as far as they answer.
func (p *Pool) SetBack(ctx context.Context) {
	var wait sync.WaitGroup
	for _, s := range p.all {
		wait.Go(func() { _ = s.unmerge(ctx) })
	}
	wait.Wait()
}

// use has the server use weights, in place of all that it has got before. It refuses those that the server cannot load,
// and leaves it then with those that it was started with, or unknown ones. A whole transformer loads for minutes.
func (s *server) use(ctx context.Context, w Weights) error {
	ctx, cancel := context.WithTimeoutCause(ctx, longest, fmt.Errorf("%w for %v", remotehttp.ErrSilent, longest))
	defer cancel()
	if err := s.unmerge(ctx); err != nil { // an adapter survives a change of the transformer
		return err
	}
	if err := s.useFull(ctx, w.Full); err != nil {
		return err
	}
	if w.Adapter == "" {
		return nil
	}
	err := s.ask(ctx, "/v1/set_lora", map[string]any{
		"lora_nickname": nickname, "lora_path": w.Adapter, "target": "transformer", "strength": 1,
	})
	if err != nil { // after a wrong shape it makes no images before it is set back
		return errors.Join(refuseWeights(err), s.unmerge(ctx))
	}
	return nil
}

// useFull has the server use the whole transformer of a folder; empty: that of its model.
func (s *server) useFull(ctx context.Context, folder string) error {
	if s.full == folder {
		return nil
	}
	loaded, _, err := s.adapters(ctx)
	switch {
	case err != nil:
		return err
	case loaded > 0 && s.full == unknown && folder == "":
		s.full = "" // its adapters were added to the checkpoint: no whole transformer can have come after them
		return nil
	case loaded > 0:
		return fmt.Errorf("%w: a whole transformer: SGLang-Diffusion leaves its tensors out, with status 200, once "+
			"the server has had an adapter; restart the server", remotehttp.ErrRefused)
	}
	s.full = unknown
	if err := s.ask(ctx, "/update_weights_from_disk", map[string]any{
		"model_path": cmp.Or(folder, s.path), "flush_cache": true, "target_modules": []string{"transformer"},
	}); err != nil {
		return err
	}
	s.full = folder
	return nil
}

// unmerge has the server take all adapters away.
func (s *server) unmerge(ctx context.Context) error {
	return s.ask(ctx, "/v1/unmerge_lora_weights", map[string]any{"target": "all"})
}

// ask sends a change of the weights. The server works off the images of others before.
func (s *server) ask(ctx context.Context, path string, body map[string]any) error {
	return classify(s.http.AskSlow(ctx, http.MethodPost, path, body, nil))
}

// refuseWeights refuses what the server says of an adapter that it cannot load: with status 500.
func refuseWeights(err error) error {
	if err != nil && strings.Contains(err.Error(), "Failed to set LoRA adapter") {
		return fmt.Errorf("%w: %w", remotehttp.ErrRefused, err)
	}
	return err
}

// adapters returns how many adapters the server has in memory, and those that it uses: the nickname and the folder of
// each.
func (s *server) adapters(ctx context.Context) (loaded int, used []string, err error) {
	type adapter struct {
		Nickname string `json:"nickname"`
		Path     string `json:"path"`
	}
	var list struct {
		Loaded []adapter            `json:"loaded_adapters"`
		Active map[string][]adapter `json:"active"`
	}
	if err := s.http.AskSlow(ctx, http.MethodGet, "/v1/list_loras", nil, &list); err != nil {
		return 0, nil, classify(err)
	}
	for _, of := range list.Active {
		for _, a := range of {
			used = append(used, a.Nickname+" "+a.Path)
		}
	}
	return len(list.Loaded), used, nil
}

// checkWeights returns ErrChanged if the server uses another adapter now. It is asked after each image, which is then
// made again: another client may change the weights at any time.
func (s *server) checkWeights(ctx context.Context, w Weights) error {
	_, has, err := s.adapters(ctx)
	if err != nil {
		return err
	}
	var want []string
	if w.Adapter != "" {
		want = []string{nickname + " " + w.Adapter}
	}
	if !slices.Equal(has, want) {
		return fmt.Errorf("%w: it has the adapters %q; must be %q", ErrChanged, has, want)
	}
	return nil
}
