package remotelm

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
)

// vllm is the dialect of vLLM 0.11 and newer. It uses the token route if that is open (--enable-scale-out), which
// tells the versions of weights; else the completions route, with ids instead of texts. An event has the new
// tokens: mostly one, several if the reader is slow. The server drops a request whose connection closes.
var vllm = dialect{
	discover: discoverVLLM, routes: []string{vllmTokens, "/v1/completions"}, requestBody: vllmBody,
	parseEvent: parseVLLM, processedKind: Processed, load: "/v1/load_lora_adapter", unload: "/v1/unload_lora_adapter",
	need:   "--enable-lora and with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
	reload: reloadVLLM, paused: pausedVLLM,
}

const vllmTokens = "/inference/v1/generate"

// pausedVLLM asks a server in development mode; others do not have the route.
func pausedVLLM(ctx context.Context, s *Server) bool {
	var is struct {
		Paused bool `json:"is_paused"`
	}
	return s.http.Ask(ctx, http.MethodGet, "/is_paused", nil, &is) == nil && is.Paused
}

// discoverVLLM asks for the release, and for the first model that is not an adapter.
func discoverVLLM(ctx context.Context, s *Server, f *Facts) error {
	var version struct {
		Version string `json:"version"`
	}
	if err := s.http.Ask(ctx, http.MethodGet, "/version", nil, &version); err != nil {
		return err
	}
	models, err := s.models(ctx)
	if err != nil {
		return err
	}
	for _, m := range models {
		if m.Parent == nil { // not an adapter of another
			f.Version, f.Model, f.MaxTokens, s.root = version.Version, m.ID, m.Tokens, m.Root
			f.Whole = m.Root != "" && s.http.Ask(ctx, http.MethodGet, "/weight_info", nil, nil) == nil
			f.KeepsHead = f.Whole && onCPU(ctx, s)
			return nil
		}
	}
	return fmt.Errorf("%w: /v1/models: none; must be the model that it serves", ErrGarbage)
}

// onCPU asks a server in development mode whether it computes on a CPU.
func onCPU(ctx context.Context, s *Server) bool {
	var says struct {
		Config struct {
			On struct {
				Device string `json:"device"`
			} `json:"device_config"`
		} `json:"vllm_config"`
	}
	err := s.http.Ask(ctx, http.MethodGet, "/server_info?config_format=json", nil, &says)
	return err == nil && says.Config.On.Device == "cpu"
}

// servedModel is an entry of /v1/models: the server's model, or an adapter of it, which has a parent.
type servedModel struct {
	ID     string  `json:"id"`
	Root   string  `json:"root"` // what it was started with
	Parent *string `json:"parent"`
	Tokens int     `json:"max_model_len"`
}

// models asks a server for its model and the adapters that it has loaded.
func (s *Server) models(ctx context.Context) ([]servedModel, error) {
	var list struct {
		Data []servedModel `json:"data"`
	}
	err := s.http.Ask(ctx, http.MethodGet, "/v1/models", nil, &list)
	return list.Data, err
}

// vllmBody is a dialect's requestBody: the two routes name their fields differently.
func vllmBody(f Facts, _ int, r *Request, top int) map[string]any {
	sampling := map[string]any{
		"max_tokens": r.MaxTokens, "temperature": r.Temperature, "top_p": r.TopP, "top_k": r.TopK, "min_p": r.MinP,
		"seed":     r.Seed,
		"logprobs": top, "stop_token_ids": r.Stop, "ignore_eos": true, "repetition_penalty": 1.0,
	}
	body := map[string]any{"model": f.Model, "request_id": r.ID, "stream": true}
	if f.Route == vllmTokens {
		body["token_ids"], body["sampling_params"], body["output_mode"] = r.IDs, sampling, "tokens"
		return body
	}
	body["prompt"], body["return_token_ids"], body["return_tokens_as_token_ids"] = r.IDs, true, true
	for k, v := range sampling {
		body[k] = v
	}
	return body
}

// vllmToken is a token with its number.
type vllmToken struct {
	ID      *int32      `json:"token_id"`
	LogProb *vllmNumber `json:"logprob"`
}

// vllmLeast is what vLLM writes for minus infinity, in answers over HTTP, and so for any number below it.
const vllmLeast = -9999.0

// vllmNumber is a number of a token; minus infinity where vLLM writes vllmLeast.
type vllmNumber float64

// UnmarshalJSON reads a number.
func (n *vllmNumber) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, (*float64)(n)); err != nil || float64(*n) > vllmLeast {
		return err
	}
	*n = vllmNumber(math.Inf(-1))
	return nil
}

type vllmEvent struct {
	Error   json.RawMessage `json:"error"`
	Choices []struct {
		Index    int     `json:"index"`
		IDs      []int32 `json:"token_ids"`
		Finish   *string `json:"finish_reason"`
		LogProbs struct {
			Content []struct {
				vllmToken
				Top []vllmToken `json:"top_logprobs"`
			} `json:"content"` // of the token route
			Values []*vllmNumber            `json:"token_logprobs"` // of completions
			Top    []map[string]*vllmNumber `json:"top_logprobs"`
		} `json:"logprobs"`
		Weights []struct {
			Version string `json:"version"`
			Start   int    `json:"start"`
			End     int    `json:"end"`
		} `json:"weight_versions"`
	} `json:"choices"`
}

// parseVLLM is a dialect's parseEvent: every event has only new tokens, in the form of its route.
func parseVLLM(f Facts, data []byte, _ []int32) (e event, err error) {
	var in vllmEvent
	if err := json.Unmarshal(data, &in); err != nil {
		return e, fmt.Errorf("%w: %w", ErrGarbage, err)
	}
	if len(in.Error) > 0 {
		return e, serverError(data, in.Error)
	}
	if len(in.Choices) == 0 {
		return e, nil // a count of tokens
	}
	c := in.Choices[0]
	if len(in.Choices) > 1 || c.Index != 0 {
		return e, fmt.Errorf("%w: %d answers, the first of index %d; must be one", ErrGarbage, len(in.Choices), c.Index)
	}
	if c.Finish != nil {
		e.finish = *c.Finish
	}
	for _, w := range c.Weights {
		e.weights = append(e.weights, Span{w.Version, w.Start, w.End})
	}
	if f.Route == vllmTokens {
		if len(c.LogProbs.Content) != len(c.IDs) {
			return e, fmt.Errorf("%w: numbers of %d tokens, %d ids", ErrGarbage, len(c.LogProbs.Content), len(c.IDs))
		}
		for i, t := range c.LogProbs.Content {
			list := append([]vllmToken{t.vllmToken}, t.Top...)
			if t.ID == nil || *t.ID != c.IDs[i] {
				return e, fmt.Errorf("%w: the number of another token than %d", ErrGarbage, c.IDs[i])
			}
			token := scored{id: c.IDs[i]}
			for k, n := range list {
				switch {
				case n.ID == nil || n.LogProb == nil:
					return e, fmt.Errorf("%w: token %d: no number", ErrGarbage, c.IDs[i])
				case k == 0:
					token.value = float64(*n.LogProb)
				default:
					token.ids, token.of = append(token.ids, *n.ID), append(token.of, float64(*n.LogProb))
				}
			}
			e.tokens = append(e.tokens, token)
		}
		return e, nil
	}
	if len(c.LogProbs.Values) != len(c.IDs) || len(c.LogProbs.Top) != len(c.IDs) {
		return e, fmt.Errorf("%w: numbers of %d tokens, %d ids; vLLM must know return_token_ids, as 0.11 and newer do",
			ErrGarbage, len(c.LogProbs.Values), len(c.IDs))
	}
	for i, id := range c.IDs {
		token := scored{id: id}
		if c.LogProbs.Values[i] == nil {
			return e, fmt.Errorf("%w: token %d: no number", ErrGarbage, id)
		}
		token.value = float64(*c.LogProbs.Values[i])
		for name, v := range c.LogProbs.Top[i] {
			n, err := strconv.ParseInt(strings.TrimPrefix(name, "token_id:"), 10, 32)
			if err != nil || !strings.HasPrefix(name, "token_id:") || v == nil {
				return e, fmt.Errorf("%w: %.40q among the likeliest; must be a token_id:N with its number", ErrGarbage,
					name)
			}
			token.ids, token.of = append(token.ids, int32(n)), append(token.of, float64(*v))
		}
		e.tokens = append(e.tokens, token)
	}
	return e, nil
}
