// Package hubtest is a Hugging Face Hub for tests: it serves folders as repositories, with the paths, headers,
// redirects and faults of the real one, and takes commits. Large files are on a second host, as in LFS.
package hubtest

import (
	"bytes"
	"crypto/sha1" //nolint:gosec // Git's own digest
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Repo is a repository. Its fields may be changed before it is asked for.
type Repo struct {
	// Files are the contents by path.
	Files map[string][]byte
	// Gated refuses files without Token, 401, or with another, 403.
	Gated bool
	// Token is the one that is let in.
	Token string
	// Renamed is the name that it goes by now.
	Renamed string
	// Corrupt is a file that comes with a wrong byte.
	Corrupt string
	// Huge is a large file that is listed with more bytes than any disk has.
	Huge string
	// CutAfter breaks the connection after so many bytes of a large file, Cuts times.
	CutAfter, Cuts int
	// Plain leaves digests and sizes out of the listing, as some mirrors do.
	Plain bool
}

// Hub is a server. Its fields are for the test that made it.
type Hub struct {
	*httptest.Server
	// Repos are by kind and name, such as models/org/name.
	Repos map[string]*Repo
	// PartSize is what larger files are to be sent in, bytes; 0: each at once.
	PartSize int

	store *httptest.Server // of large files
	mu    sync.Mutex
	asked []string
	large map[string][]byte // by SHA-256, uploaded; parts by that and their number
}

// Start starts a Hub, and sets the variables by which this process and its children find it, with an empty cache.
func Start(t testing.TB) *Hub {
	t.Helper()
	h := &Hub{Repos: map[string]*Repo{}, large: map[string][]byte{}}
	h.Server = httptest.NewServer(http.HandlerFunc(h.serve))
	h.store = httptest.NewServer(http.HandlerFunc(h.serveLarge))
	t.Cleanup(func() {
		h.Server.Close()
		h.store.Close()
	})
	if e, ok := t.(interface{ Setenv(k, v string) }); ok {
		for _, v := range []string{
			"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN",
			"HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH",
		} {
			e.Setenv(v, "") // it is restored, but not empty until then: huggingface_hub takes that as said
			_ = os.Unsetenv(v)
		}
		e.Setenv("HF_HOME", t.TempDir())
		e.Setenv("HF_ENDPOINT", h.URL)
	}
	return h
}

// Add serves the files of a folder as a repository, models/ORG/NAME or datasets/ORG/NAME.
func (h *Hub) Add(t testing.TB, name, dir string) *Repo {
	t.Helper()
	r := &Repo{Files: map[string][]byte{}}
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		r.Files[filepath.ToSlash(rel)], err = os.ReadFile(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	h.Repos[name] = r
	return r
}

// Asked returns the requests so far, METHOD PATH, and forgets them.
func (h *Hub) Asked() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	asked := h.asked
	h.asked = nil
	return asked
}

// note remembers a request for Asked.
func (h *Hub) note(q *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	line := q.Method + " " + q.URL.Path
	if at := q.Header.Get("Range"); at != "" {
		line += " " + at
	}
	h.asked = append(h.asked, line)
}

// Commit is the commit of the files of a repository.
func (r *Repo) Commit() string {
	d := sha1.New() //nolint:gosec // as above
	for _, name := range slices.Sorted(maps.Keys(r.Files)) {
		fmt.Fprintf(d, "%s %s\n", name, etag(name, r.Files[name]))
	}
	return hex.EncodeToString(d.Sum(nil))
}

func isLarge(name string) bool {
	return slices.Contains([]string{".safetensors", ".parquet", ".bin"}, path.Ext(name))
}

func etag(name string, b []byte) string {
	if isLarge(name) {
		s := sha256.Sum256(b)
		return hex.EncodeToString(s[:])
	}
	s := sha1.Sum(append(fmt.Appendf(nil, "blob %d\x00", len(b)), b...)) //nolint:gosec // as above
	return hex.EncodeToString(s[:])
}

func fail(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("X-Error-Code", code)
	w.Header().Set("X-Error-Message", message)
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"error": %q}`, message)
}

// serve answers as the Hub does.
func (h *Hub) serve(w http.ResponseWriter, q *http.Request) {
	h.note(q)
	parts := strings.Split(strings.Trim(q.URL.Path, "/"), "/")
	if parts[0] == "complete" {
		h.complete(w, q)
		return
	}
	api := parts[0] == "api"
	if api {
		parts = parts[1:]
	} else if parts[0] != "datasets" {
		parts = append([]string{"models"}, parts...)
	}
	if api && parts[0] == "repos" && q.Method == http.MethodPost {
		h.create(w, q)
		return
	}
	if len(parts) < 3 {
		fail(w, http.StatusNotFound, "", "no such page")
		return
	}
	name, rest := strings.Join(parts[:3], "/"), parts[3:]
	name = strings.TrimSuffix(name, ".git")
	r := h.Repos[name]
	switch {
	case r == nil:
		fail(w, http.StatusUnauthorized, "RepoNotFound", "Repository not found")
	case r.Renamed != "":
		to := strings.Replace(q.URL.Path, strings.TrimPrefix(name, "models/"), r.Renamed, 1)
		http.Redirect(w, q, to+"?"+q.URL.RawQuery, http.StatusTemporaryRedirect)
	case api && q.Method == http.MethodPost:
		h.upload(w, q, r, rest)
	case len(rest) > 3 && rest[0] == "info" && rest[1] == "lfs":
		h.batch(w, q)
	case api && len(rest) > 1 && rest[0] == "tree":
		r.tree(w)
	case api:
		r.info(w, q, name, rest)
	case len(rest) > 2 && rest[0] == "resolve":
		h.file(w, q, r, rest[1], strings.Join(rest[2:], "/"))
	default:
		fail(w, http.StatusNotFound, "", "no such page")
	}
}

// isRevision writes the refusal of a revision that is none.
func (r *Repo) isRevision(w http.ResponseWriter, revision string) bool {
	ok := revision == "main" || revision == r.Commit()
	if !ok {
		fail(w, http.StatusNotFound, "RevisionNotFound", "Invalid rev id: "+revision)
	}
	return ok
}

// info describes the repository at a revision; a revision that it does not have is refused.
func (r *Repo) info(w http.ResponseWriter, q *http.Request, name string, rest []string) {
	if len(rest) == 2 && rest[0] == "revision" && !r.isRevision(w, rest[1]) {
		return
	}
	_, id, _ := strings.Cut(name, "/")
	siblings := []map[string]any{}
	for _, n := range slices.Sorted(maps.Keys(r.Files)) {
		s := map[string]any{"rfilename": n}
		if b := r.Files[n]; q.URL.Query().Get("blobs") != "" && !r.Plain {
			s["size"], s["blobId"] = len(b), etag("", b)
			if isLarge(n) {
				size := len(b)
				if n == r.Huge {
					size = 1 << 60
				}
				s["lfs"] = map[string]any{"sha256": etag(n, b), "size": size, "pointerSize": 130}
			}
		}
		siblings = append(siblings, s)
	}
	answer(w, map[string]any{
		"id": id, "modelId": id, "sha": r.Commit(), "siblings": siblings, "private": false, "tags": []string{},
		"downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
	})
}

// tree lists the files as huggingface_hub asks for them.
func (r *Repo) tree(w http.ResponseWriter) {
	list := []map[string]any{}
	for _, n := range slices.Sorted(maps.Keys(r.Files)) {
		b := r.Files[n]
		e := map[string]any{"type": "file", "path": n, "size": len(b), "oid": etag("", b)}
		if isLarge(n) {
			e["lfs"] = map[string]any{"oid": etag(n, b), "size": len(b), "pointerSize": 130}
		}
		list = append(list, e)
	}
	answer(w, list)
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// file sends a file, or says where the store has it.
func (h *Hub) file(w http.ResponseWriter, q *http.Request, r *Repo, revision, name string) {
	b, ok := r.Files[name]
	given := strings.TrimPrefix(q.Header.Get("Authorization"), "Bearer ")
	switch {
	case r.Gated && given == "":
		fail(w, http.StatusUnauthorized, "GatedRepo", "Access to it is restricted")
		return
	case r.Gated && given != r.Token:
		fail(w, http.StatusForbidden, "GatedRepo", "Access to it is restricted, and you are not in the list")
		return
	case !r.isRevision(w, revision):
		return
	case !ok:
		fail(w, http.StatusNotFound, "EntryNotFound", "Entry not found")
		return
	}
	w.Header().Set("X-Repo-Commit", r.Commit())
	if isLarge(name) {
		w.Header().Set("X-Linked-Etag", `"`+etag(name, b)+`"`)
		w.Header().Set("X-Linked-Size", fmt.Sprint(len(b)))
		w.Header().Set("Location", h.store.URL+"/"+etag(name, b))
		w.WriteHeader(http.StatusFound)
		return
	}
	w.Header().Set("ETag", `"`+etag(name, b)+`"`)
	http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(damaged(r, name, b)))
}

func damaged(r *Repo, name string, b []byte) []byte {
	if r.Corrupt == name {
		b = slices.Clone(b)
		b[len(b)/2] ^= 1
	}
	return b
}

// serveLarge is the host of large files. It refuses a token, which is not for it.
func (h *Hub) serveLarge(w http.ResponseWriter, q *http.Request) {
	h.note(q)
	if q.Header.Get("Authorization") != "" {
		http.Error(w, "only one auth mechanism allowed", http.StatusBadRequest)
		return
	}
	if q.Method == http.MethodPut {
		h.put(w, q)
		return
	}
	for _, r := range h.Repos {
		for name, b := range r.Files {
			if isLarge(name) && "/"+etag(name, b) == q.URL.Path {
				h.send(w, q, r, damaged(r, name, b))
				return
			}
		}
	}
	http.NotFound(w, q)
}

// send sends a large file, or breaks off.
func (h *Hub) send(w http.ResponseWriter, q *http.Request, r *Repo, b []byte) {
	h.mu.Lock()
	cut := r.Cuts > 0 && q.Method == http.MethodGet
	if cut {
		r.Cuts--
	}
	h.mu.Unlock()
	if cut {
		w = &cutter{w, r.CutAfter}
	}
	http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(b))
}

// cutter breaks the connection after some bytes.
type cutter struct {
	http.ResponseWriter
	left int
}

// Write writes until the bytes are used up, and breaks the connection then.
func (c *cutter) Write(b []byte) (int, error) {
	if len(b) < c.left {
		c.left -= len(b)
		return c.ResponseWriter.Write(b)
	}
	_, _ = c.ResponseWriter.Write(b[:c.left])
	c.ResponseWriter.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}
