package remotelm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Routes of vLLM by which it takes adapters while it runs.
const (
	vllmLoadAdapter   = "/v1/load_lora_adapter"
	vllmUnloadAdapter = "/v1/unload_lora_adapter"
)

// WithAdapter returns the same server, asked for its model with the adapter called name. LoadAdapter comes first.
func (s *Server) WithAdapter(name string) *Server {
	with := *s
	with.adapter = name
	return &with
}

// LoadAdapter makes the server load a LoRA from a folder in PEFT's form, which the server must be able to read, and
// call it name. It is no error that it has one of that name. An error that wraps ErrRefused says that the server takes
// no adapters, or not this one.
func (s *Server) LoadAdapter(ctx context.Context, name, folder string) error {
	if s.facts.Name != VLLM {
		return fmt.Errorf("%s: %w: it takes no adapters", s, ErrRefused)
	}
	models, err := s.vllmModels(ctx)
	if err == nil && !slices.ContainsFunc(models, func(m vllmModel) bool { return m.ID == name }) {
		err = s.http.Ask(ctx, http.MethodPost, vllmLoadAdapter, map[string]any{"lora_name": name, "lora_path": folder}, nil)
	}
	status, answered := errors.AsType[*remotehttp.StatusError](err)
	switch {
	case err == nil:
		return nil
	case answered && (status.Status == http.StatusNotFound || status.Status == http.StatusMethodNotAllowed):
		return fmt.Errorf("%s: %w; it takes adapters if it is started with --enable-lora and with "+
			"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and must be able to read %s", s, err, folder)
	case answered && strings.Contains(err.Error(), "add_lora"): // with status 500: what its worker says of the files
		return fmt.Errorf("%s: %w: %w", s, ErrRefused, err)
	}
	return fmt.Errorf("%s: load adapter: %w", s, err)
}

// UnloadAdapter makes the server forget an adapter.
func (s *Server) UnloadAdapter(ctx context.Context, name string) error {
	return s.http.Ask(ctx, http.MethodPost, vllmUnloadAdapter, map[string]any{"lora_name": name}, nil)
}

// AdapterLost reports whether the error of a Stream says that the server does not have the adapter, such as one that
// was started again.
func AdapterLost(err error) bool {
	status, ok := errors.AsType[*remotehttp.StatusError](err)
	return ok && status.Status == http.StatusNotFound
}
