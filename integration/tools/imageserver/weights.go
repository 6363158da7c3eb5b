package imageserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
)

// held is the weights of a server, as the real one keeps them: an adapter on top of the whole transformer.
type held struct {
	base     model.Model // the model with the whole transformer that it was given last
	now      model.Model // what images are made with
	adapter  map[string]any
	adapters int // how many nicknames have had an adapter: from the first on whole transformers are left out
}

// SetAdapter gives the server an adapter, as another client of it may.
func (s *Server) SetAdapter(nickname, folder string) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.setAdapter(nickname, folder)
}

func (s *Server) setAdapter(nickname, folder string) error {
	a, err := lora.Open(folder)
	if err != nil {
		return err
	}
	m, err := s.held.base.(lora.Adaptable[model.Model]).Adapted(lora.Weighted{Adapter: a, Weight: 1})
	if err != nil {
		return err
	}
	s.held.now, s.held.adapters = m, 1
	s.held.adapter = map[string]any{"nickname": nickname, "path": folder, "merged": true}
	return nil
}

// changeWeights answers the routes by which clients change weights, as the real server does, in turn with images. It
// reports whether the path is one of them.
func (s *Server) changeWeights(w http.ResponseWriter, r *http.Request) bool {
	var in struct {
		Nickname string `json:"lora_nickname"`
		Path     string `json:"lora_path"`
		Model    string `json:"model_path"`
	}
	answer := func(v any, err error) {
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			v = map[string]any{"detail": fmt.Sprintf("Failed to set LoRA adapter: %s", err)}
		}
		_ = json.NewEncoder(w).Encode(v)
	}
	if s.isDead() {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(exited))
		return true
	}
	decode := func() error { return json.NewDecoder(r.Body).Decode(&in) }
	s.turn.Lock()
	defer s.turn.Unlock()
	h := &s.held
	switch r.URL.Path {
	case "/v1/list_loras":
		active := map[string]any{}
		if h.adapter != nil {
			active["transformer"] = []any{h.adapter}
		}
		answer(map[string]any{"loaded_adapters": make([]any, h.adapters), "active": active}, nil)
	case "/v1/unmerge_lora_weights":
		h.now, h.adapter = h.base, nil
		answer(map[string]any{"status": "ok"}, nil)
	case "/v1/set_lora":
		err := decode()
		answer(map[string]any{"status": "ok"}, errors.Join(err, s.setAdapter(in.Nickname, in.Path)))
	case "/update_weights_from_disk":
		err := decode()
		if err == nil && h.adapters == 0 {
			err = s.replace(in.Model)
		}
		answer(map[string]any{"success": true}, err)
	default:
		return false
	}
	return true
}

// replace gives the server the transformer of a folder.
func (s *Server) replace(folder string) error {
	full, err := lora.OpenFull(folder)
	if err != nil {
		return err
	}
	m, err := s.model.(lora.Adaptable[model.Model]).Replaced(full, "other")
	if err == nil {
		s.held.base, s.held.now = m, m
	}
	return err
}

// StartAgain has the server forget all weights that it was given, as one that was started again.
func (s *Server) StartAgain() {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.held = held{base: s.model, now: s.model}
}
