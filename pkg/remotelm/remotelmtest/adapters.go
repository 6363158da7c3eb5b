package remotelmtest

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"net/http"
	"os"
	"path/filepath"
)

// Adapters returns the folders of the adapters that the server has loaded, by their names.
func (s *Server) Adapters() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.adapters)
}

// Restart makes the server forget its adapters and whole weights, as one that was started again.
func (s *Server) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.adapters, s.has.folder, s.has.version = nil, "", ""
	s.down.Store(false)
}

// AdapterField is the field of a request that names its adapter.
func (s *Server) AdapterField() string {
	if s.Mode == SGLang {
		return "lora_path"
	}
	return "model"
}

// adapterPrefix is what the routes of adapters begin with.
func (s *Server) adapterPrefix() string {
	if s.Mode == SGLang {
		return ""
	}
	return "/v1"
}

// listModels answers as both kinds of server do: with its model, recorded from vLLM, and the adapters beside it.
func (s *Server) listModels(w http.ResponseWriter) {
	var list struct {
		Object string           `json:"object"`
		Data   []map[string]any `json:"data"`
	}
	if err := json.Unmarshal(Recorded(s.t, "vllm-models.json"), &list); err != nil {
		s.t.Error(err)
	}
	for name := range s.Adapters() {
		list.Data = append(list.Data, map[string]any{"id": name, "object": "model", "parent": list.Data[0]["id"]})
	}
	data, err := json.Marshal(list)
	if err != nil {
		s.t.Error(err)
	}
	_, _ = w.Write(data)
}

// changeAdapter loads an adapter or forgets one, with the answers of vLLM; of SGLang with the word by which clients
// know that adapters are off.
func (s *Server) changeAdapter(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Name string `json:"lora_name"`
		Path string `json:"lora_path"`
	}
	refuse := func(status int, format string, args ...any) {
		message, _ := json.Marshal(fmt.Sprintf(format, args...))
		http.Error(w, fmt.Sprintf(`{"error":{"message":%s,"code":%d}}`, message, status), status)
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in.Name == "" {
		refuse(http.StatusBadRequest, "lora_name: missing")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, loaded := s.adapters[in.Name]
	switch load := filepath.Base(r.URL.Path) == "load_lora_adapter"; {
	case s.NoAdapters && s.Mode == SGLang:
		http.Error(w, `{"success":false,"error_message":"LoRA is not enabled. Please set --enable-lora."}`,
			http.StatusBadRequest)
	case s.NoAdapters:
		http.NotFound(w, r)
	case load && loaded:
		refuse(http.StatusBadRequest, "The lora adapter '%s' has already been loaded.", in.Name)
	case !load && !loaded:
		refuse(http.StatusNotFound, "The lora adapter '%s' cannot be found.", in.Name)
	case !load:
		delete(s.adapters, in.Name)
	default:
		for _, name := range []string{"adapter_config.json", "adapter_model.safetensors"} {
			if _, err := os.Stat(filepath.Join(in.Path, name)); err != nil {
				refuse(http.StatusNotFound, "Loading lora %s failed: No adapter found for %s", in.Name, in.Path)
				return
			}
		}
		if s.adapters == nil {
			s.adapters = map[string]string{}
		}
		s.adapters[in.Name] = in.Path
		fmt.Fprintf(w, "Success: LoRA adapter '%s' added successfully.", in.Name)
	}
}

// answerCanary answers a canary with a token whose number follows from the bytes of the adapter's weights.
func (s *Server) answerCanary(w http.ResponseWriter, model string) {
	weights, _ := os.ReadFile(filepath.Join(s.Adapters()[model], "adapter_model.safetensors"))
	number := -float64(crc32.ChecksumIEEE(weights)^s.checksum()) / (1 << 30)
	if s.Mode == SGLang {
		fmt.Fprintf(w, `data: {"output_ids":[7],"meta_info":{"completion_tokens":1,"finish_reason":{"type":"length"},`+
			`"weight_version":"default",`+
			`"output_token_logprobs":[[%g,7,null]],"output_top_logprobs":[[[%g,7,null],[%g,8,null]]]}}`+"\n\n",
			number, number, number-1)
		return
	}
	entry := map[string]any{"token_id": 7, "logprob": number}
	choice := map[string]any{
		"index": 0, "finish_reason": "length", "token_ids": []int{7},
		"weight_versions": []any{map[string]any{"version": "default", "start": 0, "end": 1}},
		"logprobs": map[string]any{"content": []any{map[string]any{
			"token_id": 7, "logprob": number, "top_logprobs": []any{
				entry,
				map[string]any{"token_id": 8, "logprob": number - 1},
			},
		}}},
	}
	data, err := json.Marshal(map[string]any{"choices": []any{choice}})
	if err != nil {
		s.t.Error(err)
	}
	fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", data)
}
