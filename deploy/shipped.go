// Package deploy has the files that ship inside the programs: the models that --model takes by name, and examples.
package deploy

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
)

//go:embed models/signs/README.md models/signs/*.json models/signs/held_out.txt
//go:embed models/signs/scheduler models/signs/text_encoder models/signs/tokenizer
//go:embed models/signs/transformer models/signs/vae
//go:embed models/sums/README.md models/sums/*.json models/sums/*.jinja models/sums/*.safetensors
//go:embed models/signs-flow-grpo
//go:embed demo/*.txt demo/*.json demo/*.jsonl demo/*.csv demo/adapter
//go:embed scorers
var files embed.FS

// Files are all that ships, with the paths that documents name below deploy.
func Files() fs.FS { return files }

// Models are the models that ship, a folder for each.
func Models() fs.FS {
	models, err := fs.Sub(files, "models")
	if err != nil {
		panic(err) // the name is a path
	}
	return models
}

// digest names what this program ships, so that two versions side by side have folders of their own.
func digest() string {
	hash.once.Do(func() {
		h := sha256.New()
		err := each(Models(), ".", func(name string, data []byte) error {
			fmt.Fprintf(h, "%s %d\n", name, len(data))
			_, err := h.Write(data)
			return err
		})
		if err != nil {
			panic(err) // the files are in memory
		}
		hash.text = hex.EncodeToString(h.Sum(nil)[:8])
	})
	return hash.text
}

// A function in a variable would keep the files in programs that open no models.
var hash struct {
	once sync.Once
	text string
}

// Folder returns the folder of a model that ships, "" if none has the name. Readers of models want files: they are
// written into the user's cache (XDG_CACHE_HOME, or the system's folder) at first use, and again if they are others.
func Folder(name string) (dir string, err error) {
	if info, err := fs.Stat(Models(), name); err != nil || !info.IsDir() || name == "." {
		return "", nil // an invalid name is no model's
	}
	cache, err := os.UserCacheDir()
	if err == nil {
		dir = filepath.Join(cache, "meander", "models-"+digest())
		err = Write(dir, Models(), name)
	}
	if err != nil {
		return "", fmt.Errorf("unpack the model: %w; set XDG_CACHE_HOME to a folder for it, or MEANDER_MODELS to one "+
			"that has the model", err)
	}
	return filepath.Join(dir, name), nil
}

// Differing returns the files of a folder that are in the way of Write: those that have other bytes.
func Differing(dir string, of fs.FS) (names []string, err error) {
	err = each(of, ".", func(name string, data []byte) error {
		file := filepath.Join(dir, filepath.FromSlash(name))
		have, err := os.ReadFile(file)
		if err == nil && !bytes.Equal(have, data) {
			names = append(names, file)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return names, err
}

// Write writes the files below name into a folder. A file that has the same bytes is left as it is; a process that
// reads the folder meanwhile sees a file whole or not at all.
func Write(dir string, of fs.FS, name string) error {
	return each(of, name, func(name string, data []byte) error {
		file := filepath.Join(dir, filepath.FromSlash(name))
		if have, err := os.ReadFile(file); err == nil && bytes.Equal(have, data) {
			return nil
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		temporary, err := os.CreateTemp(filepath.Dir(file), "."+path.Base(name)+"-")
		if err != nil {
			return err
		}
		defer os.Remove(temporary.Name()) // it is not there any more if all went well
		_, err = temporary.Write(data)
		if err := errors.Join(err, temporary.Chmod(0o644), temporary.Close()); err != nil {
			return err
		}
		return os.Rename(temporary.Name(), file)
	})
}

// each calls do with each file below name.
func each(of fs.FS, name string, do func(name string, data []byte) error) error {
	return fs.WalkDir(of, name, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := fs.ReadFile(of, name)
		if err != nil {
			return err
		}
		return do(name, data)
	})
}
