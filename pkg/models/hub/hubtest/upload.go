package hubtest

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// create makes a repository.
func (h *Hub) create(w http.ResponseWriter, q *http.Request) {
	var asked struct{ Type, Name, Organization string }
	_ = json.NewDecoder(q.Body).Decode(&asked)
	name := asked.Type + "s/" + asked.Organization + "/" + asked.Name
	switch given := strings.TrimPrefix(q.Header.Get("Authorization"), "Bearer "); {
	case given == "":
		fail(w, http.StatusUnauthorized, "", "Invalid username or password.")
	case given == "read-only":
		fail(w, http.StatusForbidden, "", "You don't have the rights to create a "+asked.Type+" under this namespace")
	case h.Repos[name] != nil:
		fail(w, http.StatusConflict, "", "You already created this "+asked.Type+" repo")
	default:
		h.Repos[name] = &Repo{Files: map[string][]byte{}}
		answer(w, map[string]any{"url": h.URL + "/" + name})
	}
}

// upload answers the two requests of a commit: how each file is to be sent, and the commit.
func (h *Hub) upload(w http.ResponseWriter, q *http.Request, r *Repo, rest []string) {
	if rest[0] == "preupload" {
		var asked struct {
			Files []struct{ Path string }
		}
		_ = json.NewDecoder(q.Body).Decode(&asked)
		list := []map[string]any{}
		for _, f := range asked.Files {
			mode := "regular"
			if isLarge(f.Path) {
				mode = "lfs"
			}
			list = append(list, map[string]any{"path": f.Path, "uploadMode": mode, "shouldIgnore": false})
		}
		answer(w, map[string]any{"files": list})
		return
	}
	lines := bufio.NewScanner(q.Body)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var line struct {
			Key   string
			Value struct{ Path, Content, Encoding, OID string }
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			fail(w, http.StatusBadRequest, "", err.Error())
			return
		}
		switch line.Key {
		case "file":
			r.Files[line.Value.Path], _ = base64.StdEncoding.DecodeString(line.Value.Content)
		case "lfsFile":
			b, ok := h.large[line.Value.OID]
			if !ok {
				fail(w, http.StatusBadRequest, "", "lfs object "+line.Value.OID+" was not uploaded")
				return
			}
			r.Files[line.Value.Path] = b
		}
	}
	answer(w, map[string]any{"commitOid": r.Commit(), "commitUrl": h.URL + "/commit/" + r.Commit(), "success": true})
}

// batch says where large files are to be sent.
func (h *Hub) batch(w http.ResponseWriter, q *http.Request) {
	var asked struct {
		Objects []struct {
			OID  string
			Size int64
		}
	}
	_ = json.NewDecoder(q.Body).Decode(&asked)
	list := []map[string]any{}
	for _, o := range asked.Objects {
		object := map[string]any{"oid": o.OID, "size": o.Size}
		if h.large[o.OID] == nil {
			upload := map[string]any{"href": h.store.URL + "/" + o.OID}
			if size := int64(h.PartSize); size > 0 && o.Size > size {
				header := map[string]string{"chunk_size": strconv.FormatInt(size, 10)}
				for n := int64(1); n <= (o.Size+size-1)/size; n++ {
					header[fmt.Sprintf("%05d", n)] = fmt.Sprintf("%s/%s/%d", h.store.URL, o.OID, n)
				}
				upload = map[string]any{"href": h.URL + "/complete/" + o.OID, "header": header}
			}
			object["actions"] = map[string]any{"upload": upload}
		}
		list = append(list, object)
	}
	answer(w, map[string]any{"transfer": "basic", "objects": list})
}

// complete joins the parts of a large file, which name each by its place and its ETag.
func (h *Hub) complete(w http.ResponseWriter, q *http.Request) {
	var asked struct {
		OID   string
		Parts []struct {
			PartNumber int
			ETag       string
		}
	}
	err := json.NewDecoder(q.Body).Decode(&asked)
	var whole []byte
	for i, p := range asked.Parts {
		b := h.large[fmt.Sprintf("%s/%d", asked.OID, p.PartNumber)]
		if p.PartNumber != i+1 || p.ETag != etag(".bin", b) {
			fail(w, http.StatusBadRequest, "", fmt.Sprintf("part %d is another", p.PartNumber))
			return
		}
		whole = append(whole, b...)
	}
	if err != nil || etag(".bin", whole) != asked.OID {
		fail(w, http.StatusBadRequest, "", fmt.Sprint("wrong digest ", err))
		return
	}
	h.large[asked.OID] = whole
	answer(w, map[string]any{"success": true})
}

// put keeps an uploaded large file, or a part of one; a file with another digest is refused.
func (h *Hub) put(w http.ResponseWriter, q *http.Request) {
	b, err := io.ReadAll(q.Body)
	oid := strings.Trim(q.URL.Path, "/")
	if strings.Contains(oid, "/") && err == nil && len(b) <= h.PartSize {
		w.Header().Set("ETag", etag(".bin", b))
	} else if err != nil || etag(".bin", b) != oid {
		http.Error(w, fmt.Sprint("wrong digest ", err), http.StatusBadRequest)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.large[oid] = b
}
