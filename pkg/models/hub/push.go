package hub

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
)

// Upload is a file to push.
type Upload struct {
	// Name is its path in the repository, Path that on this disk.
	Name, Path string

	size   int64
	sha256 string
	sample []byte // its first bytes
	large  bool
}

// sampleSize is how many first bytes the Hub is shown of a file, to say how it is to be sent.
const sampleSize = 512

// Push makes a private data set ORG/NAME where there is none, and commits the files to its branch main with a message.
// It returns the address of the commit. What the Hub has already is not sent again. An error names what mends it.
func Push(ctx context.Context, id, message string, files []Upload, watch Watcher) (commit string, err error) {
	if err := CheckPush(id); err != nil {
		return "", err
	}
	r := Ref{ID: id, Revision: mainRevision, kind: datasets}
	p := &push{ref: r, client: newClient(), watch: watch}
	defer p.client.CloseIdleConnections()
	if commit, err = p.run(ctx, message, files); err != nil {
		return "", fmt.Errorf("%s: %w", id, err)
	}
	return commit, nil
}

// CheckPush returns what forbids a Push before it begins: the name, the variables, or a token that is missing.
func CheckPush(id string) error {
	if !isID(id) {
		return fmt.Errorf("%q; must be ORG/NAME: a user or an organization, and the name of the data set", id)
	}
	if v := Offline(); v != "" {
		return fmt.Errorf("%s: %s=%s forbids it; unset %[2]s", id, v, os.Getenv(v))
	}
	if t, _ := token(); t == "" {
		return fmt.Errorf("%s: there is no token: log in with 'hf auth login', or set HF_TOKEN to one that may write",
			id)
	}
	return nil
}

// push is the state of one Push.
type push struct {
	ref    Ref
	client *http.Client
	watch  Watcher
}

// run makes what is missing, sends the large files, and commits. Nothing is committed after a failure.
func (p *push) run(ctx context.Context, message string, files []Upload) (commit string, err error) {
	for i := range files {
		if err := files[i].read(); err != nil {
			return "", err
		}
	}
	if err := p.create(ctx); err != nil {
		return "", err
	}
	if err := p.askModes(ctx, files); err != nil {
		return "", err
	}
	if err := p.sendLarge(ctx, files); err != nil {
		return "", err
	}
	return p.commit(ctx, message, files)
}

// read finds size and digest of a file.
func (u *Upload) read() error {
	f, err := os.Open(u.Path)
	if err != nil {
		return err
	}
	h := sha256.New()
	head := &bytes.Buffer{}
	_, err = io.CopyN(io.MultiWriter(h, head), f, sampleSize)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	rest, failed := io.Copy(h, f)
	u.sample, u.size, u.sha256 = head.Bytes(), int64(head.Len())+rest, hex.EncodeToString(h.Sum(nil))
	return errors.Join(err, failed, f.Close())
}

// post asks the Hub with a body, bytes or what is to be JSON, and decodes its answer. accepted is a status that is no
// error, besides 2xx.
func (p *push) post(ctx context.Context, address, kind string, body any, accepted int, answer any) error {
	data, encoded := body.([]byte)
	if !encoded {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return err
		}
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(data))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", kind)
	q.Header.Set("Accept", kind)
	t, from := token()
	if strings.HasPrefix(address, endpoint()+"/") {
		q.Header.Set("Authorization", "Bearer "+t)
	}
	a, err := p.client.Do(q)
	if err != nil {
		return unreachable(ctx, err)
	}
	text, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer))
	if err = errors.Join(err, a.Body.Close()); err != nil {
		return err
	}
	switch {
	case a.StatusCode == accepted:
		return nil
	case a.StatusCode == http.StatusUnauthorized || a.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%w: the token from %s may not write there (%d): use one with the right to write, of an "+
			"account that may (%s/settings/tokens)", ErrName, from, a.StatusCode, endpoint())
	case a.StatusCode/100 != 2:
		return p.ref.refused(a, string(text))
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("read the answer of %s: %w", endpoint(), err)
	}
	return nil
}

const typeJSON = "application/json"

// create makes the repository; one that is there stays.
func (p *push) create(ctx context.Context) error {
	owner, name, _ := strings.Cut(p.ref.ID, "/")
	body := map[string]any{"type": "dataset", "name": name, "organization": owner, "private": true}
	var made map[string]any
	return p.post(ctx, endpoint()+"/api/repos/create", typeJSON, body, http.StatusConflict, &made)
}

// askModes asks how each file is to be sent.
func (p *push) askModes(ctx context.Context, files []Upload) error {
	var list []map[string]any
	for _, f := range files {
		list = append(list, map[string]any{"path": f.Name, "size": f.size, "sample": f.sample})
	}
	body := map[string]any{"files": list}
	var modes struct {
		Files []struct {
			Path string `json:"path"`
			Mode string `json:"uploadMode"`
		} `json:"files"`
	}
	if err := p.post(ctx, p.api("preupload"), typeJSON, body, 0, &modes); err != nil {
		return err
	}
	for _, m := range modes.Files {
		for i := range files {
			if files[i].Name == m.Path {
				files[i].large = m.Mode == "lfs"
			}
		}
	}
	return nil
}

func (p *push) api(what string) string {
	return fmt.Sprintf("%s/api/%s/%s/%s/%s", endpoint(), p.ref.kind, p.ref.ID, what, mainRevision)
}

const typeLFS = "application/vnd.git-lfs+json"

// action is a request that LFS asks for.
type action struct {
	Address string            `json:"href"`
	Header  map[string]string `json:"header"`
}

// object is a file as LFS knows it.
type object struct {
	ID      string            `json:"oid"`
	Size    int64             `json:"size"`
	Actions map[string]action `json:"actions,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// sendLarge sends the files that go to LFS and that it does not have.
func (p *push) sendLarge(ctx context.Context, files []Upload) (err error) {
	of := map[string]*Upload{}
	var ask []object
	for i := range files {
		if f := &files[i]; f.large && of[f.sha256] == nil {
			of[f.sha256] = f
			ask = append(ask, object{ID: f.sha256, Size: f.size})
		}
	}
	if len(ask) == 0 {
		return nil
	}
	body := map[string]any{
		"operation": "upload", "transfers": []string{"basic", "multipart"}, "hash_algo": "sha256", "objects": ask,
	}
	var answer struct {
		Objects []object `json:"objects"`
	}
	address := fmt.Sprintf("%s/%s/%s.git/info/lfs/objects/batch", endpoint(), p.ref.kind, p.ref.ID)
	if err := p.post(ctx, address, typeLFS, body, 0, &answer); err != nil {
		return err
	}
	plan := Plan{Name: p.ref.ID, To: p.ref.page()}
	for _, o := range answer.Objects {
		if o.Error != nil {
			return fmt.Errorf("%s: the Hub refuses it: %s", of[o.ID].Name, o.Error.Message)
		}
		if _, wanted := o.Actions["upload"]; wanted && of[o.ID] != nil {
			plan.Files, plan.Bytes = plan.Files+1, plan.Bytes+o.Size
		}
	}
	if p.watch.Plan != nil {
		p.watch.Plan(plan)
	}
	defer func() {
		if p.watch.End != nil {
			p.watch.End(err)
		}
	}()
	for _, o := range answer.Objects {
		if to, wanted := o.Actions["upload"]; wanted && of[o.ID] != nil {
			if err := p.send(ctx, of[o.ID], to); err != nil {
				return fmt.Errorf("send %s: %w", of[o.ID].Name, err)
			}
			if check, asked := o.Actions["verify"]; asked {
				if err := p.verify(ctx, o, check); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// counting tells how much of a file is sent.
type counting struct {
	io.Reader
	got func(int64)
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	if c.got != nil {
		c.got(int64(n))
	}
	return n, err
}

// send sends one file to where LFS wants it: at once, or in parts of a size, each to an address of its own.
func (p *push) send(ctx context.Context, f *Upload, to action) error {
	file, err := os.Open(f.Path)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	if to.Header[partSize] == "" {
		_, err := p.put(ctx, to.Address, file, f.size, to.Header)
		return err
	}
	size, _ := strconv.ParseInt(to.Header[partSize], 10, 64)
	addresses := map[int64]string{}
	for k, v := range to.Header {
		if n, err := strconv.ParseInt(k, 10, 64); err == nil {
			addresses[n] = v
		}
	}
	if n := int64(len(addresses)); size < 1 || n != (f.size+size-1)/size || addresses[n] == "" {
		return fmt.Errorf("the Hub names %d parts of %q bytes each; must be those of %d bytes", len(addresses),
			to.Header[partSize], f.size)
	}
	type part struct {
		Number int64  `json:"partNumber"`
		ETag   string `json:"etag"`
	}
	whole := struct {
		ID    string `json:"oid"`
		Parts []part `json:"parts"`
	}{ID: f.sha256}
	for n := int64(1); n <= int64(len(addresses)); n++ {
		from := (n - 1) * size
		some := min(size, f.size-from)
		etag, err := p.put(ctx, addresses[n], io.NewSectionReader(file, from, some), some, nil)
		if err != nil {
			return fmt.Errorf("part %d of %d: %w", n, len(addresses), err)
		}
		whole.Parts = append(whole.Parts, part{n, etag})
	}
	var answer any
	return p.post(ctx, to.Address, typeLFS, whole, http.StatusOK, &answer)
}

// partSize is the header by which LFS asks for a file in parts; those with numbers are their addresses.
const partSize = "chunk_size"

// put sends bytes to an address, and returns the name that they have there.
func (p *push) put(
	ctx context.Context, address string, from io.Reader, size int64, header map[string]string,
) (etag string, err error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPut, address, &counting{from, p.watch.Got})
	if err != nil {
		return "", err
	}
	q.ContentLength = size
	for k, v := range header {
		q.Header.Set(k, v)
	}
	a, err := p.client.Do(q)
	if err != nil {
		return "", fmt.Errorf("%w; run the same command again", unreachable(ctx, err))
	}
	text, _ := io.ReadAll(io.LimitReader(a.Body, 300))
	if err := a.Body.Close(); err != nil || a.StatusCode/100 == 2 {
		return a.Header.Get("ETag"), err
	}
	return "", fmt.Errorf("%s answers %d %s; run the same command again", q.URL.Host, a.StatusCode, text)
}

// verify tells LFS that a file was sent.
func (p *push) verify(ctx context.Context, o object, to action) error {
	var answer any
	return p.post(ctx, to.Address, typeLFS, object{ID: o.ID, Size: o.Size}, http.StatusOK, &answer)
}

// commit makes the commit of all files.
func (p *push) commit(ctx context.Context, message string, files []Upload) (address string, err error) {
	var body bytes.Buffer
	lines := json.NewEncoder(&body)
	line := func(key string, value any) {
		err = errors.Join(err, lines.Encode(map[string]any{"key": key, "value": value}))
	}
	line("header", map[string]string{"summary": message, "description": ""})
	for _, f := range files {
		if f.large {
			line("lfsFile", map[string]any{"path": f.Name, "algo": "sha256", "oid": f.sha256, "size": f.size})
			continue
		}
		content, failed := os.ReadFile(f.Path)
		if err = errors.Join(err, failed); err != nil {
			return "", err
		}
		line("file", map[string]string{
			"path": path.Clean(f.Name), "encoding": "base64", "content": base64.StdEncoding.EncodeToString(content),
		})
	}
	if err != nil {
		return "", err
	}
	var done struct {
		Address string `json:"commitUrl"`
	}
	err = p.post(ctx, p.api("commit"), "application/x-ndjson", body.Bytes(), 0, &done)
	return done.Address, err
}
