package remotelmtest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"os"
	"path/filepath"
)

// weights are the whole weights that a server has.
type weights struct {
	version string // its name for them; empty: default
	folder  string // that they were read from; empty: that of its model
	loads   int
}

// Version returns the server's name for its weights, and how often it has loaded some.
func (s *Server) Version() (name string, loads int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return cmp.Or(s.has.version, "default"), s.has.loads
}

// SetVersion has the server call its weights by another name, as after another client has changed them.
func (s *Server) SetVersion(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.has.version = name
}

// checksum returns a number of the file of its whole weights; 0: it has those of its model.
func (s *Server) checksum() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, err := os.ReadFile(filepath.Join(s.has.folder, "model.safetensors"))
	if s.has.folder == "" || s.Stale || err != nil {
		return 0
	}
	return crc32.ChecksumIEEE(data)
}

// changeWeights answers the routes by which whole weights change: those of vLLM in its development mode, or that of
// SGLang. A load that fails has the answers of both, and ends vLLM.
func (s *Server) changeWeights(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Next   string `json:"new_version"`
		Name   string `json:"weight_version"`
		Folder string `json:"model_path"`
		Method string `json:"method"`
		Kwargs struct {
			Folder string `json:"weights_path"`
		} `json:"kwargs"`
	}
	body, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(body, &in); err != nil && len(body) > 0 {
		s.t.Errorf("%s: %v", r.URL.Path, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	folder := cmp.Or(in.Folder, in.Kwargs.Folder)
	_, err := os.Stat(filepath.Join(folder, "model.safetensors"))
	own := folder == "deploy/models/sums" // as the recordings call it
	switch {
	case r.URL.Path == "/update_weight_version":
		s.has.version = in.Next
		fmt.Fprintf(w, `{"success":true,"new_version":%q}`, in.Next)
	case r.URL.Path == "/reset_prefix_cache":
		s.resets++
		fmt.Fprintf(w, `{"success":%v}`, s.resets%2 == 0) // blocks are held at first
	case err != nil && !own && s.Mode == SGLang:
		http.Error(w, `{"success":false,"message":"Failed to get weights iterator: Cannot find any model weights with `+
			"`"+folder+"`"+`.","num_paused_requests":0}`, http.StatusBadRequest)
	case err != nil && !own:
		s.down.Store(true)
		http.Error(w, `{"error":{"message":"Call to collective_rpc method failed: Worker failed with error 'Repo id must `+
			`be in the form 'repo_name'', please check the stack trace above","type":"InternalServerError","param":null,`+
			`"code":500}}`, http.StatusInternalServerError)
	default:
		if s.has.folder = folder; own {
			s.has.folder = ""
		}
		if s.has.loads++; s.Mode == SGLang {
			s.has.version = in.Name
		}
		fmt.Fprint(w, `{"success":true,"message":"Succeeded to update model weights.","results":[null]}`)
	}
}

// isWeightsRoute reports whether the server has a path by which whole weights change.
func (s *Server) isWeightsRoute(path string) bool {
	switch path {
	case "/update_weights_from_disk":
		return s.Mode == SGLang
	case "/update_weight_version", "/collective_rpc", "/reset_prefix_cache":
		return s.Mode != SGLang && s.DevMode
	}
	return false
}

// named has recorded answers name the server's weights in place of those that they were recorded with.
type named struct {
	http.ResponseWriter
	version string
}

func (n named) Write(data []byte) (int, error) {
	out := data
	for _, recorded := range []string{"default", "v1", "v2"} {
		out = bytes.ReplaceAll(out, []byte(`"`+recorded+`"`), []byte(`"`+n.version+`"`))
	}
	_, err := n.ResponseWriter.Write(out)
	return len(data), err
}

// Flush sends what was written.
func (n named) Flush() { n.ResponseWriter.(http.Flusher).Flush() }
