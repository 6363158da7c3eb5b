// Package hub gets models, adapters and data sets of the Hugging Face Hub by name: Local looks in the cache on this
// disk, Fetch also downloads what is missing. The cache is that of Python's huggingface_hub, in its layout, so each
// finds what the other has downloaded:
//
//	models--ORG--NAME/blobs/ETAG                    one file each: SHA-256 of a file in LFS, else Git's SHA-1
//	models--ORG--NAME/blobs/ETAG.incomplete         its beginning; a download goes on from there
//	models--ORG--NAME/snapshots/COMMIT/FILE         a link to the blob
//	models--ORG--NAME/refs/main                     the commit of a branch or tag
//	.locks/models--ORG--NAME/ETAG.lock              held by who downloads the blob
//
// The variables of huggingface_hub count: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE, HF_TOKEN,
// HF_TOKEN_PATH, HF_ENDPOINT. Every file is checked against its digest before it becomes a blob.
package hub

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/meander-rl/meander/pkg/models/userpath"
)

// Kinds of repositories, as the Hub names them in paths.
const (
	models   = "models"
	datasets = "datasets"
)

// Ref names a repository on the Hub, or one of its files, at a revision.
type Ref struct {
	// ID is ORG/NAME.
	ID string
	// Revision is a branch, a tag or a commit; main where the name has none.
	Revision string
	// File is the path of the file in the repository; empty: the repository is meant.
	File string

	kind string
}

const mainRevision = "main"

var (
	idPattern       = regexp.MustCompile(`^[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*$`)
	revisionPattern = regexp.MustCompile(`^\w[\w./-]*$`)
	commitPattern   = regexp.MustCompile(`^[0-9a-f]{40}$`)
)

// maxID bounds ORG/NAME, as the Hub does.
const maxID = 96

// Parse reads the name of a model or an adapter, ORG/NAME or ORG/NAME@REVISION. ok is false for what cannot be one: a
// path, or a name without an owner.
func Parse(name string) (r Ref, ok bool) {
	id, revision, given := strings.Cut(name, "@")
	if !given {
		revision = mainRevision
	}
	return Ref{ID: id, Revision: revision, kind: models}, isID(id) && isRevision(revision)
}

func isID(id string) bool {
	return len(id) <= maxID && idPattern.MatchString(id) && !strings.Contains(id, "--") &&
		!strings.Contains(id, "..") && !strings.HasSuffix(id, ".git") && !strings.HasSuffix(id, ".")
}

func isRevision(r string) bool { return revisionPattern.MatchString(r) && !strings.Contains(r, "..") }

// DatasetScheme begins the address of a file in a data set of the Hub.
const DatasetScheme = "hf://datasets/"

// ParseDataset reads the address of a file in a data set, hf://datasets/ORG/NAME/FILE, with @REVISION behind NAME, as
// pandas has it, or at the end.
func ParseDataset(address string) (r Ref, err error) {
	parts := strings.SplitN(strings.TrimPrefix(address, DatasetScheme), "/", 3)
	fault := fmt.Errorf("%q: must be %sORG/NAME/FILE, with @REVISION behind NAME or at the end for another than main",
		address, DatasetScheme)
	if !strings.HasPrefix(address, DatasetScheme) || len(parts) < 3 {
		return r, fault
	}
	name, revision, given := strings.Cut(parts[1], "@")
	file := parts[2]
	if !given {
		file, revision, given = strings.Cut(parts[2], "@")
	}
	if !given {
		revision = mainRevision
	}
	r = Ref{ID: parts[0] + "/" + name, Revision: revision, File: file, kind: datasets}
	if !isID(r.ID) || !isRevision(revision) || !filepath.IsLocal(file) {
		return r, fault
	}
	return r, nil
}

// String is the name as people give it.
func (r Ref) String() string {
	s := r.ID
	if r.Revision != mainRevision {
		s += "@" + r.Revision
	}
	if r.kind == datasets {
		return DatasetScheme + s + "/" + r.File
	}
	return s
}

// what is the kind of the repository, in a sentence.
func (r Ref) what() string {
	if r.kind == datasets {
		return "data set"
	}
	return "model"
}

// page is the address of the repository for people.
func (r Ref) page() string {
	if r.kind == datasets {
		return endpoint() + "/datasets/" + r.ID
	}
	return endpoint() + "/" + r.ID
}

// ErrName is wrapped by errors that another name, revision or token would mend.
var ErrName = errors.New("the Hub does not give it")

// Misspelt returns what is wrong with a name that was meant for the Hub; empty: nothing, or it is a path.
func Misspelt(name string) string {
	id, revision, given := strings.Cut(name, "@")
	rest, isURL := strings.CutPrefix(name, endpoint()+"/")
	if !isURL {
		rest, isURL = strings.CutPrefix(name, defaultEndpoint+"/")
	}
	if !isURL {
		rest, isURL = strings.CutPrefix(name, "hf://")
	}
	parts := strings.Split(rest, "/")
	switch {
	case isURL && len(parts) > 1 && isID(parts[0]+"/"+parts[1]):
		return fmt.Sprintf("a model of the Hub goes by its name: %s/%s, with @REVISION for another than main", parts[0],
			parts[1])
	case given && isID(id) && !isRevision(revision):
		return fmt.Sprintf("revision %q; must be a branch, a tag or a commit, as in %s@main", revision, id)
	case !given && len(parts) > 2 && isID(parts[0]+"/"+parts[1]) && !strings.HasPrefix(name, "."):
		return fmt.Sprintf("a model of the Hub is ORG/NAME, as in %s/%s", parts[0], parts[1])
	}
	return ""
}

// Cache returns the folder of the cache.
func Cache() string {
	if dir := firstOf("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"); dir != "" {
		return userpath.Expand(dir)
	}
	return filepath.Join(home(), "hub")
}

// home is the folder of Hugging Face programs.
func home() string {
	if dir := os.Getenv("HF_HOME"); dir != "" {
		return userpath.Expand(dir)
	}
	if dir := os.Getenv("XDG_CACHE_HOME"); dir != "" {
		return filepath.Join(userpath.Expand(dir), "huggingface")
	}
	return userpath.Expand("~/.cache/huggingface")
}

func firstOf(variables ...string) string {
	for _, v := range variables {
		if s := os.Getenv(v); s != "" {
			return s
		}
	}
	return ""
}

// Offline returns the variable that forbids downloads; empty: they are allowed.
func Offline() string {
	for _, v := range []string{"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} {
		switch strings.ToUpper(os.Getenv(v)) {
		case "1", "ON", "YES", "TRUE":
			return v
		}
	}
	return ""
}

const defaultEndpoint = "https://huggingface.co"

func endpoint() string {
	if e := os.Getenv("HF_ENDPOINT"); e != "" {
		return strings.TrimRight(e, "/")
	}
	return defaultEndpoint
}

// token returns the token of the user, and where it is from; both empty: there is none.
func token() (token, from string) {
	for _, v := range []string{"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} {
		if t := strings.TrimSpace(os.Getenv(v)); t != "" {
			return t, v
		}
	}
	file := os.Getenv("HF_TOKEN_PATH")
	if file == "" {
		file = filepath.Join(home(), "token")
	}
	b, err := os.ReadFile(userpath.Expand(file))
	if t := strings.TrimSpace(string(b)); err == nil && t != "" {
		return t, file
	}
	return "", ""
}
