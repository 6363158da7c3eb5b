package model

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/deploy"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// FindFolder returns the folder of the model called name that has this file, "" if there is none, and
// the folders that it tried: see Registry.Find. The root of a Hugging Face cache folder means its snapshot; an error
// says that it has several. A model of the Hub, ORG/NAME or ORG/NAME@REVISION, is looked for in the cache (hub.Local).
func FindFolder(name, file string) (dir string, tried []string, err error) {
	tried = []string{name}
	byName := name != "" && !strings.ContainsAny(name, `/\`)
	if models := os.Getenv("MEANDER_MODELS"); byName && models != "" {
		tried = append(tried, filepath.Join(models, name))
	}
	if dir := hub.Local(name); dir != "" {
		tried = append(tried, dir)
	}
	for _, dir := range tried {
		if dir, err = safetensors.Snapshot(dir); err != nil {
			return "", tried, err
		}
		if has(os.DirFS(dir), file) {
			return dir, tried, nil
		}
	}
	if byName && has(deploy.Models(), path.Join(name, file)) {
		dir, err = deploy.Folder(name)
	}
	return dir, tried, err
}

// has reports whether there is a regular file.
func has(folder fs.FS, file string) bool {
	info, err := fs.Stat(folder, file)
	return err == nil && info.Mode().IsRegular()
}

// UnknownError says that no model has this name. It wraps ErrUnknown.
type UnknownError struct {
	Name string
	// Files are the files of which a folder must have one, Known the names of models that were found, Tried the
	// folders that were searched.
	Files, Known, Tried []string
}

// Unknown returns the error for a name for which FindFolder found no folder. known are names of models without
// folders.
func Unknown(name, file string, tried []string, known ...string) *UnknownError {
	for _, dir := range tried[1:] {
		if hub.Source(dir) != "" {
			continue // beside it are other commits
		}
		folders, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), "*", file))
		for _, f := range folders {
			known = append(known, filepath.Base(filepath.Dir(f)))
		}
	}
	shipped, _ := fs.Glob(deploy.Models(), "*/"+file)
	for _, f := range shipped {
		known = append(known, path.Dir(f))
	}
	slices.Sort(known)
	return &UnknownError{Name: name, Files: []string{file}, Known: slices.Compact(known), Tried: tried}
}

// And combines e with the error for another kind of model, if the name is unknown for both.
func (e *UnknownError) And(other *UnknownError) *UnknownError {
	known := slices.Concat(e.Known, other.Known)
	slices.Sort(known)
	files := slices.Concat(e.Files, other.Files)
	return &UnknownError{Name: e.Name, Files: files, Known: slices.Compact(known), Tried: e.Tried}
}

// Error says what the model must be, where it was looked for, and how one of the hub is got.
func (e *UnknownError) Error() string {
	must := "a folder with a " + strings.Join(e.Files, " or a ")
	if len(e.Known) > 0 {
		must = "one of " + strings.Join(e.Known, ", ") + ", or " + must
	}
	said := fmt.Sprintf("model %q: %v; must be %s; looked in %s", e.Name, ErrUnknown, must, strings.Join(e.Tried, ", "))
	if _, ok := hub.Parse(e.Name); ok {
		said += fmt.Sprintf(", and in the cache of the Hugging Face Hub, %s; 'meander model fetch %s' downloads it",
			hub.Cache(), e.Name)
	} else if wrong := hub.Misspelt(e.Name); wrong != "" {
		said += "; " + wrong
	}
	return said
}

func (e *UnknownError) Unwrap() error { return ErrUnknown }

// NameOf returns the name in events of the model at a path: the last element of the path, with every character
// other than A-Z a-z 0-9 _ - replaced by -. For a path in a Hugging Face cache,
// models--ORG--NAME/snapshots/REVISION, and for ORG/NAME@REVISION of the Hub it is NAME.
func NameOf(path string) string {
	path = filepath.Clean(path)
	if r, ok := hub.Parse(path); ok && strings.Contains(path, "@") {
		if _, err := os.Stat(path); err != nil {
			path = r.ID
		}
	}
	name := filepath.Base(path)
	if up := filepath.Dir(path); filepath.Base(up) == "snapshots" {
		if repository, ok := strings.CutPrefix(filepath.Base(filepath.Dir(up)), "models--"); ok {
			parts := strings.Split(repository, "--")
			name = parts[len(parts)-1]
		}
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '-'
	}, name)
}
