package hub

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// folder is the folder of the repository in the cache.
func (r Ref) folder() string {
	return filepath.Join(Cache(), r.kind+"--"+strings.ReplaceAll(r.ID, "/", "--"))
}

func (r Ref) snapshot(commit string) string { return filepath.Join(r.folder(), "snapshots", commit) }

// cachedCommit returns the commit of the revision as the cache has it; empty: it has none.
func (r Ref) cachedCommit() string {
	if commitPattern.MatchString(r.Revision) {
		return r.Revision
	}
	b, err := os.ReadFile(filepath.Join(r.folder(), "refs", filepath.FromSlash(r.Revision)))
	if commit := strings.TrimSpace(string(b)); err == nil && commitPattern.MatchString(commit) {
		return commit
	}
	return ""
}

// Local returns the folder in the cache of the model or adapter with this name; empty: the name is not of the Hub, or
// the cache does not have it. It never asks the Hub.
func Local(name string) string {
	r, ok := Parse(name)
	if !ok {
		return ""
	}
	commit := r.cachedCommit()
	if info, err := os.Stat(r.snapshot(commit)); commit == "" || err != nil || !info.IsDir() {
		return ""
	}
	return r.snapshot(commit)
}

// Source returns the name with the commit of a folder in the cache, ORG/NAME@COMMIT; empty for any other folder.
func Source(dir string) string {
	dir = filepath.Clean(dir)
	up := filepath.Dir(dir)
	repository, ok := strings.CutPrefix(filepath.Base(filepath.Dir(up)), models+"--")
	if !ok || filepath.Base(up) != "snapshots" || !commitPattern.MatchString(filepath.Base(dir)) {
		return ""
	}
	return strings.Replace(repository, "--", "/", 1) + "@" + filepath.Base(dir)
}

// Want says which files of a repository are wanted.
type Want int

// What is wanted. Description leaves the weights out.
const (
	Model Want = iota
	Description
	Adapter
)

// Files that say what a folder is.
const (
	pipelineFile = "model_index.json"
	languageFile = "config.json"
	adapterFile  = "adapter_config.json"
)

// adapterWeights are the files in which an adapter is.
var adapterWeights = []string{"adapter_model.safetensors", "pytorch_lora_weights.safetensors"}

// lacking returns what is missing in a snapshot: files, or parts of a pipeline. Only what the files that are there name
// is missed.
func (w Want) lacking(dir string) (missing []string) {
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, filepath.FromSlash(name)))
		return err == nil
	}
	if w == Adapter {
		if !slices.ContainsFunc(adapterWeights, has) {
			return adapterWeights[:1]
		}
		return nil
	}
	index, err := os.ReadFile(filepath.Join(dir, pipelineFile))
	if err != nil && !has(languageFile) {
		return []string{pipelineFile + " or " + languageFile}
	}
	parts := []string{"."}
	if err == nil {
		parts = partsOf(index)
	}
	for _, part := range parts {
		if !has(part) {
			missing = append(missing, part+"/")
		} else if w == Model {
			missing = append(missing, lackingWeights(dir, part)...)
		}
	}
	return missing
}

// partsOf returns the folders of a pipeline that model_index.json names; none if it cannot be read, which is for who
// opens it to say.
func partsOf(index []byte) (parts []string) {
	var fields map[string]any
	_ = json.Unmarshal(index, &fields)
	for name, v := range fields {
		class, ok := v.([]any)
		if ok && len(class) == 2 && class[0] != nil && class[1] != nil && filepath.IsLocal(name) {
			parts = append(parts, name)
		}
	}
	slices.Sort(parts)
	return parts
}

// lackingWeights returns the weights of a part that are missing: shards that an index names, or all.
func lackingWeights(dir, part string) (missing []string) {
	entries, err := os.ReadDir(filepath.Join(dir, part))
	network, weights := false, false
	for _, e := range entries {
		name := e.Name()
		there := false
		if _, err := os.Stat(filepath.Join(dir, part, name)); err == nil {
			there = true
		}
		network = network || name == languageFile
		weights = weights || strings.HasSuffix(name, ".safetensors") && there
		if !isIndex(name) || !there {
			continue
		}
		var index struct {
			Map map[string]string `json:"weight_map"`
		}
		b, _ := os.ReadFile(filepath.Join(dir, part, name))
		_ = json.Unmarshal(b, &index)
		shards := map[string]bool{}
		for _, shard := range index.Map {
			if _, err := os.Stat(filepath.Join(dir, part, shard)); err != nil && !shards[shard] {
				shards[shard] = true
				missing = append(missing, path.Join(part, shard))
			}
		}
		weights = true
	}
	slices.Sort(missing)
	if err == nil && network && !weights {
		missing = append(missing, path.Join(part, "*.safetensors"))
	}
	return missing
}

func isIndex(name string) bool { return strings.HasSuffix(name, ".safetensors.index.json") }

// small matches the files of a part that describe it, or its tokenizer.
func small(name string) bool {
	return slices.Contains([]string{".json", ".txt", ".model", ".jinja"}, path.Ext(name)) &&
		!strings.Contains(name, ".index.")
}

// choose returns the files of a listing that are wanted. index is model_index.json; nil: there is none.
func (w Want) choose(list []file, index []byte) (chosen []file, err error) {
	in := map[string][]file{} // by folder
	has := func(name string) bool {
		return slices.ContainsFunc(list, func(f file) bool { return f.Name == name })
	}
	for _, f := range list {
		in[path.Dir(f.Name)] = append(in[path.Dir(f.Name)], f)
	}
	if w == Adapter {
		for _, f := range in["."] {
			if f.Name == adapterFile || slices.Contains(adapterWeights, f.Name) {
				chosen = append(chosen, f)
			}
		}
		if !slices.ContainsFunc(adapterWeights, has) {
			return nil, fmt.Errorf("%w: it has no %s; must be an adapter in PEFT's or diffusers' form", ErrName,
				strings.Join(adapterWeights, " or "))
		}
		return chosen, nil
	}
	parts := []string{"."}
	switch {
	case index != nil:
		for _, f := range in["."] {
			if path.Ext(f.Name) == ".json" {
				chosen = append(chosen, f)
			}
		}
		parts = partsOf(index)
	case !has(languageFile):
		return nil, fmt.Errorf("%w: it has no %s and no %s; must be a pipeline of diffusers or a language model of "+
			"transformers", ErrName, pipelineFile, languageFile)
	}
	for _, part := range parts {
		chosen = append(chosen, w.ofPart(in[part])...)
	}
	return chosen, nil
}

// ofPart returns the wanted files of one folder: what describes it, and weights in safetensors. Of weights under two
// usual names the first that loaders take; variants, such as fp16, only where there is nothing else.
func (w Want) ofPart(files []file) (chosen []file) {
	var plain, shards, variants []file
	for _, f := range files {
		name := path.Base(f.Name)
		stem, isWeights := strings.CutSuffix(name, ".safetensors")
		usual := strings.HasPrefix(name, "model") || strings.HasPrefix(name, "diffusion_pytorch_model")
		switch {
		case small(name):
			chosen = append(chosen, f)
		case !usual || !isWeights && !strings.Contains(name, ".safetensors.index."):
		case isIndex(name) && !strings.Contains(strings.TrimSuffix(name, ".safetensors.index.json"), "."):
			shards = append(shards, f)
		case isWeights && !strings.Contains(stem, ".") && strings.Contains(stem, "-of-"):
			shards = append(shards, f)
		case isWeights && !strings.Contains(stem, "."):
			plain = append(plain, f)
		default:
			variants = append(variants, f)
		}
	}
	switch {
	case w == Description:
		return chosen
	case slices.ContainsFunc(plain, func(f file) bool { return path.Base(f.Name) == "model.safetensors" }):
		return append(chosen, plain...)
	case slices.ContainsFunc(shards, func(f file) bool { return isIndex(f.Name) }):
		return append(chosen, shards...)
	case len(plain) > 0:
		return append(chosen, plain...)
	}
	return append(chosen, variants...)
}
