package lm

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/model"
)

// ConfigFile is the file of a folder that names the model's family.
const ConfigFile = "config.json"

// Family is an architecture: how its checkpoints are recognised and opened.
type Family struct {
	// Name is the Card.Family of its models, Class the entry of architectures in config.json.
	Name, Class string
	// Open loads the checkpoint in a folder.
	Open func(dir string, o Options) (Model, error)
	// Language reads a folder without its weights. Its card has no digest of weights, no backend and no cache size.
	Language func(dir string) (Language, error)
	// Inspect describes a folder by its configurations and the headers of its weights. The reasons why it would not
	// open are in Info.Problems.
	Inspect func(dir string) (*Info, error)
}

// Options change what a family opens. The zero value changes nothing.
type Options struct {
	// Options are those of all models. There is no cache of prompts, and no device is chosen that could be slow, so
	// PromptCacheBytes and Warn have no effect.
	model.Options
	// CacheBytes bounds the cache of keys and values; default 1 GiB. It grows as it is needed.
	CacheBytes int
	// MaxPositions bounds sequences further than the model does; default, and at most, 32768.
	MaxPositions int
}

// Registry lists the families that a program can open.
type Registry []Family

// Find returns the folder of the model called name, a path or a name in a cache, and its family. It
// looks in the folders that model.Registry looks in. The error for a missing folder or an unknown
// family wraps model.ErrUnknown.
func (r Registry) Find(name string) (dir string, f Family, err error) {
	dir, tried, err := model.FindFolder(name, ConfigFile)
	if err != nil {
		return "", f, fmt.Errorf("model %q: %w", name, err)
	}
	if dir == "" {
		return "", f, model.Unknown(name, ConfigFile, tried)
	}
	classes, err := classesOf(dir)
	if err != nil {
		return "", f, fmt.Errorf("model %q: %w", name, err)
	}
	var known []string
	for _, f := range r {
		if slices.Contains(classes, f.Class) {
			return dir, f, nil
		}
		known = append(known, f.Class)
	}
	return "", f, fmt.Errorf("model %q: %w: %s: architectures: %.80q; must be one of %s",
		name, model.ErrUnknown, ConfigFile, classes, strings.Join(known, ", "))
}

// classesOf returns the architectures in the config.json of a folder.
func classesOf(dir string) (classes []string, err error) {
	var c struct {
		Architectures []string `json:"architectures"`
	}
	err = model.ReadIndex(dir, ConfigFile, &c)
	return c.Architectures, err
}

// Open returns the model called name, as Find finds it. The caller closes it.
func (r Registry) Open(name string, o Options) (Model, error) {
	dir, f, err := r.Find(name)
	if err != nil {
		return nil, err
	}
	return f.Open(dir, o)
}

// Language reads the model called name without its weights.
func (r Registry) Language(name string) (Language, error) {
	dir, f, err := r.Find(name)
	if err != nil {
		return nil, err
	}
	return f.Language(dir)
}

// Info describes a model without loading it.
type Info struct {
	// Card is the card of the opened model, without the digest of the weights and the backend. Fields whose
	// configuration cannot be read are zero. CacheTokens is for a cache of the default size.
	Card
	// Parts is the network, if it could be read.
	Parts []model.PartInfo `json:"parts"`
	// Tokens is the number of tokens of the tokenizer, 0 if it cannot be read.
	Tokens int `json:"tokens"`
	// Template shows how the chat template writes a conversation; empty if it cannot be read.
	Template string `json:"template"`
	// CacheTokenBytes is the memory of a token in the cache, CacheBytes the default size of the cache.
	CacheTokenBytes int `json:"cache_token_bytes"`
	CacheBytes      int `json:"cache_bytes"`
	// Problems are the reasons why the model would not open; none means that it opens.
	Problems []string `json:"problems"`
}
