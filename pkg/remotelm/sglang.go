package remotelm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

// sglang is the dialect of SGLang 0.4 and newer: /generate. An event has all tokens so far or, if the server was
// started so, only the new ones; the number of ids tells which. It gives log-probs after temperature and before
// filters or, if its environment says so, before both; never logits.
var sglang = dialect{
	discover: discoverSGLang, routes: []string{"/generate"}, requestBody: sglangBody, parseEvent: parseSGLang,
	processedKind: Tempered, load: "/load_lora_adapter", unload: "/unload_lora_adapter",
	need:   "--enable-lora, --max-lora-rank and --lora-target-modules",
	reload: reloadSGLang, release: abortSGLang,
}

// abortSGLang aborts a request: when only its connection closes, it may stay in the queue of the server.
func abortSGLang(s *Server, id string) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = s.http.Ask(ctx, http.MethodPost, "/abort_request", map[string]any{"rid": id}, nil)
	}()
}

// discoverSGLang asks for the release, the length limit and the model.
func discoverSGLang(ctx context.Context, s *Server, f *Facts) error {
	var server struct {
		Version string `json:"version"`
		Context *int   `json:"context_length"`
		Path    string `json:"model_path"` // what it was started with
	}
	if err := s.askEither(ctx, &server, "/server_info", "/get_server_info"); err != nil {
		return err
	}
	var model struct {
		Path string `json:"model_path"`
	}
	if err := s.askEither(ctx, &model, "/model_info", "/get_model_info"); err != nil {
		return err
	}
	f.Version, f.Model, s.root, f.Whole = server.Version, model.Path, server.Path, server.Path != ""
	if server.Context != nil {
		f.MaxTokens = *server.Context
	}
	return nil
}

// askEither asks at the current path, or at an older one if the server refuses that.
func (s *Server) askEither(ctx context.Context, v any, now, before string) error {
	err := s.http.Ask(ctx, http.MethodGet, now, nil, v)
	if errors.Is(err, ErrRefused) {
		err = s.http.Ask(ctx, http.MethodGet, before, nil, v)
	}
	return err
}

// sglangBody writes "no limit" for top_k as -1, and seeds of 31 bits.
func sglangBody(_ Facts, vocabulary int, r *Request, top int) map[string]any {
	if top < 0 {
		top = vocabulary
	}
	k := r.TopK
	if k == 0 {
		k = -1
	}
	// No ignore_eos: with it SGLang ignores stop_token_ids, too, and draws until it is aborted. So the eos tokens of
	// its tokenizer end answers as well.
	body := map[string]any{
		"input_ids": r.IDs, "rid": r.ID, "stream": true, "return_logprob": true, "top_logprobs_num": top,
		"sampling_params": map[string]any{
			"max_new_tokens": r.MaxTokens, "temperature": r.Temperature, "top_p": r.TopP, "top_k": k, "min_p": r.MinP,
			"sampling_seed":  r.Seed & (1<<31 - 1),
			"stop_token_ids": r.Stop, "no_stop_trim": true, "skip_special_tokens": false,
		},
	}
	if r.Adapter != "" {
		body["lora_path"] = r.Adapter
	}
	return body
}

type sglangEvent struct {
	Error json.RawMessage `json:"error"`
	IDs   []int32         `json:"output_ids"`
	Meta  struct {
		Tokens *int `json:"completion_tokens"`
		Finish *struct {
			Type    string `json:"type"`
			Message string `json:"message"`
			Status  int    `json:"status_code"`
		} `json:"finish_reason"`
		LogProbs []sglangNumber   `json:"output_token_logprobs"`
		Top      [][]sglangNumber `json:"output_top_logprobs"`
		Version  string           `json:"weight_version"`
		Versions []struct {
			Version string `json:"version"`
			Start   int    `json:"start"`
			End     int    `json:"end"`
		} `json:"weight_versions"`
	} `json:"meta_info"`
}

// sglangNumber is [log-prob, id, text or null].
type sglangNumber struct {
	value float64
	id    int32
}

// UnmarshalJSON reads the list; its log-prob and its id must be there.
func (n *sglangNumber) UnmarshalJSON(b []byte) error {
	var in []json.RawMessage
	var value *float64
	var id *int32
	if err := json.Unmarshal(b, &in); err != nil || len(in) < 2 {
		return fmt.Errorf("%.40q; must be [log-prob, id, text]", b)
	}
	if err := errors.Join(json.Unmarshal(in[0], &value), json.Unmarshal(in[1], &id)); err != nil || value == nil ||
		id == nil {
		return fmt.Errorf("%.40q; must be [log-prob, id, text]", b)
	}
	n.value, n.id = *value, *id
	return nil
}

// parseSGLang is a dialect's parseEvent. An event may repeat the tokens so far, done: they must be the same.
func parseSGLang(_ Facts, data []byte, done []int32) (e event, err error) {
	var in sglangEvent
	if err := json.Unmarshal(data, &in); err != nil {
		return e, fmt.Errorf("%w: %w", ErrGarbage, err)
	}
	if len(in.Error) > 0 {
		return e, serverError(data, in.Error)
	}
	m := &in.Meta
	if m.Tokens == nil {
		return e, fmt.Errorf("%w: meta_info.completion_tokens: none", ErrGarbage)
	}
	if f := m.Finish; f != nil {
		if e.finish = f.Type; f.Type == aborted && f.Status >= 400 && f.Status < 500 {
			return e, &remotehttp.StatusError{Status: f.Status, Err: fmt.Errorf("%w: %.400s", ErrAborted, f.Message)}
		}
	}
	fresh := *m.Tokens - len(done)
	switch n := len(in.IDs); {
	case fresh < 0:
		return e, fmt.Errorf("%w: %d tokens after %d; must not be fewer", ErrGarbage, *m.Tokens, len(done))
	case fresh == 0: // of an abort, the last once more
	case n == *m.Tokens && !slices.Equal(in.IDs[:len(done)], done):
		return e, fmt.Errorf("%w: other tokens in the place of some of the first %d", ErrGarbage, len(done))
	case n != *m.Tokens && n != fresh:
		return e, fmt.Errorf("%w: %d ids of %d tokens, after %d; must be all, or the new ones", ErrGarbage, n,
			*m.Tokens, len(done))
	case len(m.LogProbs) != n, len(m.Top) != n:
		return e, fmt.Errorf("%w: log-probs of %d tokens, the likeliest of %d, %d ids", ErrGarbage, len(m.LogProbs),
			len(m.Top), n)
	default:
		for i := n - fresh; i < n; i++ {
			token := scored{id: in.IDs[i], value: m.LogProbs[i].value}
			if m.LogProbs[i].id != token.id {
				return e, fmt.Errorf("%w: the log-prob of token %d in the place of that of %d", ErrGarbage,
					m.LogProbs[i].id, token.id)
			}
			for _, t := range m.Top[i] {
				token.ids, token.of = append(token.ids, t.id), append(token.of, t.value)
			}
			e.tokens = append(e.tokens, token)
		}
	}
	for _, w := range m.Versions {
		e.weights = append(e.weights, Span{w.Version, w.Start, w.End})
	}
	if len(m.Versions) == 0 && m.Version != "" {
		e.weights = []Span{{m.Version, 0, *m.Tokens}}
	}
	return e, nil
}
