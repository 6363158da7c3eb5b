package hub

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// file is a file of a repository at a commit.
type file struct {
	Name string `json:"rfilename"`
	Size int64  `json:"size"`
	Blob string `json:"blobId"`
	LFS  *struct {
		SHA256 string `json:"sha256"`
		Size   int64  `json:"size"`
	} `json:"lfs"`
	etag string // the name of its blob in the cache
}

// listing is what the Hub says of a repository at a revision.
type listing struct {
	ID     string `json:"id"`
	Commit string `json:"sha"`
	Files  []file `json:"siblings"`
}

// answerWithin bounds how long the Hub may take to begin an answer.
const answerWithin = 30 * time.Second

// maxAnswer bounds an answer in JSON, in bytes.
const maxAnswer = 64 << 20

// newClient returns a client that keeps the token from other hosts than the Hub: they are those that store the files.
func newClient() *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = answerWithin
	return &http.Client{Transport: t, CheckRedirect: func(next *http.Request, before []*http.Request) error {
		if next.URL.Host != before[0].URL.Host {
			next.Header.Del("Authorization")
		}
		if len(before) > 10 {
			return errors.New("more than 10 redirects")
		}
		return nil
	}}
}

// ask sends a request to the Hub; the caller closes the body. A refusal is an error that says how to mend it.
func (r Ref) ask(ctx context.Context, c *http.Client, method, address string, header ...string,
) (*http.Response, error) {
	q, err := http.NewRequestWithContext(ctx, method, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	q.Header.Set("User-Agent", "meander")
	q.Header.Set("Accept-Encoding", "identity") // sizes and digests are of the file
	if t, _ := token(); t != "" {
		q.Header.Set("Authorization", "Bearer "+t)
	}
	for i := 0; i+1 < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	a, err := c.Do(q)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if a.StatusCode/100 < 4 || a.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return a, nil
	}
	text, _ := io.ReadAll(io.LimitReader(a.Body, 4096))
	return nil, errors.Join(r.refused(a, string(text)), a.Body.Close())
}

// errReach is wrapped by errors of a Hub that cannot be reached, or fails: to ask again may help.
var errReach = errors.New("the Hub cannot be reached")

// unreachable is the error for a request without an answer: it wraps errReach, or is that of a ctx that has ended.
func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var of *url.Error
	if errors.As(err, &of) {
		err = of.Err
	}
	return fmt.Errorf("%w at %s: %w; check the network and HTTPS_PROXY, or name a mirror with HF_ENDPOINT",
		errReach, endpoint(), err)
}

// refused says why the Hub refuses, and what mends it.
func (r Ref) refused(a *http.Response, text string) error {
	code, said := a.Header.Get("X-Error-Code"), a.Header.Get("X-Error-Message")
	if said == "" && len(text) < 300 {
		said = strings.TrimSpace(text)
	}
	_, from := token()
	login := "log in with 'hf auth login', or set HF_TOKEN"
	if from != "" {
		login = "use a token of an account that may read it; this one is from " + from
	}
	switch {
	case code == "GatedRepo" || a.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%w: gated (%d): accept its terms at %s, then %s", ErrName, a.StatusCode, r.page(), login)
	case code == "RevisionNotFound":
		return fmt.Errorf("%w: it has no revision %q: leave @%[2]s out for main, or choose a branch, a tag or a "+
			"commit of %[3]s/commits/main", ErrName, r.Revision, r.page())
	case code == "EntryNotFound":
		return fmt.Errorf("%w: it has no such file: see %s/tree/%s", ErrName, r.page(), r.Revision)
	case a.StatusCode == http.StatusUnauthorized && from != "" && strings.Contains(said, "redentials"):
		return fmt.Errorf("%w: the token from %s is not valid (%s): make a new one at %s/settings/tokens", ErrName,
			from, said, endpoint())
	case a.StatusCode == http.StatusUnauthorized || a.StatusCode == http.StatusNotFound || code == "RepoNotFound":
		return fmt.Errorf("%w: there is no such %s at %s (%d), or it is private: check the spelling; for a private "+
			"one %s", ErrName, r.what(), endpoint(), a.StatusCode, login)
	case a.StatusCode == http.StatusTooManyRequests:
		return fmt.Errorf("%w: too many requests (429): wait some minutes; with a token more are allowed", errReach)
	case a.StatusCode/100 == 5:
		return fmt.Errorf("%w at %s: it answers %d %s: try again later", errReach, endpoint(), a.StatusCode, said)
	}
	return fmt.Errorf("%s answers %d %s", a.Request.URL, a.StatusCode, said)
}

// list asks which files the repository has at the revision.
func (r Ref) list(ctx context.Context, c *http.Client) (l listing, err error) {
	address := fmt.Sprintf("%s/api/%s/%s/revision/%s?blobs=true", endpoint(), r.kind, r.ID,
		url.PathEscape(r.Revision))
	a, err := r.ask(ctx, c, http.MethodGet, address)
	if err != nil {
		return l, err
	}
	err = json.NewDecoder(io.LimitReader(a.Body, maxAnswer)).Decode(&l)
	if err = errors.Join(err, a.Body.Close()); err != nil {
		return l, fmt.Errorf("read the list of files from %s: %w", endpoint(), err)
	}
	if !commitPattern.MatchString(l.Commit) {
		return l, fmt.Errorf("%s says commit %.60q; must be 40 hexadecimal digits: is HF_ENDPOINT a Hub?", endpoint(),
			l.Commit)
	}
	if l.ID == "" {
		l.ID = r.ID
	}
	for i := range l.Files {
		f := &l.Files[i]
		if !filepath.IsLocal(f.Name) {
			return l, fmt.Errorf("%s lists the file %q, which leads out of the folder", endpoint(), f.Name)
		}
		if f.etag = f.Blob; f.LFS != nil {
			f.etag, f.Size = f.LFS.SHA256, f.LFS.Size
		}
	}
	return l, nil
}

// describe asks for size and digest of a file that the listing has none of, as some mirrors do.
func (r Ref) describe(ctx context.Context, c *http.Client, commit string, f *file) error {
	if f.etag != "" {
		return checkEtag(f)
	}
	first := *c
	first.CheckRedirect = func(next *http.Request, before []*http.Request) error {
		if next.URL.Host != before[0].URL.Host {
			return http.ErrUseLastResponse // where the file is; the Hub has said all
		}
		return nil
	}
	a, err := r.ask(ctx, &first, http.MethodHead, r.resolve(commit, f.Name))
	if err == nil {
		err = a.Body.Close()
	}
	if err != nil {
		return err
	}
	header := func(names ...string) string {
		for _, name := range names {
			if v := a.Header.Get(name); v != "" {
				return v
			}
		}
		return ""
	}
	f.etag = strings.Trim(strings.TrimPrefix(header("X-Linked-Etag", "ETag"), "W/"), `"`)
	if f.Size, err = strconv.ParseInt(header("X-Linked-Size", "Content-Length"), 10, 64); err != nil {
		return fmt.Errorf("%s does not say how large %s is", endpoint(), f.Name)
	}
	return checkEtag(f)
}

// checkEtag refuses a digest that cannot be the name of a file.
func checkEtag(f *file) error {
	if len(f.etag) < 8 || !filepath.IsLocal(f.etag) || strings.ContainsAny(f.etag, `/\`) {
		return fmt.Errorf("%s says digest %.60q of %s; must be SHA-256 or Git's SHA-1", endpoint(), f.etag, f.Name)
	}
	return nil
}

// resolve is the address of a file.
func (r Ref) resolve(commit, name string) string {
	prefix := ""
	if r.kind != models {
		prefix = r.kind + "/"
	}
	parts := strings.Split(name, "/")
	for i, p := range parts {
		parts[i] = url.PathEscape(p)
	}
	return fmt.Sprintf("%s/%s%s/resolve/%s/%s", endpoint(), prefix, r.ID, commit, strings.Join(parts, "/"))
}
